"""The order of documents, cut into global batches.

An epoch is a permutation of the store's documents, from ``numpy.random.default_rng((seed,
epoch))``. Where the packing method cuts the stream of documents, a global batch is the stream's
next N·C tokens, cut every C. Otherwise every document is cut into pieces of C tokens and a last one
with the rest, and a global batch is the next pieces of the order, as many as come nearest to N·C
tokens. If not all pieces of a document fit, the next global batch begins with the document's next
piece. So every global batch but an epoch's last has N·C ± C/2 tokens.

Cost: linear in the documents that are drawn; once per epoch a permutation, 4 bytes a document.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.argument_checks import whole
from lightning_wlb.plan import Piece


class StreamPosition(NamedTuple):
    """Which documents of an epoch have arrived."""

    position: int = 0  # number of documents that have arrived whole
    offset: int = 0  # tokens of the next document that have arrived


class Stream(NamedTuple):
    """How the documents of a store become global batches."""

    tokens: int  # N·C, of a global batch
    window: int  # C, of the longest piece
    cuts: bool  # whether documents are concatenated and cut at every C tokens
    seed: int  # decides, with the epoch's number, the order of documents
    shuffle: bool  # whether each epoch has an order of its own; else all take the store's order


class GlobalBatches:
    """The global batches of one epoch after another.

    Args:
        lengths: tokens of each document of the store, by document number; after truncation.
        stream: how they become global batches.
    """

    def __init__(self, lengths: NDArray[np.int64], stream: Stream) -> None:
        self._lengths, self._stream = lengths, stream
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Go to the first document of an epoch."""
        self.epoch = epoch
        self._order = document_numbers(len(self._lengths))
        if self._stream.shuffle:
            np.random.default_rng((self._stream.seed, epoch)).shuffle(self._order)
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
        """The position in the epoch, in plain integers."""
        return {"epoch": self.epoch, **self._at._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self.start_epoch(whole("epoch", state["epoch"], 0))
        self._at = StreamPosition(*(whole(each, state[each], 0) for each in StreamPosition._fields))
        position, offset = self._at
        length = self._lengths[self._order[position]] if position < len(self._order) else 1
        if position > len(self._order) or (offset >= length and len(self._order)):
            raise ValueError(f"no run stands at token {offset} of document {position}")

    def _after(self, at: StreamPosition) -> tuple[list[tuple[int, int, int]], StreamPosition]:
        """Pieces (document, origin, stop) of the global batch at a position, and where it ends."""
        return next_pieces(self._order, self._lengths, at, *self._stream[:3])


def document_numbers(count: int) -> NDArray[np.signedinteger[Any]]:
    """The numbers 0 to ``count - 1``, in 4 bytes each where these suffice."""
    return np.arange(count, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64)


def next_pieces(
    documents: NDArray[np.signedinteger[Any]],
    lengths: NDArray[np.int64],
    at: StreamPosition,
    tokens: int,
    window: int,
    cuts_stream: bool,
) -> tuple[list[tuple[int, int, int]], StreamPosition]:
    """The pieces whose sum comes nearest to ``tokens`` tokens; in a tie one piece more.

    Args:
        documents: document numbers in the order of the epoch.
        lengths: tokens of each document of the store, by document number.
        at: the position in the order.
        tokens: how many to take, fewer at the epoch's end; a multiple of ``window``.
        window: C, tokens of the longest piece.
        cuts_stream: whether the concatenated documents are cut every ``window`` tokens, which takes
            exactly ``tokens``; else each document is cut every ``window`` from its beginning.

    Returns:
        Pieces (document, origin, stop) in order, at least one, and the position after them.
    """
    pieces: list[tuple[int, int, int]] = []
    taken = 0
    position, offset = at
    while taken < tokens and position < len(documents):
        document = int(documents[position])
        length = int(lengths[document])
        part = min(length - offset, window - taken % window if cuts_stream else window)
        if pieces and taken + part - tokens > tokens - taken:
            break
        pieces.append((document, offset, offset + part))
        taken += part
        offset += part
        if offset == length:
            position, offset = position + 1, 0
    return pieces, StreamPosition(position, offset)
