"""What the exact kernel promises beyond its numbers (those: tests/attention/test_backends.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_wlb.attention import kernels_exact
from lightning_wlb.attention.kernel_interface import AttentionOptions
from lightning_wlb.attention.kernels_exact import exact_attention
from tests.attention.support import (
    SEGMENTS,
    Watched,
    attending,
    metadata_of,
    random_inputs,
    results,
)
from tests.device import DEVICE

OPTIONS = AttentionOptions(0.3, 100, 2.0)


def watched(segments: list[tuple[int, int]]) -> Watched:
    *inputs, gradient = random_inputs(segments, 4, 2)
    inputs.append(torch.linspace(-1, 1, 4, dtype=torch.float64))
    attend = attending(exact_attention, metadata_of(segments), OPTIONS)
    with Watched() as watch:
        results(attend, inputs, gradient)
    return watch


def test_no_operator_adds_up_in_an_order_of_its_own() -> None:
    """Those of torch that do so on CUDA, if deterministic algorithms are not asked for."""
    names = watched(list(SEGMENTS)).names
    assert {"bmm", "_softmax_backward_data"} <= names
    unordered = ("index", "scatter", "put", "cumsum", "embedding", "bincount", "histc")
    assert not [name for name in names if any(part in name for part in unordered)]


def test_scores_of_one_block_at_a_time_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_exact, "BLOCK", 16)
    assert watched([(64, 300)] * 4).largest <= 4 * max(16 * (16 + 99 + 1), 300 * 4 * 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_call_gives_the_same_bits_in_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    *inputs, gradient = random_inputs(SEGMENTS, 4, 2)
    inputs = [x.to(dtype) for x in inputs]
    attend = attending(exact_attention, metadata_of(SEGMENTS, DEVICE), OPTIONS)
    once, again = (results(attend, inputs, gradient) for _ in range(2))
    assert {x.dtype for x in once} == {dtype}
    for x, y in zip(once, again, strict=True):
        assert torch.equal(x, y)


def test_all_of_it_is_on_the_device_of_the_queries() -> None:
    """Forward and backward on tensors without memory, which mix with no others."""
    *inputs, gradient = (x.to("meta") for x in random_inputs(SEGMENTS, 4, 2))
    inputs.append(torch.empty(4, device="meta", dtype=torch.float64))
    metadata = metadata_of(SEGMENTS)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return exact_attention(q, k, v, metadata, replace(OPTIONS, sinks=sinks))

    assert {x.device.type for x in results(attend, inputs, gradient)} == {"meta"}


def test_segments_without_queries_or_keys_for_them_are_refused() -> None:
    for segment in ((0, 1), (2, 1)):
        *inputs, _ = random_inputs([segment], 2, 2)
        with pytest.raises(ValueError, match=f"{segment[0]} queries and 1 keys"):
            exact_attention(*inputs, metadata_of([segment]), OPTIONS)
