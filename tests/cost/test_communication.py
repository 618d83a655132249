"""Links of a mesh, and times of messages against hand-made figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_wlb.cost.communication import Communication
from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.mesh import Mesh

NODE, NETWORK = Link(1000.0, 100e9), Link(5000.0, 10e9)
PROFILE = replace(
    Profile.load("h100"), devices_per_node=8, links={"node": NODE, "network": NETWORK}
)


def test_inner_axes_stay_in_the_node_and_outer_ones_cross() -> None:
    made = Communication(PROFILE, Mesh(data=2, pipeline=2, context=2, tensor=4))
    assert made.links["tensor"] == made.links["context"] == NODE
    # One rank of each data × context pair per node: two of context, and two nodes.
    assert made.links["data"] == Link(3000.0, 20e9)  # every second hop leaves the node
    assert made.pipeline == (NETWORK, NETWORK)


def test_a_stage_boundary_may_lie_inside_a_node() -> None:
    made = Communication(PROFILE, Mesh(pipeline=4, tensor=4))
    assert made.pipeline == (NODE, NETWORK, NODE, NETWORK)


def test_a_group_over_nodes_drives_one_adapter_for_each_of_its_ranks_there() -> None:
    assert Communication(PROFILE, Mesh(tensor=16)).links["tensor"] == Link(1500.0, 80e9)
    fast = replace(PROFILE, links={"node": NODE, "network": Link(5000.0, 50e9)})
    assert Communication(fast, Mesh(tensor=16)).links["tensor"] == Link(1500.0, 100e9)  # the node's
    assert Communication(PROFILE, Mesh(context=4, tensor=8)).links["context"] == NETWORK


def test_a_mesh_of_several_nodes_needs_a_network() -> None:
    alone = replace(PROFILE, links={"node": NODE})
    Communication(alone, Mesh(tensor=8))
    with pytest.raises(ValueError, match=r"16 devices, a node .* has 8.*links.network"):
        Communication(alone, Mesh(data=2, tensor=8))


def test_times_are_latency_plus_bytes_over_bandwidth() -> None:
    made = Communication(PROFILE, Mesh(pipeline=2, tensor=4))
    # Three steps of 1 µs and 2.5 MB at 100 GB/s.
    assert made.collective_ns("tensor", 4, 10_000_000) == 3 * (1000 + 25_000)
    assert made.collective_ns("tensor", 1, 10_000_000) == 0
    assert made.collective_ns("tensor", 4, 0) == 0
    assert made.message_ns(0, 10_000_000) == 1000 + 100_000
    assert made.message_ns(2, 10_000_000) == made.message_ns(0, 10_000_000)


def test_a_link_fills_up_while_a_transfer_ramps() -> None:
    link = Link(1000.0, 100e9, launch_ns=8000.0, ramp_ns=16000.0)
    # 100 kB take 1 µs at the full rate and lose as much; 10 MB take 100 µs and lose 16.
    assert link.ns(3, 100_000) == 3000 + 8000 + 2 * 1000
    assert link.ns(3, 10_000_000) == 3000 + 8000 + 100_000 + 16_000
    with pytest.raises(ValueError, match="ramp_ns"):
        Link(1000.0, 100e9, ramp_ns=-1.0)


def test_a_reduce_scatter_adds_what_arrived_on_gpus() -> None:
    made = Communication(PROFILE, Mesh(tensor=4))
    plain = made.collective_ns("tensor", 4, 10_000_000)
    added = 3 * 2_500_000 * 1e9 / PROFILE.element_bytes_per_second
    assert made.collective_ns("tensor", 4, 10_000_000, summed=True) == round(plain + added)
    cpu = Communication(replace(PROFILE, device_type="cpu"), Mesh(tensor=4))
    assert cpu.collective_ns("tensor", 4, 10_000_000, summed=True) == plain
