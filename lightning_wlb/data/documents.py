"""Document stores: what the planner and the data loader need to know about documents.

A store tells the length of every document without reading tokens, so that every rank can plan
a step for the whole mesh and then read only its own share. :class:`InMemoryDocuments` holds
sequences that fit in memory (fine-tuning sets, tests), and every loader worker has a copy of it.
Larger corpora stay in their files, which :mod:`lightning_wlb.data.stores` maps into memory. For
another format implement :class:`DocumentStore`.

Cost: reading is a slice; counting targets is two look-ups in a cumulative sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lightning_wlb.arguments import whole

IGNORED_LABEL = -100
"""The label that Hugging Face gives to a token that may not be a target."""


@runtime_checkable
class DocumentStore(Protocol):
    """Documents by number, 0-based; ranges are in tokens from the document's start.

    The *target* of token j is token j + 1 of the same document, where it exists and the mask
    allows it; how a document is cut for training never changes its targets.
    """

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every document, int64 [documents], all at least 1; known without reading."""

    @property
    def vocab_size(self) -> int | None:
        """Tokens are in ``[0, vocab_size)``; None: not known before they are read."""

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens ``[start, stop)``, int64 [stop - start]."""

    def targets(self, document: int, start: int, stop: int) -> int:
        """How many tokens of ``[start, stop)`` have a target."""

    def mask(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Whether each token of ``[start, stop)`` may be a target, bool; None: all may."""


def check_lengths(
    lengths: npt.NDArray[Any],
    store: str,
    remedy: str = "Leave empty documents out of the store.",
) -> None:
    """Refuse a store without documents, documents without tokens and lengths of another type.

    Args:
        lengths: tokens of every document.
        store: how the error calls the store.
        remedy: what to do about empty documents.

    Raises:
        ValueError: naming the first empty document or the type, and the remedy.
    """
    _integers(f"{store}: lengths", lengths, "Give a flat array of whole numbers.")
    if len(lengths) == 0:
        raise ValueError(f"{store} holds no documents. Give it at least one document with a token.")
    empty = np.flatnonzero(lengths < 1)
    if len(empty):
        raise ValueError(
            f"{store}: {len(empty)} of {len(lengths)} documents have no tokens, the first is"
            f" document {int(empty[0])}. {remedy}"
        )


