"""Steps of an epoch, counted beforehand, and documents held out for tests."""

from __future__ import annotations

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.documents import InMemoryDocuments
from lightning_wlb.data.open_documents import documents
from lightning_wlb.data.trainer_options import about_steps
from lightning_wlb.planning import DataSettings

TOKENS = [[number] * 10 for number in range(20)]


@pytest.mark.parametrize(
    ("lengths", "long_documents", "steps"),
    [([32, 32], "split", 1), ([32, 33], "split", 2), ([320], "split", 5), ([320], "truncate", 1)],
)
def test_steps_of_an_epoch(lengths: list[int], long_documents: str, steps: int) -> None:
    store = InMemoryDocuments([[1] * length for length in lengths])
    settings = DataSettings(32, 2, packing="original", long_documents=long_documents)
    assert about_steps(store, settings) == steps


def test_a_mixture_is_not_counted() -> None:
    store = documents({"mixture": [{"documents": TOKENS, "weight": 1}]})
    assert about_steps(store, DataSettings(32, 2)) is None


def firsts(store) -> set[int]:
    """The documents of a store, by their first token."""
    return {int(store.read(number, 0, 1)[0]) for number in range(len(store.lengths))}


def test_test_documents_are_held_out_beside_those_for_validation() -> None:
    made = WLBDataModule(
        TOKENS, context_window=16, micro_batches=2, validation_documents=4, test_documents=5
    )
    train, validation, test = map(firsts, made._stores())
    assert (len(train), len(validation), len(test)) == (11, 4, 5)
    assert train | validation | test == set(range(20))
    fewer = WLBDataModule(TOKENS, context_window=16, micro_batches=2, validation_documents=4)
    assert firsts(fewer._stores()[1]) == validation


def test_more_test_documents_than_there_are() -> None:
    made = WLBDataModule(
        TOKENS, context_window=16, micro_batches=2, validation_documents=15, test_documents=5
    )
    with pytest.raises(MisconfigurationException, match="test_documents=5 of 5 documents cannot"):
        made.setup("fit")
    with pytest.raises(ValueError, match="test_documents"):
        WLBDataModule(TOKENS, context_window=16, micro_batches=2, test_documents=-1)
