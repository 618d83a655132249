import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.data.open_documents import hold_out
from lightning_wlb.data.store_checks import count_targets
from lightning_wlb.data.stores.document_store import DocumentStore, DocumentSubset
from lightning_wlb.data.stores.in_memory import InMemoryDocuments


def test_reads_lists_arrays_and_tensors() -> None:
    store = InMemoryDocuments([[1, 2, 3], np.array([4], np.int32), torch.tensor([5, 6])])
    assert isinstance(store, DocumentStore)
    assert store.lengths.tolist() == [3, 1, 2]
    assert store.vocab_size == 7
    assert store.read(0, 1, 3).tolist() == [2, 3]
    assert store.read(2, 0, 2).tolist() == [5, 6]
    assert store.read(2, 0, 2).dtype == np.int64
    assert store.mask(0, 0, 3) is None
    assert len(store) == 3


@given(st.data())
def test_targets_count_what_the_mask_allows(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    masks = [
        data.draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
        for length in lengths
    ]
    store = InMemoryDocuments([[7] * length for length in lengths], masks)
    number = data.draw(st.integers(0, len(lengths) - 1))
    start = data.draw(st.integers(0, lengths[number]))
    stop = data.draw(st.integers(start, lengths[number]))
    allowed = masks[number] or [True] * lengths[number]
    expected = sum(allowed[token + 1] for token in range(start, stop) if token + 1 < len(allowed))
    assert count_targets(store, number, start, stop) == expected
    shown = store.mask(number, start, stop)
    assert shown.tolist() == allowed[start:stop]


def test_a_subset_renumbers() -> None:
    whole = InMemoryDocuments([[1], [2, 3], [4, 5, 6]], [None, [True, False], None], vocab_size=9)
    part = DocumentSubset(whole, [2, 1])
    assert part.lengths.tolist() == [3, 2]
    assert part.vocab_size == 9
    assert part.read(0, 1, 3).tolist() == [5, 6]
    mask = part.mask(1, 0, 2)
    assert mask.tolist() == [True, False]
    with pytest.raises(ValueError, match="no documents"):
        DocumentSubset(whole, [])
    for numbers, message in (
        ([0, 3], "document 3 is not in the store, whose documents are 0 to 2"),
        ([-1], "document -1 is not in the store"),
        ([True, False, True], "numbers is an array of bool .* np.flatnonzero"),
        ([0.0], "numbers is an array of float64"),
    ):
        with pytest.raises(ValueError, match=message):
            DocumentSubset(whole, numbers)


def test_holding_out_of_many_documents_takes_12_bytes_each() -> None:
    documents, count = 1_000_000, 100
    store = SimpleNamespace(lengths=np.ones(documents, np.int64), vocab_size=2)
    tracemalloc.start()
    kept, held_out = hold_out(store, count, 0, "validation_documents")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == documents - count
    assert len(held_out) == count
    # Numbers and lengths, 4 and 8 bytes each, and little more on the way.
    assert most < 16 * documents


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "holds no documents"),
        (([[1], [], [2], []],), "2 of 4 documents have no tokens, the first is document 1"),
        (([[1.5]],), "document 0 is an array of float64"),
        (([[[1]]],), r"shape \(1, 1\)"),
        (([[1]], []), "0 masks for 1 documents"),
        (([[1, 2]], [[True]]), r"2 tokens but a mask of shape \(1,\)"),
    ],
)
def test_bad_input_is_answered(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InMemoryDocuments(*arguments)


def test_tokens_and_masks_that_cannot_be_are_refused_when_read() -> None:
    store = InMemoryDocuments([[1, 9], [-1]], [[0, -100], None], vocab_size=9)
    for number, message in ((0, "document 0 of InMemory.* token 9 at position 1"), (1, "token -1")):
        with pytest.raises(ValueError, match=message):
            store.read(number, 0, int(store.lengths[number]))
    with pytest.raises(ValueError, match=r"its mask has the value -100 at position 1.*labels != -"):
        store.mask(0, 0, 2)
