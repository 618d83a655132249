"""The order of documents, cut into global batches.

An epoch is a permutation of the store's documents, from ``numpy.random.default_rng((seed,
epoch))``. Where the packing method cuts the stream of documents, a global batch is the stream's
next N·C tokens, cut every C. Otherwise it is the next whole documents that reach N·C tokens; what
the last of them has beyond N·C is taken off the following global batches.

Cost: linear in the documents of the global batches drawn; once per epoch a permutation, of 4 bytes
for each document.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.plan import Piece


class StreamPosition(NamedTuple):
    """Which documents of an epoch have arrived."""

    position: int = 0  # number of documents that have arrived
    offset: int = 0  # tokens of the next document that a cut stream has taken
    surplus: int = 0  # tokens that earlier global batches took beyond N·C


class GlobalBatches:
    """The global batches of one epoch after another.

    Args:
        lengths: tokens of each document of the store, by document number.
        tokens: N·C, tokens of a global batch.
        window: C, tokens of the longest piece.
        cuts_stream: whether documents are concatenated and cut at every C tokens.
        seed: decides, with the epoch's number, the order of documents.
        shuffle: whether each epoch has an order of its own; else all have that of the store.
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
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Go to the first document of an epoch."""
        self.epoch = epoch
        self._order = document_numbers(len(self._lengths))
        if self._shuffle:
            np.random.default_rng((self._seed, epoch)).shuffle(self._order)
        self._at = StreamPosition()

    @property
    def exhausted(self) -> bool:
        """Whether the epoch's last global batch has been drawn."""
        return self._at.position >= len(self._order)

    def draw(self, step: int) -> list[Piece] | None:
        """The pieces of the next global batch, which may be none; None after the epoch's last.

        Args:
            step: optimiser step at which they arrive.
        """
        if self.exhausted:
            return None
        pieces, self._at = self._after(self._at)
        return [Piece(*piece, step) for piece in pieces]

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, in plain integers."""
        return {"epoch": self.epoch, **self._at._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self.start_epoch(state["epoch"])
        self._at = StreamPosition(state["position"], state["offset"], state["surplus"])

    def _after(self, at: StreamPosition) -> tuple[list[tuple[int, int, int]], StreamPosition]:
        """Pieces (document, origin, stop) of the global batch at a position, and where it ends."""
        if self._cuts_stream:
            cut, position, offset = cut_stream(
                self._order, self._lengths, at.position, at.offset, self._tokens, self._window
            )
            return cut, StreamPosition(position, offset)
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
        return pieces, StreamPosition(position, surplus=max(tokens - self._tokens, 0))


def document_numbers(count: int) -> NDArray[np.signedinteger[Any]]:
    """The numbers 0 to ``count - 1``, in 4 bytes each where these suffice."""
    return np.arange(count, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64)


def cut_stream(
    documents: NDArray[np.signedinteger[Any]],
    lengths: NDArray[np.int64],
    position: int,
    offset: int,
    tokens: int,
    window: int,
) -> tuple[list[tuple[int, int, int]], int, int]:
    """The next ``tokens`` tokens of the concatenated documents, cut every ``window`` tokens.

    Args:
        documents: document numbers in the order of the epoch.
        lengths: tokens of each document of the store, by document number.
        position: index in ``documents`` where the stream stands.
        offset: tokens of that document which are already taken.
        tokens: how many to take, fewer at the epoch's end; a multiple of ``window``.
        window: tokens of a window, C.

    Returns:
        Pieces (document, origin, stop) in stream order, and the new ``position`` and ``offset``.
    """
    pieces: list[tuple[int, int, int]] = []
    taken = 0
    while taken < tokens and position < len(documents):
        document = int(documents[position])
        length = int(lengths[document])
        part = min(length - offset, window - taken % window)
        pieces.append((document, offset, offset + part))
        taken += part
        offset += part
        if offset == length:
            position, offset = position + 1, 0
    return pieces, position, offset
