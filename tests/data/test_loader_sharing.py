"""Loader workers share the planning of the steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_wlb.data import loader as sampler
from lightning_wlb.planning.planner import Planner, Release
from tests.data.test_loader import content, dataset


def test_a_worker_places_its_own_steps_and_those_whose_digest_they_carry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed: list[int] = []
    place = Planner.place

    def noting(planner: Planner, release: Release) -> Any:
        placed.append(release.step)
        return place(planner, release)

    whole = list(dataset())
    monkeypatch.setattr(Planner, "place", noting)
    monkeypatch.setattr(sampler, "get_worker_info", lambda: SimpleNamespace(id=1, num_workers=4))
    own = list(dataset())
    assert [content(batch) for batch in own] == [content(batch) for batch in whole[1::4]]
    assert placed == [step for step in range(len(whole)) if step % 4 in (1, 2)]
    placed.clear()
    monkeypatch.undo()
    monkeypatch.setattr(Planner, "place", noting)
    list(dataset())
    assert placed == list(range(len(whole))), "one worker places each step once"
