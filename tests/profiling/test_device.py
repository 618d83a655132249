"""What a device is: its peak, the shipped profile that is nearest, what is out of memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from lightning_wlb.cost.profile import Profile
from lightning_wlb.profiling.device import (
    is_out_of_memory,
    nearest_profile,
    peak_flops,
    shipped_profile,
)


@pytest.mark.parametrize(
    ("error", "out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("no"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, out: bool) -> None:
    assert is_out_of_memory(error) is out


CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def float32_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.filterwarnings("ignore:FLOPs not found")
@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA A10G", 125.0),  # Lightning knows it
        ("NVIDIA Unheard Of", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_a_device_is_known_by_its_name(
    name: str, teraflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = peak_flops(CUDA, torch.bfloat16)
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_float32_is_on_tensor_cores_only_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    torch.set_float32_matmul_precision("highest")
    assert peak_flops(CUDA, torch.float32) == pytest.approx(66.9e12)
    torch.set_float32_matmul_precision("high")
    assert peak_flops(CUDA, torch.float32) == pytest.approx(494.7e12)
    assert peak_flops(CUDA, torch.float16) == 989.4e12
    assert peak_flops(CUDA, torch.float64) == pytest.approx(66.9e12)
    assert peak_flops(CUDA, torch.int8) is None


def test_a_processor_has_no_data_sheet() -> None:
    assert peak_flops(torch.device("cpu"), torch.float32) is None


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
        found = nearest_profile(name, memory, kernel)
    assert (found.name, found.memory_bytes) == (profile, memory)


@pytest.mark.parametrize(
    ("name", "memory", "profile"),
    [("NVIDIA A100-SXM4-40GB", 42_000_000_000, "h100"), ("NVIDIA B200", 190_000_000_000, "h200")],
)
def test_another_gpu_gets_the_nearest_in_memory_with_a_warning(name, memory, profile) -> None:
    words = f"no device profile of {name}.*analytic profile '{profile}' with {memory // 10**9} GB"
    with pytest.warns(UserWarning, match=words + ".*lightning-wlb profile --output FILE"):
        found = nearest_profile(name, memory, "flash_attn 3")
    assert (found.name, found.memory_bytes) == (profile, memory)


def test_a_cpu_gets_the_measured_one_and_other_devices_none() -> None:
    assert shipped_profile(torch.device("cpu")) == Profile.load("cpu")
    assert shipped_profile(torch.device("meta")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_has_one() -> None:
    device = torch.device("cuda", 0)
    found = shipped_profile(device)
    assert found is not None
    assert found.memory_bytes == torch.cuda.get_device_properties(device).total_memory
