"""The chunks of a layout, rank by rank."""

from __future__ import annotations

from typing import NamedTuple

from lightning_wlb.sharding import Layout


class Chunk(NamedTuple):
    """Tokens ``[start, stop)`` of a piece, counted from the piece's start."""

    document: int
    start: int
    stop: int


def chunks_by_rank(made: Layout) -> list[tuple[Chunk, ...]]:
    """For each rank its chunks in local row order."""
    return [
        tuple(Chunk(*row) for row in made.table[made.chunks_of(rank), 1:].tolist())
        for rank in range(made.ranks)
    ]
