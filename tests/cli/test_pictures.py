from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

from lightning_wlb.cli.pictures import draw_gantt, rows_of
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.evaluate import evaluate
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.planning import DataSettings
from tests.schedule.support import make_programs, parse_program, simulate


def predicted():
    return simulate(
        [parse_program("0F0 0B0"), parse_program("1F0 1B0")],
        lambda action: 2_500 if action.kind == "F" else 4_000,
        changed_bytes=lambda action: 10 + action.stage,
        constant_bytes=[100, 200],
        synchronisation_ns=1_000,
    )


def test_rows_have_actions_and_waits_and_who_ends_them():
    rows = rows_of([predicted()])
    spans = [[(str(action), *times) for action, *times in row.spans] for row in rows]
    assert spans == [
        [("0F0", 0, 2_500), ("0B0", 9_000, 13_000)],
        [("1F0", 2_500, 5_000), ("1B0", 5_000, 9_000)],
    ]
    assert [row.waits for row in rows] == [
        ((2_500, 9_000, "rank 1"),),
        ((0, 2_500, "rank 0"), (9_000, 13_000, "rank 0")),
    ]


def test_rows_are_of_all_replicas_and_wait_as_long_as_the_table_says():
    lengths, data = [900, 100, 200, 300, 400, 500, 600], DataSettings(1024, 3, shuffle=False)
    shape = TransformerConfig(layers=4).shape
    for mesh in (Mesh(data=2), Mesh(data=2, pipeline=2), Mesh(pipeline=2)):
        sizes = dict(zip(AXES, mesh.shape, strict=True))
        request = MeshRequest(
            np.array(lengths), shape, data, Profile.load("cpu"), mesh.devices, 4, fixed=sizes
        )
        (step,) = evaluate(replace(request, steps=1), mesh).steps
        rows = rows_of(step.simulations)
        assert len({row.name for row in rows}) == len(rows) == mesh.data * mesh.pipeline
        # Only replicas with the same beginning weigh the same in the mean.
        assert len({each.begin_ns for each in step.simulations}) == 1
        assert sum(row.idle for row in rows) / len(rows) == pytest.approx(step.bubble)
        first, last = step.simulations[0].begin_ns, step.simulations[0].compute_ns
        names = {row.name for row in rows}
        for row in rows:
            parts = sorted([*row.waits, *((*span[1:], "") for span in row.spans)])
            assert [part[0] for part in parts] == [first, *(part[1] for part in parts[:-1])]
            assert parts[-1][1] == last
            assert all(other in names - {row.name} for *_, other in row.waits)


def share(pixels, colour):
    wanted = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return float((np.abs(pixels[..., :3] - wanted).max(axis=-1) < 0.01).mean())


def test_gantt_shows_forward_and_backward_in_proportion(tmp_path):
    path = tmp_path / "made" / "gantt.png"
    programs = make_programs("interleaved", 2, 4, 2)
    found = simulate(programs, lambda action: 100 if action.kind == "F" else 200)
    draw_gantt(path, {"interleaved": [found]}, "a title")
    pixels = imread(path)
    dark, light = share(pixels, "#08306b"), share(pixels, "#4292c6")
    orange, pale = share(pixels, "#e69f00"), share(pixels, "#fbe3a8")
    assert dark > 0.03
    # Bars are twice as wide backward; their white edges and the numbers blur the proportion.
    assert 1.8 < orange / dark < 2.4
    assert 1.8 < pale / light < 2.4
    assert share(pixels, "#ececec") > 0.01


def test_gantt_of_an_empty_step(tmp_path):
    empty = simulate(make_programs("1f1b", 2, 0), lambda _: 1)
    path = tmp_path / "gantt.png"
    draw_gantt(path, {"predicted": [predicted()], "empty": [empty]}, "a title")
    assert imread(path).shape[1] == 12 * 150
