"""The interface of document stores (:class:`DocumentStore`), and base classes for stores.

A store knows the length of every document without reading tokens, so that every rank can plan a
step for the whole mesh and then read only its own share. For another format implement
:class:`DocumentStore`. :class:`CheckedDocuments` converts ranges into 64-bit tokens and refuses
tokens outside the vocabulary and masks with values other than 0 and 1. It can be sent to another
process: a forked worker shares its memory maps, a pickled store opens its files again.
:class:`DocumentSubset` has some documents of a store.

Cost: 8 bytes for each document. A read copies the range and looks at each of its tokens twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from lightning_wlb.argument_checks import whole


@runtime_checkable
class DocumentStore(Protocol):
    """Documents by number, 0-based; ranges are in tokens from the document's start.

    The *target* of token j is token j + 1 of the same document, if it exists and the mask allows
    it. The cutting of documents for training never changes their targets.
    """

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every document, int64 [documents], all at least 1; known without reading."""

    @property
    def vocab_size(self) -> int | None:
        """Tokens are in ``[0, vocab_size)``; None: not known without reading them."""

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens ``[start, stop)``, int64 [stop - start]."""

    def mask(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Whether each token of ``[start, stop)`` may be a target, bool; None: all may."""


def check_lengths(lengths: npt.NDArray[Any], store: str) -> None:
    """Raise ValueError for no documents, documents without tokens and lengths of another type.

    ``store`` is the store's name in the error.
    """
    integers(f"{store}: lengths", lengths, "Give a flat array of whole numbers.")
    if len(lengths) == 0:
        raise ValueError(f"{store} holds no documents. Give it at least one document with a token.")
    empty = np.flatnonzero(lengths < 1)
    if len(empty):
        raise ValueError(
            f"{store}: {len(empty)} of {len(lengths)} documents have no tokens, the first is"
            f" document {int(empty[0])}. Leave them out, as stores of files do by themselves."
        )


def check_tokens(
    tokens: npt.NDArray[np.int64],
    vocab_size: int | None,
    store: DocumentStore,
    document: int,
    start: int,
) -> None:
    """Raise ValueError for tokens outside ``[0, vocab_size)``, or below 0 if this is not known.

    ``tokens`` are from the store's document, from position ``start`` on.
    """
    if not len(tokens):
        return
    if int(tokens.min()) >= 0 and (vocab_size is None or int(tokens.max()) < vocab_size):
        return
    outside = tokens < 0
    if vocab_size is not None:
        outside |= tokens >= vocab_size
    first = int(np.argmax(outside))
    raise ValueError(
        f"{name_of(store, document)} has the token {int(tokens[first])} at position"
        f" {start + first}, outside the vocabulary [0, {vocab_size or '...'}). Check that the"
        " documents were made with the model's tokenizer, and that the files are whole."
    )


def name_of(store: DocumentStore, document: int) -> str:
    """The name of a document in errors: by its store's ``name_of``, or by number and store."""
    own = getattr(store, "name_of", None)
    return own(document) if own else f"document {document} of {store!r}"


class RenumberedDocuments(ABC):
    """A view of other stores that gives their documents new numbers."""

    lengths: npt.NDArray[np.int64]

    @abstractmethod
    def _find(self, document: int) -> tuple[DocumentStore, int]:
        """The store that holds a document, and the document's number there."""

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens ``[start, stop)`` of the document, int64 [stop - start]."""
        store, own = self._find(document)
        return store.read(own, start, stop)

    def mask(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Whether each token of ``[start, stop)`` may be a target."""
        store, own = self._find(document)
        return store.mask(own, start, stop)

    def name_of(self, document: int) -> str:
        """The name of a document in errors, by its own store."""
        return name_of(*self._find(document))

    def __len__(self) -> int:
        return len(self.lengths)


