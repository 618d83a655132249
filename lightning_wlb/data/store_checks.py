"""Checks on stores: every read is checked, and ranks compare a digest of their copies.

A store must return exactly what a range needs: as many tokens as the range has, whole numbers of
the vocabulary, and a mask of as many booleans. Other values (from a user's own store, or damaged
files) would be trained on silently: numpy spreads a single token over a whole range, and a mask of
labels (-100) counts as True. Each error names store, document and range. Targets, whose number
divides the loss, are counted here from lengths and masks, and not by the store.

If lengths are equal on all ranks, plans are equal too, and a rank reads only its own rows. So nodes
whose copies of a corpus differ in their tokens (another tokenizer, a changed file) would train on a
mixture of both. In the first step of every pass over the documents each rank hashes the beginnings
of some documents, spread over the store (:func:`checked_digests`). The exchange that compares plans
also compares these digests, and a resumed run compares them with the saved ones. That is no proof.

Cost: one look at each token that is read, and at each mask of a piece that is planned. The digest
reads up to ``SAMPLED_TOKENS`` tokens of ``SAMPLED_DOCUMENTS`` documents a store, pass and worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_wlb.data.stores.document_store import (
    DocumentStore,
    DocumentSubset,
    check_tokens,
    name_of,
)
from lightning_wlb.data.stores.mixture import MixedDocuments


def read_tokens(
    store: DocumentStore, document: int, start: int, stop: int, vocab_size: int | None
) -> npt.NDArray[np.int64]:
    """Tokens ``[start, stop)``, not empty, of a document, int64 [stop - start].

    They must be in ``[0, vocab_size)``, or at least 0 if ``vocab_size`` is None.

    Raises:
        ValueError: the store fails, or returns anything but that many tokens of the vocabulary.
    """
    with _naming(store, document, start, stop, "tokens"):
        tokens = np.asarray(store.read(document, start, stop))
    if tokens.shape != (stop - start,) or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{name_of(store, document)}: {_returned('read', document, start, stop, tokens)}, not"
            f" {stop - start} whole numbers. Its length is said to be {length_of(store, document)}."
            " Mend the store: read returns the tokens of the range, as integers."
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
            " target; for labels with -100 it is labels != -100."
        )
    return mask


def count_targets(store: DocumentStore, document: int, start: int, stop: int) -> int:
    """How many tokens of ``[start, stop)`` have a target: a next token, and the mask allows it.

    Raises:
        ValueError: as :func:`read_mask`.
    """
    last = min(stop + 1, length_of(store, document))
    if last <= start + 1:
        return 0
    mask = read_mask(store, document, start + 1, last)
    return last - start - 1 if mask is None else int(np.count_nonzero(mask))


def length_of(store: DocumentStore, document: int) -> int:
    """Tokens of a document; a mixture's later passes have numbers beyond its last document."""
    return int(store.lengths[document % len(store.lengths)])


def check_has_targets(store: DocumentStore) -> None:
    """Raise ValueError for a store without targets; checks documents until one has a target."""
    lengths = enumerate(store.lengths.tolist())
    if not any(count_targets(store, document, 0, length) for document, length in lengths):
        raise ValueError(
            f"{store!r}: no document has a target, so that nothing would be learned. The target of"
            " a token is the document's next one, where the mask allows it: give documents of at"
            " least 2 tokens, and a mask that leaves some."
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


SAMPLED_DOCUMENTS = 16
SAMPLED_TOKENS = 256


class CorpusDigest(NamedTuple):
    """A digest of data that was read from a store."""

    store: str
    """The store's name in messages; it may differ from rank to rank."""
    digest: int
    """A 63-bit digest of its vocabulary, and of some documents' tokens and masks."""


def checked_digests(
    store: DocumentStore, state: Mapping[str, Any] | None = None
) -> tuple[CorpusDigest, ...]:
    """The digest of a store, or of each store of a mixture.

    Raises:
        ValueError: the digests differ from those in ``state``, or a read fails the store's checks.
    """
    stores = store.stores if isinstance(store, MixedDocuments) else (store,)
    found = tuple(CorpusDigest(repr(each), _digest(each)) for each in stores)
    digests = [each.digest for each in found]
    if (state or {}).get("corpora", digests) != digests:
        raise ValueError(
            f"{store!r} is not what the saved run read: its lengths agree, but tokens, masks or"
            " vocabulary differ. Resume with the run's documents, or load the weights alone."
        )
    return found


def _digest(store: DocumentStore) -> int:
    sha = hashlib.sha256(repr(store.vocab_size).encode())
    subset = store
    while isinstance(subset, DocumentSubset) and np.ptp(store.lengths) == 0:
        sha.update(subset.numbers.tobytes())  # subsets of equal lengths may differ in them
        subset = subset.store
    last = len(store.lengths) - 1
    for document in sorted(
        {round(last * part / (SAMPLED_DOCUMENTS - 1)) for part in range(SAMPLED_DOCUMENTS)}
    ):
        stop = min(SAMPLED_TOKENS, int(store.lengths[document]))
        sha.update(read_tokens(store, document, 0, stop, store.vocab_size).tobytes())
        mask = read_mask(store, document, 0, stop)
        sha.update((np.ones(stop, np.bool_) if mask is None else mask).tobytes())
    return int.from_bytes(sha.digest()[:8], "big") >> 1
