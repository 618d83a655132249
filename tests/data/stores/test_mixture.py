"""A mixture reads from its stores, and its loader resumes with any number of workers."""

from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger

from lightning_wlb.callbacks.monitor import ImbalanceMonitor
from lightning_wlb.data import open_documents
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.loader import StepDataset, StepLoader
from lightning_wlb.data.open_documents import documents, hold_out
from lightning_wlb.data.store_checks import count_targets
from lightning_wlb.data.stores.document_store import DocumentStore, DocumentSubset
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.data.stores.mixture import MixedDocuments
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.planning.mixture import StoreShare
from tests.callbacks.test_monitor import make_trainer
from tests.data.test_loader import DATA, WORK, content
from tests.ranks import run_ranks


def sequences(count: int, first: int) -> list[list[int]]:
    """Documents whose tokens tell which store, document and place they are from."""
    rng = np.random.default_rng(first)
    return [
        [first + number, *rng.integers(0, 9, int(rng.integers(1, 90)))] for number in range(count)
    ]


WEB, BOOKS = sequences(40, 100), sequences(7, 200)


def mixed(**books: Any) -> MixedDocuments:
    entries = [
        {"documents": WEB, "weight": 0.75, "name": "web", "repeat": False},
        {"documents": BOOKS, "weight": 0.25, "name": "books", **books},
    ]
    return documents({"mixture": entries})


@given(st.data())
def test_documents_are_those_of_the_stores_in_every_pass(data) -> None:
    store = mixed()
    assert isinstance(store, DocumentStore)
    every = [*WEB, *BOOKS]
    assert store.lengths.tolist() == list(map(len, every))
    number = data.draw(st.integers(0, len(every) - 1))
    later = number + data.draw(st.integers(0, 10**9)) * len(every)
    start = data.draw(st.integers(0, len(every[number])))
    stop = data.draw(st.integers(start, len(every[number])))
    whole = InMemoryDocuments(every)
    assert store.read(later, start, stop).tolist() == every[number][start:stop]
    assert count_targets(store, later, start, stop) == count_targets(whole, number, start, stop)
    assert store.mask(later, start, stop) is None
    name, own = ("web", number) if number < len(WEB) else ("books", number - len(WEB))
    assert store.name_of(later).startswith(f"document {own} of {name}, InMemoryDocuments")
    assert store.vocab_size == whole.vocab_size


def test_an_epoch_has_every_document_as_often_as_its_store_was_passed() -> None:
    dataset = StepDataset(mixed(), DATA, WORK)
    batches = list(dataset)
    firsts = Counter(
        token
        for batch in batches
        for each in batch.micro_batches
        for token in each.tokens.tolist()
        if token >= 100
    )
    assert {token: firsts[token] for token in range(100, 140)} == dict.fromkeys(range(100, 140), 1)
    standing = batches[-2].state["mixture"]["books"]
    assert {firsts[token] for token in range(200, 207)} <= {
        standing["passes"],
        standing["passes"] + 1,
    }
    # Labels across the ends of documents are those of no other document.
    following = Counter(
        (row, after)
        for document in [*WEB, *BOOKS]
        for row, after in pairwise(document)
        for _ in range(firsts[document[0]])
    )
    seen = Counter(
        (row, after)
        for batch in batches
        for each in batch.micro_batches
        for row, after in zip(each.tokens.tolist(), each.labels.tolist(), strict=True)
        if after >= 0
    )
    assert seen == following


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_loader_resumes_with_any_number_of_workers(workers) -> None:
    unbroken = [content(each) for _ in range(2) for each in StepDataset(mixed(), DATA, WORK)]
    first = StepLoader(StepDataset(mixed(), DATA, WORK), num_workers=workers)
    for stop in (1, 4):
        begun = [content(each) for each in islice(first, stop)]
        at = first.dataset.state["step"]
        assert begun == unbroken[at - stop : at]
        second = StepLoader(StepDataset(mixed(), DATA, WORK), num_workers=(workers + 1) % 3)
        second.load_state_dict(first.state_dict())
        assert [content(each) for each in islice(second, 5)] == unbroken[at : at + 5]


