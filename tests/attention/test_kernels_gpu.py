"""Which package of FlashAttention is taken, how it is called, and what is said of a broken one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from lightning_wlb.attention import kernels_gpu
from lightning_wlb.attention.backends import VarlenAttention, kernel_name
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions
from tests.attention.flash import fake_flash, on_device_of
from tests.attention.support import metadata_of, random_inputs

pytestmark = pytest.mark.usefixtures("every_backend")


@pytest.mark.parametrize(
    ("major", "versions", "chosen"),
    [
        (9, ("2.8.3", "3", "4"), "flash_attn 3"),
        (9, ("2.8.3", "4"), "flash_attn 2"),
        (9, ("4",), "flash_attn 4"),
        (9, (), "torch (FlashAttention-2)"),
        # FlashAttention-3 is for Hopper, and 4 has no backward before it.
        (8, ("2.8.3", "3", "4"), "flash_attn 2"),
        (8, ("3", "4"), "torch (FlashAttention-2)"),
        (10, ("3", "4"), "flash_attn 4"),
        (10, ("3",), "torch (FlashAttention-2)"),
    ],
)
def test_auto_on_cuda_prefers_flash(
    monkeypatch: pytest.MonkeyPatch,
    cuda: None,
    recwarn: pytest.WarningsRecorder,
    major: int,
    versions: tuple[str, ...],
    chosen: str,
) -> None:
    on_device_of(monkeypatch, major)
    fake_flash(monkeypatch, *versions)
    attention = VarlenAttention()
    assert attention.kernel_name("cuda") == kernel_name("auto", "cuda:0") == chosen
    assert not list(recwarn)
    # CPU tensors still run, as with Trainer(accelerator="cpu") on a machine with a GPU.
    *inputs, _ = random_inputs([(4, 4)], 2, 2)
    assert attention(*inputs, metadata_of([(4, 4)])).shape == (4, 2, 8)


@pytest.mark.parametrize(
    "reason",
    [
        ImportError("undefined symbol: _ZN3c105Error"),
        ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
        RuntimeError("no compiler"),
        OSError("libcudart.so.12"),
        AttributeError("module 'cutlass' has no attribute 'cute'"),
    ],
    ids=repr,
)
def test_a_broken_package_is_left_out_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, cuda: None, reason: Exception
) -> None:
    fake_flash(monkeypatch, "2.8.3")
    broken = {"flash_attn_interface"}

    def imported(name: str) -> Any:
        if name in broken:
            raise reason
        return import_module(name)

    monkeypatch.setattr(kernels_gpu, "import_module", imported)
    with pytest.warns(match=f"flash_attn_interface is installed.*{re.escape(str(reason))}") as seen:
        assert kernel_name("auto", "cuda") == "flash_attn 2"
    assert len(seen) == 1
    broken.add("flash_attn")
    with pytest.warns() as seen:
        assert kernel_name("auto", "cuda") == "torch (FlashAttention-2)"
    assert len(seen) == 2
    with pytest.warns(), pytest.raises(ValueError, match=re.escape(str(reason))):
        VarlenAttention("flash")


@pytest.mark.parametrize("version", ["2.8.3", "3", "4"])
def test_flash_call(monkeypatch: pytest.MonkeyPatch, cuda: None, version: str) -> None:
    calls = fake_flash(monkeypatch, version)
    _, kernel = VarlenAttention("flash")._kernels["cuda"]
    *inputs, _ = random_inputs([(3, 5)], 4, 2)
    metadata = metadata_of([(3, 5)])
    out = kernel(*inputs, metadata, AttentionOptions(scale=0.25))
    kernel(*inputs, metadata, AttentionOptions(0.25, 4))
    assert torch.equal(out, inputs[0])
    plain = {
        "cu_seqlens_q": metadata.cu_seqlens_q,
        "cu_seqlens_k": metadata.cu_seqlens_k,
        "max_seqlen_q": 3,
        "max_seqlen_k": 5,
        "softmax_scale": 0.25,
        "causal": True,
    }
    assert calls == [plain, {**plain, "window_size": (3, 0)}]
    with pytest.raises(ValueError, match=r"'flash' has no sinks.*attention_backend='torch'"):
        kernel(*inputs, metadata, AttentionOptions(sinks=torch.zeros(4)))


@pytest.mark.parametrize("version", ["2.7.0.post1", "2.8.3+cu12torch2.8", "3", "4"])
def test_a_soft_cap_takes_a_flash_with_a_backward_for_it(
    monkeypatch: pytest.MonkeyPatch, cuda: None, version: str
) -> None:
    calls = fake_flash(monkeypatch, version)
    _, kernel = VarlenAttention("flash")._kernels["cuda"]
    *inputs, _ = random_inputs([(3, 5)], 4, 2)
    options = AttentionOptions(softcap=50.0)
    if version == "4":
        with pytest.raises(ValueError, match=r"flash-attn 4 cannot cap packed scores.*2\.7 or"):
            kernel(*inputs, metadata_of([(3, 5)]), options)
        return
    kernel(*inputs, metadata_of([(3, 5)]), options)
    assert [call["softcap"] for call in calls] == [50.0]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("version", ["2.8.3", "3", "4"])
def test_flash_is_told_to_be_deterministic_where_torch_is(
    monkeypatch: pytest.MonkeyPatch, cuda: None, deterministic: None, version: str
) -> None:
    calls = fake_flash(monkeypatch, version)
    _, kernel = VarlenAttention("flash")._kernels["cuda"]
    *inputs, _ = random_inputs([(3, 5)], 4, 2)
    kernel(*inputs, metadata_of([(3, 5)]), PLAIN)
    torch.use_deterministic_algorithms(False)
    kernel(*inputs, metadata_of([(3, 5)]), PLAIN)
    assert [call.get("deterministic") for call in calls] == [True, None]


@pytest.mark.parametrize(("version", "head_dim", "major"), [("3", 256, 9), ("4", 8, 12)])
def test_a_kernel_that_cannot_be_deterministic_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    cuda: None,
    deterministic: None,
    version: str,
    head_dim: int,
    major: int,
) -> None:
    on_device_of(monkeypatch, major)
    calls = fake_flash(monkeypatch, version)
    _, kernel = VarlenAttention("flash")._kernels["cuda"]
    *inputs, _ = random_inputs([(3, 5)], 4, 2, head_dim)
    message = f"FlashAttention-{version} has no deterministic backward"
    with pytest.raises(ValueError, match=f"{message}.*attention_backend='torch'"):
        kernel(*inputs, metadata_of([(3, 5)]), PLAIN)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(match=message):
        kernel(*inputs, metadata_of([(3, 5)]), PLAIN)
    assert [call.get("deterministic") for call in calls] == [None]
