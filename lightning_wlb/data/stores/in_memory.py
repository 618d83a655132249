"""Documents whose tokens are held in memory: sequences of numbers, with masks or labels.

For fine-tuning sets and tests; every loader worker has a copy. Larger corpora stay in their files.

Cost: 8 bytes for each token, 1 more with a mask. A read is a slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_wlb.argument_checks import whole
from lightning_wlb.data.stores.document_store import check_lengths, integers, labels_as_mask


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
            integers(f"InMemoryDocuments: document {number}", sequence, remedy).astype(np.int64)
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
            masks = [
                None if given is None else _mask_of_labels(number, given, arrays[number])
                for number, given in _for_each(labels, arrays, "sequences of labels")
            ]
        self._mask: npt.NDArray[np.bool_] | None = None
        if masks is not None:
            given_masks = _for_each(masks, arrays, "masks")
            flat = [_mask(number, each, arrays[number]) for number, each in given_masks]
            self._mask = np.concatenate(flat)

    def read(self, document: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens ``[start, stop)`` of the document, int64 [stop - start]."""
        begin = self._starts[document]
        return self._tokens[begin + start : begin + stop]

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


def _for_each(
    given: Sequence[Any], tokens: list[npt.NDArray[np.int64]], what: str
) -> Iterable[tuple[int, Any]]:
    """What is given for each document, with the document's number."""
    if len(given) != len(tokens):
        raise ValueError(
            f"InMemoryDocuments: {len(given)} {what} for {len(tokens)} documents. Give one (or"
            " None) for each document."
        )
    return enumerate(given)


def _mask_of_labels(
    number: int, given: Any, tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    named = f"InMemoryDocuments: document {number}"
    labels = integers(f"{named}: labels", given, "Give one integer for each token.")
    if len(labels) != len(tokens):
        raise ValueError(
            f"{named} has {len(tokens)} tokens but {len(labels)} labels. Give one for each token."
        )
    return labels_as_mask(labels, tokens, named, 0, "Give masks of booleans for others.")


def _mask(number: int, given: Any, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    mask = np.ones(len(tokens), bool) if given is None else np.asarray(given)
    if mask.shape != tokens.shape:
        raise ValueError(
            f"InMemoryDocuments: document {number} has {len(tokens)} tokens but a mask of shape"
            f" {mask.shape}. Give one bool for each token."
        )
    wrong = np.flatnonzero((mask != 0) & (mask != 1))
    if len(wrong):
        raise ValueError(
            f"InMemoryDocuments: the mask of document {number} has {mask[wrong[0]]} at position"
            f" {int(wrong[0])}, but a mask says True (may be a target) or False. Give labels, which"
            " have -100, as labels=... in its place."
        )
    return mask.astype(bool)
