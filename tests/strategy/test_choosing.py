"""What a run plans by, and whose mesh it takes, before there is a search."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme
from lightning_wlb.strategy import choosing
from lightning_wlb.strategy.mesh_choice import compare
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.strategy.harness import CASES, data

CPU, H100 = Profile.load("cpu"), Profile.load("h100")


@pytest.mark.parametrize(
    ("asked", "usual"),
    [
        (("auto", None), ("1f1b", 1)),
        (("auto", 1), ("1f1b", 1)),
        (("auto", 3), ("interleaved", 3)),
        (("interleaved", None), ("interleaved", 2)),
        (("gpipe", None), ("gpipe", 1)),
    ],
)
def test_what_a_schedule_comes_to_where_nothing_is_chosen(asked, usual) -> None:
    schedule, stages = asked
    strategy = WLBStrategy(schedule=schedule, virtual_pipeline_size=stages)
    assert (strategy.schedule, strategy._virtual_stages) == usual


def profile(device: str, settled: bool, given: Profile | None = None, nodes: int = 1):
    """The profile of a run on so many nodes of four devices."""
    strategy = WLBStrategy()
    strategy.num_nodes = nodes
    strategy.parallel_devices = [torch.device(device)] * 4
    with (
        mock.patch.object(WLBStrategy, "root_device", torch.device(device)),
        mock.patch.object(choosing, "profile_of", return_value=CPU if device == "cpu" else H100),
    ):
        return strategy._profile(given, settled)


def test_runs_on_gpus_and_those_that_search_plan_by_a_profile() -> None:
    four = {"devices_per_node": 4}
    assert profile("cpu", settled=True) is None
    assert profile("cpu", settled=False) == replace(CPU, **four)
    assert profile("cuda", settled=True) == replace(H100, **four)
    assert profile("cuda", settled=False, nodes=2) == replace(H100, **four)
    # The data module's is its own affair, unless a mesh is chosen by it.
    own = replace(H100, name="own", devices_per_node=2)
    assert profile("cuda", settled=True, given=own) is None
    assert profile("cuda", settled=False, given=own) == replace(own, **four)
    # Nothing is known of what lies between nodes of CPUs.
    assert profile("cpu", settled=False, nodes=2) is None


def on(mesh: Mesh, schedule: str) -> WLBStrategy:
    """A strategy that has run on a mesh."""
    strategy = WLBStrategy()
    strategy._rank, strategy.schedule = mesh.coordinate(0), schedule
    return strategy


@pytest.mark.parametrize(
    ("options", "takes_it"),
    [
        ({}, True),
        ({"pipeline_parallel_size": 2}, True),
        ({"data_parallel_size": 2, "schedule": "interleaved", "virtual_pipeline_size": 2}, True),
        ({"pipeline_parallel_size": 4}, False),
        ({"schedule": "1f1b"}, False),
        ({"virtual_pipeline_size": 4}, False),
    ],
)
def test_a_mesh_is_gone_on_with_where_it_has_what_is_given(options, takes_it) -> None:
    earlier = on(Mesh(2, 2, virtual_stages=2), "interleaved")
    later = WLBStrategy(**options)
    for size, expected in ((4, takes_it), (8, False)):
        with mock.patch.object(WLBStrategy, "world_size", size):
            assert earlier._is_as_asked_by(later) == expected


def test_ranks_that_were_given_different_profiles_are_refused() -> None:
    def said(**options) -> dict[str, str]:
        return WLBStrategy()._arguments(data(CASES[0], **options))

    everyone = [said(profile=given) for given in (None, "none", "cpu", None)]
    assert [each["a device profile"] for each in everyone[:2]] == ["whatever is measured", "none"]
    compare([everyone[0], everyone[3]])
    for other in everyone[1:3]:
        with pytest.raises(MisconfigurationException, match="rank 0 sees a device profile of what"):
            compare([everyone[0], other])


def test_ranks_that_were_given_different_strategies_are_refused() -> None:
    others = [(Scheme(0, (4,), 1, 2), Scheme(2, (2, 2)))], "off"
    everyone = [WLBStrategy(dynamic=each)._arguments(data(CASES[0])) for each in others]
    with pytest.raises(MisconfigurationException, match=r"ranks \[1\] of off"):
        compare(everyone)
