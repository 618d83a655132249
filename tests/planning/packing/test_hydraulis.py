"""Hydraulis' assignment against all assignments, and how far ours is from it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exact_dealing import lower_bound
from lightning_wlb.mesh import Mesh
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.packing.hydraulis import pack_pipeline
from tests.planning.test_packings import WORK
from tests.planning.test_slicing import LINEAR, pieces_of


def split(homes, bins: int) -> list[list[int]]:
    return [[i for i, home in enumerate(homes) if home == number] for number in range(bins)]


@pytest.mark.parametrize(
    ("lengths", "cap"),
    [([3, 3, 2, 2, 2], 10), ([7, 5, 5, 3, 1], 8), ([6, 6, 6, 1], 6)],
)
def test_packing_is_the_best_of_all_numbers_of_micro_batches(lengths, cap) -> None:
    stages = 2

    def cost(tokens: int) -> int:
        return 10 * tokens + tokens**2

    def time(packed, bins: int) -> int:
        return (stages - 1 + bins) * max(sum(map(cost, own)) for own in packed)

    best = min(
        time(packed, bins)
        for bins in range(1, len(lengths) + 1)
        for homes in product(range(bins), repeat=len(lengths))
        if max(map(sum, packed := [[lengths[i] for i in own] for own in split(homes, bins)])) <= cap
    )
    packed = pack_pipeline(pieces_of(lengths), stages, cap, cost, solves=99)
    assert sorted(piece.document for own in packed for piece in own) == list(range(len(lengths)))
    assert time([[piece.tokens for piece in own] for own in packed], len(packed)) == best


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    stages=st.integers(1, 5),
    utilised=st.integers(1, 40),
)
def test_no_packing_is_below_the_bound(lengths, stages, utilised) -> None:
    packed = pack_pipeline(pieces_of(lengths), stages, 40, LINEAR, utilised=utilised, solves=0)
    heaviest = max(sum(piece.tokens for piece in own) for own in packed)
    assert heaviest <= 40
    assert sorted(piece.tokens for own in packed for piece in own) == sorted(lengths)
    bound = lower_bound([[each] for each in lengths], range(len(lengths)), 0, stages)
    assert (stages - 1 + len(packed)) * heaviest >= bound


def test_the_solver_finds_what_greed_misses_where_micro_batches_must_be_long() -> None:
    """Twice 6 tokens in micro-batches of at least 6: longest first gives 7 and 5."""

    def packed(solves: int) -> list[list[int]]:
        made = pack_pipeline(pieces_of([3, 3, 2, 2, 2]), 2, 7, LINEAR, utilised=6, solves=solves)
        return sorted([piece.tokens for piece in own] for own in made)

    assert packed(0) == [[3, 2], [3, 2, 2]]
    assert packed(1) == [[2, 2, 2], [3, 3]]


def test_the_method_deals_and_packs_for_the_mesh() -> None:
    """Two long documents go to different replicas, short ones to where the bound is low."""
    data = DataSettings(60, 4, packing="hydraulis", shuffle=False)
    lengths = [60, 60, *[10] * 12]
    plan = Planner(lengths, data, WORK, Mesh(data=2, pipeline=2)).next_step()
    assert plan is not None
    both = [sorted(part.tokens for part in replica.slices) for replica in plan.replicas]
    assert both == [[10] * 6 + [60]] * 2
    assert all(part.context == 0 for replica in plan.replicas for part in replica.slices)
