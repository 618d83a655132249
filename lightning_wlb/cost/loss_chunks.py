"""How many rows of the loss head exist at a time as logits: one rule for the loss and its memory.

Each chunk of rows reads and writes the sum of the output matrix' gradient once, 8 bytes for each of
its elements in float32, for 8 FLOPs per element and row. So on an accelerator of 600 TFLOP/s and
3.3 TB/s chunks of 4,096 rows spend 4 % of their time on that (by these numbers, not measured), and
those of 256 more than 40 %. On a CPU, whose products take so much longer, the two are equal within
the noise (``benchmarks/loss_head.py``).
"""

from __future__ import annotations

CPU_LOGITS = 2**22
"""Logits of a chunk on a CPU (16 MiB in float32), unless that is fewer than the least rows."""

LEAST_ROWS = 256
"""Fewer rows than this starve the matrix product."""

ACCELERATOR_LOGITS = 2**29
"""Most logits of a chunk on an accelerator (2 GiB in float32): 4,096 rows of 128K words."""

ACCELERATOR_ROWS = 4096
"""Rows of a chunk on an accelerator, unless they have more logits than that."""


def chunk_rows(words: int, accelerator: bool) -> int:
    """Rows of a chunk, where the rank has so many words of the vocabulary."""
    if accelerator:
        return max(min(ACCELERATOR_LOGITS // max(words, 1), ACCELERATOR_ROWS), LEAST_ROWS)
    return max(CPU_LOGITS // max(words, 1), LEAST_ROWS)
