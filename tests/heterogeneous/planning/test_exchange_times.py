"""What travels to pipelines that are not the mesh's: the closed form against the exchanges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.heterogeneous.planning.exchange_times import exchange_traffic, volume
from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.heterogeneous.planning.sharded_layouts import Weights
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme, schemes_of
from lightning_wlb.prediction.predictor import Predictor

SHAPE = ModelShape(64, 4, 8, 8, 8, 128, 512)
LINKS = {"node": Link(1000, 1e9), "network": Link(5000, 1e8)}


def base(mesh: Mesh, per_node: int = 8) -> Predictor:
    profile = replace(Profile.load("h100"), devices_per_node=per_node, links=LINKS)
    layers = SHAPE.layers // mesh.pipeline
    stages = tuple(range(at, at + layers) for at in range(0, SHAPE.layers, layers))
    return Predictor(LatencyModel(profile, SHAPE, mesh), stages)


def weights() -> Weights:
    """The reference decoder of the shape."""
    dim, wide, vocab = SHAPE.dim, SHAPE.ffn_dim, SHAPE.vocab_size
    layer = {
        "norm": (dim,), "wq": (dim, dim), "wk": (dim, dim), "wv": (dim, dim), "wo": (dim, dim),
        "norm2": (dim,), "w1": (wide, dim), "w2": (dim, wide), "w3": (wide, dim),
    }  # fmt: skip
    columns = {"wo": 1, "w2": 1, "norm": None, "norm2": None}
    shapes = {"embed.weight": (vocab, dim)}
    shapes |= {f"layers.{n}.{name}": each for n in range(4) for name, each in layer.items()}
    shapes |= {"head.norm": (dim,), "head.weight": (vocab, dim)}
    split = {
        name: dim for name in shapes if (dim := columns.get(name.split(".")[-1], 0)) is not None
    }
    return Weights(shapes, {size: split for size in (2, 4, 8)})


MIXED = (Scheme(0, (1, 3), tensor=2), Scheme(4, (4,), context=2), Scheme(6, (4,)), Scheme(7, (4,)))
ALONE = tuple(Scheme(rank, (4,)) for rank in range(8))
WIDE = (Scheme(0, (4,), tensor=4), Scheme(4, (4,), tensor=4))


@pytest.mark.parametrize(
    ("mesh", "strategy", "per_node", "inside"),
    [
        (Mesh(8), MIXED, 8, 0.15),
        (Mesh(2, 1, 2, 2), MIXED, 1, 0.15),
        (Mesh(4, 2), ALONE, 4, 0.15),
        (Mesh(2, 1, 2, 2), WIDE, 2, 0.45),  # more of what a node holds is wanted there
    ],
)
def test_the_busiest_ranks_elements_are_those_of_the_exchanges(
    mesh, strategy, per_node, inside
) -> None:
    """But for norms, and for parts that a rank holds anyway or not at all."""
    predictor, of_model = base(mesh, per_node), weights()
    own = schemes_of(mesh, predictor.stages)
    of_all = [Redistribution(of_model, own, strategy, rank) for rank in range(8)]
    want = np.zeros((2, of_all[0].turns, 8, 2))
    for turn, rank in np.ndindex(want.shape[1:3]):
        for way, pieces in enumerate(of_all[rank].exchange(turn)):
            for each in pieces:
                if each.peer != rank:
                    outside = each.peer // per_node != rank // per_node
                    want[int(outside), turn, rank, way] += each.elements
    within, across = (each.sum() for each in volume(predictor, strategy, per_node))
    busiest = want.max(axis=(2, 3)).sum(axis=1)
    assert within == pytest.approx(busiest[0], rel=inside)
    assert across == pytest.approx(busiest[1], rel=0.15)


def test_a_slots_time_is_a_latency_and_its_elements_over_the_link() -> None:
    """Eight whole models from eight shards: each rank lacks 7/8 of every unit."""
    (traffic, *others) = exchange_traffic(base(Mesh(8)), ALONE).values()
    assert others == [traffic] * 7
    model = base(Mesh(8)).memory.model
    whole = model.parameters(base(Mesh(8)).memory.parts[0])
    assert (traffic.ranks, traffic.buckets) == (1, (6,))
    assert traffic.gather == (round(6 * 7 * 1000 + whole * 7 / 8 * 2),)
    assert traffic.reduce == (round(6 * 7 * 1000 + whole * 7 / 8 * 4),)
    assert traffic.optimise == base(Mesh(8)).traffic.optimise
    # On two nodes each rank lacks half of the model that is in the other one, and the slower of
    # the two links sets the pace: the network, or the nodes' own a thousandth as fast.
    (traffic, *_) = exchange_traffic(base(Mesh(8), 4), ALONE).values()
    assert traffic.gather == (round(6 * 4 * 5000 + whole / 2 * 2 * 10),)
    assert traffic.reduce == (round(6 * 4 * 5000 + whole / 2 * 4 * 10),)
    slow = replace(base(Mesh(8), 4).latency.profile, links={**LINKS, "node": Link(1000, 1e6)})
    own = replace(base(Mesh(8), 4), latency=replace(base(Mesh(8), 4).latency, profile=slow))
    (paced, *_) = exchange_traffic(own, ALONE).values()
    assert paced.gather == (round(6 * 3 * 1000 + whole * 3 / 8 * 2 * 1000),)


def test_a_stage_waits_for_its_own_slots_only() -> None:
    """Slots are as long as the busiest rank's, which may be in another pipeline."""
    strategy = (Scheme(0, (4,)), Scheme(1, (4,)), Scheme(2, (2, 2)))
    own = base(Mesh(4))
    found = exchange_traffic(own, strategy)
    slots = volume(own, strategy, 4)[0]
    assert found[strategy[2]].buckets == (3, 3)
    first = round(3 * 3 * 1000 + slots[:3].sum() * 2)
    assert found[strategy[2]].gather == (first, first)
    assert found[strategy[0]].gather == (round(6 * 3 * 1000 + slots.sum() * 2),)


def test_devices_that_are_no_whole_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="8 devices are not whole nodes of 3"):
        exchange_traffic(base(Mesh(8), 3), ALONE)
