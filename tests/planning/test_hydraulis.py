"""Hydraulis' dealing as a definition, and how far ours is from it."""

from __future__ import annotations

from itertools import product

from lightning_wlb.planning.dp_merge import merge_pieces
from tests.planning.hydraulis import deal_exactly, deal_greedily, lower_bound
from tests.planning.test_slicing import LINEAR, pieces_of


def test_hydraulis_bound_and_seed() -> None:
    costs = [9, 5, 4, 3, 2, 2]
    assert lower_bound(costs, [0, 5], 4) == 11 + 3 * 9
    assert lower_bound(costs, [], 4) == 0
    one, same = (deal_greedily(costs, 3, 4, trials=5, seed=7) for _ in range(2))
    assert one == same


def test_hydraulis_exact_is_the_best_of_all_dealings() -> None:
    costs, replicas, stages = [9, 7, 5, 4, 3, 2, 2], 3, 4

    def worst(homes) -> int:
        dealt = [[i for i, home in enumerate(homes) if home == r] for r in range(replicas)]
        return max(lower_bound(costs, own, stages) for own in dealt)

    best = min(map(worst, product(range(replicas), repeat=len(costs))))
    dealt, proven = deal_exactly(costs, replicas, stages)
    assert proven
    assert max(lower_bound(costs, own, stages) for own in dealt) == best
    greedy = deal_greedily(costs, replicas, stages)
    assert best <= max(lower_bound(costs, own, stages) for own in greedy) <= 1.1 * best


def test_dealing_by_work_is_near_the_optimum_of_equation_3() -> None:
    """Without a pipeline the bound is the work, and without large pieces none is shared."""
    costs = [97, 88, 71, 60, 52, 33, 21, 9, 4, 1]
    dealt, proven = deal_exactly(costs, 3, 1)
    assert proven
    best = max(lower_bound(costs, own, 1) for own in dealt)
    ours = merge_pieces(pieces_of(costs), 3, LINEAR, 1)
    assert ours.shared == []
    assert best <= max(ours.loads) <= 1.03 * best
