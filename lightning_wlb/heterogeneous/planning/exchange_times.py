"""When parameters reach the pipelines of a step, and gradients their shards: a closed form.

A turn (:mod:`.exchanges`) takes as long as its busiest rank. A forward waits only for the turns of
its own stage, and a turn of gradients is sent as soon as it is complete.

A rank receives the parameters that it needs except its own shard, and sends others its shard of
what they need. Shards are assumed to be equal on all ranks that hold a layer. Data within a node
use the node's link; at the same time the rest crosses nodes, each device through its own network
adapter. A tied weight is counted at both ends. The time of first connections is left out.

Cost: O(ranks · buckets · tensor) for each choice of pipelines: 0.1 s for 32 layers, 1,024 ranks.
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
    """The times at which each pipeline has its parameters and its gradients are reduced.

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
    inside, outside = volume(base, schemes, per_node)
    turns = _turns(base.latency.shape, schemes)
    width = DTYPE_BYTES[profile.dtype]

    def took(link: Link, ranks: int, elements: Floats, size: int) -> Floats:
        return ranks * link.latency_ns + elements * size * 1e9 / link.bytes_per_second

    def ends_ns(size: int) -> list[int]:
        """When 0, 1, 2, ... turns, which run one after another, have ended."""
        times = took(profile.links["node"], per_node - 1, inside, size)
        if devices > per_node:
            network = profile.links["network"]
            times = np.maximum(times, took(network, devices - per_node, outside, size))
        return [0, *map(round, times.cumsum().tolist())]

    pulled, pushed = ends_ns(width), ends_ns(max(width, 4))
    found = {}
    for scheme in schemes:
        of_stages = turns[scheme.first : scheme.ranks.stop : scheme.context * scheme.tensor]
        buckets = tuple((of_stages >= 0).sum(axis=1).tolist())
        found[scheme] = ParameterTraffic(
            len(buckets),
            buckets,
            tuple(pulled[count] for count in buckets),
            tuple(pushed[count] for count in buckets),
            base.traffic.optimise,
        )
    return found


def volume(base: Predictor, schemes: Schemes, per_node: int) -> tuple[Floats, Floats]:
    """Elements that the busiest rank sends or receives in each turn, in its node and outside."""
    shape, mesh = base.latency.shape, base.latency.mesh
    # The parts into which all tensor-parallel sizes together cut a weight.
    cuts = math.lcm(mesh.tensor, *(scheme.tensor for scheme in schemes))
    places, turn = Places.of(schemes), _turns(shape, schemes)
    sizes = {size: _sizes(shape, size) / (cuts // size) for size in set(places.size.tolist())}
    of_ranks = np.array([sizes[size] for size in places.size.tolist()])
    need: Floats = of_ranks[:, :, None] * _held(shape, schemes, cuts)
    share = _held(shape, schemes_of(mesh, base.stages), cuts) / (mesh.data * mesh.context)
    by_node = len(need) // per_node, per_node
    inside, outside = [], []
    for number in range(int(turn.max()) + 1):
        now = turn == number
        buckets = now.any(axis=0)
        every = (need * now[..., None])[:, buckets], share[:, buckets]
        wanted, own = (each.reshape(*by_node, *each.shape[1:]) for each in every)
        in_node = [each.sum(axis=1, keepdims=True) for each in (wanted, own)]
        in_all = [each.sum(axis=0, keepdims=True) for each in in_node]
        inside.append(_busiest(wanted, own, in_node[0] - wanted, in_node[1] - own))
        outside.append(_busiest(wanted, own, in_all[0] - in_node[0], in_all[1] - in_node[1]))
    return np.array(inside), np.array(outside)


def _busiest(wanted: Floats, own: Floats, they_want: Floats, they_own: Floats) -> float:
    """The elements that the busiest rank receives from others, or sends to them."""
    into, out = wanted * they_own, own * they_want
    return float(max(each.sum(axis=(2, 3)).max() for each in (into, out)))


def _turns(shape: ModelShape, schemes: Schemes) -> Integers:
    """The turn in which each rank first uses embedding, layers and head: int64 [ranks, buckets]."""
    layers = [(number,) for number in range(shape.layers)]
    return Places.of(schemes).turns([layers[0], *layers, layers[-1]])


def _held(shape: ModelShape, schemes: Schemes, cuts: int) -> Truths:
    """Which cuts of a bucket a rank has in a step on these pipelines: [ranks, buckets, cuts]."""
    places = Places.of(schemes)
    own = np.arange(cuts) // (cuts // places.size)[:, None] == places.tensor[:, None]
    held: Truths = (_turns(shape, schemes) >= 0)[:, :, None] & own[:, None]
    return held


def _sizes(shape: ModelShape, tensor: int) -> Floats:
    """Elements of each bucket on one rank of ``tensor`` tensor-parallel ranks."""
    model, kinds = MemoryModel(shape, Mesh(tensor=tensor)), list(shape.kinds)
    none = (0,) * len(kinds)
    layers = [
        model.parameters(StageParts(tuple(int(kind == layer) for kind in kinds)))
        for layer in shape.each_layer
    ]
    ends = [StageParts(none, embedding=True), StageParts(none, head=True)]
    return np.array([model.parameters(ends[0]), *layers, model.parameters(ends[1])], float)
