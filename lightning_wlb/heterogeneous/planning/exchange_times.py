"""When parameters reach the pipelines of a step, and gradients their shards: a closed form.

:mod:`~lightning_wlb.heterogeneous.parameter_transfer` moves buckets (an end, a layer) in turns;
turn j moves the j-th bucket of every rank, and takes as long as the busiest rank. A forward waits
for its own stage's turns only, and a turn of gradients leaves as soon as it is complete. With two
hops (:mod:`.exchanges`) one turn goes between nodes while others go inside them, so turns follow
each other as fast as the slower hop allows, and the faster hop costs only its first turn.

A rank receives what it needs less its own shard of that, and sends its shard of what all others
need. Shards are taken to lie evenly over the ranks that hold a layer. A node receives once what
several of its ranks need. Rates and latencies are those of the profile's links; each device has a
network adapter of its own. A tied weight is counted at both ends. Connecting ranks for the first
time is left out.

Cost: O(ranks · buckets · tensor) array elements for each choice of pipelines, once: a tenth of a
second of processor time for 32 layers on 1,024 ranks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.cost.latency import DTYPE_BYTES
from lightning_wlb.cost.memory_model import MemoryModel, StageParts
from lightning_wlb.cost.profile import Link
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.heterogeneous.planning.sharded_layouts import Integers, Places, Truths
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme, Schemes, schemes_of
from lightning_wlb.prediction.parameter_traffic import ParameterTraffic
from lightning_wlb.prediction.predictor import Predictor

Floats = NDArray[np.float64]


def exchange_traffic(base: Predictor, schemes: Schemes) -> dict[Scheme, ParameterTraffic]:
    """When each pipeline of a step has its parameters, and its gradients are reduced.

    Args:
        base: predicts steps on the mesh over which parameters and optimizer state are sharded.
        schemes: the pipelines of the step, on all ranks of the mesh.

    Raises:
        ValueError: the devices do not fill whole nodes.
    """
    profile, devices = base.latency.profile, base.latency.mesh.devices
    per_node = min(profile.devices_per_node, devices)
    if devices % per_node:
        raise ValueError(
            f"{devices} devices are not whole nodes of {per_node}. Say how many devices a node has."
        )
    nodes = devices // per_node
    first, second = volume(base, schemes, per_node)
    turns = _turns(base.latency.shape, schemes)
    width = DTYPE_BYTES[profile.dtype]

    def turns_ns(elements: Floats, ranks: int, link: Link, size: int) -> Floats:
        latency_ns = (ranks - 1) * link.latency_ns
        times: Floats = latency_ns + elements * size * 1e9 / link.bytes_per_second
        return times

    def both(size: int) -> tuple[Floats, Floats]:
        """The time of each turn on either hop; the first hop has zeros where there is only one."""
        links = profile.links
        if nodes > 1 and per_node > 1:
            between = turns_ns(first, nodes, links["network"], size)
            return between, turns_ns(second, per_node, links["node"], size)
        link = links["node" if nodes == 1 else "network"]
        return first, turns_ns(second, devices, link, size)

    pulled, pushed = both(width), both(max(width, 4))
    before, after = (round(float(between[0])) for between, _ in (pulled, pushed))
    found = {}
    for scheme in schemes:
        of_stages = turns[scheme.first : scheme.ranks.stop : scheme.context * scheme.tensor]
        buckets = tuple((of_stages >= 0).sum(axis=1).tolist())
        found[scheme] = ParameterTraffic(
            len(buckets),
            buckets,
            tuple(_through(*(each[:n] for each in pulled)) - before for n in buckets),
            # Gradients begin with the last turn, on the hop inside the nodes.
            tuple(_through(*(each[:n][::-1] for each in pushed[::-1])) - after for n in buckets),
            base.traffic.optimise,
            before,
            after,
        )
    return found


def _through(first: Floats, second: Floats) -> int:
    """The end of the last turn, where each of the two hops handles one turn at a time."""
    end = 0.0
    for there, took in zip(first.cumsum().tolist(), second.tolist(), strict=True):
        end = max(end, there) + took
    return round(end)


def volume(base: Predictor, schemes: Schemes, per_node: int) -> tuple[Floats, Floats]:
    """The elements that the busiest rank sends or receives in each turn, in either direction.

    Args:
        base: as for :func:`exchange_traffic`.
        schemes: as for :func:`exchange_traffic`.
        per_node: ranks of a node.

    Returns:
        Elements of each turn on the first of two hops, between nodes, and on the second. Where
        there is only one hop, the first has zeros.
    """
    shape, mesh = base.latency.shape, base.latency.mesh
    # The parts into which all tensor-parallel sizes together cut a weight.
    cuts = math.lcm(mesh.tensor, *(scheme.tensor for scheme in schemes))
    places, turn = Places.of(schemes), _turns(shape, schemes)
    sizes = {size: _sizes(shape, size) / (cuts // size) for size in set(places.size.tolist())}
    of_ranks = np.array([sizes[size] for size in places.size.tolist()])
    need: Floats = of_ranks[:, :, None] * _held(shape, schemes, cuts)
    share = _held(shape, schemes_of(mesh, base.stages), cuts) / (mesh.data * mesh.context)
    ranks, turns = len(need), int(turn.max()) + 1
    if per_node in (1, ranks):
        return np.zeros(turns), _busiest(need, share[:, None], turn, turns)
    by_node = (ranks // per_node, per_node)
    share = share.reshape(*by_node, *share.shape[1:])
    rail = share.sum(axis=0)  # what comes into a node through each of its ranks
    never = np.where(turn < 0, turns, turn)
    enters = never.reshape(*by_node, -1).min(axis=1)  # the first turn in which a rank uses a bucket
    whole = _sizes(shape, 1)[:, None] / cuts
    of_node = whole * (need > 0).reshape(*by_node, -1, cuts).any(axis=1)
    within = [
        _busiest(need[own], rail[:, None], turn[own], turns)
        for own in (slice(rank, rank + per_node) for rank in range(0, ranks, per_node))
    ]
    return _busiest(of_node, share, enters, turns), np.max(within, axis=0)


def _busiest(need: Floats, share: Floats, turn: Integers, turns: int) -> Floats:
    """Most elements that a rank sends or receives in each turn.

    Args:
        need: [receivers, buckets, cuts], elements that each receiver (a rank or a node) needs.
        share: [receivers, ranks of a receiver, buckets, cuts], the part of these elements that is
            sharded on each rank. A rank exchanges with those at its place in the other receivers.
        turn: [receivers, buckets], when each is needed; outside ``range(turns)``: never.
        turns: number of turns.
    """
    most = np.zeros(turns)
    for number in range(turns):
        buckets = (turn == number).any(axis=0)
        wanted = (need[:, buckets] * (turn == number)[:, buckets, None])[:, None]
        own = share[:, :, buckets]
        into = (wanted * (own.sum(axis=0) - own)).sum(axis=(2, 3))
        out = (own * (wanted.sum(axis=0) - wanted)).sum(axis=(2, 3))
        most[number] = max(into.max(), out.max())
    return most


def _turns(shape: ModelShape, schemes: Schemes) -> Integers:
    """When each rank uses the embedding, the layers and the head first: int64 [ranks, buckets]."""
    layers = [(number,) for number in range(shape.layers)]
    return Places.of(schemes).turns([layers[0], *layers, layers[-1]])


def _held(shape: ModelShape, schemes: Schemes, cuts: int) -> Truths:
    """Which cuts of a bucket a rank has in a step on these pipelines: [ranks, buckets, cuts]."""
    places = Places.of(schemes)
    own = np.arange(cuts) // (cuts // places.size)[:, None] == places.tensor[:, None]
    held: Truths = (_turns(shape, schemes) >= 0)[:, :, None] & own[:, None]
    return held


def _sizes(shape: ModelShape, tensor: int) -> Floats:
    """Elements of each bucket on one of so many tensor-parallel ranks."""
    model, kinds = MemoryModel(shape, Mesh(tensor=tensor)), list(shape.kinds)
    none = (0,) * len(kinds)
    layers = [
        model.parameters(StageParts(tuple(int(kind == layer) for kind in kinds)))
        for layer in shape.each_layer
    ]
    ends = [StageParts(none, embedding=True), StageParts(none, head=True)]
    return np.array([model.parameters(ends[0]), *layers, model.parameters(ends[1])], float)
