"""The strategy of a plan: schemes, what it refuses, JSON, digest, print."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.plan import ReplicaPlan, Scheme, StepPlan
from tests.test_plan import merged, plain

UNEQUAL = (Scheme(0, (1, 3), tensor=2), Scheme(4, (4,), context=2))

sizes = st.integers(1, 4)
schemes = st.builds(
    Scheme, st.integers(0, 9), st.lists(sizes, min_size=1, max_size=4).map(tuple), sizes, sizes
)


@given(schemes)
def test_a_scheme_places_its_ranks_as_a_mesh_does(scheme: Scheme) -> None:
    """Stages outermost, tensor innermost, without a gap; every layer is on one stage."""
    stages, context, tensor = len(scheme.stages), scheme.context, scheme.tensor
    assert [scheme.place(rank) for rank in scheme.ranks] == list(
        itertools.product(range(stages), range(context), range(tensor))
    )
    assert (scheme.ranks.start, len(scheme.ranks)) == (scheme.first, scheme.size)
    assert [layer for stage in scheme.layers for layer in stage] == list(range(sum(scheme.stages)))
    assert tuple(map(len, scheme.layers)) == scheme.stages
    for outside in (scheme.first - 1, scheme.first + scheme.size):
        with pytest.raises(ValueError, match=f"rank {outside} is not in the pipeline"):
            scheme.place(outside)


def test_sizes_that_are_none_are_refused() -> None:
    assert Scheme(np.int64(2), [np.int64(3)]) == Scheme(2, (3,))
    for wrong, message in (
        ({"first": -1}, "scheme: first=-1"),
        ({"stages": ()}, "holds no layer"),
        ({"stages": (2, 0)}, "scheme: stages=0"),
        ({"context": 0}, "scheme: context=0"),
        ({"tensor": True}, "scheme: tensor=True is of type bool"),
    ):
        with pytest.raises(ValueError, match=message):
            Scheme(**{"first": 0, "stages": (4,)} | wrong)


def test_a_plan_says_on_which_ranks_each_replica_runs() -> None:
    plan = replace(plain(), schemes=UNEQUAL).validate()
    copy = StepPlan.from_json(plan.to_json())
    assert copy == plan
    assert copy.digest == plan.digest != plain().digest
    assert plan.digest != replace(plan, schemes=(Scheme(0, (2, 2), tensor=2), UNEQUAL[1])).digest
    assert str(plan).splitlines()[1:3] == [
        "  replica 0 on ranks [0, 4): context 1 × tensor 2, layers 1+3",
        "  replica 1 on ranks [4, 6): context 2 × tensor 1, layers 4",
    ]


def test_without_a_strategy_json_and_digest_are_what_they_were() -> None:
    plan = plain()
    assert "strategy" not in json.loads(plan.to_json())
    assert StepPlan.from_json(plan.to_json()).schemes == ()
    assert plan.digest == 825703355640727667


def test_a_strategy_that_cannot_run_is_refused() -> None:
    for strategy, message in (
        (UNEQUAL[:1], "1 schemes for 2 replicas"),
        ((UNEQUAL[0], replace(UNEQUAL[1], first=5)), "pipeline 1, .* the next free rank is 4"),
        ((replace(UNEQUAL[0], first=1), UNEQUAL[1]), "pipeline 0, .* the next free rank is 0"),
        ((UNEQUAL[0], Scheme(4, (3,))), "have 3 layers, those of pipeline 0 4"),
        ((Scheme(0, (4,), tensor=3), Scheme(3, (4,))), "replica 0: micro-batch 0 has 64 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(plain(), schemes=strategy).validate()


def test_rows_hold_every_token_of_the_scheme() -> None:
    first, second = plain().replicas
    plan = replace(
        plain(),
        replicas=(first, second.changed(lambda each: replace(each, rows=24))),
        schemes=UNEQUAL,
    )
    with pytest.raises(ValueError, match=r"micro-batch 0 has 24 rows .* for 50 tokens"):
        plan.validate()


def test_only_pipelines_that_are_alike_share_a_micro_batch() -> None:
    alike = (Scheme(0, (2, 2)), Scheme(2, (2, 2)))
    replace(merged(), schemes=alike).validate()
    with pytest.raises(ValueError, match=r"shared by replicas \(0, 1\), but .* replica 1 on"):
        replace(merged(), schemes=(alike[0], Scheme(2, (1, 3)))).validate()


def moved(plan: StepPlan, to: Sequence[int]) -> StepPlan:
    """The plan with its replicas at other places, and pipelines without work at the rest."""
    replicas = [ReplicaPlan((), ())] * (max(to) + 1)
    for replica, number in zip(plan.replicas, to, strict=True):
        replicas[number] = replica.changed(
            lambda each: replace(each, replicas=tuple(to[n] for n in each.replicas))
        )
    return replace(plan, replicas=tuple(replicas))


def test_those_that_share_are_an_aligned_range_of_the_pipelines_that_are_alike() -> None:
    small, other = (4,), (2, 2)
    at = [Scheme(0, other), Scheme(2, small), Scheme(3, other), Scheme(5, small), Scheme(6, small)]
    plan = replace(moved(merged(), (1, 3)), schemes=tuple(at[:4])).validate()
    assert StepPlan.from_json(plan.to_json()) == plan
    assert "shared by (1, 3): 1[0:50)" in str(plan)
    with pytest.raises(ValueError, match=r"\(3, 4\).* power-of-two range of \[1, 3, 4\]"):
        replace(moved(merged(), (3, 4)), schemes=tuple(at)).validate()
    with pytest.raises(ValueError, match=r"\(1, 3\).* power-of-two range of \[0, 1, 2, 3\]"):
        moved(merged(), (1, 3)).validate()
