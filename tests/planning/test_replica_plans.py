"""Every micro-batch of a step gets the sharding and the rows that it would get alone."""

from __future__ import annotations

import pytest

from lightning_wlb.cost.attention_tiles import reference_kernel_cost
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Slice
from lightning_wlb.planning.replica_plans import (
    laid_out,
    replica_plan,
)
from lightning_wlb.sharding import choose, layout

WHOLE, LONG = [Slice(0, 0, 0, 900), Slice(1, 0, 0, 300)], [Slice(2, 0, 0, 5000)]
CUT = [[Slice(3, 0, 0, 2048)], [Slice(3, 0, 2048, 4000)]]
MESH = Mesh(data=2, context=2, tensor=4)


def replicas_of(sharding: str):
    shard = sharding
    shared = [(LONG, (0, 1))]
    packs = [WHOLE, *CUT]
    return [replica_plan(packs if not at else [], at, shard, shared) for at in (0, 1)]


@pytest.mark.parametrize("sharding", ["adaptive", "per_sequence"])
def test_each_is_laid_out_as_alone(sharding):
    open_plans = replicas_of(sharding)
    made = laid_out(open_plans, MESH, sharding, reference_kernel_cost)
    for before, after in zip(open_plans, made, strict=True):
        assert after.slices == before.slices
        assert [each.slices for each in after.forward] == [each.slices for each in before.forward]
        for each in after.forward:
            slices = after.slices_of(each)
            lengths, contexts = [[part[at] for part in _sizes(slices)] for at in (0, 1)]
            sizes = 2 * len(each.replicas), 4
            name = choose(lengths, *sizes, contexts=contexts)[0]
            if sharding == "per_sequence":
                name = sharding
            assert (each.sharding, each.rows) == (name, layout(name, lengths, *sizes).rows)


def _sizes(slices):
    return [(part.tokens, part.context) for part in slices]
