"""What the heat map shows, and that it becomes a picture."""

import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.image import imread

from lightning_wlb.callbacks.heat_map import HeatMap, new_figure, save_png
from lightning_wlb.callbacks.imbalance import COMPUTE, in_pipelines
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme


def seconds_of(
    compute: list[list[float]], mesh: Mesh, shapes: list[tuple[int, int, int]] | None = None
) -> list[np.ndarray]:
    """Forward compute [ranks, micro-batches] as timings of pipelines of these shapes."""
    seconds = np.zeros((mesh.devices, len(compute[0]), 2, 2))
    seconds[:, :, 0, COMPUTE] = compute
    return in_pipelines(seconds, shapes or [mesh.shape[1:]] * mesh.data)


def test_each_rank_computes_and_waits_in_all_steps():
    drawing = HeatMap(Mesh(data=2))
    # The heavy replica changes, so that sums of compute alone would look balanced.
    drawing.add(0, seconds_of([[1.0, 3.0], [2.0, 0.0]], drawing.mesh), [2, 1], seconds=5.0)
    drawing.add(1, seconds_of([[2.0], [4.0]], drawing.mesh), [1, 1], seconds=5.0)
    drawing.add(2, np.zeros((2, 1, 1, 1, 0, 2, 2)), [0, 0], seconds=1.0)
    assert drawing.steps == 2
    np.testing.assert_allclose(drawing.computed, [6.0, 6.0])
    np.testing.assert_allclose(drawing.waiting, [0.4, 0.4])
    # In each step the mean rank computes a second less than the heaviest.
    assert drawing.uneven == 2.0


@pytest.mark.parametrize(
    ("mesh", "compute", "seconds", "advice"),
    [
        (Mesh(data=2), [[3.9], [3.8]], 4.0, "4% of their time: there is nothing to gain"),
        (Mesh(data=2), [[3.8], [1.8]], 4.0, "30% of their time, 25% for the replica with most"),
        (
            Mesh(data=2),
            [[2.0], [1.6]],
            4.0,
            "5% for the replica .* messages or other programs: .* --mesh auto",
        ),
        (Mesh(pipeline=2), [[2.0], [2.0]], 4.0, "50% .* the pipeline and for messages: give more"),
    ],
)
def test_a_sentence_says_what_the_waiting_is_and_what_to_do(mesh, compute, seconds, advice):
    drawing = HeatMap(mesh)
    drawing.add(0, seconds_of(compute, mesh), [1] * mesh.data, seconds)
    assert re.search(f"^Ranks wait .*{advice}", drawing.advice)


def test_a_row_is_a_rank_also_in_steps_on_pipelines_of_their_own(tmp_path: Path):
    mesh = Mesh(tensor=3)
    drawing = HeatMap(mesh)
    strategy = Scheme(0, (2,), tensor=2), Scheme(2, (2,))
    compute = [[1.0, 1.0], [1.0, 0.5], [4.0, 0.0]]
    seconds = seconds_of(compute, mesh, [(1, 1, 2), (1, 1, 1)])
    drawing.add(7, seconds, [2, 1], seconds=5.0, strategy=strategy)
    step, taken, milliseconds = drawing.typical
    assert (step, taken) == (7, strategy)
    np.testing.assert_array_equal(milliseconds, [[1000, 1000], [1000, 500], [4000, np.nan]])
    np.testing.assert_allclose(drawing.computed, [2.0, 1.5, 4.0])
    assert drawing.uneven == 4.0 - 2.5
    assert drawing._rank_labels(strategy)[1:] == [
        "rank 1\ndata 0, tensor 1",
        "rank 2\ndata 1",
    ]
    drawing.draw(tmp_path / "map.png", "")
    assert imread(tmp_path / "map.png")[..., :3].std() > 0.05


def test_the_typical_step_has_the_median_waiting():
    mesh = Mesh(data=2)
    drawing = HeatMap(mesh)
    for step, heavy in enumerate([5.0, 1.0, 3.0]):
        drawing.add(step, seconds_of([[heavy, 1.0], [1.0, 0.0]], mesh), [2, 1], seconds=6.0)
    step, strategy, milliseconds = drawing.typical
    assert (step, strategy) == (2, ())
    np.testing.assert_allclose(milliseconds, [[3000.0, 1000.0], [1000.0, np.nan]])


def test_it_draws_a_large_mesh(tmp_path: Path):
    mesh, columns = Mesh(data=8, pipeline=4, context=4), 40
    drawing = HeatMap(mesh)
    generator = np.random.default_rng(0)
    for step in range(3):
        seconds = seconds_of(generator.random((mesh.devices, columns)), mesh)
        drawing.add(step, seconds, [columns] * mesh.data, 1.5 * columns)
    path = tmp_path / "deep" / "map.png"
    path.parent.mkdir()
    (tmp_path / "thesis").write_text("mine")
    path.symlink_to(tmp_path / "thesis")
    drawing.draw(path, f"mesh {mesh}")
    assert (tmp_path / "thesis").read_text() == "mine", "never through a link"
    with (
        mock.patch(
            "lightning_wlb.callbacks.heat_map.check_links", side_effect=ValueError("strange")
        ),
        pytest.raises(ValueError, match="strange"),
    ):
        drawing.draw(path, f"mesh {mesh}")
    height, width = imread(path).shape[:2]
    assert 500 <= width <= 3200
    assert 300 <= height <= 1700
    # Something is drawn in it: not one colour.
    assert imread(path)[..., :3].std() > 0.05


def test_no_text_goes_to_latex(tmp_path: Path):
    """As a matplotlibrc of the working folder may ask."""
    asked = mock.patch("matplotlib.texmanager.TexManager.make_dvi", side_effect=AssertionError)
    with asked, rc_context({"text.usetex": True}):
        figure = new_figure(2, 2)
        figure.subplots().set_title("title")
        save_png(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