class DocumentSubset(RenumberedDocuments):
    """Some documents of another store, renumbered from 0 in the given order.

    Args:
        numbers: documents of ``store``; an int32 array is kept without a copy.

    Cost: 12 bytes for each document of the subset.

    Raises:
        ValueError: no documents, or numbers that the store does not have.
    """

    def __init__(self, store: DocumentStore, numbers: Sequence[int] | npt.NDArray[Any]) -> None:
        array = integers(
            "DocumentSubset: numbers",
            numbers,
            "Give a flat sequence of document numbers; np.flatnonzero makes them from a selection.",
        )
        documents = len(store.lengths)
        # A negative number would count from the end of the lengths, but not of the store.
        if len(array) and (int(array.min()) < 0 or int(array.max()) >= documents):
            outside = array[(array < 0) | (array >= documents)]
            raise ValueError(
                f"DocumentSubset: document {int(outside[0])} is not in the store, whose documents"
                f" are 0 to {documents - 1}. Choose from these."
            )
        small = np.int32 if documents <= np.iinfo(np.int32).max else np.int64
        self.store, self.vocab_size = store, store.vocab_size
        self.vocabulary = getattr(store, "vocabulary", None)
        self.numbers = array.astype(small, copy=False)
        self.lengths = np.asarray(store.lengths)[self.numbers]
        check_lengths(self.lengths, "DocumentSubset")

    def _find(self, document: int) -> tuple[DocumentStore, int]:
        return self.store, int(self.numbers[document])

    def __repr__(self) -> str:
        return f"DocumentSubset({len(self)} documents of {self.store!r})"


def integers(name: str, values: Any, remedy: str) -> npt.NDArray[Any]:
    """The values as a flat array of whole numbers; else ValueError, with the remedy."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} is an array of {array.dtype} with shape {array.shape}. {remedy}")
    return array


Array = npt.NDArray[Any]


class CheckedDocuments(ABC):
    """Documents whose tokens and masks are checked as they are read.

    A subclass finds the lengths for this constructor. Empty rows are left out and logged.

    Args:
        name: the store's name in errors.
        lengths: tokens of every row of the source, int64 [rows].
        vocab_size: tokens are in ``[0, vocab_size)``; None: not known.

    Raises:
        ValueError: no row has tokens, or ``vocab_size`` is invalid.
    """

    _make: Callable[[], CheckedDocuments]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments, from which another process makes the store again."""
        made = super().__new__(cls)
        made._make = partial(cls, *args, **kwargs)
        return made

    def __init__(self, name: str, lengths: npt.NDArray[np.int64], vocab_size: int | None) -> None:
        self._rows: npt.NDArray[np.int64] | None = None
        if not lengths.all():
            from lightning.pytorch.utilities import rank_zero_info

            self._rows = np.flatnonzero(lengths)
            rank_zero_info(
                f"{name}: {len(lengths) - len(self._rows)} of {len(lengths)} documents have no"
                " tokens and are left out."
            )
            lengths = lengths[self._rows]
        check_lengths(lengths, name)
        self.name, self.lengths = name, lengths
        self.vocab_size = (
            None if vocab_size is None else whole(f"{name}: vocab_size", vocab_size, 1)
        )

    @abstractmethod
    def _tokens(self, row: int, start: int, stop: int) -> Array:
        """Tokens ``[start, stop)`` of a document's row, of any integer type."""

    def _flags(self, row: int, start: int, stop: int) -> Array | None:
        """The mask of a range of a row, as stored in the source; None: there is no mask."""
        return None

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens ``[start, stop)`` of the document, int64 [stop - start].

        Raises:
            ValueError: a token that is negative or outside the vocabulary of the store.
        """
        tokens = np.asarray(self._tokens(self._row(document), start, stop), np.int64)
        check_tokens(tokens, self.vocab_size, self, document, start)
        return tokens

    def mask(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Whether each token of ``[start, stop)`` may be a target, bool [stop - start].

        Raises:
            ValueError: a mask with values other than 0 and 1.
        """
        flags = self._flags(self._row(document), start, stop)
        if flags is None or flags.dtype == np.bool_:
            return flags
        wrong = np.flatnonzero((flags != 0) & (flags != 1))
        if len(wrong):
            raise ValueError(
                f"{self.name_of(document)}: its mask has the value {flags[wrong[0]]} at position"
                f" {start + int(wrong[0])}, but a mask says 1 (may be a target) or 0. Mend the"
                " source; for labels with -100 the mask is labels != -100."
            )
        return flags.astype(np.bool_)

    def name_of(self, document: int) -> str:
        """The name of a document in errors: its row in the source, and the store."""
        return f"document {self._row(document)} of {self.name}"

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return (
            f"{self.name} ({len(self)} documents, {int(self.lengths.sum())} tokens,"
            f" vocab_size={self.vocab_size})"
        )

    # Pickled memory maps would contain all their tokens, so another process opens the files itself.
    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, ()

    def _row(self, document: int) -> int:
        """The document's row in the source."""
        return document if self._rows is None else int(self._rows[document])
