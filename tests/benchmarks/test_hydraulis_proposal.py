"""The dynamic programme against all strategies, and what it proposes for real lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hydraulis_proposal import (
    propose,
    proposed_meshes,
    proposed_strategies,
)
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import legal_meshes
from lightning_wlb.planning import DataSettings


def slowest(times, most, end: int, steps: int) -> float:
    """The least time of all strategies for the first ``end`` intervals, by trying them all."""
    best = np.inf
    for groups in range(1, min(end, steps) + 1):
        for cuts in combinations(range(1, end), groups - 1):
            bounds = [0, *cuts, end]
            for devices in product(range(1, steps + 1), repeat=groups):
                if sum(devices) > steps:
                    continue
                for schemes in product(range(len(times)), repeat=groups):
                    if any(most[k] < stop for k, stop in zip(schemes, bounds[1:], strict=True)):
                        continue
                    best = min(
                        best,
                        max(
                            times[k, start:stop].sum() / own
                            for k, start, stop, own in zip(
                                schemes, bounds, bounds[1:], devices, strict=False
                            )
                        ),
                    )
    return best


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_it_finds_the_best_of_all_strategies(data) -> None:
    schemes, intervals, steps = (data.draw(st.integers(1, most)) for most in (3, 4, 4))
    numbers = st.integers(1, 100)
    times = np.array(
        data.draw(st.lists(st.lists(numbers, min_size=intervals, max_size=intervals),
                           min_size=schemes, max_size=schemes)), float,
    )  # fmt: skip
    most = np.array(
        data.draw(st.lists(st.integers(0, intervals), min_size=schemes, max_size=schemes))
    )
    for end, parts in enumerate(propose(times, most, steps), start=1):
        expected = slowest(times, most, end, steps)
        if not np.isfinite(expected):
            assert parts == []
            continue
        begins = [0, *(part.longest + 1 for part in parts)]
        assert begins[-1] == end
        assert sum(part.devices for part in parts) <= steps
        assert all(most[part.scheme] > part.longest for part in parts)
        assert max(
            times[part.scheme, begin : part.longest + 1].sum() / part.devices
            for begin, part in zip(begins, parts, strict=False)
        ) == pytest.approx(expected)


def test_lengths_decide_the_schemes() -> None:
    """Short documents want small replicas; a window that one device cannot hold a larger one."""
    shape = ModelShape(2048, 16, 16, 16, 128, 5504, 32_000)

    def proposed(longest: int) -> set[int]:
        lengths = np.array([500] * 300 + [longest] * 20, np.int64)
        request = MeshRequest(
            lengths, shape, DataSettings(longest, 4), Profile.load("h100"), devices=8
        )
        meshes = proposed_meshes(request)
        assert set(meshes) <= set(legal_meshes(request))
        return {mesh.devices // mesh.data for mesh in meshes}

    assert min(proposed(2_000)) == max(proposed(2_000)) == 1
    assert max(proposed(400_000)) > 2


def test_strategies_have_whole_pipelines_the_larger_first() -> None:
    lengths = np.array([500] * 300 + [60_000] * 15 + [200_000] * 2, np.int64)
    shape = ModelShape(2048, 16, 16, 16, 128, 5504, 32_000)
    data, fixed = DataSettings(200_000, 4), {"data": 2}
    request = MeshRequest(lengths, shape, data, Profile.load("h100"), devices=8, fixed=fixed)
    found = proposed_strategies(request)
    assert len(set(found)) == len(found) > 2
    assert any(len({scheme.shape for scheme in strategy}) > 1 for strategy in found)
    for strategy in found:
        assert [scheme.first for scheme in strategy] == [
            sum(each.size for each in strategy[:at]) for at in range(len(strategy))
        ]
        assert strategy[-1].ranks.stop == 8
        assert [each.size for each in strategy] == sorted((s.size for s in strategy), reverse=True)
        assert {sum(each.stages) for each in strategy} == {16}
    whole = proposed_strategies(replace(request, fixed={"tensor": 1}))
    assert {scheme.tensor for strategy in whole for scheme in strategy} == {1}
