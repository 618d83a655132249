"""The fast construction held against the optimum on the same grid."""

import pytest

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.planning.slicing import slice_pieces
from tests.planning.slicing_milp import slice_pieces_milp
from tests.planning.test_slicing import LINEAR, WORK, load, pieces_of, plan_of

STEEP = PassWork(1000, 2)  # attention equals the rest at 1000 tokens


def largest(packs, work):
    return max(load(pack, work) for pack in packs)


def test_the_optimum_of_an_instance_by_hand():
    pieces = pieces_of([500, 250, 150, 100])
    packs = slice_pieces_milp(pieces, 4, 1000, LINEAR, tile=50, least=50)
    assert largest(packs, LINEAR) == 250
    assert sorted(part.stop for pack in packs for part in pack if part.document == 1)[-1] == 250


@pytest.mark.parametrize(
    ("lengths", "packs", "cap", "work", "bound"),
    [
        ([1500, 1500, 300, 200], 3, 4096, STEEP, 1.06),
        ([1200, 1000, 800, 600, 150, 90, 40], 3, 1500, STEEP, 1.12),
        pytest.param([2048, 900, 600, 300, 250], 4, 2048, STEEP, 1.06, marks=pytest.mark.soak),
        pytest.param([2000, 400, 400, 400, 400], 3, 1500, STEEP, 1.06, marks=pytest.mark.soak),
        pytest.param([2048, 1024, 512, 256, 128, 64], 3, 2048, WORK, 1.06, marks=pytest.mark.soak),
    ],
)
def test_the_fast_construction_is_near_the_optimum(lengths, packs, cap, work, bound):
    pieces = pieces_of(lengths)
    best = slice_pieces_milp(pieces, packs, cap, work, tile=64, least=128)
    fast = slice_pieces(pieces, packs, cap, work, tile=64, least=128)
    plan_of(pieces, [best], cap).validate()
    assert len(fast) <= packs
    ratio = largest(fast, work) / largest(best, work)
    assert 1 - 1e-6 <= ratio < bound
