"""The committed fingerprints are those of the plans that the packings make today."""

from __future__ import annotations

import json

import pytest

from benchmarks.plan_digests import PACKINGS, RESULTS, Setting, digest, settings

COMMITTED = json.loads(RESULTS.read_text())


def test_every_setting_is_committed() -> None:
    assert set(COMMITTED["digests"]) == {str(each) for each in settings()}


@pytest.mark.parametrize("packing", PACKINGS)
def test_plans_have_not_moved(packing: str) -> None:
    """If they were to move: write the fingerprints anew, and say in the commit why."""
    setting = Setting(packing, "generator_a", micro_batches=4, data=1, pipeline=4, context=1)
    assert digest(setting, COMMITTED["steps"]) == COMMITTED["digests"][str(setting)]
