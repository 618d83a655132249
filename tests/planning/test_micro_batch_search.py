"""The search finds what trying every way finds."""

from dataclasses import replace
from itertools import accumulate

import pytest

from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece
from lightning_wlb.planning.micro_batch_search import (
    FEWEST,
    FILLED,
    Candidate,
    MicroBatchSearch,
    Score,
    score_of,
)
from lightning_wlb.planning.plan_scoring import Placement, WorkScorer
from lightning_wlb.planning.replica_plans import replica_plan
from lightning_wlb.planning.synthetic_lengths import generator_a
from lightning_wlb.planning.tuning import HALVES
from tests.planning.test_slicing import LLAMA2_7B_LAYER

WINDOW = 16_384
TOTAL, FORWARD = LLAMA2_7B_LAYER.total, LLAMA2_7B_LAYER.forward
SMALL = FORWARD(WINDOW // 100)
EVERY = [
    FEWEST,
    *(Candidate(kind, halves) for kind in ("whole", "sliced", "apart") for halves in HALVES),
]


def candidates(lengths, stages=4, virtual=1, overhead=SMALL, nominal=4, **limits):
    mesh = Mesh(pipeline=stages, virtual_stages=virtual)
    return MicroBatchSearch(
        [Piece(number, 0, tokens, 0) for number, tokens in enumerate(lengths)],
        nominal=nominal,
        cap=WINDOW,
        work=TOTAL,
        place=Placement(
            mesh, "per_sequence", WorkScorer(LLAMA2_7B_LAYER, mesh, overhead, **limits)
        ),
    )


def a_step(seed):
    lengths = generator_a(500, WINDOW, seed).tolist()
    return [
        n for n, filled in zip(lengths, accumulate(lengths), strict=True) if filled < 4 * WINDOW
    ]


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (4, 1), (4, 2)])
def test_no_way_is_shorter_than_the_one_found(stages, virtual):
    for seed in range(2):
        tried = candidates(a_step(seed), stages, virtual)
        found = tried.score(tried.best())
        assert found.time <= 1.002 * min(tried.score(way) for way in EVERY).time


def test_dear_actions_lead_to_few_micro_batches():
    tried = candidates(a_step(0), overhead=FORWARD(WINDOW))
    assert tried.best().halves <= 3
    assert tried.score(tried.best()) == min(tried.score(way) for way in EVERY)


def test_few_micro_batches_are_not_tried_where_a_long_pipeline_would_wait_for_them():
    tried = candidates(a_step(0), stages=8)
    assert tried.best() in EVERY
    assert FEWEST not in tried._scores
    assert tried.score(tried.best()).time < tried.score(FEWEST).time / 1.3


def test_one_stage_has_nothing_to_fill():
    assert candidates(a_step(0), stages=1).best() == FEWEST


def test_pieces_that_waste_a_window_stay_whole_on_one_stage():
    """In three micro-batches they would be cut, and cut pieces stay open till the step ends."""
    tried = candidates([WINDOW * 3 // 5] * 5, stages=1)
    assert tried.best() == FEWEST
    assert [[part.tokens for part in pack] for pack in tried.packs(FEWEST)] == [
        [WINDOW * 3 // 5]
    ] * 5
    assert not tried.score(FEWEST).excess


def test_the_walk_steps_over_numbers_that_make_the_same_micro_batches():
    """Two pieces of half a window and a bit are whole in four and in more micro-batches alike."""
    tried = candidates([WINDOW // 2 + 1] * 10, nominal=5)
    numbers = [len(tried.packs(Candidate("whole", halves))) for halves in HALVES]
    assert numbers == [0, 0, 0, 10, 10, 10, 10, 10, 10, 10]
    assert tried._beside("whole", 4, 1) == []
    assert tried._beside("whole", 9, -1) == [2]


def test_what_overflows_is_taken_only_where_nothing_fits():
    free = candidates(a_step(1))
    tight = candidates(a_step(1), limit=WINDOW)
    assert not tight.score(tight.best()).excess
    assert tight.score(tight.best()).time >= free.score(free.best()).time
    assert candidates(a_step(1), limit=1).best() in EVERY


def test_a_shared_micro_batch_comes_first_and_those_of_others_not_at_all():
    tried = candidates([600, 500])
    packs = tried.packs(FEWEST)
    plan = replica_plan(
        packs, 1, "per_sequence", [([packs[0][0]], (0, 1)), ([packs[0][0]], (2, 3))]
    )
    assert [micro_batch.replicas for micro_batch in plan.forward] == [(0, 1), (1,)]
    assert Score(0, 2) < Score(1, 1) < Score(2, 0)
    assert score_of([], tried.place.scorer) == (0, 0)


@pytest.mark.parametrize("pieces", [11, 12])
def test_equal_pieces_are_cut_apart_where_memory_stops_other_slices(pieces):
    """Slices whose micro-batches join pieces would open all of the step at once."""
    tried = candidates([WINDOW] * pieces, nominal=pieces, limit=4 * WINDOW)
    found = tried.best()
    assert found.kind == "apart"
    assert not tried.score(found).excess
    assert tried.score(Candidate("sliced", found.halves)).excess
    fitting = [tried.score(way) for way in EVERY if not tried.score(way).excess]
    assert tried.score(found).time <= 1.005 * min(fitting).time < 0.88 * tried.score(FEWEST).time


def test_what_exceeds_the_limit_least_is_taken_where_nothing_fits():
    tried = candidates(a_step(1), limit=WINDOW // 2)
    least = min(tried.score(way) for way in EVERY)
    assert least.excess
    assert tried.score(tried.best()).excess <= 1.1 * least.excess


class KnownDevice(WorkScorer):
    """One that has a device of much memory."""

    longest = (10 * WINDOW,)


def test_full_micro_batches_and_a_small_last_one_are_tried_where_a_device_is_known():
    half, third, quarter, ninth = (WINDOW // part for part in (2, 3, 4, 9))
    lengths = [half] * 5 + [third] * 2 + [quarter] * 3 + [ninth]
    unknown = candidates(lengths, stages=2, overhead=FORWARD(WINDOW))
    scorer = KnownDevice(LLAMA2_7B_LAYER, unknown.place.mesh, FORWARD(WINDOW))
    known = replace(unknown, place=unknown.place._replace(scorer=scorer))
    assert [sum(piece.tokens for piece in pack) for pack in known.packs(FILLED)] == [
        *(2 * half, 2 * half, half + third + ninth, third + 2 * quarter, quarter)
    ]
    assert known.best() == FILLED
    assert unknown.best() != FILLED
    assert known.score(FILLED).time < 0.98 * unknown.score(unknown.best()).time
    # A piece that is longer than the cap cannot be packed so.
    assert replace(known, cap=WINDOW // 8).packs(FILLED) == []