def check_tokens(
    tokens: npt.NDArray[np.int64],
    vocab_size: int | None,
    store: DocumentStore,
    document: int,
    start: int,
) -> None:
    """Refuse tokens outside a vocabulary.

    Args:
        tokens: of a range of a document.
        vocab_size: they must be in ``[0, vocab_size)``; None: at least 0.
        store: that they come from.
        document: its number there.
        start: where the range starts in the document.

    Raises:
        ValueError: naming the first token outside, its position and the vocabulary.
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


def labels_as_mask(
    labels: npt.NDArray[Any], tokens: npt.NDArray[Any], named: str, start: int, remedy: str
) -> npt.NDArray[np.bool_]:
    """Which tokens may be targets, from a range of labels as Hugging Face's models take them.

    Args:
        labels: of each token itself, or ``-100`` where it may not be a target.
        tokens: of the same range.
        named: how errors call the document.
        start: where the range starts in it.
        remedy: what to do about labels of another kind.

    Raises:
        ValueError: a label that is neither ``-100`` nor the token.
    """
    mask = labels != IGNORED_LABEL
    wrong = np.flatnonzero(mask & (labels != tokens))
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"{named}: its label at position {start + first} is {labels[first]}, its token"
            f" {tokens[first]}. Labels equal the tokens or are {IGNORED_LABEL}; they are not"
            f" shifted. {remedy}"
        )
    return np.asarray(mask)


def name_of(store: DocumentStore, document: int) -> str:
    """How errors call a document: as its store does (``name_of``), or by number and store."""
    own = getattr(store, "name_of", None)
    return f"document {document} of {store!r}" if own is None else str(own(document))


class InMemoryDocuments:
    """Documents given as sequences of token numbers (lists, numpy arrays or torch tensors).

    Args:
        sequences: one sequence of integers for each document.
        masks: for each document None or one bool (or 0 or 1) for each token: whether the token may
            be a target (a loss mask: False for the prompt's tokens in fine-tuning). None: all may.
        vocab_size: None: the largest token plus one.
        labels: in place of masks, as Hugging Face's models take them: for each document None or
            one integer for each token, the token itself or ``-100`` where it may not be a target.

    Raises:
        ValueError: an empty store or document, tokens that are not integers in
            ``[0, vocab_size)``, or masks or labels that do not match the sequences.
    """

    def __init__(
        self,
        sequences: Sequence[Any],
        masks: Sequence[Any] | None = None,
        vocab_size: int | None = None,
        labels: Sequence[Any] | None = None,
    ) -> None:
        remedy = "Give each document as a flat sequence of integer token numbers."
        arrays = [
            _integers(f"InMemoryDocuments: document {number}", sequence, remedy).astype(np.int64)
            for number, sequence in enumerate(sequences)
        ]
        self.lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        check_lengths(self.lengths, "InMemoryDocuments")
        self._tokens = np.concatenate(arrays)
        self._starts = np.concatenate(([0], np.cumsum(self.lengths)))
        largest = int(self._tokens.max())
        self.vocab_size = largest + 1 if vocab_size is None else whole("vocab_size", vocab_size, 1)
        if int(self._tokens.min()) < 0 or largest >= self.vocab_size:
            raise ValueError(
                f"InMemoryDocuments: tokens range from {int(self._tokens.min())} to {largest},"
                f" outside [0, vocab_size={self.vocab_size}). Raise vocab_size or check the"
                " tokenizer."
            )
        if labels is not None:
            if masks is not None:
                raise ValueError(
                    "InMemoryDocuments: masks and labels were given, and both say which tokens may"
                    " be targets. Give one of them."
                )
            masks = _masks_of(labels, arrays)
        self._mask = None if masks is None else _flat_mask(masks, self.lengths)
        # _allowed[i]: tokens before i (over the whole store) that may be targets.
        self._allowed = None if self._mask is None else np.concatenate(([0], self._mask.cumsum()))

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens ``[start, stop)`` of the document, int64 [stop - start]."""
        begin = self._starts[document]
        return self._tokens[begin + start : begin + stop]

    def targets(self, document: int, start: int, stop: int) -> int:
        """How many tokens of ``[start, stop)`` have a target."""
        # The tokens [first, last) that are targets of [start, stop).
        last = min(stop + 1, int(self.lengths[document]))
        first = min(start + 1, last)
        if self._allowed is None:
            return last - first
        begin = self._starts[document]
        return int(self._allowed[begin + last] - self._allowed[begin + first])

    def mask(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Whether each token of ``[start, stop)`` may be a target, bool [stop - start]."""
        if self._mask is None:
            return None
        begin = self._starts[document]
        return self._mask[begin + start : begin + stop]

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} documents, {int(self.lengths.sum())} tokens,"
            f" vocab_size={self.vocab_size})"
        )


class DocumentSubset:
    """Some documents of another store, renumbered from 0 in the order given.

    Args:
        store: the store that holds the tokens.
        numbers: documents of ``store``; an array of int32 is kept, not copied.

    Cost: 12 bytes for each document of the subset.

    Raises:
        ValueError: no documents, or numbers that the store does not have.
    """

    def __init__(self, store: DocumentStore, numbers: Sequence[int] | npt.NDArray[Any]) -> None:
        self.store = store
        self.numbers = _document_numbers(numbers, len(store.lengths))
        self.lengths: npt.NDArray[np.int64] = np.asarray(store.lengths)[self.numbers]
        check_lengths(self.lengths, "DocumentSubset")
        self.vocab_size = store.vocab_size

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens ``[start, stop)`` of the document, int64 [stop - start]."""
        return self.store.read(int(self.numbers[document]), start, stop)

    def targets(self, document: int, start: int, stop: int) -> int:
        """How many tokens of ``[start, stop)`` have a target."""
        return self.store.targets(int(self.numbers[document]), start, stop)

    def mask(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Whether each token of ``[start, stop)`` may be a target."""
        return self.store.mask(int(self.numbers[document]), start, stop)

    def name_of(self, document: int) -> str:
        """How errors call a document: as the whole store does."""
        return name_of(self.store, int(self.numbers[document]))

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"DocumentSubset({len(self)} documents of {self.store!r})"


def _document_numbers(numbers: Any, documents: int) -> npt.NDArray[Any]:
    array = _integers(
        "DocumentSubset: numbers",
        numbers,
        "Give a flat sequence of document numbers; np.flatnonzero makes them from a selection.",
    )
    # A negative number would count from the end, and read another document than its length's.
    if len(array) and (int(array.min()) < 0 or int(array.max()) >= documents):
        outside = array[(array < 0) | (array >= documents)]
        raise ValueError(
            f"DocumentSubset: document {int(outside[0])} is not in the store, whose documents are 0"
            f" to {documents - 1}. Choose from these."
        )
    small = np.int32 if documents <= np.iinfo(np.int32).max else np.int64
    return array.astype(small, copy=False)


def _integers(name: str, values: Any, remedy: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{name} is an array of {array.dtype} with shape {array.shape}. {remedy}")
    return array


def _masks_of(
    labels: Sequence[Any], tokens: list[npt.NDArray[np.int64]]
) -> list[npt.NDArray[np.bool_] | None]:
    """The masks of documents in memory, from their labels."""
    if len(labels) != len(tokens):
        raise ValueError(
            f"InMemoryDocuments: {len(labels)} sequences of labels for {len(tokens)} documents."
            " Give one (or None) for each document."
        )
    masks: list[npt.NDArray[np.bool_] | None] = []
    for number, (given, own) in enumerate(zip(labels, tokens, strict=True)):
        if given is None:
            masks.append(None)
            continue
        named = f"InMemoryDocuments: document {number}"
        array = _integers(f"{named}: labels", given, "Give one integer for each token.")
        if len(array) != len(own):
            raise ValueError(
                f"{named} has {len(own)} tokens but {len(array)} labels. Give one for each token."
            )
        masks.append(labels_as_mask(array, own, named, 0, "Give masks of booleans for others."))
    return masks


def _flat_mask(masks: Sequence[Any], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    if len(masks) != len(lengths):
        raise ValueError(
            f"InMemoryDocuments: {len(masks)} masks for {len(lengths)} documents. Give one mask"
            " (or None) for each document."
        )
    flat = []
    for number, (mask, length) in enumerate(zip(masks, lengths.tolist(), strict=True)):
        array = np.ones(length, bool) if mask is None else np.asarray(mask)
        if array.shape != (length,):
            raise ValueError(
                f"InMemoryDocuments: document {number} has {length} tokens but a mask of shape"
                f" {array.shape}. Give one bool for each token."
            )
        wrong = np.flatnonzero((array != 0) & (array != 1))
        if len(wrong):
            raise ValueError(
                f"InMemoryDocuments: the mask of document {number} has {array[wrong[0]]} at"
                f" position {int(wrong[0])}, but a mask says True (may be a target) or False. Give"
                " labels, which have -100, as labels=... in its place."
            )
        flat.append(array.astype(bool))
    return np.concatenate(flat)
