"""Documents whose tokens are held in memory: sequences of numbers, with masks.

Use it for fine-tuning sets and tests: every loader worker has a copy. Larger corpora stay in files.

Cost: 8 bytes for each token, 1 more with a mask, and some 100 for each document. A read is a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_wlb.data.stores.document_store import (
    Array,
    CheckedDocuments,
    check_lengths,
    integers,
)


class InMemoryDocuments(CheckedDocuments):
    """Documents given as sequences of token numbers (lists, numpy arrays or torch tensors).

    Args:
        sequences: one sequence of integers for each document.
        masks: for each document None or one bool (or 0 or 1) for each token: whether the token may
            be a target (a loss mask: False for the prompt's tokens in fine-tuning). None: all may.
            For labels in Hugging Face's format the mask is ``labels != -100``.
        vocab_size: None: the largest token plus one.

    Raises:
        ValueError: an empty store or document, tokens that are not integers, or masks that do not
            match the sequences. Tokens and masks with wrong values are refused when they are read.
    """

    def __init__(
        self,
        sequences: Sequence[Any],
        masks: Sequence[Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        name, remedy = type(self).__name__, "Give a flat sequence of integer token numbers."
        self._arrays = [
            integers(f"{name}: document {number}", sequence, remedy).astype(np.int64)
            for number, sequence in enumerate(sequences)
        ]
        lengths = np.array([len(array) for array in self._arrays], np.int64)
        check_lengths(lengths, name)
        if vocab_size is None:
            vocab_size = max(0, *(int(array.max()) for array in self._arrays)) + 1
        super().__init__(name, lengths, vocab_size)
        self._masks = None if masks is None else _checked(masks, lengths, name)
        # The given sequences are not kept, because lists take several times the memory.
        self._make = partial(type(self), self._arrays, self._masks, vocab_size)

    def _tokens(self, row: int, start: int, stop: int) -> Array:
        return self._arrays[row][start:stop]

    def _flags(self, row: int, start: int, stop: int) -> Array | None:
        return None if self._masks is None else self._masks[row][start:stop]


def _checked(masks: Sequence[Any], lengths: npt.NDArray[np.int64], name: str) -> list[Array]:
    """The masks of all documents, each with as many entries as its document has tokens."""
    if len(masks) != len(lengths):
        raise ValueError(
            f"{name}: {len(masks)} masks for {len(lengths)} documents. Give one (or None) for each."
        )
    arrays: list[Array] = []
    for mask, length in zip(masks, lengths.tolist(), strict=True):
        arrays.append(np.ones(length, bool) if mask is None else np.asarray(mask))
        if (shape := arrays[-1].shape) != (length,):
            raise ValueError(
                f"{name}: document {len(arrays) - 1} has {length} tokens but a mask of shape"
                f" {shape}. Give one bool for each token."
            )
    return arrays
