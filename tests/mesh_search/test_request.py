"""What a search is asked: checks, and a digest of all that decides the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.mixture import StoreShare
from tests.mesh_search.requests import SMALL, request


def test_equal_requests_have_equal_digests() -> None:
    assert request().digest == request().digest
    # How far a run goes decides nothing, and the profile's nodes are those that are given.
    longer = replace(request().data, max_tokens=10**6)
    assert replace(request(), data=longer).digest == request().digest
    per_node = replace(Profile.load("h100"), devices_per_node=4)
    assert request(profile=per_node).digest == request(devices_per_node=4).digest


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": np.arange(64, 124)},
        {"shape": replace(SMALL, layers=9)},
        {"data": DataSettings(4096, 4, packing={"method": "slim", "micro_packs": 2})},
        {"data": DataSettings(4096, 4, seed=1)},
        {"profile": replace(Profile.load("h100"), memory_bytes=10**10)},
        {"devices": 8},
        {"devices_per_node": 2},
        {"fixed": {"tensor": 2}},
        {"schedule": "1f1b"},
        {"virtual_stages": 2},
        {"activation_checkpointing": "full"},
        {"rest_dtype": "bfloat16"},
        {"reduce_dtype": "bfloat16"},
        {"compiled": True},
        {"sharding": "hybrid"},
        {"mixture": (StoreShare("a", 30, 1.0), StoreShare("b", 30, 2.0))},
        {"steps": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_decides_the_answer_changes_the_digest(change: dict[str, Any]) -> None:
    assert replace(request(), **change).digest != request().digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 0}, "devices=0"),
        ({"fixed": {"tensor": 3}}, "tensor 3: together 3, which does not go into 4 devices"),
        ({"fixed": {"data": 1, "pipeline": 1, "context": 1, "tensor": 2}}, "together 2"),
        ({"fixed": {"rows": 1}}, "fixed='rows'"),
        ({"schedule": "zigzag"}, "schedule='zigzag'"),
        ({"schedule": "1f1b", "virtual_stages": 2}, "runs one stage a rank"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing='some'"),
        ({"sharding": "rows"}, "sharding='rows'"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_mistakes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request(**change)


def test_several_stages_run_interleaved_unless_a_schedule_is_given() -> None:
    two = Mesh(1, 2, 2, 1, virtual_stages=2)
    assert request().schedule_of(two) == request().predictor(two).schedule == "interleaved"
    assert request().schedule_of(Mesh(1, 4)) == "1f1b"
    assert request(schedule="interleaved").schedule_of(Mesh(1, 4)) == "interleaved"
