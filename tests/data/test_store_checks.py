from typing import Any

import numpy as np
import pytest
import torch

from lightning_wlb.data.batch import make_step_batch
from lightning_wlb.data.loader import StepDataset, StepLoader
from lightning_wlb.data.open_documents import documents, hold_out
from lightning_wlb.data.store_checks import (
    SAMPLED_TOKENS,
    check_has_targets,
    checked_digests,
    read_mask,
    read_tokens,
)
from lightning_wlb.data.stores.document_store import DocumentStore
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.mesh import Rank
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.planning import DataSettings

TOKENS = [[5, 6, 7, 8], [1, 2, 3, 4, 5, 6]]
MASKS = [None, [True, True, False, True, True, True]]


def test_a_corpus_without_a_target_is_refused() -> None:
    check_has_targets(InMemoryDocuments([[1], [2], [1, 2]], vocab_size=9))
    none = [[False] * 4, [True] + [False] * 5]
    for store in (
        InMemoryDocuments([[1], [2]], vocab_size=9),
        InMemoryDocuments(TOKENS, none, vocab_size=9),
    ):
        with pytest.raises(ValueError, match="no document has a target"):
            check_has_targets(store)


class Lying(InMemoryDocuments):
    """A store whose methods return something else than they should, for document 1."""

    def __init__(self, method: str, answer: Any) -> None:
        super().__init__(TOKENS, MASKS, vocab_size=9)
        self.method, self.answer = method, answer

    def _say(self, method: str, document: int, start: int, stop: int) -> Any:
        honest = getattr(super(), method)(document, start, stop)
        if method != self.method or document != 1:
            return honest
        return self.answer(honest)

    def read(self, document: int, start: int, stop: int) -> Any:
        return self._say("read", document, start, stop)

    def mask(self, document: int, start: int, stop: int) -> Any:
        return self._say("mask", document, start, stop)


def fail(honest: Any) -> Any:
    raise OSError("the disk is gone")


LIES = [
    ("read", lambda t: t[:-1], r"read\(1, 0, 6\) returned .* int64 with shape \[5\], not 6"),
    ("read", lambda t: np.append(t, 1), r"of int64 with shape \[7\], not 6 whole numbers"),
    ("read", lambda t: t[0], r"of int64 with shape \[\], not 6"),
    ("read", lambda t: t[None], r"of int64 with shape \[1, 6\]"),
    ("read", lambda t: t.astype(np.float32), "an array of float32 .* Its length is said to be 6"),
    ("read", lambda t: t > 2, "an array of bool with"),
    ("read", lambda t: t + 4, r"has the token 9 at position 4, outside the vocabulary \[0, 9\)"),
    ("read", lambda t: t - 2, "has the token -1 at position 0"),
    ("read", fail, r"reading tokens of \[0, 6\) failed: OSError: the disk is gone"),
    ("mask", lambda m: m[:-1], r"mask\(1, 1, 6\) returned .* bool with shape \[4\], not 5"),
    ("mask", lambda m: np.where(m, 5, -100), "of int64 .*, not 5 booleans.* labels != -100"),
    ("mask", fail, r"reading the mask of \[1, 6\) failed: OSError"),
]


@pytest.mark.parametrize(("method", "answer", "message"), LIES)
def test_what_a_store_returns_is_what_it_said(method: str, answer: Any, message: str) -> None:
    honest, lying = InMemoryDocuments(TOKENS, MASKS, vocab_size=9), Lying(method, answer)
    data = DataSettings(10, 1, packing="original", shuffle=False)
    dataset = StepDataset.for_model(honest, data, TransformerConfig(vocab_size=9).shape)
    plan = dataset.planner().next_step()
    make_step_batch(plan, honest, Rank(), {}, 0, True, None, 9)
    with pytest.raises(ValueError, match=message) as error:
        make_step_batch(plan, lying, Rank(), {}, 0, True, None, 9)
    assert str(error.value).startswith("document 1 of Lying")


def test_other_kinds_of_whole_numbers_are_taken() -> None:
    for kind in (list, torch.tensor, lambda t: t.astype(np.uint8)):
        read = read_tokens(Lying("read", kind), 1, 1, 4, 9)
        assert read.dtype == np.int64
        assert read.tolist() == [2, 3, 4]
    mask = read_mask(Lying("mask", list), 1, 1, 4)
    assert mask.tolist() == [True, False, True]


