"""What the heat map shows, and that it becomes a picture."""

from pathlib import Path

import numpy as np
from matplotlib.image import imread

from lightning_wlb.callbacks.heat_map import KEPT_STEPS, HeatMap
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


def test_the_sum_is_over_sorted_steps():
    mesh = Mesh(data=2)
    drawing = HeatMap(mesh)
    # The heavy micro-batch moves, the sorted picture does not.
    drawing.add(0, seconds_of([[1.0, 3.0], [2.0, 2.0 / 3]], mesh), [2, 2], slots=4)
    drawing.add(1, seconds_of([[2.0 / 3, 2.0], [3.0, 1.0]], mesh), [2, 2], slots=4)
    even = (1 + 3 + 2 + 2 / 3) / 4
    np.testing.assert_allclose(drawing.relative, np.array([[3.0, 1.0], [2.0, 2 / 3]]) / even)


def test_more_micro_batches_in_a_later_step_and_empty_ones():
    mesh = Mesh()
    drawing = HeatMap(mesh)
    drawing.add(0, seconds_of([[1.0]], mesh), [1], slots=2)
    drawing.add(1, seconds_of([[1.0, 2.0, 3.0]], mesh), [3], slots=3)
    # Even work is half a second in step 0, whose second micro-batch is empty, and 2 in step 1.
    np.testing.assert_allclose(drawing.relative, [[4 / 2.5, 2 / 2.5, 1 / 2.5]])
    drawing.add(2, np.zeros((1, 1, 1, 1, 0, 2, 2)), [0], slots=2)
    assert drawing.steps == 2


def test_a_row_is_a_rank_also_in_steps_on_pipelines_of_their_own(tmp_path: Path):
    mesh = Mesh(tensor=3)
    drawing = HeatMap(mesh)
    strategy = Scheme(0, (2,), tensor=2), Scheme(2, (2,))
    compute = [[1.0, 1.0], [1.0, 0.5], [4.0, 0.0]]
    seconds = seconds_of(compute, mesh, [(1, 1, 2), (1, 1, 1)])
    # Two micro-batches of two of three ranks and one of one are 5 of 3 ranks' 6.
    drawing.add(7, seconds, [2, 1], slots=5 / 1.5, strategy=strategy)
    step, taken, milliseconds = drawing.typical
    assert (step, taken) == (7, strategy)
    np.testing.assert_array_equal(milliseconds, [[1000, 1000], [1000, 500], [4000, np.nan]])
    # The rank alone has most to do for a rank, and comes first; even is 7.5 seconds in 5 places.
    np.testing.assert_allclose(
        drawing.relative, np.array([[4.0, 0.0], [1.0, 1.0], [1.0, 0.5]]) / 1.5
    )
    assert drawing._rank_labels(strategy)[1:] == [
        "rank 1\ndata 0, tensor 1",
        "rank 2\ndata 1",
    ]
    drawing.draw(tmp_path / "map.png", "")
    assert imread(tmp_path / "map.png")[..., :3].std() > 0.05


def test_the_typical_step_has_the_median_imbalance():
    mesh = Mesh(data=2)
    drawing = HeatMap(mesh)
    for step, heavy in enumerate([5.0, 1.0, 3.0]):
        drawing.add(step, seconds_of([[heavy, 1.0], [1.0, 0.0]], mesh), [2, 1], slots=3)
    step, strategy, milliseconds = drawing.typical
    assert (step, strategy) == (2, ())
    np.testing.assert_allclose(milliseconds, [[3000.0, 1000.0], [1000.0, np.nan]])


def test_only_the_last_steps_are_kept():
    mesh = Mesh()
    drawing = HeatMap(mesh)
    for step in range(KEPT_STEPS + 10):
        drawing.add(step, seconds_of([[1.0]], mesh), [1], slots=1)
    assert drawing.steps == KEPT_STEPS + 10
    assert drawing.typical[0] >= 10


def test_it_draws_a_large_mesh(tmp_path: Path):
    mesh, columns = Mesh(data=8, pipeline=4, context=4), 40
    drawing = HeatMap(mesh)
    generator = np.random.default_rng(0)
    for step in range(3):
        seconds = seconds_of(generator.random((mesh.devices, columns)), mesh)
        drawing.add(step, seconds, [columns] * mesh.data, columns * mesh.data)
    path = tmp_path / "deep" / "map.png"
    drawing.draw(path, f"mesh {mesh}")
    height, width = imread(path).shape[:2]
    assert 500 <= width <= 3200
    assert 300 <= height <= 1700
    # Something is drawn in it: not one colour.
    assert imread(path)[..., :3].std() > 0.05


def test_without_steps_nothing_is_written(tmp_path: Path):
    HeatMap(Mesh()).draw(tmp_path / "map.png", "")
    assert not (tmp_path / "map.png").exists()
