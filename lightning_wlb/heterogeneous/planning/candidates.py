"""Pipelines that are worth simulating for some steps: of one or several kinds, over all ranks.

A *kind* is a pipeline × context × tensor that pipelines may have. Of each size those are looked at
with which documents of some length take the least time. A choice says how many pipelines of each
kind there are. What a step takes on it is estimated: its pieces, longest first, go each to the kind
that is done with it first, and pipelines of a kind do all of its pieces together. A piece that is
too long for one of them is shared by several, which take as long as one with so many times the
context ranks, where the packing shares pieces. In a pipeline of P stages, for which about six
micro-batches a stage are planned, everything takes 1 + (P - 1) / 6P times as long.

The estimate begins with all pipelines alike, and with some pipelines of one kind and all other
ranks with pipelines of another. From the best of these it goes on to neighbours, while they are
better: one pipeline becomes two of half its size, two that are alike become one, or one is of
another kind of its size. Of choices that have the same kinds only the best one stays for a step.
Hydraulis' own proposal to begin with (``benchmarks/hydraulis_proposal.py``) finds nothing better.

The estimate knows nothing of imbalance, of exchanging parameters, or of how micro-batches fit in
memory beside each other, so it prunes and must not choose.

Cost: about twenty predictions of a micro-batch for each legal kind, and for each step some tens of
milliseconds in compiled loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.heterogeneous.planning.document_time import documents_ns
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import Reasons, legal_meshes
from lightning_wlb.plan import Piece, Recompute, Scheme, Schemes, Shape, schemes_of
from lightning_wlb.prediction.predictor import Predictor

ONE_BY_ONE = 64
"""Longest pieces of a step that are dealt one by one; the others are, in as many lots."""

SHORTEST = 9
"""Binary logarithm of tokens; shorter pieces take as long for each token."""

CLIMBED = 4
"""Choices for a step from which neighbours are looked at."""

ROUNDS = 8
"""Times at most that a step goes on to a neighbour."""

MICRO_BATCHES = 6
"""Micro-batches of each stage, by which the wait for the first and the last one is estimated."""

Counts = tuple[int, ...]
"""Pipelines of each kind."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def candidate_schemes(
    request: MeshRequest, steps: Sequence[Sequence[Piece]], most: int, beside: Schemes = ()
) -> list[Schemes]:
    """The choices of pipelines with the least estimated time for steps of these pieces.

    The best of each step come first, then their second best, and so on. None has virtual stages.
    Of the sizes that the request gives only tensor 1 is kept to, as of a model whose weights cannot
    be split: pipelines are to differ from the mesh.

    Args:
        request: model, settings and device.
        steps: of a sample.
        most: choices to return.
        beside: pipelines that are not to be among them.
    """
    fixed = {"tensor": 1} if request.fixed.get("tensor") == 1 else {}
    request = replace(request, fixed=fixed, virtual_stages=1)
    kinds = _Kinds(request, _all_kinds(request))
    ranked = [kinds.best(pieces) for pieces in steps]
    found: dict[Schemes, None] = {}
    for place in range(max(map(len, ranked), default=0)):
        for of_step in ranked:
            if place < len(of_step) and (made := kinds.schemes(of_step[place])) != beside:
                found[made] = None
    return list(found)[:most]


def estimated(counts: Integers, times: Floats, shared: Integers) -> Floats:
    """What a step takes on choices, by the rule of this module; inf where one cannot hold it.

    Args:
        counts: [choices, kinds], pipelines of each kind.
        times: [kinds, pieces], what a piece takes on a pipeline, longest piece first.
        shared: [kinds, pieces], the least number of pipelines that can hold the piece together;
            ``times`` is that of one pipeline which does all their work.
    """
    load = np.zeros(counts.shape)
    each = np.arange(len(counts))
    for time, needed in zip(times.T, shared.T, strict=True):
        after = np.where(counts >= needed, load + time / np.maximum(counts, 1), np.inf)
        home = after.argmin(axis=1)
        load[each, home] = after[each, home]
    most: Floats = load.max(axis=1)
    return most


