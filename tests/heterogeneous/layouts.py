"""Random models and layouts, and links carried out in numpy, all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from lightning_wlb.heterogeneous.planning.exchanges import Exchange, Link, Parts
from lightning_wlb.heterogeneous.planning.sharded_layouts import Regions, Weights, at_rest, in_step
from lightning_wlb.plan import Scheme, Schemes

Key = tuple[int, int]  # unit, parameter


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
def links(draw: st.DrawFn) -> list[Link]:
    """The links of all ranks between two random layouts of a random model."""
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
    return [Link(model, base, tuple(strategy), rank, per_node) for rank in range(ranks)]


def held(link: Link, *, rest: bool) -> dict[int, Regions]:
    """Who holds what of every unit, all ranks."""
    layout, strategy = (at_rest, link.base) if rest else (in_step, link.strategy)
    return {
        number: layout(link.weights, unit, strategy)
        for number, unit in enumerate(link.weights.units)
    }


class Memory:
    """What one rank holds: whole arrays that are NaN where it holds nothing."""

    def __init__(self, link: Link, of: dict[int, Regions] | None, rank: int, fill: float) -> None:
        self.values: dict[Key, np.ndarray] = {}
        for number, unit in enumerate(link.weights.units):
            for parameter, name in enumerate(unit.names):
                self.values[number, parameter] = np.full(link.weights.shapes[name], np.nan)
        for unit, regions in (of or {}).items():
            for box, parameter in zip(*self._own(regions, rank), strict=True):
                self.at(unit, parameter, box)[...] = fill

    @staticmethod
    def _own(regions: Regions, rank: int) -> tuple[np.ndarray, np.ndarray]:
        mine = regions.rank == rank
        return regions.box[mine], regions.parameter[mine]

    def at(self, unit: int, parameter: int, box: np.ndarray) -> np.ndarray:
        whole = self.values[int(unit), int(parameter)]
        return whole[tuple(slice(*ends) for ends in box[: whole.ndim])]

    def read(self, parts: Parts) -> list[np.ndarray]:
        return [
            self.at(unit, parameter, box).copy()
            for unit, parameter, box in zip(parts.unit, parts.parameter, parts.box, strict=True)
        ]


def carry(
    exchanges: Sequence[Exchange],
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
            place = targets[rank].at(into.unit[number], into.parameter[number], into.box[number])
            assert place.shape == value.shape
            if push:
                np.copyto(place, np.nan_to_num(place) + value)
            else:
                assert np.isnan(place).all(), "an element came twice"
                place[...] = value
    assert not any(sent.values()), "a message that nobody receives"


def run(links: Sequence[Link], sources: Sequence[Memory], targets: Sequence[Memory], *, push: bool):
    """All slots, in order; gradients in the reverse order. Returns the exchanges of each hop."""
    slots = range(links[0].slots)
    middle = [Memory(link, None, link.rank, 0) for link in links]
    done: list[list[list[Exchange]]] = [[] for _ in range(links[0].hops)]
    for slot in reversed(slots) if push else slots:
        hops = list(range(links[0].hops))
        for hop in reversed(hops) if push else hops:
            exchanges = [link.exchange(slot, hop, push=push) for link in links]
            ends = [sources, *[middle] * (len(hops) - 1), targets]
            # Parameters go from hop to hop + 1; gradients, given first, the other way.
            first, second = (hop + 1, hop) if push else (hop, hop + 1)
            if push:
                ends = ends[::-1]
            carry(exchanges, ends[first], ends[second], push=push)
            done[hop].append(exchanges)
    return done
