"""Mixtures of pipelines: the estimate by hand, and proposals for short and for long steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.heterogeneous.planning.candidates import (
    candidate_schemes,
    estimated,
)
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece, schemes_of
from tests.mesh_search.requests import request

SHAPE = ModelShape(2048, 8, 16, 16, 128, 5504, 32_000)
PROFILE = replace(Profile.load("h100"), memory_bytes=10_000_000_000)
ASKED = request(
    8, [500, 30_000], SHAPE, window=32_768, micro_batches=1, virtual_stages=1, profile=PROFILE
)


def step(*lengths: int) -> list[Piece]:
    return [Piece(number, 0, tokens, 0) for number, tokens in enumerate(lengths)]


SHORT = step(*range(300, 4300, 20))
LONG = step(30_000, *range(300, 1100, 100))


def test_the_estimate_by_hand() -> None:
    # On the first kind a piece takes half as long as on the second; three pieces, the longest of
    # which two pipelines of the second kind must share.
    times = np.array([[40.0, 10.0, 4.0], [80.0, 20.0, 8.0]])
    shared = np.array([[1, 1, 1], [2, 1, 1]])
    counts = np.array([[1, 0], [2, 0], [1, 2], [0, 4], [0, 1], [1, 1]])
    # Third: 40 on either, so on the first kind, then 10 and 4 of two pipelines on the second.
    assert estimated(counts, times, shared).tolist() == [54, 27, 40, 27, np.inf, 40]
    assert estimated(counts[2:3], times[:, 1:], shared[:, 1:]).tolist() == [10]


def test_short_and_long_steps_want_different_pipelines() -> None:
    found = candidate_schemes(ASKED, [SHORT, LONG], 6)
    assert len(found) == len(set(found)) == 6
    for strategy in found:
        assert [scheme.first for scheme in strategy] == [
            sum(each.size for each in strategy[:at]) for at in range(len(strategy))
        ]
        assert strategy[-1].ranks.stop == 8
        sizes = [each.size for each in strategy]
        assert sizes == sorted(sizes, reverse=True)
        assert {sum(each.stages) for each in strategy} == {8}
    # The best of each step comes first.
    single = schemes_of(Mesh(8), ASKED.predictor(Mesh(8)).stages)
    assert found[0] == single
    assert found[1][0].size > 1
    assert any(len({scheme.shape for scheme in strategy}) > 1 for strategy in found)
    assert any(scheme.tensor > 1 for strategy in found for scheme in strategy)
    whole = candidate_schemes(replace(ASKED, fixed={"tensor": 1}), [SHORT, LONG], 6, beside=single)
    assert single not in whole
    assert {scheme.tensor for strategy in whole for scheme in strategy} == {1}
