from __future__ import annotations

import numpy as np
import pytest

from lightning_wlb.data.corpus_digest import TOKENS, samples_of
from lightning_wlb.data.documents import InMemoryDocuments
from lightning_wlb.data.loader import StepDataset, StepLoader
from lightning_wlb.data.open_documents import documents
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.planning import DataSettings

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
    (sample,) = samples_of(store)
    assert sample.store == repr(store)
    assert [document for document, _, _ in store.reads] == [
        0, 7, 13, 20, 26, 33, 40, 46, 53, 59, 66, 73, 79, 86, 92, 99,
    ]  # fmt: skip
    assert {(start, stop) for _, start, stop in store.reads} == {(0, TOKENS)}
    small = Counting([[1, 2], [3]])
    samples_of(small)
    assert small.reads == [(0, 0, 2), (1, 0, 1)]


def test_it_tells_tokens_masks_and_vocabularies_apart() -> None:
    masks = [[True] * 4 for _ in SEQUENCES]
    stores = [InMemoryDocuments(SEQUENCES, vocab_size=7), changed(99), changed(0)]
    masks[40][0] = False
    stores += [InMemoryDocuments(SEQUENCES, masks), InMemoryDocuments(SEQUENCES, vocab_size=8)]
    digests = [samples_of(store)[0].digest for store in stores]
    assert len(set(digests)) == len(stores)
    assert samples_of(InMemoryDocuments(np.array(SEQUENCES, np.int32)))[0].digest == digests[0]
    # One that is not sampled: it is no proof.
    assert samples_of(changed(1))[0].digest == digests[0]


def test_each_store_of_a_mixture_has_its_own() -> None:
    entries = [{"documents": SEQUENCES, "weight": 1}, {"documents": [[1, 2]], "weight": 1}]
    first, second = samples_of(documents({"mixture": entries}))
    assert first == samples_of(InMemoryDocuments(SEQUENCES))[0]
    assert second == samples_of(InMemoryDocuments([[1, 2]]))[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_batch_of_each_pass_brings_it(workers: int) -> None:
    shape = TransformerConfig(vocab_size=7).shape
    dataset = StepDataset.for_model(SEQUENCES, DataSettings(32, 3), shape)
    loader = StepLoader(dataset, num_workers=workers)
    for _ in range(2):
        brought = [len(batch.samples) for batch in loader]
        assert brought == [1] + [0] * (len(brought) - 1)
        assert len(brought) > 2