def test_what_is_planned_by_is_checked_too() -> None:
    data = DataSettings(10, 1)
    shape = TransformerConfig(vocab_size=9).shape
    planner = StepDataset.for_model(Lying("mask", fail), data, shape).planner()
    with pytest.raises(ValueError, match=r"document 1 of Lying.*: reading the mask of \[1, 6\) f"):
        planner.next_step()
    for lengths, message in (
        (np.array([4.0, 6.0]), "lengths is an array of float64"),
        (np.array([[4], [6]]), r"lengths is an array of int64 with shape \(2, 1\)"),
        (np.array([4, 0]), "1 of 2 documents have no tokens, the first is document 1"),
    ):
        store = InMemoryDocuments(TOKENS, vocab_size=9)
        store.lengths = lengths
        with pytest.raises(ValueError, match=message):
            StepDataset.for_model(store, data, shape)


SEQUENCES = [[number % 7, 1, 2, 3] for number in range(100)]


class Counting(InMemoryDocuments):
    reads: list[tuple[int, int, int]]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        vars(self).setdefault("reads", []).append((document, start, stop))
        return super().read(document, start, stop)


def changed(document: int) -> InMemoryDocuments:
    sequences = [list(each) for each in SEQUENCES]
    sequences[document][1] += 1
    return InMemoryDocuments(sequences, vocab_size=7)


def test_some_documents_spread_over_the_store() -> None:
    store = Counting([[*each, *[0] * 1000] for each in SEQUENCES])
    (sample,) = checked_digests(store)
    assert sample.store == repr(store)
    assert [document for document, _, _ in store.reads] == [
        0, 7, 13, 20, 26, 33, 40, 46, 53, 59, 66, 73, 79, 86, 92, 99,
    ]  # fmt: skip
    assert {(start, stop) for _, start, stop in store.reads} == {(0, SAMPLED_TOKENS)}
    small = Counting([[1, 2], [3]])
    checked_digests(small)
    assert small.reads == [(0, 0, 2), (1, 0, 1)]


def test_it_tells_tokens_masks_and_vocabularies_apart() -> None:
    masks = [[True] * 4 for _ in SEQUENCES]
    stores = [InMemoryDocuments(SEQUENCES, vocab_size=7), changed(99), changed(0)]
    masks[40][0] = False
    stores += [InMemoryDocuments(SEQUENCES, masks), InMemoryDocuments(SEQUENCES, vocab_size=8)]
    digests = [checked_digests(store)[0].digest for store in stores]
    assert len(set(digests)) == len(stores)
    assert checked_digests(InMemoryDocuments(np.array(SEQUENCES, np.int32)))[0].digest == digests[0]
    # One that is not sampled: it is no proof.
    assert checked_digests(changed(1))[0].digest == digests[0]


def test_it_tells_apart_which_documents_of_one_length_are_held_out() -> None:
    store = InMemoryDocuments([[number, number] for number in range(2000)])

    def trained_on(*held_out: int) -> DocumentStore:
        rest: DocumentStore = store
        for number in held_out:
            rest, _ = hold_out(rest, number, 3, "documents")
        return rest

    digests = [checked_digests(trained_on(*each))[0].digest for each in ((1, 2), (2, 1), (1, 2))]
    assert digests[0] == digests[2] != digests[1]


def test_each_store_of_a_mixture_has_its_own() -> None:
    entries = [{"documents": SEQUENCES, "weight": 1}, {"documents": [[1, 2]], "weight": 1}]
    first, second = checked_digests(documents({"mixture": entries}))
    assert first == checked_digests(InMemoryDocuments(SEQUENCES))[0]
    assert second == checked_digests(InMemoryDocuments([[1, 2]]))[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_batch_of_each_pass_brings_it(workers: int) -> None:
    shape = TransformerConfig(vocab_size=7).shape
    dataset = StepDataset.for_model(SEQUENCES, DataSettings(32, 3), shape)
    loader = StepLoader(dataset, num_workers=workers)
    for _ in range(2):
        brought = [len(batch.corpora) for batch in loader]
        assert brought == [1] + [0] * (len(brought) - 1)
        assert len(brought) > 2
