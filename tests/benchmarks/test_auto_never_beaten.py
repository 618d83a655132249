"""On cases that once lost by 12 to 45 %, and on others, auto is beaten by none."""

from __future__ import annotations

import pytest

from benchmarks.auto_never_beaten import ALLOWED, Case, K
from lightning_wlb.cost.profile import Profile

LOST = [
    Case("equal", 64 * K, 5, 1, 4, 0),
    Case("equal", 64 * K, 24, 2, 8, 0),
    Case("bimodal", 256 * K, 4, 1, 4, 0),
]


@pytest.mark.parametrize("case", LOST, ids=str)
def test_it_is_not_beaten_where_it_was(case: Case) -> None:
    row = case.run(None)
    assert row["fits"]
    assert row["ratio"] <= ALLOWED, row["best"]


LOST_BY_PROFILE = [
    # Replicas of equal work end at unequal times, so that pieces are shared.
    ("h100", Case("log_uniform", 128 * K, 7, 3, 2, 232852)),
    # Memory is short, and whole pieces in many micro-batches need least recomputation.
    ("h100", Case("log_uniform", 128 * K, 13, 1, 2, 970104)),
    # On one stage the fewest micro-batches were 0.3 % slower than the shortest step found.
    ("h100", Case("generator_a", 64 * K, 19, 1, 1, 851640)),
    # Dealing again moved long pieces, and made other replicas late.
    ("h100-fa2", Case("generator_a", 64 * K, 21, 5, 1, 882633)),
    ("h100-fa2", Case("log_uniform", 64 * K, 12, 7, 2, 897434)),
    # Eight long pieces alike: times of slices rise and fall with their number, cut apart they fall.
    ("h100-fa2", Case("bimodal", 128 * K, 5, 1, 7, 24)),
]


@pytest.mark.parametrize(("profile", "case"), LOST_BY_PROFILE, ids=str)
def test_by_profile_it_is_not_beaten_where_it_was(profile: str, case: Case) -> None:
    row = case.run(Profile.load(profile))
    assert row["fits"]
    assert row["ratio"] <= ALLOWED, row["best"]


def test_a_dealing_that_is_not_among_the_best_is_evened_where_it_may_become_best() -> None:
    """The third dealing leaves one replica with little; the best two, evened, took 9 % more."""
    row = Case("generator_a", 64 * K, 9, 5, 3, 688554).run(Profile.load("h100-fa2"))
    assert row["ratio"] <= 0.82