@dataclass(frozen=True, eq=False)
class _Kind:
    """What a pipeline of some kind takes for pieces.

    Args:
        scheme: of such a pipeline, from rank 0 on.
        predictor: of the model on a mesh of such pipelines.
        modes: what micro-batches may recompute, least first.
        window: tokens of the longest piece.
    """

    scheme: Scheme
    predictor: Predictor
    modes: Sequence[Recompute]
    window: int

    @cached_property
    def longest(self) -> Integers:
        """Tokens of the longest piece that fits, in each mode."""
        predictor = self.predictor
        return np.array([predictor.longest_micro_batch(1, mode) for mode in self.modes])

    @cached_property
    def _per_token(self) -> tuple[Integers, Floats]:
        """Lengths, and ns of a token of pieces so long: [modes, lengths]."""
        grid = [1 << power for power in range(SHORTEST, self.window.bit_length())]
        grid.append(self.window)
        times = [documents_ns(self.predictor, tokens, self.modes) for tokens in grid]
        return np.array(grid), np.array(times).T / grid

    def times(self, lengths: Integers, longest: Integers | None = None) -> Floats:
        """What pieces take, each in the least mode that fits; inf where none does.

        Args:
            lengths: tokens of each.
            longest: in each mode, if not :attr:`longest`.
        """
        limits = self.longest if longest is None else longest
        grid, per_token = self._per_token
        found = np.full(len(lengths), np.inf)
        for limit, each in zip(limits.tolist(), per_token, strict=True):
            fits = np.isinf(found) & (lengths <= limit)
            found[fits] = lengths[fits] * np.interp(lengths[fits], grid, each)
        return found


def _all_kinds(request: MeshRequest) -> list[_Kind]:
    """Every legal kind of pipeline."""
    made = []
    for mesh in legal_meshes(request, Reasons()):
        predictor = request.predictor(mesh)
        (scheme, *_) = schemes_of(mesh, predictor.stages)
        made.append(_Kind(scheme, predictor, request.modes, request.data.context_window))
    return made


