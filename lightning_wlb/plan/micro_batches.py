"""What a step plan is made of: pieces, slices, micro-batches, and a replica's grouping of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Recompute = Literal["none", "selective", "full"]
"""What backward computes again of a layer: nothing, its feed-forward half, or all of it."""

ActivationCheckpointing = Literal["auto", Recompute]
"""``"auto"``: the plan decides for each micro-batch; else what all of them compute again."""

_AT_ONCE = 1 << 18
"""Documents that are looked at together, so that millions of them need no further memory."""


class Piece(NamedTuple):
    """Tokens ``[origin, stop)`` of a document, which attend to each other and nothing else.

    ``document`` is its number in the store; a mixture that passes over a store again adds the
    number of documents for each pass. ``arrival`` is the optimiser step whose global batch brought
    the piece (0-based); a piece released at step s was delayed by ``s - arrival`` steps.
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
    """How many pieces of each length documents are cut into.

    Args:
        lengths: tokens of each document.
        window: most tokens of a piece.

    Returns:
        Tokens -> pieces of so many, where there are any.
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
        sharding: name of the sharding that spreads the tokens over the context-parallel ranks
            (``lightning_wlb.sharding.NAMES``).
        rows: rows per context-parallel rank after padding, so that every rank knows the size
            of every message without asking.
        replicas: the data-parallel replicas that share the micro-batch: one, or for DP-Merge
            an aligned power-of-two range, all of which list it. Where a step has schemes, the
            range counts only pipelines that are alike.
        recompute: what its backward computes again of every layer, in place of holding it
            (activation checkpointing); in both passes the same for every slice.
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
        backward: the same micro-batches in the order in which their backward runs
            (:func:`symmetric_backward`).
    """

    slices: tuple[Slice, ...]
    forward: tuple[MicroBatch, ...]
    backward: tuple[MicroBatch, ...]

    @property
    def tokens(self) -> int:
        """New tokens of the replica in this step."""
        return sum(part.tokens for part in self.slices)

    @cached_property
    def last_uses(self) -> list[int]:
        """See :func:`last_uses`, of the forward pass."""
        return last_uses(self.slices, self.forward)

    @property
    def passes(self) -> tuple[tuple[str, tuple[MicroBatch, ...]], ...]:
        """The name and the micro-batches of both passes, in the order in which each runs them."""
        return ("forward", self.forward), ("backward", self.backward)

    @property
    def sharers(self) -> list[tuple[int, ...]]:
        """The replicas that run each micro-batch together, in forward order."""
        return [each.replicas for each in self.forward]

    def changed(self, change: Callable[[MicroBatch], MicroBatch]) -> ReplicaPlan:
        """The same plan with each micro-batch changed, in both passes alike."""
        made = {each: change(each) for each in self.forward}
        forward, backward = (tuple([made[each] for each in of_pass]) for _, of_pass in self.passes)
        return ReplicaPlan(self.slices, forward, backward)

    def slices_of(self, micro_batch: MicroBatch) -> tuple[Slice, ...]:
        """The slices of a micro-batch, in layout order."""
        slices = self.slices
        return tuple([slices[index] for index in micro_batch.slices])

    def tokens_of(self, micro_batch: MicroBatch) -> int:
        """New tokens of a micro-batch, over its whole context-parallel group."""
        return sum(self.slices[index].tokens for index in micro_batch.slices)


def last_uses(slices: Sequence[Slice], forward: Sequence[MicroBatch]) -> list[int]:
    """For each micro-batch the last one that has a slice of one of its pieces, often itself."""
    pieces = [part[:2] for part in slices]
    if len(set(pieces)) == len(pieces):
        return list(range(len(forward)))  # every piece is whole
    last = {
        pieces[number]: index
        for index, micro_batch in enumerate(forward)
        for number in micro_batch.slices
    }
    return [
        max([last[pieces[number]] for number in micro_batch.slices], default=index)
        for index, micro_batch in enumerate(forward)
    ]


def symmetric_backward(
    slices: Sequence[Slice], forward: Sequence[MicroBatch]
) -> tuple[MicroBatch, ...]:
    """The order in which backward runs: that of ``forward``, each chain reversed.

    Micro-batches that share a piece form a chain. Its backward runs in reverse order, because a
    slice's keys and values receive gradients from every later slice (SlimPack §4.1). Without
    slicing every chain is one micro-batch and backward runs in the order of forward.
    """
    order: list[MicroBatch] = []
    first = end = 0
    for index, last in enumerate(last_uses(slices, forward)):
        end = max(end, last)
        if index == end:
            order += forward[first : index + 1][::-1]
            first = end = index + 1
    return tuple(order)
