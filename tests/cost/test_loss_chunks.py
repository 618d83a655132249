"""Rows of the loss head that exist as logits at a time."""

from __future__ import annotations

import pytest

from lightning_wlb.cost.loss_chunks import chunk_rows


@pytest.mark.parametrize(
    ("words", "on_cpu", "on_accelerator"),
    [
        (1, 2**22, 4096),
        (4096, 1024, 4096),
        (16_384, 256, 4096),
        (128_256, 256, 4096),
        (262_144, 256, 2048),
        (2**23, 256, 256),
    ],
)
def test_rows_of_a_chunk(words: int, on_cpu: int, on_accelerator: int) -> None:
    assert chunk_rows(words, accelerator=False) == on_cpu
    assert chunk_rows(words, accelerator=True) == on_accelerator
