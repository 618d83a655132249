"""Tiles of queries dealt by work, in rounds of alternating direction (torch's PTRR balancer).

The concatenated micro-batch is cut in tiles of 128 rows. Tiles are dealt in descending work, one to
each rank in a round, and every other round goes the other way, so that every rank gets equally many
tiles and nearly equal work. Rows that do not divide are a last round of smaller, equal tiles.

Most segments are one tile with keys of its own, and most keys travel to every rank: more work in
all than other shardings make, evenly spread. It is for sequences on which those fail. Not for a
document of most of the window: the prefixes of a rank's tiles come to half their number times the
document.

Cost: vectorised, one sort of the tiles.
"""

from __future__ import annotations

import numpy as np

from lightning_wlb.cost.attention_tiles import TILE, reference_kernel_cost
from lightning_wlb.sharding.arrays import Integers, cut


def ptrr(lengths: Integers, ranks: int) -> Integers:
    """Deal tiles of the concatenated pieces in rounds of alternating direction, by work."""
    total = int(lengths.sum())
    divisible = total // (TILE * ranks) * ranks * TILE
    cuts = np.arange(0, divisible, TILE)
    if divisible < total:
        rest = divisible + (total - divisible) * np.arange(ranks) // ranks
        cuts = np.concatenate((cuts, rest))
    # A tile with the ends of pieces in it is several segments.
    tile, document, start, stop = cut(lengths, cuts).T
    cost = np.zeros(len(cuts), dtype=np.int64)
    np.add.at(cost, tile, reference_kernel_cost(stop - start, stop))
    owner = _deal(cost, divisible // TILE, ranks)
    return np.stack((owner[tile], document, start, stop), axis=1)


def _deal(cost: Integers, whole: int, ranks: int) -> Integers:
    """The rank of each tile; the first ``whole`` tiles have 128 rows. Ties go by number."""
    order = np.argsort(-cost, kind="stable")
    # The smaller tiles are the last round, or rows would not be equal.
    order = np.concatenate((order[order < whole], order[order >= whole]))
    there_and_back = np.concatenate((np.arange(ranks), np.arange(ranks)[::-1]))
    owner = np.empty(len(cost), dtype=np.int64)
    owner[order] = np.resize(there_and_back, len(cost))
    return owner
