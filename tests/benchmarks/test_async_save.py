"""The summary of measured saves: medians over the runs of one kind."""

from benchmarks.async_save import summary


def run(background: bool, stalls: list[float], while_saving: list[float]) -> dict:
    return {
        "background": background,
        "checkpoint_mb": 8.25,
        "stalls": stalls,
        "written": [2 * each for each in stalls],
        "steps": {False: [1.0, 3.0, 2.0], True: while_saving},
    }


def test_medians_of_one_kind():
    rows = [run(False, [4.0, 6.0], []), run(True, [0.5], [9.0]), run(False, [20.0], [])]
    assert summary(rows, False) == {
        "async_save": False,
        "saves": 3,
        "checkpoint_mb": 8.2,
        "stall_s": 6.0,
        "written_after_s": 12.0,
        "step_s": 2.0,
        "step_while_saving_s": None,
    }
    assert summary(rows, True)["step_while_saving_s"] == 9.0
