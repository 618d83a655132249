"""From what a user gives as documents (a name, a store, sequences of token numbers) to stores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.data.documents import DocumentStore, DocumentSubset, InMemoryDocuments
from lightning_wlb.data.mixture import MixedDocuments
from lightning_wlb.data.stdlib import StdlibDocuments


def is_documents(documents: Any) -> bool:
    """Whether this is a store, or a sequence that may become one."""
    return isinstance(documents, DocumentStore | Sequence)


def check_documents(name: str, documents: Any) -> None:
    """Refuse what :func:`open_documents` could not open, without opening anything."""
    if isinstance(documents, str) and documents != "stdlib":
        raise MisconfigurationException(
            f"{name}={documents!r}: the only store with a name is 'stdlib'. Pass a document"
            " store or sequences of token numbers for anything else."
        )
    if not is_documents(documents):
        raise MisconfigurationException(
            f"{name} of type {type(documents).__name__} are no document store: it needs lengths,"
            " vocab_size, read, targets and mask (lightning_wlb.data.documents.DocumentStore)."
            " Give one, or sequences of token numbers."
        )


def open_documents(documents: Any) -> DocumentStore:
    """The store that a user has named or given; sequences are held in memory."""
    if isinstance(documents, str):
        return StdlibDocuments()
    if isinstance(documents, DocumentStore):
        return documents
    return InMemoryDocuments(documents)


def hold_out(store: DocumentStore, count: int, seed: int) -> tuple[DocumentStore, DocumentStore]:
    """Set ``count`` documents aside for validation, chosen at random by the seed.

    Returns:
        The others, and those set aside, both in the order of ``store``.

    Raises:
        MisconfigurationException: if none or all documents would be set aside.
    """
    documents = len(store.lengths)
    if not 0 < count < documents:
        raise MisconfigurationException(
            f"validation_documents={count} of {documents} documents cannot be held out: choose a"
            f" number from 0 to {documents - 1}."
        )
    # Python's own generator: its samples are the same on every version.
    held_out = np.zeros(documents, bool)
    held_out[random.Random(seed).sample(range(documents), count)] = True
    kept, chosen = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    if isinstance(store, MixedDocuments):
        return store.subset(kept), DocumentSubset(store, chosen)
    return DocumentSubset(store, kept), DocumentSubset(store, chosen)
