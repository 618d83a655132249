"""What a plan says about recomputation: JSON with and without it, print, validation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_wlb.plan import StepPlan
from tests.test_plan import merged, plain


def recomputing(plan: StepPlan, *modes: str) -> StepPlan:
    """The plan, whose micro-batches of replica 0 have these modes, by their first slice."""
    first, *others = plan.replicas
    own = first.changed(lambda each: replace(each, recompute=modes[each.slices[0]]))
    return replace(plan, replicas=(own, *others))


def test_a_plan_says_what_each_micro_batch_recomputes() -> None:
    plan = recomputing(plain(), "selective", "full").validate()
    copy = StepPlan.from_json(plan.to_json())
    assert copy == plan
    assert [each.recompute for each in copy.replicas[0].forward] == ["selective", "full"]
    assert plan.digest != plain().digest
    assert str(plan).splitlines()[1:4] == [
        "  replica 0 forward 0: 40 tokens, per_document, 64 rows per rank, recompute selective:"
        " 2[0:40)",
        "  replica 0 forward 1: 10 tokens, per_document, 64 rows per rank, recompute full: 5[0:10)",
        "  replica 1 forward 0: 50 tokens, per_document, 64 rows per rank: 7[0:30) 7@30[30:50)",
    ]


def test_json_from_before_recomputation_was_planned_means_none() -> None:
    fields = json.loads(plain().to_json())
    for replica in fields["replicas"]:
        for micro_batch in (*replica["forward"], *replica["backward"]):
            del micro_batch["recompute"]
    assert StepPlan.from_json(json.dumps(fields)) == plain()


def test_modes_that_cannot_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"replica 0: micro-batch 1 has recompute='some'"):
        recomputing(plain(), "none", "some").validate()
    with pytest.raises(ValueError, match=r"replica 1 does not list it"):
        recomputing(merged(), "full", "none").validate()
