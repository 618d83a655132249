"""Random corpora, and what every store over files is held to."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from lightning_wlb.data.stores.document_store import DocumentStore
from lightning_wlb.data.stores.in_memory import InMemoryDocuments

VOCABULARY = 60_000
TOKENS = [[1, 2, 3], [4], [5, 6]]

Documents = list[list[int]]
Masks = list[list[bool]]


def corpora(most: int = 9) -> st.SearchStrategy[Documents]:
    """Up to ``most`` documents of 1 to 20 tokens."""
    tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)
    return st.lists(tokens, min_size=1, max_size=most)


def write_arrow(path: Path, table: pa.Table, rows: int | None = None) -> Path:
    """An Arrow stream of record batches of so many rows."""
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, rows)
    return path


def masks_of(documents: Documents, seed: int) -> Masks:
    """A mask for each document."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2, len(tokens)).astype(bool).tolist() for tokens in documents]


class Ranges(Dataset[tuple[Any, ...]]):
    """Every answer of a store about every document, as a loader's worker reads it."""

    def __init__(self, store: DocumentStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store.lengths)

    def __getitem__(self, document: int) -> tuple[Any, ...]:
        length = int(self.store.lengths[document])
        ranges = [(0, length), (length // 3, length), (length // 2, length // 2)]
        ranges += [(length // 3, max(length - 1, length // 3))]
        return tuple(
            (
                self.store.read(document, start, stop).tolist(),
                None if (mask := self.store.mask(document, start, stop)) is None else mask.tolist(),
            )
            for start, stop in ranges
        )


def check(store: DocumentStore, documents: Documents, masks: Masks | None = None) -> None:
    """Hold a store to sequences in memory, here and after a pickle's round trip."""
    expected = InMemoryDocuments(documents, masks, VOCABULARY)
    for each in (store, pickle.loads(pickle.dumps(store))):
        assert isinstance(each, DocumentStore)
        assert each.lengths.dtype == np.int64
        assert each.lengths.tolist() == expected.lengths.tolist()
        assert each.read(0, 0, 1).dtype == np.int64
        assert list(answers(each, 0)) == list(answers(expected, 0))


def check_in_workers(store: DocumentStore, counts: Sequence[int] = (0, 1, 3)) -> None:
    """The answers in forked workers are those of this process."""
    here = [Ranges(store)[document] for document in range(len(store.lengths))]
    for workers in counts:
        assert answers(store, workers) == here


def answers(store: DocumentStore, workers: int) -> list[Any]:
    loader = DataLoader(
        Ranges(store),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        collate_fn=_as_it_is,
    )
    return list(loader)


def _as_it_is(item: Any) -> Any:
    return item


def write_parquet(path: Path, rows: Any, per_group: int = 2, **others: Any) -> Path:
    pq.write_table(pa.table({"input_ids": rows, **others}), path, row_group_size=per_group)
    return path
