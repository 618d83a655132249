"""Links between random layouts: values arrive, gradients add up, and nothing travels in vain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings

from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.plan import Scheme
from tests.heterogeneous.numpy_exchanges import Memory, held, redistributions, run, uniform, weights


def masks(
    own: Redistribution, *, shard: bool, trained: bool = False
) -> list[dict[tuple[int, int], np.ndarray]]:
    """Of each rank which elements of each parameter it holds; ``trained``: that gets gradients."""
    of, buckets = held(own, shard=shard), own.weights.buckets
    return [
        {
            (bucket, number): ~np.isnan(value)
            & (not trained or buckets[bucket].names[number] not in own.weights.frozen)
            for (bucket, number), value in Memory(own, of, rank, 1).values.items()
        }
        for rank in range(len(own._turns))
    ]


def union(of: list[dict[tuple[int, int], np.ndarray]]) -> dict[tuple[int, int], np.ndarray]:
    return {key: np.logical_or.reduce([each[key] for each in of]) for key in of[0]}


def received(exchanges, rank: int, per_node: int, *, push: bool) -> int:
    """Elements that come to a rank from other nodes, in all turns of a hop."""
    count = 0
    for turn in exchanges:
        into = turn[rank].out if push else turn[rank].into
        count += into.elements[into.peer // per_node != rank // per_node].sum()
    return int(count)


def unequal() -> list[Redistribution]:
    """Nodes of four ranks; in the second one a layer is used first in other turns by each."""
    strategy = (Scheme(0, (1, 2), tensor=2), Scheme(4, (3,), context=2), Scheme(6, (2, 1)))
    base = uniform(8, 3, pipeline=2, context=1, tensor=2)
    model = weights(3, tied=True, frozen=("layers.1", "layers.2.up"))
    return [Redistribution(model, base, strategy, rank, 4) for rank in range(8)]


@settings(max_examples=6, deadline=None)
@example(unequal())
@given(redistributions())
def test_parameters_arrive_and_only_what_a_rank_or_node_lacks_travels(
    of_all: list[Redistribution],
) -> None:
    rest, need = (masks(of_all[0], shard=each) for each in (True, False))
    values = np.random.default_rng(0)
    true = {key: values.random(mask.shape) for key, mask in rest[0].items()}
    sources = [Memory(own, None, own.rank, 0) for own in of_all]
    for memory, mask in zip(sources, rest, strict=True):
        for key, own in mask.items():
            memory.values[key][own] = true[key][own]
    targets = [Memory(own, None, own.rank, 0) for own in of_all]
    done = run(of_all, sources, targets, push=False)
    for memory, mask in zip(targets, need, strict=True):
        for key, own in mask.items():
            np.testing.assert_array_equal(memory.values[key], np.where(own, true[key], np.nan))
    size = of_all[0].per_node if of_all[0].hops == 2 else 1
    for first in range(0, len(of_all), size):
        node = range(first, first + size)
        lacks = union([need[rank] for rank in node])
        has = union([rest[rank] for rank in node])
        least = sum(int((lacks[key] & ~has[key]).sum()) for key in lacks)
        assert sum(received(done[0], rank, size, push=False) for rank in node) == least


@settings(max_examples=6, deadline=None)
@example(unequal())
@given(redistributions())
def test_gradients_add_up_at_every_copy_and_enter_once_from_each_rank_or_node(
    of_all: list[Redistribution],
) -> None:
    """Frozen parameters have none, and nothing of them travels."""
    rest, need = (masks(of_all[0], shard=each, trained=True) for each in (True, False))
    values = np.random.default_rng(0)
    sources = [Memory(own, None, own.rank, 0) for own in of_all]
    true = {key: np.zeros(mask.shape) for key, mask in rest[0].items()}
    for memory, mask in zip(sources, need, strict=True):
        for key, own in mask.items():
            # Whole numbers, so that sums do not depend on their order.
            memory.values[key][own] = values.integers(1, 99, own.shape)[own]
            true[key] += np.where(own, np.nan_to_num(memory.values[key]), 0)
    targets = [Memory(own, None, own.rank, 0) for own in of_all]
    done = run(of_all, sources, targets, push=True)
    for memory, mask in zip(targets, rest, strict=True):
        for key, own in mask.items():
            np.testing.assert_array_equal(memory.values[key], np.where(own, true[key], np.nan))
    size = of_all[0].per_node if of_all[0].hops == 2 else 1
    nodes = [range(first, first + size) for first in range(0, len(of_all), size)]
    makes = [union([need[rank] for rank in node]) for node in nodes]
    for rank, own in enumerate(rest):
        least = sum(
            int((made[key] & own[key]).sum())
            for node, made in zip(nodes, makes, strict=True)
            if rank not in node
            for key in own
        )
        assert received(done[0], rank, size, push=True) == least


def test_buckets_come_in_the_order_of_use() -> None:
    """The tied weight last but one where a stage has no embedding; turns are the most buckets."""
    model = weights(3, tied=True)
    assert [bucket.names[0] for bucket in model.buckets] == [
        "embed.weight", "layers.0.up", "layers.1.up", "layers.2.up", "head.norm",
    ]  # fmt: skip
    strategy = (Scheme(0, (1, 2)), Scheme(2, (3,)))
    base = uniform(3, 3, pipeline=1, context=1, tensor=1)
    of_all = [Redistribution(model, base, strategy, rank, 3) for rank in range(3)]
    assert [own.buckets for own in of_all] == [[0, 1], [2, 0, 3, 4], [0, 1, 2, 3, 4]]
    assert {own.turns for own in of_all} == {5}


def test_layouts_that_do_not_go_together_are_refused() -> None:
    model, base = weights(2), uniform(4, 2, 1, 1, 1)
    with pytest.raises(
        ValueError, match=r"sharded over 4 ranks, 4 of a node, and the pipelines of the step have 2"
    ):
        Redistribution(model, base, uniform(2, 2, 1, 1, 1), 0, 4)
    with pytest.raises(ValueError, match="sharded over 4 ranks, 3 of a node"):
        Redistribution(model, base, uniform(4, 2, 2, 1, 1), 0, 3)
    with pytest.raises(ValueError, match="has 3 layers, the model 2"):
        Redistribution(model, base, uniform(4, 3, 1, 1, 1), 0, 4)
    with pytest.raises(ValueError, match="how tensor=3 ranks split"):
        Redistribution(model, uniform(3, 2, 1, 1, 1), uniform(3, 2, 1, 1, 3), 0, 3).exchange(0, 0)
