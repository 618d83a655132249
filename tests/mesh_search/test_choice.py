"""The answer as data: derived figures, JSON and back."""

from __future__ import annotations

import pytest

from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.choice import LeftOut, MeshChoice, MeshRow, name_of


def row(mesh: Mesh, time: int) -> MeshRow:
    shares = {"pipeline bubble": 0.1, "exchange of keys": 0.2}
    return MeshRow(mesh, "1f1b", "auto", 0.25, True, time, 2, 8000, 10**15, 70, shares)


CHOICE = MeshChoice(
    (row(Mesh(2, 2), 4_000_000), row(Mesh(1, 2, 2, virtual_stages=2), 5_000_000)),
    (row(Mesh(4), 6_000_000),),
    (LeftOut("too slow", 3, "1,1,4,1"),),
    "abc",
)


def test_figures_of_a_row() -> None:
    best = CHOICE.best
    assert best.step_ms == 2.0
    assert best.tokens_per_second == 2_000_000
    assert best.bubble == 0.1
    assert CHOICE.rows[1].times(best) == 1.25
    assert best.bound_by == "exchange of keys"
    assert best.sizes == "2,2,1,1"
    assert best.figures["mesh"] == vars(Mesh(2, 2))
    assert best.figures["tokens_per_second"] == 2_000_000


def test_the_best_of_each_size_is_the_first() -> None:
    assert CHOICE.best_by("pipeline") == {1: CHOICE.others[0], 2: CHOICE.rows[0]}
    assert CHOICE.best_by("context") == {1: CHOICE.rows[0], 2: CHOICE.rows[1]}


def test_json_and_back() -> None:
    text = CHOICE.to_json()
    assert "\n" not in text
    assert MeshChoice.from_json(text) == CHOICE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}]}', CHOICE.to_json()[:-9]])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the answer of a mesh search"):
        MeshChoice.from_json(text)


def test_a_name_has_virtual_stages_where_there_are_any() -> None:
    assert name_of(Mesh(2, 2)) == "2,2,1,1"
    assert name_of(Mesh(2, 2, virtual_stages=2)) == "2,2,1,1 with 2 virtual stages"
