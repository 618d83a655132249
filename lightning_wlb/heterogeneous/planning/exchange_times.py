"""When parameters reach pipelines that are not the mesh's, and gradients come back: closed form.

As :mod:`~lightning_wlb.heterogeneous.transfer` does it: units (an end, a layer) travel in slots,
slot j
having the j-th unit of every rank, and a slot takes as long as the busiest rank. A forward waits
for its own stage's slots only (pulled ahead), and a slot of gradients leaves as soon as it is
complete (pushed early). Over two hops one slot is on the rails while others are inside the nodes,
so that slots follow each other as fast as the slower hop takes them: the faster one costs the first
slot alone.

A rank brings in what it needs, less its share of what rests with it, and sends its share of what
all others need; parts at rest are taken to lie evenly over the ranks that hold a layer. A node
needs what its ranks need once. Rates and latencies are those of the profile's links; each device
has a network adapter of its own. A tied weight is counted at both ends. Connecting ranks for the
first time is left out.

Cost: O(ranks · units · tensor) array elements for each strategy, once: a tenth of a second of
processor time for 32 layers on 1,024 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.cost.latency import DTYPE_BYTES
from lightning_wlb.cost.memory_model import MemoryModel, StageParts
from lightning_wlb.cost.profile import Link
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme, schemes_of
from lightning_wlb.prediction.parameter_traffic import ParameterTraffic
from lightning_wlb.prediction.predictor import Predictor

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Volume(NamedTuple):
    """Elements that the busiest rank sends or receives in each slot, in either direction.

    Attributes:
        between: over the network; zeros where there is one hop.
        within: over the other hop.
    """

    between: Floats
    within: Floats


def linked_traffic(base: Predictor, strategy: Sequence[Scheme]) -> dict[Scheme, ParameterTraffic]:
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

    def both(size: int) -> tuple[Floats, Floats]:
        """Of each slot: over the rails, zeros where there is one hop; and over the other hop."""
        links = profile.links
        if nodes > 1 and per_node > 1:
            between = slots_ns(moved.between, nodes, links["network"], size)
            return between, slots_ns(moved.within, per_node, links["node"], size)
        link = links["node" if nodes == 1 else "network"]
        return moved.between, slots_ns(moved.within, devices, link, size)

    pulled, pushed = both(width), both(max(width, 4))
    before, after = (round(float(between[0])) for between, _ in (pulled, pushed))
    found = {}
    for scheme in strategy:
        units = tuple(map(len, _units(scheme)))
        found[scheme] = ParameterTraffic(
            len(units),
            units,
            tuple(_through(*(each[:n] for each in pulled)) - before for n in units),
            # The last slot comes first, and the inner hop.
            tuple(_through(*(each[:n][::-1] for each in pushed[::-1])) - after for n in units),
            base.traffic.optimise,
            before,
            after,
        )
    return found


def _through(first: Floats, second: Floats) -> int:
    """When the last of some slots has come over two hops, each of which takes one at a time."""
    end = 0.0
    for there, took in zip(first.cumsum().tolist(), second.tolist(), strict=True):
        end = max(end, there) + took
    return round(end)


def volume(base: Predictor, strategy: Sequence[Scheme], per_node: int) -> Volume:
    """What travels in each slot.

    Args:
        base: as for :func:`linked_traffic`.
        strategy: likewise.
        per_node: ranks of a node.
    """
    need, slot = _needs(base, strategy)
    share = _shares(base, need.shape[2])
    ranks, slots = len(need), int(slot.max()) + 1
    if per_node in (1, ranks):
        return Volume(np.zeros(slots), _within(need, share, slot, slots))
    by_node = (ranks // per_node, per_node)
    share = share.reshape(*by_node, *share.shape[1:])
    rail = share.sum(axis=0)  # what comes into a node through each of its ranks
    never = np.where(slot < 0, slots, slot)
    enters = never.reshape(*by_node, -1).min(axis=1)  # the first slot in which a rank uses a unit
    cuts = need.shape[2]
    whole = _sizes(base.latency.shape, 1)[:, None] / cuts
    of_node = whole * (need > 0).reshape(*by_node, -1, cuts).any(axis=1)
    within = [
        _within(need[rank : rank + per_node], rail, slot[rank : rank + per_node], slots)
        for rank in range(0, ranks, per_node)
    ]
    return Volume(_between(of_node, share, enters, slots), np.max(within, axis=0))


def _within(need: Floats, share: Floats, slot: Integers, slots: int) -> Floats:
    """Most elements that a rank sends or receives in each slot.

    Args:
        need: [ranks, units, cuts], elements.
        share: likewise, how much of them rests there.
        slot: [ranks, units], when it is needed; any other number: never.
        slots: how many there are.
    """
    most = np.zeros(slots)
    for number in range(slots):
        units = (slot == number).any(axis=0)
        wanted = need[:, units] * (slot == number)[:, units, None]
        own = share[:, units]
        into = (wanted * (1 - own)).sum(axis=(1, 2))
        out = (own * (wanted.sum(axis=0) - wanted)).sum(axis=(1, 2))
        most[number] = max(into.max(), out.max())
    return most


def _between(need: Floats, share: Floats, slot: Integers, slots: int) -> Floats:
    """Most elements that a rank sends to, or receives from, those at its place in other nodes.

    Args:
        need: [nodes, units, cuts], elements.
        share: [nodes, ranks of a node, units, cuts], how much of them rests there.
        slot: [nodes, units], when it is needed; any other number: never.
        slots: how many there are.
    """
    most = np.zeros(slots)
    for number in range(slots):
        units = (slot == number).any(axis=0)
        wanted = (need[:, units] * (slot == number)[:, units, None])[:, None]
        own = share[:, :, units]
        into = (wanted * (own.sum(axis=0) - own)).sum(axis=(2, 3))
        out = (own * (wanted.sum(axis=0) - wanted)).sum(axis=(2, 3))
        most[number] = max(into.max(), out.max())
    return most


def _needs(base: Predictor, strategy: Sequence[Scheme]) -> tuple[Floats, Integers]:
    """Of each rank and unit: elements of each of its cuts, and the slot; -1 for none.

    Cuts are the parts into which all tensor-parallel sizes together cut a weight.
    """
    shape = base.latency.shape
    ranks, units = sum(scheme.size for scheme in strategy), shape.layers + 2
    cuts = math.lcm(base.latency.mesh.tensor, *(scheme.tensor for scheme in strategy))
    need, slot = np.zeros((ranks, units, cuts)), np.full((ranks, units), -1, np.int64)
    for scheme in strategy:
        each, own = cuts // scheme.tensor, _units(scheme)
        sizes = _sizes(shape, scheme.tensor) / each
        for rank in scheme.ranks:
            stage, _, tensor = scheme.place(rank)
            held = own[stage]
            cut = slice(tensor * each, (tensor + 1) * each)
            need[rank, held, cut] = sizes[held, None]
            slot[rank, held] = np.arange(len(held))
    return need, slot


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


def _shares(base: Predictor, cuts: int) -> Floats:
    """How much of each cut of each unit rests on each rank, [ranks, units, cuts]."""
    share: Floats = np.zeros((base.latency.mesh.devices, base.latency.shape.layers + 2, cuts))
    strategy = schemes_of(base.latency.mesh, base.stages)
    each, over = cuts // strategy[0].tensor, len(strategy) * strategy[0].context
    for scheme in strategy:
        units = _units(scheme)
        for rank in scheme.ranks:
            stage, _, tensor = scheme.place(rank)
            share[rank, units[stage], tensor * each : (tensor + 1) * each] = 1 / over
    return share
