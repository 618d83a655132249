"""Which profile a run gets where nobody gave one."""

import warnings

import pytest
import torch

from lightning_wlb.cost.profile import Profile
from lightning_wlb.strategy.devices import nearest, profile_of


@pytest.mark.parametrize(
    ("name", "memory", "kernel", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", 85_000_000_000, "flash_attn 3", "h100"),
        ("NVIDIA H100 80GB HBM3", 85_000_000_000, "torch (FlashAttention-2)", "h100-fa2"),
        ("NVIDIA H200", 150_000_000_000, "flash_attn 4", "h200"),
        ("NVIDIA H200", 150_000_000_000, "flash_attn 2", "h200-fa2"),
        ("NVIDIA H200", 150_000_000_000, "exact", "h200-fa2"),
        ("NVIDIA GH200 480GB", 100_000_000_000, "flash_attn 3", "h200"),
    ],
)
def test_a_gpu_gets_the_profile_of_its_name_and_kernel_and_its_own_memory(
    name, memory, kernel, profile
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = nearest(name, memory, kernel)
    assert (found.name, found.memory_bytes) == (profile, memory)


@pytest.mark.parametrize(
    ("name", "memory", "profile"),
    [("NVIDIA A100-SXM4-40GB", 42_000_000_000, "h100"), ("NVIDIA B200", 190_000_000_000, "h200")],
)
def test_another_gpu_gets_the_nearest_in_memory_with_a_warning(name, memory, profile) -> None:
    words = f"no device profile of {name}.*analytic profile '{profile}' with {memory // 10**9} GB"
    with pytest.warns(UserWarning, match=words + ".*lightning-wlb profile --output FILE"):
        found = nearest(name, memory, "flash_attn 3")
    assert (found.name, found.memory_bytes) == (profile, memory)


def test_a_cpu_gets_the_measured_one_and_other_devices_none() -> None:
    assert profile_of(torch.device("cpu")) == Profile.load("cpu")
    assert profile_of(torch.device("meta")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_has_one() -> None:
    device = torch.device("cuda", 0)
    found = profile_of(device)
    assert found is not None
    assert found.memory_bytes == torch.cuda.get_device_properties(device).total_memory
