"""The search finds what trying every way finds."""

from itertools import accumulate

import pytest

from lightning_wlb.plan import Piece
from lightning_wlb.planning.candidates import FEWEST, HALVES, Candidates, Score, Way, score_of
from lightning_wlb.planning.judge import PipelineJudge
from lightning_wlb.planning.replicas import unsharded
from lightning_wlb.planning.slicing import PrefixWork
from lightning_wlb.planning.workloads import generator_a
from tests.planning.test_slicing import LLAMA2_7B_LAYER

WINDOW = 16_384
TOTAL, FORWARD = LLAMA2_7B_LAYER.total, LLAMA2_7B_LAYER.forward
SMALL = FORWARD(WINDOW // 100)
EVERY = [
    FEWEST,
    *(Way(kind, halves) for kind in ("whole", "equal", "tapered") for halves in HALVES),
]


def candidates(lengths, stages=4, per_rank=1, overhead=SMALL, nominal=4, passes=None, **limits):
    return Candidates(
        [Piece(number, 0, tokens, 0) for number, tokens in enumerate(lengths)],
        nominal=nominal,
        cap=WINDOW,
        work=PrefixWork.of(TOTAL),
        total=TOTAL,
        stages=stages,
        stages_per_rank=per_rank,
        judge=PipelineJudge(TOTAL, FORWARD, stages, per_rank, overhead, **limits),
        shard=unsharded,
        passes=passes,
    )


def a_step(seed):
    lengths = generator_a(500, WINDOW, seed).tolist()
    return [
        n for n, filled in zip(lengths, accumulate(lengths), strict=True) if filled < 4 * WINDOW
    ]


@pytest.mark.parametrize(("stages", "per_rank"), [(2, 1), (4, 1), (4, 2)])
def test_no_way_is_shorter_than_the_one_found(stages, per_rank):
    for seed in range(2):
        tried = candidates(a_step(seed), stages, per_rank)
        found = tried.score(tried.best())
        assert found.time <= 1.002 * min(tried.score(way) for way in EVERY).time


def test_dear_actions_lead_to_few_micro_batches():
    tried = candidates(a_step(0), overhead=FORWARD(WINDOW))
    assert tried.best().halves <= 3
    assert tried.score(tried.best()) == min(tried.score(way) for way in EVERY)


def test_one_stage_has_nothing_to_fill():
    assert candidates(a_step(0), stages=1).best() == FEWEST


def test_slices_where_whole_pieces_do_not_fit_one_stage():
    tried = candidates([WINDOW * 3 // 5] * 5, stages=1)
    assert tried.packs(FEWEST).forward == []
    assert tried.score(FEWEST).overflows
    packs = tried.packs(tried.best()).forward
    assert sum(part.tokens for pack in packs for part in pack) == 5 * (WINDOW * 3 // 5)
    assert len(packs) == 3


def test_what_overflows_is_taken_only_where_nothing_fits():
    free = candidates(a_step(1))
    tight = candidates(a_step(1), limit=WINDOW)
    assert not tight.score(tight.best()).overflows
    assert tight.score(tight.best()).time >= free.score(free.best()).time
    assert candidates(a_step(1), limit=1).best() in EVERY


def test_a_shared_micro_batch_comes_first():
    tried = candidates([600, 500])
    plan = tried.plan(FEWEST, 1, [([tried.packs(FEWEST).forward[0][0]], (0, 1))], unsharded)
    assert [group.replicas for group in plan.forward] == [(0, 1), (1,)]
    assert Score(False, 2) < Score(True, 1)
    assert score_of([], tried.judge) == (False, 0)


def asymmetric_candidates(**settings):
    """One long piece, cut into as many slices as M allows; units are more and smaller."""
    work, forward = PrefixWork.of(TOTAL), PrefixWork.of(FORWARD)
    backward = PrefixWork(work.linear - forward.linear, work.pair - forward.pair)
    return candidates([WINDOW], nominal=1, passes=(forward, backward), **settings)


def test_packs_of_their_own_for_backward_where_they_are_faster():
    tried = asymmetric_candidates(overhead=0)
    way = tried.best()
    assert way.kind == "units"
    assert tried.score(way).time < min(tried.score(each).time for each in EVERY)
    plan = tried.plan(way, 0, (), unsharded)
    assert {group.slices for group in plan.forward} != {group.slices for group in plan.backward}
    dear = asymmetric_candidates(overhead=FORWARD(WINDOW))
    assert dear.best().kind != "units"


def test_units_compute_nothing_twice():
    tried = asymmetric_candidates(overhead=0, stages=1)
    assert tried.score(Way("units", 8)).time == TOTAL(WINDOW)
