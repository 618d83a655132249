"""When parameters reach pipelines that are not the mesh's, and gradients come back: closed form.

As :mod:`~lightning_wlb.strategy.travel` does it: units (an end, a layer) travel in slots, slot j
having the j-th unit of every rank, and a slot takes as long as the busiest rank. A forward waits
for its own stage's slots only (pulled ahead), and a slot of gradients leaves as soon as it is
complete (pushed early). Over two hops what enters the nodes travels before the first action, and
what leaves them after the last, so that this part is never hidden.

A rank brings in what it needs, less its share of what rests with it, and sends its share of what
all others need; parts at rest are taken to lie evenly over the ranks that hold a layer. A node
needs what its ranks need once. Rates and latencies are those of the profile's links; each device
has a network adapter of its own. A tied weight is counted at both ends. Connecting ranks for the
first time is left out.

Cost: O(ranks · units · slots) array elements for each strategy, once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.cost.latency import DTYPE_BYTES
from lightning_wlb.cost.memory import MemoryModel, StageParts
from lightning_wlb.cost.profile import Link
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.traffic import Traffic

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Volume(NamedTuple):
    """Elements that the busiest rank sends or receives in each slot, in either direction.

    Attributes:
        between: over the network, of one device of the busiest node; zeros where there is one hop.
        within: over the other hop.
    """

    between: Floats
    within: Floats


def linked_traffic(base: Predictor, strategy: Sequence[Scheme]) -> dict[Scheme, Traffic]:
    """The traffic of each pipeline of a strategy.

    Args:
        base: on the mesh, where parameters and optimizer state rest.
        strategy: of the step, on all ranks of the mesh.

    Raises:
        ValueError: devices that are not whole nodes, of several devices each.
    """
    profile, devices = base.latency.profile, base.latency.mesh.devices
    per_node = min(profile.devices_per_node, devices)
    if devices % per_node:
        raise ValueError(
            f"{devices} devices are not whole nodes of {per_node}. Say how many devices a node has."
        )
    nodes = devices // per_node
    moved = volume(base, strategy, per_node)
    width = DTYPE_BYTES[profile.dtype]

    def slots_ns(elements: Floats, ranks: int, link: Link, size: int) -> Floats:
        times: Floats = (
            ranks - 1
        ) * link.latency_ns + elements * size * 1e9 / link.bytes_per_second
        return times

    def both(size: int) -> tuple[Floats, int]:
        """Of the hop that can be hidden, each slot; of the other, all of them."""
        links = profile.links
        if nodes == 1:
            return slots_ns(moved.within, devices, links["node"], size), 0
        if per_node == 1:
            return slots_ns(moved.within, devices, links["network"], size), 0
        between = slots_ns(moved.between, nodes, links["network"], size)
        return slots_ns(moved.within, per_node, links["node"], size), round(float(between.sum()))

    (pulled, before), (pushed, after) = both(width), both(max(width, 4))
    found = {}
    for scheme in strategy:
        units = tuple(map(len, _units(scheme)))
        found[scheme] = Traffic(
            len(units),
            units,
            tuple(round(float(pulled[:count].sum())) for count in units),
            tuple(round(float(pushed[:count].sum())) for count in units),
            base.traffic.optimise,
            before,
            after,
        )
    return found


def volume(base: Predictor, strategy: Sequence[Scheme], per_node: int) -> Volume:
    """What travels in each slot.

    Args:
        base: as for :func:`linked_traffic`.
        strategy: likewise.
        per_node: ranks of a node.
    """
    need, slot, parts = _needs(base.latency.shape, strategy)
    share = _shares(base, need.shape[1])
    ranks, slots = len(need), int(slot.max()) + 1
    if per_node in (1, ranks):
        return Volume(np.zeros(slots), _busiest(need, share, slot, slots))
    by_node = (ranks // per_node, per_node, -1)
    never = np.where(slot < 0, slots, slot)
    enters = never.reshape(by_node).min(axis=1)  # the first slot in which a rank of it uses a unit
    whole = _sizes(base.latency.shape, 1)
    of_node = whole * parts.reshape(*by_node, parts.shape[2]).any(axis=1).mean(axis=2)
    share = share.reshape(by_node).sum(axis=1)
    between = _busiest(of_node, share, enters, slots) / per_node
    even = np.full((per_node, need.shape[1]), 1 / per_node)
    within = [
        _busiest(need[rank : rank + per_node], even, slot[rank : rank + per_node], slots)
        for rank in range(0, ranks, per_node)
    ]
    return Volume(between, np.max(within, axis=0))


def _busiest(need: Floats, share: Floats, slot: Integers, slots: int) -> Floats:
    """Most elements that a place sends or receives, in each slot.

    Args:
        need: [places, units], elements.
        share: likewise, of each unit what rests there.
        slot: likewise, when it is needed; any other number: never.
        slots: how many there are.
    """
    most = np.zeros(slots)
    for number in range(slots):
        wanted = np.where(slot == number, need, 0)
        into = (wanted * (1 - share)).sum(axis=1)
        out = (share * (wanted.sum(axis=0) - wanted)).sum(axis=1)
        most[number] = max(into.max(), out.max())
    return most


def _needs(
    shape: ModelShape, strategy: Sequence[Scheme]
) -> tuple[Floats, Integers, NDArray[np.bool_]]:
    """Of each rank and unit: elements, slot (-1: none), and which parts of the weights these are.

    The parts are those into which all tensor-parallel sizes together cut a weight.
    """
    ranks, units = sum(scheme.size for scheme in strategy), shape.layers + 2
    cuts = math.lcm(*(scheme.tensor for scheme in strategy))
    need, slot = np.zeros((ranks, units)), np.full((ranks, units), -1, np.int64)
    parts = np.zeros((ranks, units, cuts), bool)
    for scheme in strategy:
        sizes, own = _sizes(shape, scheme.tensor), _units(scheme)
        for rank in scheme.ranks:
            stage, _, tensor = scheme.place(rank)
            held = own[stage]
            need[rank, held] = sizes[held]
            slot[rank, held] = np.arange(len(held))
            first, stop = (at * cuts // scheme.tensor for at in (tensor, tensor + 1))
            parts[rank, held.start : held.stop, first:stop] = True
    return need, slot, parts


def _units(scheme: Scheme) -> list[range]:
    """Numbers of the units of each stage: the embedding, layers, the head."""
    last = len(scheme.stages) - 1
    return [
        range(layers.start + (stage > 0), layers.stop + 1 + (stage == last))
        for stage, layers in enumerate(scheme.layers)
    ]


def _sizes(shape: ModelShape, tensor: int) -> Floats:
    """Elements of each unit on one of so many tensor-parallel ranks."""
    model, kinds = MemoryModel(shape, Mesh(tensor=tensor)), list(shape.kinds)
    none = (0,) * len(kinds)
    layers = [
        model.parameters(StageParts(tuple(int(kind == layer) for kind in kinds)))
        for layer in shape.each_layer
    ]
    ends = [StageParts(none, embedding=True), StageParts(none, head=True)]
    return np.array([model.parameters(ends[0]), *layers, model.parameters(ends[1])], float)


def _shares(base: Predictor, units: int) -> Floats:
    """Of each unit what rests on each rank, [ranks, units]."""
    mesh, stages = base.latency.mesh, base.stages
    share = np.zeros((mesh.devices, units))
    stage_of = mesh.groups("data", "context", "tensor")  # a group for each pipeline rank
    for stage, (ranks, layers) in enumerate(zip(stage_of, stages, strict=True)):
        first = layers.start + (stage > 0)
        stop = layers.stop + 1 + (stage == len(stages) - 1)
        share[ranks, first:stop] = 1 / len(ranks)
    return share
