"""Mixtures of pipelines: the estimate by hand, and proposals for short and for long steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.heterogeneous.planning.candidates import (
    _Kinds,
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


@pytest.fixture(scope="module")
def kinds() -> _Kinds:
    return _Kinds(ASKED)


def test_the_estimate_by_hand() -> None:
    # On the first kind a piece takes half as long as on the second; three pieces, the longest of
    # which two pipelines of the second kind must share.
    times = np.array([[40.0, 10.0, 4.0], [80.0, 20.0, 8.0]])
    shared = np.array([[1, 1, 1], [2, 1, 1]])
    counts = np.array([[1, 0], [2, 0], [1, 2], [0, 4], [0, 1], [1, 1]])
    # Third: 40 on either, so on the first kind, then 10 and 4 of two pipelines on the second.
    assert estimated(counts, times, shared).tolist() == [54, 27, 40, 27, np.inf, 40]
    assert estimated(counts[2:3], times[:, 1:], shared[:, 1:]).tolist() == [10]


def test_neighbours_have_all_ranks(kinds: _Kinds) -> None:
    def ranks(counts: tuple[int, ...]) -> int:
        return sum(a * b for a, b in zip(counts, kinds._sizes, strict=True))

    assert all(ranks(counts) == 8 for counts in kinds._first)
    for counts in kinds._first:
        around = list(kinds._neighbours(counts))
        assert {ranks(each) for each in around} <= {8}
        assert counts not in around
    by_size = {size: kinds._sizes.index(size) for size in (1, 2, 4)}
    four_and_ones = kinds._counts({by_size[4]: 1, by_size[1]: 4})
    assert kinds._counts({by_size[2]: 2, by_size[1]: 4}) in kinds._neighbours(four_and_ones)
    assert kinds._counts({by_size[4]: 1, by_size[2]: 1, by_size[1]: 2}) in kinds._neighbours(
        four_and_ones
    )


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


def test_long_pieces_are_shared_where_that_saves_recomputation(kinds: _Kinds) -> None:
    single = next(kind for kind in kinds.legal if kind.scheme.size == 1)
    none, _, full = single.longest.tolist()
    lengths = np.array([8 * full + 1, full + 1, none + 1, none])
    times, sharers = kinds._together(single, lengths)
    assert np.isinf(times[0])
    assert sharers.tolist()[1:] == [2, 2, 1]
    other = next(kind for kind in kinds.legal if kind.scheme.shape == ((8,), 2, 1))
    assert times[2] == 2 * other.times(lengths, 2 * single.longest)[2] < single.times(lengths)[2]
    assert np.isinf(single.times(lengths)[:2]).all()


def test_nothing_is_shared_with_a_packing_that_does_not() -> None:
    apart = replace(ASKED, data=replace(ASKED.data, packing="hydraulis"))
    kinds = _Kinds(apart)
    single = next(kind for kind in kinds.legal if kind.scheme.size == 1)
    full = int(single.longest[-1])
    times, sharers = kinds._together(single, np.array([full + 1, full]))
    assert times.tolist() == [np.inf, *single.times(np.array([full]))]
    assert sharers.tolist() == [1, 1]
