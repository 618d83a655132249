"""What travels to pipelines that are not the mesh's: the closed form against the links themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.links.layout import Weights, strategy_of
from lightning_wlb.links.link import Link as Exchanges
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme
from lightning_wlb.prediction.linking import linked_traffic, volume
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


@pytest.mark.parametrize("per_node", [8, 4, 2, 1])
@pytest.mark.parametrize("mesh", [Mesh(4, 2), Mesh(8), Mesh(2, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("strategy", [MIXED, ALONE, WIDE], ids=["mixed", "alone", "wide"])
def test_the_busiest_ranks_elements_are_those_of_the_links(mesh, strategy, per_node) -> None:
    """But for what rests unevenly: norms, and parts that a rank holds anyway or not at all."""
    predictor, of_model = base(mesh, per_node), weights()
    own = strategy_of(mesh, predictor.stages)
    found = volume(predictor, strategy, per_node)
    links = [Exchanges(of_model, own, strategy, rank, per_node) for rank in range(8)]
    slots, hops = links[0].slots, links[0].hops
    assert len(found.within) == len(found.between) == slots
    for hop, given in zip((-1, 0), (found.within, found.between), strict=True):
        if hop == 0 and hops == 1:
            assert not given.any()
            continue
        want = np.zeros((slots, 8, 2))
        for slot in range(slots):
            for rank, link in enumerate(links):
                exchange = link.exchange(slot, hops + hop if hop else 0)
                for way, parts in enumerate((exchange.out, exchange.into)):
                    want[slot, rank, way] = parts.elements[parts.peer != rank].sum()
        total, busiest = given.sum(), want.max(axis=(1, 2)).sum()
        assert 0.7 * busiest <= total <= 1.45 * busiest, (hop, given, want.max(axis=(1, 2)))
