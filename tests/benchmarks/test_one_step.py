"""The picture of one step shows what its title says."""

from benchmarks.one_step import WAYS, draw, steps_of
from lightning_wlb.cli.pictures import rows_of


def test_the_picture_shows_waits_that_add_up_to_what_its_title_says(tmp_path) -> None:
    steps = steps_of(0)
    assert list(steps) == list(WAYS)
    for step in steps.values():
        rows = rows_of(step.simulations)
        waited = sum(end - begin for row in rows for begin, end, _ in row.waits)
        busy = sum(end - begin for row in rows for _, begin, end in row.spans)
        assert len(rows) == 4
        assert waited / (waited + busy) == step.bubble
    draw(tmp_path / "step.png", steps)
    assert (tmp_path / "step.png").stat().st_size > 10_000
