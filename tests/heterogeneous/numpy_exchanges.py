"""Random models and layouts, and redistributions carried out in numpy, all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from lightning_wlb.heterogeneous.planning.exchanges import Redistribution, TurnExchange
from lightning_wlb.heterogeneous.planning.sharded_layouts import Weights, in_step, sharded
from lightning_wlb.plan import Scheme, Schemes

Tensors = dict[str, np.ndarray]
"""What a rank holds of each parameter."""


def weights(
    layers: int, tied: bool = False, rows: int = 8, frozen: tuple[str, ...] = ()
) -> Weights:
    """Layers of two kinds; ``kv`` is split over 2 ranks and whole on each of 4.

    Parameters get no gradients whose names begin with one of ``frozen``.
    """
    shapes = {"embed.weight": (2 * rows, 3)}
    split = {"embed.weight": 0}
    for number in range(layers):
        name = f"layers.{number}."
        shapes[name + "up"] = (rows, 3 + number % 2)
        shapes[name + "down"] = (3, rows)
        shapes[name + "kv"] = (2, 5)
        shapes[name + "packed"] = (1, 2, 4)
        shapes[name + "norm"] = (5,)
        split |= {name + "up": 0, name + "down": 1, name + "packed": 2, name + "kv": 0}
    shapes["head.norm"] = (5,)
    if not tied:
        shapes["head.weight"] = (2 * rows, 3)
        split["head.weight"] = 0
    few = {name: dim for name, dim in split.items() if not name.endswith("kv")}
    none = frozenset(name for name in shapes if name.startswith(frozen))
    return Weights(shapes, {2: split, 4: few}, frozenset({"embed.weight"} if tied else ()), none)


def stages(layers: int, count: int) -> tuple[int, ...]:
    return (*[layers // count] * (count - 1), layers - layers // count * (count - 1))


def uniform(ranks: int, layers: int, pipeline: int, context: int, tensor: int) -> Schemes:
    size = pipeline * context * tensor
    assert ranks % size == 0
    own = stages(layers, pipeline)
    return tuple(Scheme(first, own, context, tensor) for first in range(0, ranks, size))


@st.composite
def redistributions(draw: st.DrawFn) -> list[Redistribution]:
    """Those of all ranks between two random layouts of a random model."""
    layers = draw(st.integers(1, 4))
    frozen = draw(st.sampled_from(((), ("embed", "layers.0.up"), ("layers.0", "head"))))
    model = weights(layers, draw(st.booleans()), draw(st.sampled_from((4, 8, 12))), frozen)
    ranks = draw(st.sampled_from((3, 4, 6, 8)))
    sizes = st.tuples(st.integers(1, layers), st.integers(1, 3), st.sampled_from((1, 2, 4)))
    pipeline, context, tensor = draw(sizes.filter(lambda s: ranks % (s[0] * s[1] * s[2]) == 0))
    base = uniform(ranks, layers, pipeline, context, tensor)
    strategy: list[Scheme] = []
    first = 0
    for depth, shared, split in draw(st.lists(sizes, max_size=5)):
        scheme = Scheme(first, stages(layers, depth), shared, split)
        if scheme.ranks.stop <= ranks:
            strategy.append(scheme)
            first = scheme.ranks.stop
    strategy += [Scheme(rank, (layers,)) for rank in range(first, ranks)]
    return [Redistribution(model, base, tuple(strategy), rank) for rank in range(ranks)]


def boxes(own: Redistribution, *, shard: bool) -> dict[str, np.ndarray]:
    """What every rank holds of each parameter: [ranks, dimensions, 2]."""
    found: dict[str, np.ndarray] = {}
    for bucket in own.weights.buckets:
        held = sharded(own.weights, bucket, own.base)
        found |= held if shard else in_step(own.weights, bucket, own.schemes)
    return found


def place(box: np.ndarray) -> tuple[slice, ...]:
    """Where a box lies in the whole parameter."""
    return tuple(slice(*ends) for ends in box.tolist())


def run(
    of_all: Sequence[Redistribution],
    sources: Sequence[Tensors],
    targets: Sequence[Tensors],
    *,
    push: bool,
) -> list[list[TurnExchange]]:
    """All turns, in order; gradients in the reverse order. Returns the exchanges of all ranks.

    Checks that both ends of each message expect the same. Targets begin as NaN.
    """
    turns, done = range(of_all[0].turns), []
    for turn in reversed(turns) if push else turns:
        exchanges = [own.exchange(turn, push=push) for own in of_all]
        sent: dict[tuple[int, int], list[np.ndarray]] = {}
        for rank, (out, _) in enumerate(exchanges):
            assert [each.peer for each in out] == sorted(each.peer for each in out)
            for each in out:
                value = sources[rank][each.name][each.place]
                assert not np.isnan(value).any(), "a rank sends what it has not"
                assert value.size == each.elements
                sent.setdefault((rank, each.peer), []).append(value.copy())
        for rank, (_, into) in enumerate(exchanges):
            assert [each.peer for each in into] == sorted(each.peer for each in into)
            for each in into:
                value, own = sent[each.peer, rank].pop(0), targets[rank][each.name][each.place]
                assert own.shape == value.shape
                if push:
                    np.copyto(own, np.nan_to_num(own) + value)
                else:
                    assert np.isnan(own).all(), "an element came twice"
                    own[...] = value
        assert not any(sent.values()), "a message that nobody receives"
        done.append(exchanges)
    return done
