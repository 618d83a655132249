"""Choices of pipelines that are worth simulating, found by an estimate of the step time.

A *kind* is a shape that a pipeline may have: stages × context × tensor ranks. Among kinds of equal
size, a kind is kept if it takes the least time for documents of some length. A *choice* is a number
of pipelines of each kind, which together use the ranks.

The estimate gives each piece of a step, longest first, to the kind that finishes it first, as if
all pipelines of a kind worked on each piece together. If the packing shares pieces, a piece that is
too long for one pipeline is shared by several. Filling and draining a pipeline of P stages, which
gets about six micro-batches a stage, multiplies all times by 1 + (P - 1) / 6P.

A choice has pipelines of one kind, or some of one kind and those of another on all other ranks.
Among choices of the same kinds only the best is kept for a step.

The estimate leaves out imbalance, exchanges and open micro-batches: simulations choose.

Cost: about 30 micro-batch predictions per legal kind, and tens of milliseconds a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.heterogeneous.planning.dealing import PipelineKind
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import legal_meshes
from lightning_wlb.plan import Piece, Scheme, Schemes, schemes_of
from lightning_wlb.planning.plan_scoring import ProfileScorer

SHORTEST = 9
"""log2 of the shortest length that is predicted; shorter pieces have its time per token."""

MICRO_BATCHES = 6
"""Micro-batches per stage of a pipeline, for the estimate of filling and draining."""

Counts = tuple[int, ...]
"""Pipelines of each kind."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def candidate_schemes(
    request: MeshRequest, steps: Sequence[Sequence[Piece]], most: int, beside: Schemes = ()
) -> list[Schemes]:
    """The choices of pipelines with the least estimated time for steps of these pieces.

    The best choice of each step comes first, then the second best of each, and so on. No pipeline
    has virtual stages. The request's fixed axis sizes are ignored, since pipelines are to differ
    from the mesh, except ``tensor=1``: a model whose weights cannot be split needs it.

    Args:
        steps: pieces of each step of a sample.
        beside: a choice that is left out, such as the mesh's own pipelines.
    """
    fixed = {"tensor": 1} if request.fixed.get("tensor") == 1 else {}
    kinds = _Kinds(replace(request, fixed=fixed, virtual_stages=1))
    ranked = [kinds.best(pieces) for pieces in steps]
    found: dict[Schemes, None] = {}
    for place in range(max(map(len, ranked), default=0)):
        for of_step in ranked:
            if place < len(of_step) and (made := kinds.schemes(of_step[place])) != beside:
                found[made] = None
    return list(found)[:most]


def estimated(counts: Integers, times: Floats, shared: Integers) -> Floats:
    """The estimated time of a step on each choice; inf if a choice cannot hold the step.

    Args:
        counts: [choices, kinds], pipelines of each kind.
        times: [kinds, pieces], time of a piece, longest first, if one pipeline does all its work.
        shared: [kinds, pieces], the least number of pipelines that can hold the piece together.
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
class _Kinds:
    """All kinds of pipelines that are legal for a request."""

    request: MeshRequest

    @cached_property
    def legal(self) -> list[PipelineKind]:
        request, made = self.request, []
        for mesh in legal_meshes(request):
            predictor = request.predictor(mesh)
            (scheme, *_) = schemes_of(mesh, predictor.stages)
            scorer = ProfileScorer(predictor, request.activation_checkpointing)
            made.append(PipelineKind(scheme, scorer, request.sharding, mesh.data))
        return [kind for kind in made if kind.longest]

    def best(self, pieces: Sequence[Piece]) -> list[Counts]:
        """Choices for a step, best first; only the best among those with the same kinds."""
        if not self._kept:  # the model fits nowhere
            return []
        lengths = np.sort(np.array([piece.tokens for piece in pieces], np.int64))[::-1]
        times, shared = zip(*(self._together(kind, lengths) for kind in self._kept), strict=True)
        choices = np.array(self._choices, np.int64)
        found = estimated(choices, np.array(times), np.array(shared)).tolist()
        by_kinds: dict[tuple[bool, ...], Counts] = {}
        for time, counts in sorted(zip(found, self._choices, strict=True)):
            if np.isfinite(time):
                by_kinds.setdefault(tuple(map(bool, counts)), counts)
        return list(by_kinds.values())

    def schemes(self, counts: Counts) -> Schemes:
        """The pipelines of a choice, larger ones first, so that none lies across nodes."""
        made: list[Scheme] = []
        for number in sorted(range(len(counts)), key=lambda number: -self._sizes[number]):
            for _ in range(counts[number]):
                first = made[-1].ranks.stop if made else 0
                made.append(replace(self._kept[number].scheme, first=first))
        return tuple(made)

    @cached_property
    def _kept(self) -> list[PipelineKind]:
        """The kinds that are the fastest of their size for pieces of some length."""
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
    def _choices(self) -> list[Counts]:
        """Choices of one kind, and of some larger pipelines beside smaller ones of another kind."""
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

    def _counts(self, given: dict[int, int]) -> Counts:
        return tuple(given.get(kind, 0) for kind in range(len(self._kept)))

    def _together(self, kind: PipelineKind, lengths: Integers) -> tuple[Floats, Integers]:
        """The time of pieces on pipelines of a kind, and how many pipelines share each piece.

        The time counts all work of a piece on one pipeline.
        """
        stages, packer = len(kind.scheme.stages), self.request.data.packer
        filling = 1 + (stages - 1) / (MICRO_BATCHES * stages)
        times = filling * np.array(kind.costs(lengths.tolist()))
        sharers = 2 ** np.ceil(np.log2(np.maximum(lengths / kind.longest, 1))).astype(np.int64)
        return np.where(lengths <= kind.longest_shared(packer), times, np.inf), sharers
