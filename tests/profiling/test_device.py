"""What counts as running out of memory."""

from __future__ import annotations

import pytest
import torch

from lightning_wlb.profiling.device import is_out_of_memory


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
