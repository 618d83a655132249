"""Who waits for whom in the picture of one step."""

from benchmarks.one_step import Wait, draw, steps_of, waits_of
from lightning_wlb.schedule.actions import Action, Span


def test_a_gap_waits_for_the_stage_that_its_next_action_needs() -> None:
    spans = (
        Span(Action(1, "F", 0), 2, 5),
        Span(Action(1, "B", 0), 9, 10),
        Span(Action(1, "F", 1), 10, 12),
    )
    assert list(waits_of(1, spans, 15)) == [Wait(0, 2, 0), Wait(5, 9, 2), Wait(12, 15, None)]


def test_the_picture_shows_waits_that_add_up_to_what_its_title_says(tmp_path) -> None:
    steps = steps_of(0)
    for step in steps.values():
        (replica,) = step.simulations
        rows = [waits_of(stage, spans, step.total_ns) for stage, spans in enumerate(replica.spans)]
        waited = sum(wait.end_ns - wait.begin_ns for row in rows for wait in row)
        busy = sum(replica.busy_ns)
        assert waited + busy == len(replica.spans) * step.total_ns
    draw(tmp_path / "step.png", steps)
    assert (tmp_path / "step.png").stat().st_size > 10_000