@dataclass(frozen=True, eq=False)
class _Kinds:
    """All kinds of pipelines that are legal for a request."""

    request: MeshRequest
    legal: Sequence[_Kind]

    def best(self, pieces: Sequence[Piece]) -> list[Counts]:
        """Choices for a step, best first; of those with the same kinds one."""
        if not self._kept:  # the model fits nowhere
            return []
        lengths = np.sort(np.array([piece.tokens for piece in pieces], np.int64))[::-1]
        times, shared = self._times(lengths)
        known: dict[Counts, float] = {}

        def look(at: list[Counts]) -> None:
            new = [each for each in dict.fromkeys(at) if each not in known]
            if new:
                found = estimated(np.array(new, np.int64), times, shared)
                known.update(zip(new, found.tolist(), strict=True))

        look(self._first)
        for begin in self._ranked(known)[:CLIMBED]:
            here = begin
            for _ in range(ROUNDS):
                around = list(self._neighbours(here))
                look(around)
                best = min(around, key=known.__getitem__, default=here)
                if known[best] >= known[here]:
                    break
                here = best
        return self._ranked(known)

    def schemes(self, counts: Counts) -> Schemes:
        """The pipelines of a choice, larger ones first, so that none lies across nodes."""
        made: list[Scheme] = []
        for number in sorted(range(len(counts)), key=lambda number: -self._sizes[number]):
            for _ in range(counts[number]):
                first = made[-1].ranks.stop if made else 0
                made.append(replace(self._kept[number].scheme, first=first))
        return tuple(made)

    @staticmethod
    def _ranked(known: dict[Counts, float]) -> list[Counts]:
        """Those that hold the step, best first; of those with the same kinds one."""
        by_kinds: dict[tuple[bool, ...], Counts] = {}
        for counts in sorted(known, key=lambda counts: (known[counts], counts)):
            if np.isfinite(known[counts]):
                by_kinds.setdefault(tuple(map(bool, counts)), counts)
        return list(by_kinds.values())

    @cached_property
    def _kept(self) -> list[_Kind]:
        """The kinds of each size that are the best for some length."""
        window = self.request.data.context_window
        edges = np.array([1 << power for power in range(SHORTEST, window.bit_length())] + [window])
        costs = np.array([self._together(each, edges)[0] for each in self.legal])
        kept: set[int] = set()
        sizes = np.array([each.scheme.size for each in self.legal])
        for size in set(sizes.tolist()):
            (own,) = np.nonzero(sizes == size)
            able = np.isfinite(costs[own]).any(axis=0)
            kept.update(own[costs[own].argmin(axis=0)[able]].tolist())
        return [self.legal[at] for at in sorted(kept)]

    @cached_property
    def _sizes(self) -> list[int]:
        return [each.scheme.size for each in self._kept]

    @cached_property
    def _first(self) -> list[Counts]:
        """All pipelines alike, and some larger ones beside those of another kind."""
        devices, made = self.request.devices, []
        for large, size in enumerate(self._sizes):
            made.append(self._counts({large: devices // size}))
            for small, other in enumerate(self._sizes):
                number = 1
                while other < size and number * size < devices:
                    rest = (devices - number * size) // other
                    made.append(self._counts({large: number, small: rest}))
                    number *= 2
        return made

    def _neighbours(self, counts: Counts) -> Iterator[Counts]:
        sizes = self._sizes
        for kind, count in enumerate(counts):
            for other, size in enumerate(sizes):
                if count and other != kind and size == sizes[kind]:
                    yield self._moved(counts, kind, -1, other, 1)
                if count and 2 * size == sizes[kind]:
                    yield self._moved(counts, kind, -1, other, 2)
                if count > 1 and size == 2 * sizes[kind]:
                    yield self._moved(counts, kind, -2, other, 1)

    def _moved(self, counts: Counts, kind: int, less: int, other: int, more: int) -> Counts:
        moved = list(counts)
        moved[kind] += less
        moved[other] += more
        return tuple(moved)

    def _counts(self, given: dict[int, int]) -> Counts:
        return tuple(given.get(kind, 0) for kind in range(len(self._kept)))

    def _together(self, kind: _Kind, lengths: Integers) -> tuple[Floats, Integers]:
        """What pieces take on pipelines of a kind, and how many of these share each of them.

        The time is that of one pipeline which does the work of all that share.
        """
        stages, context, tensor = kind.scheme.shape
        times, sharers = np.full(len(lengths), np.inf), np.ones(len(lengths), np.int64)
        ranks, shares = 1, self.request.data.packer.compares_plans
        while other := self._by_shape.get((stages, context * ranks, tensor)):
            # As many hold more, and so may recompute less.
            each = ranks * other.times(lengths, ranks * kind.longest)
            less = each < times
            times[less], sharers[less] = each[less], ranks
            if not shares:
                break
            ranks *= 2
        filling = 1 + (len(stages) - 1) / (MICRO_BATCHES * len(stages))
        return times * filling, sharers

    @cached_property
    def _by_shape(self) -> dict[Shape, _Kind]:
        return {each.scheme.shape: each for each in self.legal}

    def _times(self, lengths: Integers) -> tuple[Floats, Integers]:
        """``times`` and ``shared`` of :func:`estimated` for pieces, the short ones in lots."""
        times, shared = zip(*(self._together(kind, lengths) for kind in self._kept), strict=True)
        lots = np.array_split(np.arange(len(lengths))[ONE_BY_ONE:], ONE_BY_ONE)
        short = [lot for lot in lots if len(lot)]
        first = slice(0, ONE_BY_ONE)
        table, most = np.array(times), np.array(shared)
        summed = [table[:, lot].sum(axis=1) for lot in short]
        largest = [most[:, lot].max(axis=1) for lot in short]
        return (
            np.column_stack([table[:, first], *summed]),
            np.column_stack([most[:, first], *largest]),
        )
