"""The parts of a step plan: pieces, slices, micro-batches, and the plan of one replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Recompute = Literal["none", "selective", "full"]
"""The part of a layer that backward recomputes: nothing, its feed-forward half, or all of it."""

ActivationCheckpointing = Literal["auto", Recompute]
"""What all micro-batches recompute; ``"auto"``: the plan decides for each micro-batch."""

_AT_ONCE = 1 << 18
"""Documents that are counted at a time, so that millions of them need little further memory."""


class Piece(NamedTuple):
    """Tokens ``[origin, stop)`` of a document, which attend to each other and nothing else.

    ``document`` is its number in the store; for each further pass over a store a mixture adds the
    number of documents. ``arrival`` is the optimiser step (0-based) whose global batch contained
    the piece; a piece released at step s was delayed by ``s - arrival`` steps.
    """

    document: int
    origin: int
    stop: int
    arrival: int

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.stop - self.origin


def piece_counts(lengths: NDArray[np.int64], window: int) -> dict[int, int]:
    """The number of pieces of each length into which documents are cut: tokens -> pieces.

    ``lengths`` are the documents' tokens, ``window`` is the most tokens of a piece.
    """
    counts = np.zeros(window + 1, np.int64)
    for first in range(0, len(lengths), _AT_ONCE):
        whole, rest = np.divmod(lengths[first : first + _AT_ONCE], window)
        counts += np.bincount(rest, minlength=window + 1)
        counts[window] += whole.sum()
    present = np.flatnonzero(counts)
    found = dict(zip(present.tolist(), counts[present].tolist(), strict=True))
    found.pop(0, None)  # documents of whole windows leave no rest
    return found


class Slice(NamedTuple):
    """Tokens ``[start, stop)`` of a document, whose attention and positions begin at ``origin``.

    ``origin <= start < stop``; all in tokens from the start of the store's document.
    """

    document: int
    origin: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.stop - self.start

    @property
    def context(self) -> int:
        """Tokens of the same piece that the slice attends to before its own first token."""
        return self.start - self.origin

    def __str__(self) -> str:
        piece = f"{self.document}" if self.origin == 0 else f"{self.document}@{self.origin}"
        return f"{piece}[{self.start}:{self.stop})"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Slices that go through the pipeline as one unit.

    Args:
        slices: indices into the replica's ``slices``, in the order in which their tokens are
            laid out. Empty for a micro-batch without tokens.
        sharding: how context ranks share tokens: a name in ``lightning_wlb.sharding.SHARDINGS``.
        rows: rows per context-parallel rank after padding, so ranks know every message's size.
        replicas: the data-parallel replicas that share the micro-batch: one, or for DP-Merge an
            aligned power-of-two range of replicas, which all list it. If a step has schemes, only
            pipelines of the same shape count for the range.
        recompute: the part of every layer that backward recomputes (activation checkpointing).
    """

    slices: tuple[int, ...]
    sharding: str
    rows: int
    replicas: tuple[int, ...]
    recompute: Recompute = "none"


@dataclass(frozen=True)
class ReplicaPlan:
    """What one data-parallel replica does in a step.

    Args:
        slices: the slices that micro-batches are made of.
        forward: micro-batches in the order in which their forward runs.
    """

    slices: tuple[Slice, ...]
    forward: tuple[MicroBatch, ...]

    @property
    def tokens(self) -> int:
        """New tokens of the replica in this step."""
        return sum(part.tokens for part in self.slices)

    @property
    def sharers(self) -> list[tuple[int, ...]]:
        """The replicas that run each micro-batch together, in forward order."""
        return [each.replicas for each in self.forward]

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """For each micro-batch the number of forwards that must have run before its backward.

        The forwards up to the last slice of each of its pieces must have run, because a slice's
        keys and values receive gradients from every later slice (SlimPack §4.1).
        """
        last = self._last
        return tuple(
            [
                max([last[index] for index in each.slices], default=place) + 1
                for place, each in enumerate(self.forward)
            ]
        )

    @cached_property
    def going_on(self) -> tuple[int, ...]:
        """For each micro-batch, the number of its pieces that have slices in later ones."""
        last = self._last
        return tuple(
            [
                len({self.slices[index][:2] for index in each.slices if last[index] > place})
                for place, each in enumerate(self.forward)
            ]
        )

    @cached_property
    def _last(self) -> list[int]:
        """For each slice the micro-batch with the last slice of its piece."""
        pieces = [part[:2] for part in self.slices]
        last = {
            pieces[index]: place
            for place, micro_batch in enumerate(self.forward)
            for index in micro_batch.slices
        }
        return [last[piece] for piece in pieces]

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """The order in which backwards run, by the micro-batches' places in ``forward``.

        Micro-batches that share a piece form a chain, whose backward runs in reverse. Without
        slices every chain is one micro-batch, and backward runs in the order of forward.
        """
        order: list[int] = []
        for place, need in enumerate(accumulate(self.needs, max)):
            if need == place + 1:  # no later micro-batch has a slice of these pieces: chain ends
                order += range(place, len(order) - 1, -1)
        return tuple(order)

    def changed(self, change: Callable[[MicroBatch], MicroBatch]) -> ReplicaPlan:
        """The same plan with each micro-batch changed."""
        return ReplicaPlan(self.slices, tuple([change(each) for each in self.forward]))

    def slices_of(self, micro_batch: MicroBatch) -> tuple[Slice, ...]:
        """The slices of a micro-batch, in layout order."""
        slices = self.slices
        return tuple([slices[index] for index in micro_batch.slices])

    def tokens_of(self, micro_batch: MicroBatch) -> int:
        """New tokens of a micro-batch, over its whole context-parallel group."""
        return sum([stop - start for _, _, start, stop in self.slices_of(micro_batch)])
