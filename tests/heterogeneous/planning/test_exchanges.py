"""Exchanges between random layouts: values arrive, gradients add up, nothing is sent in vain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings

from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.plan import Scheme
from tests.heterogeneous.numpy_exchanges import (
    Tensors,
    boxes,
    place,
    redistributions,
    run,
    uniform,
    weights,
)


def unequal() -> list[Redistribution]:
    """A layer is used first in other turns by each, and a weight is tied."""
    strategy = (Scheme(0, (1, 2), tensor=2), Scheme(4, (3,), context=2), Scheme(6, (2, 1)))
    base = uniform(8, 3, pipeline=2, context=1, tensor=2)
    model = weights(3, tied=True, frozen=("layers.1", "layers.2.up"))
    return [Redistribution(model, base, strategy, rank) for rank in range(8)]


def empty(held: dict[str, np.ndarray], rank: int) -> Tensors:
    return {n: np.full(np.diff(box[rank])[:, 0].tolist(), np.nan) for n, box in held.items()}


def elements(box: np.ndarray) -> int:
    return int(np.diff(box).clip(0).prod())


def common(one: np.ndarray, other: np.ndarray) -> int:
    """Elements of both boxes."""
    return elements(np.stack([np.maximum(one, other)[:, 0], np.minimum(one, other)[:, 1]], axis=1))


@settings(max_examples=6, deadline=None)
@example(unequal())
@given(redistributions())
def test_parameters_arrive_and_only_what_a_rank_lacks_is_sent(of_all) -> None:
    shards, needs = (boxes(of_all[0], shard=each) for each in (True, False))
    values = np.random.default_rng(0)
    true = {name: values.random(shape) for name, shape in of_all[0].weights.shapes.items()}
    ranks = range(len(of_all))
    sources = [{n: true[n][place(box[rank])] for n, box in shards.items()} for rank in ranks]
    targets = [empty(needs, rank) for rank in ranks]
    done = run(of_all, sources, targets, push=False)
    for rank in ranks:
        lacks = 0
        for name, box in needs.items():
            np.testing.assert_array_equal(targets[rank][name], true[name][place(box[rank])])
            lacks += elements(box[rank]) - common(box[rank], shards[name][rank])
        into = [each for exchanges in done for each in exchanges[rank].into]
        assert sum(each.elements for each in into if each.peer != rank) == lacks
    for turn in range(of_all[0].turns):
        for rank, own in enumerate(of_all):
            shapes = {n: value.shape for n, value in targets[rank].items() if value.size}
            assert own.shapes(turn).items() <= shapes.items()


@settings(max_examples=6, deadline=None)
@example(unequal())
@given(redistributions())
def test_gradients_add_up_at_every_copy(of_all) -> None:
    """Frozen parameters have none, and nothing of them is sent."""
    shards, needs = (boxes(of_all[0], shard=each) for each in (True, False))
    values = np.random.default_rng(0)
    frozen, ranks = of_all[0].weights.frozen, range(len(of_all))
    true = {name: np.zeros(shape) for name, shape in of_all[0].weights.shapes.items()}
    sources = [empty(needs, rank) for rank in ranks]
    for rank, source in enumerate(sources):
        for name in source.keys() - frozen:
            # Whole numbers, so that sums do not depend on their order.
            source[name][...] = values.integers(1, 99, source[name].shape)
            true[name][place(needs[name][rank])] += source[name]
    targets = [empty(shards, rank) for rank in ranks]
    run(of_all, sources, targets, push=True)
    for rank in ranks:
        for name, box in shards.items():
            want = np.nan if name in frozen else true[name][place(box[rank])]
            np.testing.assert_array_equal(targets[rank][name], want, strict=False)


def test_buckets_come_in_the_order_of_use() -> None:
    """The tied weight last but one where a stage has no embedding; turns are the most buckets."""
    model = weights(3, tied=True)
    assert [bucket.names[0] for bucket in model.buckets] == [
        "embed.weight", "layers.0.up", "layers.1.up", "layers.2.up", "head.norm",
    ]  # fmt: skip
    strategy = (Scheme(0, (1, 2)), Scheme(2, (3,)))
    base = uniform(3, 3, pipeline=1, context=1, tensor=1)
    of_all = [Redistribution(model, base, strategy, rank) for rank in range(3)]
    assert [own.buckets for own in of_all] == [[0, 1], [2, 0, 3, 4], [0, 1, 2, 3, 4]]
    assert {own.turns for own in of_all} == {5}


def test_layouts_that_do_not_go_together_are_refused() -> None:
    model, base = weights(2), uniform(4, 2, 1, 1, 1)
    with pytest.raises(ValueError, match="over 4 ranks, and the pipelines of the step have 2"):
        Redistribution(model, base, uniform(2, 2, 1, 1, 1), 0)
    with pytest.raises(ValueError, match="has 3 layers, the model 2"):
        Redistribution(model, base, uniform(4, 3, 1, 1, 1), 0)
