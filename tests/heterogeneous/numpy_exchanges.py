"""Random models and layouts, and redistributions carried out in numpy, all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from lightning_wlb.heterogeneous.planning.exchanges import Pieces, Redistribution, TurnExchange
from lightning_wlb.heterogeneous.planning.sharded_layouts import Regions, Weights, in_step, sharded
from lightning_wlb.plan import Scheme, Schemes

Key = tuple[int, int]  # bucket, parameter


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
    per_node, nodes = draw(st.sampled_from(((1, 3), (4, 1), (2, 2), (2, 4), (3, 2), (4, 2))))
    ranks = per_node * nodes
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
    return [Redistribution(model, base, tuple(strategy), rank, per_node) for rank in range(ranks)]


def held(own: Redistribution, *, shard: bool) -> dict[int, Regions]:
    """Who holds what of every bucket, all ranks."""
    layout, strategy = (sharded, own.base) if shard else (in_step, own.schemes)
    return {
        number: layout(own.weights, bucket, strategy)
        for number, bucket in enumerate(own.weights.buckets)
    }


class Memory:
    """What one rank holds: whole arrays that are NaN where it holds nothing."""

    def __init__(
        self, own: Redistribution, of: dict[int, Regions] | None, rank: int, fill: float
    ) -> None:
        self.values: dict[Key, np.ndarray] = {}
        for number, bucket in enumerate(own.weights.buckets):
            for parameter, name in enumerate(bucket.names):
                self.values[number, parameter] = np.full(own.weights.shapes[name], np.nan)
        for bucket, regions in (of or {}).items():
            for box, parameter in zip(*self._own(regions, rank), strict=True):
                self.at(bucket, parameter, box)[...] = fill

    @staticmethod
    def _own(regions: Regions, rank: int) -> tuple[np.ndarray, np.ndarray]:
        mine = regions.rank == rank
        return regions.box[mine], regions.parameter[mine]

    def at(self, bucket: int, parameter: int, box: np.ndarray) -> np.ndarray:
        whole = self.values[int(bucket), int(parameter)]
        return whole[tuple(slice(*ends) for ends in box[: whole.ndim])]

    def read(self, parts: Pieces) -> list[np.ndarray]:
        return [
            self.at(bucket, parameter, box).copy()
            for bucket, parameter, box in zip(parts.bucket, parts.parameter, parts.box, strict=True)
        ]


def carry(
    exchanges: Sequence[TurnExchange],
    sources: Sequence[Memory],
    targets: Sequence[Memory],
    *,
    push: bool,
) -> None:
    """One collective of all ranks; checks that both ends of each message expect the same."""
    sent: dict[tuple[int, int], list[np.ndarray]] = {}
    for rank, exchange in enumerate(exchanges):
        out = exchange.into if push else exchange.out
        assert set(out.peer.tolist()) <= set(exchange.ranks)
        assert (np.diff(out.peer) >= 0).all()
        for peer, value in zip(out.peer.tolist(), sources[rank].read(out), strict=True):
            assert not np.isnan(value).any(), "a rank sends what it has not"
            sent.setdefault((rank, peer), []).append(value)
    for rank, exchange in enumerate(exchanges):
        into = exchange.out if push else exchange.into
        for number, peer in enumerate(into.peer.tolist()):
            value = sent[peer, rank].pop(0)
            place = targets[rank].at(into.bucket[number], into.parameter[number], into.box[number])
            assert place.shape == value.shape
            if push:
                np.copyto(place, np.nan_to_num(place) + value)
            else:
                assert np.isnan(place).all(), "an element came twice"
                place[...] = value
    assert not any(sent.values()), "a message that nobody receives"


def run(
    redistributions: Sequence[Redistribution],
    sources: Sequence[Memory],
    targets: Sequence[Memory],
    *,
    push: bool,
):
    """All turns, in order; gradients in the reverse order. Returns the exchanges of each hop."""
    turns = range(redistributions[0].turns)
    middle = [Memory(own, None, own.rank, 0) for own in redistributions]
    done: list[list[list[TurnExchange]]] = [[] for _ in range(redistributions[0].hops)]
    for turn in reversed(turns) if push else turns:
        hops = list(range(redistributions[0].hops))
        for hop in reversed(hops) if push else hops:
            exchanges = [own.exchange(turn, hop, push=push) for own in redistributions]
            ends = [sources, *[middle] * (len(hops) - 1), targets]
            # Parameters go from hop to hop + 1; gradients, given first, the other way.
            first, second = (hop + 1, hop) if push else (hop, hop + 1)
            if push:
                ends = ends[::-1]
            carry(exchanges, ends[first], ends[second], push=push)
            done[hop].append(exchanges)
    return done
