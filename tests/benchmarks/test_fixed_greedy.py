"""WLB-LLM's fixed-length packing: squares are balanced, nothing is lost, windows run by work."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fixed_greedy import FixedGreedyPacker, pack_greedily
from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.plan import Piece
from lightning_wlb.planning import DataSettings, Planner
from tests.planning.packing.test_baselines import tokens_of
from tests.planning.test_slicing import pieces_of

# Forward and backward of d tokens: d·(d + 20).
WORK = Work(PassWork(6, 1), PassWork(13, 1))
work = WORK.total


def test_greedy_balances_squares_and_cuts_what_is_left() -> None:
    # 8 | 6 -> 64, 36; 5 fits neither 2 nor 4... room 2 and 4: 5 is cut into 4 and 1.
    micro_batches = pack_greedily(pieces_of([5, 8, 6]), 2, 10)
    assert micro_batches == [
        [Piece(1, 0, 8, 0), Piece(0, 4, 5, 0)],
        [Piece(2, 0, 6, 0), Piece(0, 0, 4, 0)],
    ]
    # 7 to 0 (49), 5 to 1 (25), 4 to 1 (41), 3 to 0: 10 | 9, and 1 to 1.
    assert tokens_of(pack_greedily(pieces_of([1, 3, 4, 5, 7]), 2, 10)) == [[7, 3], [5, 4, 1]]


@given(lengths=st.lists(st.integers(1, 20), max_size=40), spare=st.integers(0, 3))
def test_greedy_loses_nothing_and_fills_exactly(lengths, spare) -> None:
    bins = -(-sum(lengths) // 20) + spare
    micro_batches = pack_greedily(pieces_of(lengths), bins, 20)
    assert len(micro_batches) == bins
    assert all(sum(tokens) <= 20 for tokens in tokens_of(micro_batches))
    parts = sorted(piece for micro_batch in micro_batches for piece in micro_batch)
    for number, length in enumerate(lengths):
        own = [piece for piece in parts if piece.document == number]
        assert own[0].origin == 0
        assert own[-1].stop == length
        assert all(a.stop == b.origin for a, b in pairwise(own))


def test_windows_run_like_micro_batches_together() -> None:
    # Four windows of ten tokens: work of [10], [9, 1], [5, 5], [2]*5 descends.
    lengths = [10, 2, 2, 2, 2, 2, 5, 5, 9, 1]
    data = DataSettings(
        10, 2, packing={"method": FixedGreedyPacker, "packing_window": 2}, shuffle=False
    )
    planner = Planner(lengths, data, WORK)
    first, second = planner.next_step(), planner.next_step()
    loads = [
        sorted(sum(work(part.tokens) for part in replica.slices_of(micro_batch)) for micro_batch in
               replica.forward)
        for plan in (first, second)
        for replica in plan.replicas
    ]  # fmt: skip
    assert loads[0][0] >= loads[1][-1]
    assert [first.tokens, second.tokens] == [20, 20]
    assert [first.max_delay, second.max_delay] == [0, 1]
    assert planner.next_step() is None
