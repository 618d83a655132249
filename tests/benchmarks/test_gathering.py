"""The summary of measured steps: of the slower rank, medians over pairs of neighbouring steps."""

from benchmarks.gathering import WARM_UP, summary

SLOW = [(9.0, 9.0, 9.0)] * WARM_UP


def test_the_slower_rank_and_pairs_count():
    first = {
        True: [*SLOW, (4.0, 2.0, 2.0), (5.0, 1.0, 2.0), (8.0, 4.0, 2.0)],
        False: [*SLOW, *[(3.0, 0.5, 1.0)] * 3],
    }
    second = {True: [*SLOW, *[(3.0, 2.5, 9.0)] * 3], False: [*SLOW, *[(2.0, 1.0, 9.0)] * 3]}
    assert summary([first, second]) == {
        "step_at_once_s": 5.0,
        "step_behind_s": 3.0,
        "exposed_at_once_s": 2.0,
        "exposed_behind_s": 0.5,
        "saved_s": 2.0,
        "hidden": 0.75,
        "step_ratio": 0.6,
        "processor_ratio": 0.5,
    }
