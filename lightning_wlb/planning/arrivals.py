"""The order of documents, cut into global batches.

An epoch is a permutation of the store's documents, from ``numpy.random.default_rng((seed,
epoch))``. A global batch is the next documents until N·C tokens: the document that crosses the
line belongs to it, and the surplus is taken off the following ones. Or, where the method cuts the
stream, exactly N·C tokens, cut every C.

The order is known, so a method may look ahead: what was peeked at is kept until it is drawn, and
is no part of the state, which a resumed run finds again from the position.

Cost: linear in the documents of the global batches drawn; once per epoch a permutation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.plan import Piece
from lightning_wlb.planning.packing.original import cut_stream


class _Position(NamedTuple):
    position: int  # in the order: documents before it have arrived
    offset: int  # tokens of the document at `position` that a cut stream has taken
    surplus: int  # tokens that earlier global batches took beyond N·C


class _Batch(NamedTuple):
    pieces: list[tuple[int, int, int]]  # document, origin, stop
    after: _Position


class GlobalBatches:
    """The global batches of one epoch after another.

    Args:
        lengths: tokens of each document of the store, by document number.
        tokens: of a global batch, N·C.
        window: C, tokens of the longest piece.
        cuts_stream: whether documents are concatenated and cut at every C tokens.
        seed: of the order.
        shuffle: False: the order of the store.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        tokens: int,
        window: int,
        cuts_stream: bool,
        seed: int,
        shuffle: bool,
    ) -> None:
        self._lengths, self._tokens, self._window = lengths, tokens, window
        self._cuts_stream, self._seed, self._shuffle = cuts_stream, seed, shuffle
        self.step = 0
        """Optimiser step that a piece drawn now arrives at."""
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Stand before the first document of an epoch."""
        self.epoch = epoch
        self._order = np.arange(len(self._lengths))
        if self._shuffle:
            np.random.default_rng((self._seed, epoch)).shuffle(self._order)
        self._at = _Position(0, 0, 0)
        self._peeked: list[_Batch] = []

    def draw(self) -> list[Piece] | None:
        """The pieces of the next global batch, which may be none; None after the epoch's last."""
        if self._at.position >= len(self._order):
            return None
        pieces, self._at = self._peeked.pop(0) if self._peeked else self._after(self._at)
        return [Piece(*piece, self.step) for piece in pieces]

    def peek(self, batches: int) -> list[list[int]]:
        """Tokens of the pieces of the next global batches; fewer at the epoch's end."""
        while len(self._peeked) < batches:
            last = self._peeked[-1].after if self._peeked else self._at
            if last.position >= len(self._order):
                break
            self._peeked.append(self._after(last))
        return [
            [stop - origin for _, origin, stop in batch.pieces] for batch in self._peeked[:batches]
        ]

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, in plain integers."""
        return {"epoch": self.epoch, **self._at._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self.start_epoch(state["epoch"])
        self._at = _Position(state["position"], state["offset"], state["surplus"])

    def _after(self, at: _Position) -> _Batch:
        if self._cuts_stream:
            cut, position, offset = cut_stream(
                self._order, self._lengths, at.position, at.offset, self._tokens, self._window
            )
            return _Batch(cut, _Position(position, offset, 0))
        pieces: list[tuple[int, int, int]] = []
        tokens, position = at.surplus, at.position
        while tokens < self._tokens and position < len(self._order):
            document = int(self._order[position])
            length = int(self._lengths[document])
            pieces.extend(
                (document, origin, min(origin + self._window, length))
                for origin in range(0, length, self._window)
            )
            tokens += length
            position += 1
        return _Batch(pieces, _Position(position, 0, max(tokens - self._tokens, 0)))
