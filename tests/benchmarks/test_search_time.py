"""The benchmark of the search: its choice against every mesh, and a result that is gone on with."""

from __future__ import annotations

from benchmarks.search_time import REGRETS, TIMES, Asked, chosen, regret, request_of
from lightning_wlb.mesh_search.closed_form import ClosedForm
from lightning_wlb.mesh_search.search import legal_meshes


def test_settings_are_eight_to_time_and_twelve_to_compare() -> None:
    assert (len(TIMES), len(REGRETS)) == (8, 12)
    assert {asked.devices for asked in TIMES.values()} == {64, 1024}
    assert {asked.devices for asked in REGRETS.values()} == {8, 12, 16, 24}


def test_of_close_meshes_the_one_with_less_communication_is_chosen() -> None:
    rows = {
        "fast": {"steps_ns": 1000, "communication_ns": 50, "fits": True},
        "close": {"steps_ns": 1010, "communication_ns": 40, "fits": True},
        "slow": {"steps_ns": 1011, "communication_ns": 0, "fits": True},
        "large": {"steps_ns": 900, "communication_ns": 0, "fits": False},
    }
    assert chosen(rows) == "close"


def test_every_mesh_is_simulated_once() -> None:
    asked, saved = Asked("550m", 8192, 2, 2), []
    request = request_of(asked, "h100", 1)
    found: dict = {}
    regret(request, found, lambda: saved.append(len(found["meshes"])))
    form = ClosedForm(request)
    fit = [mesh for mesh in legal_meshes(request) if form.step_ns(mesh)]
    assert len(found["meshes"]) == len(fit) == len(saved) - 1
    assert found["slower_percent"]["search"] >= 0
    before = dict(found["meshes"])
    regret(request, found, lambda: saved.append(0))
    assert found["meshes"] == before
    assert len(saved) == len(fit) + 2