def test_documents_are_held_out_of_the_mixture() -> None:
    store = mixed()
    kept, chosen = hold_out(store, 10, 0, "validation_documents")
    assert isinstance(kept, MixedDocuments)
    assert isinstance(chosen, DocumentSubset)
    assert [share.name for share in kept.shares] == ["web", "books"]
    assert sum(share.documents for share in kept.shares) == len(kept) == 37
    starts = [
        int(part.read(number, 0, 1)[0]) for part in (kept, chosen) for number in range(len(part))
    ]
    assert sorted(starts) == [*range(100, 140), *range(200, 207)]
    with pytest.raises(ValueError, match="No document of books is left in the mixture, of 7"):
        store.subset(np.arange(40))


def epochs_of_a_run(rank: int, folder: str) -> tuple[dict[str, float], dict[str, dict[str, int]]]:
    """What the monitor logs last, and where the planner stands then."""
    config = TransformerConfig(dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=16, vocab_size=256)
    data = WLBDataModule(mixed(), context_window=64, micro_batches=2, num_workers=0)
    options = {"devices": 1, "max_steps": 6, "logger": CSVLogger(folder)}
    trainer = make_trainer("wlb", Path(folder), [ImbalanceMonitor(heat_map=False)], **options)
    trainer.fit(LanguageModule(config, learning_rate=1e-3), data)
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    return logged, data.state_dict()["planner"]["mixture"]


def test_the_monitor_logs_the_epoch_of_each_store(tmp_path) -> None:
    ((logged, state),) = run_ranks(epochs_of_a_run, 1, str(tmp_path), process_group=False)
    for name in ("web", "books"):
        expected = state[name]["passes"] + state[name]["position"] / state[name]["documents"]
        assert logged[f"wlb/epoch/{name}"] == pytest.approx(expected)
    assert state["web"]["position"] > 0


def test_evaluation_on_a_mixture_is_refused() -> None:
    data = WLBDataModule(WEB, context_window=64, micro_batches=2, test_documents=mixed())
    with pytest.raises(MisconfigurationException, match="is a mixture, whose stores are repeated"):
        data.test_dataloader()


def test_a_mixture_is_described() -> None:
    assert mixed().describe() == (
        "Mixture, in shares of the tokens: web 75.0% (40 documents, once an epoch); books 25.0%"
        " (7 documents, repeated)"
    )


def test_names_are_those_of_files_or_places(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        {"documents": given, "weight": 1}
        for given in ("data/web.jsonl", {"tokenizer": "t", "texts": "data/books"}, [[1]])
    ]
    monkeypatch.setattr(open_documents, "documents", lambda given: InMemoryDocuments([[1]]))
    opened = open_documents._mixture(entries)
    assert [share.name for share in opened.shares] == ["web", "books", "2"]
    assert opened.shares[0] == StoreShare("web", 1, 1.0, True)


ENTRY = {"documents": [[1]], "weight": 1.0}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], r"mixture=\[\] is no list of stores"),
        (ENTRY, r"is no list of stores. Give \[\{documents: ..., weight: 0.7\}, "),
        ([{"documents": [[1]]}], r"mixture\[0\]=.*: give documents and weight, besides"),
        ([ENTRY, {**ENTRY, "wieght": 1}], r"mixture\[1\]=.*besides only repeat"),
        ([{**ENTRY, "weight": 0}], r"mixture\[0\]: weight=0 is out of range"),
        ([{**ENTRY, "weight": 1e308}], r"weight=1e\+308 is out of range. Give .* to 1e\+18"),
        ([{**ENTRY, "weight": "much"}], r"mixture\[0\]: weight='much' is of type str"),
        ([{**ENTRY, "repeat": "no"}], r"mixture\[0\]: repeat='no' is of type str"),
        ([{**ENTRY, "documents": {"mixture": [ENTRY]}}], r"mixture\[0\] is a mixture itself"),
        ([{**ENTRY, "name": "a"}] * 2, r"named a, a: it needs stores, and for each a name"),
    ],
)
def test_bad_mixtures_are_answered(entries, message) -> None:
    with pytest.raises(ValueError, match=message):
        documents({"mixture": entries})
