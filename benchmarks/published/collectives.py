"""The time of published collectives and messages between GPUs, as the package predicts it.

``bytes`` are what nccl-tests call the size: of the whole tensor in an all-gather, reduce-scatter or
all-reduce, what a rank sends in an all-to-all or a message. A figure in GB/s is nccl-tests' bus
bandwidth. This package has no all-reduce of that size; one is taken to go round the ring twice, as
two all-gathers do. Ranks fill a node before the next one begins.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published import Fact
from lightning_wlb.cost.communication import Communication
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh

BUS = {
    # nccl-tests, doc/PERFORMANCE.md: bytes that cross a rank's link, by bytes of the size
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_reduce": 2.0,
    "all_to_all": 1.0,
}


def predict(fact: Fact) -> float:
    """Microseconds, or GB/s on the busiest link."""
    kind, ranks, size = fact["collective"], fact.number("ranks"), fact.number("bytes")
    profile = Profile.load(fact["profile"])
    profile = replace(profile, devices_per_node=fact.number("per_node", 8))
    if kind == "send":
        messages = Communication(profile, Mesh(pipeline=ranks))
        ns, crossing = max(messages.message_ns(stage, size) for stage in range(ranks)), size
    else:
        messages = Communication(profile, Mesh(context=ranks))
        crossing = round(size * (ranks - 1) / ranks)
        if kind == "all_to_all":
            ns = all_to_all_ns(messages, crossing)
        else:
            summed = kind == "reduce_scatter"
            ns = messages.collective_ns("context", ranks, size, summed=summed) * round(BUS[kind])
        crossing = round(crossing * BUS[kind])
    return ns / 1e3 if fact.unit == "us" else crossing / ns


def all_to_all_ns(messages: Communication, size: int) -> int:
    """Every context-parallel rank sends ``size`` bytes, in equal parts to all the others.

    Parts for other nodes go through the rank's own network adapter only, at the same time as parts
    for its own node go through the node's link.
    """
    ranks, links = messages.mesh.context, messages.profile.links
    if ranks == 1 or size == 0:
        return 0
    together = messages._together("context")
    if together == ranks:
        return messages.exchange_ns("context", ranks, size)
    outside = size * (ranks - together) // (ranks - 1)
    inside = links["node"].ns(together - 1, size - outside)
    return round(max(links["network"].ns(ranks - together, outside), inside))
