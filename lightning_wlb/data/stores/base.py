"""What document stores over files have in common.

A kind of store finds out the lengths when it is opened, and gives views of the tokens and of the
mask of a range. The base makes a :class:`.DocumentStore` of that: it turns ranges into 64-bit
tokens, counts targets, refuses tokens outside the vocabulary and empty documents, and lets a store
travel to other processes. A forked worker shares the memory maps of its parent; a pickled store
holds its arguments only, and opens the files again where it arrives.

Cost: 8 bytes for each document. Reading copies the range and looks at each of its tokens twice;
counting targets reads the mask of the range, where there is one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities import rank_zero_info

from lightning_wlb.arguments import choice, whole
from lightning_wlb.data.documents import check_lengths, check_tokens

Empty = Literal["refuse", "drop"]
Array = npt.NDArray[Any]


class MappedDocuments(ABC):
    """Documents in files.

    A subclass finds the files and the lengths, and then calls this constructor.

    Args:
        name: how errors call the store.
        lengths: tokens of every row of the source, int64 [rows].
        vocab_size: tokens are in ``[0, vocab_size)``; None: not known.
        empty: ``"refuse"`` rows without tokens, or ``"drop"`` them and say how many.
        arguments: what the subclass was made with, by name; another process makes it anew.

    Raises:
        ValueError: no documents, an empty one, or an argument of another kind.
    """

    def __init__(
        self,
        name: str,
        lengths: npt.NDArray[np.int64],
        vocab_size: int | None,
        empty: Empty,
        arguments: dict[str, Any],
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._rows: npt.NDArray[np.int64] | None = None
        if choice(f"{name}: empty", empty, get_args(Empty)) == "drop":
            lengths = self._without_empty(lengths)
        check_lengths(lengths, name, "Open the store with empty='drop', or leave them out of it.")
        self.lengths = lengths
        self.vocab_size = (
            None if vocab_size is None else whole(f"{name}: vocab_size", vocab_size, 1)
        )

    @abstractmethod
    def _tokens(self, row: int, start: int, stop: int) -> Array:
        """Tokens ``[start, stop)`` of a row of the source, of any integer type."""

    def _flags(self, row: int, start: int, stop: int) -> Array | None:
        """The mask of a range of a row, as it stands in the source; None: there is no mask."""
        return None

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens ``[start, stop)`` of the document, int64 [stop - start].

        Raises:
            ValueError: a token that is negative or outside the vocabulary of the store.
        """
        tokens = np.asarray(self._tokens(self._row(document), start, stop), np.int64)
        check_tokens(tokens, self.vocab_size, self, document, start)
        return tokens

    def targets(self, document: int, start: int, stop: int) -> int:
        """How many tokens of ``[start, stop)`` have a target."""
        last = min(stop + 1, int(self.lengths[document]))
        first = min(start + 1, last)
        mask = self.mask(document, first, last)
        return last - first if mask is None else int(np.count_nonzero(mask))

    def mask(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Whether each token of ``[start, stop)`` may be a target, bool [stop - start].

        Raises:
            ValueError: a mask of other values than 0 and 1.
        """
        flags = self._flags(self._row(document), start, stop)
        if flags is None or flags.dtype == np.bool_:
            return flags
        wrong = np.flatnonzero((flags != 0) & (flags != 1))
        if len(wrong):
            raise ValueError(
                f"{self.name_of(document)}: its mask has the value {flags[wrong[0]]} at position"
                f" {start + int(wrong[0])}, but a mask says 1 (may be a target) or 0. Mend the"
                " source; of labels with -100 the mask is labels != -100."
            )
        return flags.astype(np.bool_)

    def name_of(self, document: int) -> str:
        """How errors call a document: its row in the source, and the store."""
        return f"document {self._row(document)} of {self.name}"

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return (
            f"{self.name}: {len(self)} documents, {int(self.lengths.sum())} tokens,"
            f" vocab_size={self.vocab_size}"
        )

    # Memory maps would be pickled with all their tokens: another process opens the files itself.
    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._arguments), ()

    def _row(self, document: int) -> int:
        return document if self._rows is None else int(self._rows[document])

    def _without_empty(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        rows = np.flatnonzero(lengths)
        if len(rows) == len(lengths):
            return lengths
        rank_zero_info(
            f"{self.name}: {len(lengths) - len(rows)} of {len(lengths)} documents have no tokens"
            " and are left out (empty='drop')."
        )
        self._rows = rows
        return lengths[rows]
