"""Reading from a store whose word is not taken for it: a store of the user's own, or damaged files.

What a store returns must be what it said: as many tokens as the range has, whole numbers of the
vocabulary, a mask of as many booleans, and as many targets as it counted for the planner, whose
sum the loss is divided by. Anything else would be trained on without a word: numpy spreads a
single token over a whole range, and a mask of labels (-100) counts as True. Each error names store,
document and range.

Cost: one look at each token; of ranges with targets, one count of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_wlb.data.documents import DocumentStore, check_tokens, name_of


def read_tokens(
    store: DocumentStore, document: int, start: int, stop: int, vocab_size: int | None
) -> npt.NDArray[np.int64]:
    """Tokens ``[start, stop)`` of a document, int64 [stop - start].

    Args:
        store: where the document is.
        document: its number there.
        start: first token of the range, which is not empty.
        stop: one after its last token.
        vocab_size: tokens must be in ``[0, vocab_size)``; None: at least 0.

    Raises:
        ValueError: the store fails, or returns anything but that many tokens of the vocabulary.
    """
    with _naming(store, document, start, stop, "tokens"):
        tokens = np.asarray(store.read(document, start, stop))
    if tokens.shape != (stop - start,) or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{name_of(store, document)}: {_returned('read', document, start, stop, tokens)}, not"
            f" {stop - start} whole numbers. Its length is said to be"
            f" {int(store.lengths[document % len(store.lengths)])}. Mend the store: read returns"
            " the tokens of the range, as integers."
        )
    tokens = tokens.astype(np.int64, copy=False)
    check_tokens(tokens, vocab_size, store, document, start)
    return tokens


def read_mask(
    store: DocumentStore, document: int, start: int, stop: int
) -> npt.NDArray[np.bool_] | None:
    """Whether each token of ``[start, stop)``, not empty, may be a target; None: all may.

    Raises:
        ValueError: the store fails, or returns anything but that many booleans.
    """
    with _naming(store, document, start, stop, "the mask"):
        given = store.mask(document, start, stop)
        mask = None if given is None else np.asarray(given)
    if mask is not None and (mask.shape != (stop - start,) or mask.dtype != np.bool_):
        raise ValueError(
            f"{name_of(store, document)}: {_returned('mask', document, start, stop, mask)}, not"
            f" {stop - start} booleans. Mend the store: mask returns True where a token may be a"
            " target; of labels with -100 it is labels != -100."
        )
    return mask


def count_targets(store: DocumentStore, document: int, start: int, stop: int) -> int:
    """How many tokens of ``[start, stop)`` have a target, as the store counts them.

    Raises:
        ValueError: the store fails.
    """
    with _naming(store, document, start, stop, "targets"):
        return operator.index(store.targets(document, start, stop))


def check_targets(store: DocumentStore, document: int, start: int, stop: int, found: int) -> None:
    """Compare how many tokens of ``[start, stop)`` have a target with what the store counts.

    Raises:
        ValueError: the store fails, or counts others than were found.
    """
    counted = count_targets(store, document, start, stop)
    if counted != found:
        raise ValueError(
            f"{name_of(store, document)}: targets({document}, {start}, {stop}) is {counted}, but"
            f" its length and mask leave {found}, and the loss would be divided by the wrong"
            " number. Mend the store: the target of token j is token j + 1 of the document, where"
            " the mask allows it."
        )


@contextmanager
def _naming(
    store: DocumentStore, document: int, start: int, stop: int, what: str
) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{name_of(store, document)}: reading {what} of [{start}, {stop}) failed:"
            f" {type(error).__name__}: {error}. Check its files, or mend the store."
        ) from error


def _returned(method: str, document: int, start: int, stop: int, got: npt.NDArray[Any]) -> str:
    shape = f"shape {list(got.shape)}"
    return f"{method}({document}, {start}, {stop}) returned an array of {got.dtype} with {shape}"
