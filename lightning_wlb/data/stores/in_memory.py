"""Documents whose tokens are held in memory: sequences of numbers, with masks.

For fine-tuning sets and tests; every loader worker has a copy. Larger corpora stay in their files.

Cost: 8 bytes for each token, 1 more with a mask. A read is a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_wlb.data.stores.document_store import Array, CheckedDocuments, integers


class InMemoryDocuments(CheckedDocuments):
    """Documents given as sequences of token numbers (lists, numpy arrays or torch tensors).

    Args:
        sequences: one sequence of integers for each document.
        masks: for each document None or one bool (or 0 or 1) for each token: whether the token may
            be a target (a loss mask: False for the prompt's tokens in fine-tuning). None: all may.
            Of labels as Hugging Face's models take them, the mask is ``labels != -100``.
        vocab_size: None: the largest token plus one.

    Raises:
        ValueError: an empty store or document, tokens that are not integers, or masks that do not
            match the sequences. Tokens and masks of other values are refused when they are read.
    """

    def __init__(
        self,
        sequences: Sequence[Any],
        masks: Sequence[Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        name, remedy = type(self).__name__, "Give a flat sequence of integer token numbers."
        arrays = [
            integers(f"{name}: document {number}", sequence, remedy).astype(np.int64)
            for number, sequence in enumerate(sequences)
        ]
        lengths = np.array([len(array) for array in arrays], np.int64)
        self._starts = np.cumsum([0, *lengths])
        self._values = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        if vocab_size is None and len(self._values):
            vocab_size = max(int(self._values.max()), 0) + 1
        super().__init__(name, lengths, vocab_size)
        self._mask = None if masks is None else _joined(masks, lengths, name)

    def _tokens(self, row: int, start: int, stop: int) -> Array:
        begin = self._starts[row]
        return self._values[begin + start : begin + stop]

    def _flags(self, row: int, start: int, stop: int) -> Array | None:
        begin = self._starts[row]
        return None if self._mask is None else self._mask[begin + start : begin + stop]


def _joined(masks: Sequence[Any], lengths: npt.NDArray[np.int64], name: str) -> Array:
    """Check the masks of all documents and join them, [tokens of all documents]."""
    if len(masks) != len(lengths):
        raise ValueError(
            f"{name}: {len(masks)} masks for {len(lengths)} documents. Give one (or None) for each"
            " document."
        )
    arrays = [
        np.ones(length, bool) if mask is None else np.asarray(mask)
        for mask, length in zip(masks, lengths.tolist(), strict=True)
    ]
    for number, (mask, length) in enumerate(zip(arrays, lengths.tolist(), strict=True)):
        if mask.shape != (length,):
            raise ValueError(
                f"{name}: document {number} has {length} tokens but a mask of shape {mask.shape}."
                " Give one bool for each token."
            )
    return np.concatenate(arrays)
