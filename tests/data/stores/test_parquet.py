from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.data import cache as cached
from lightning_wlb.data.open_documents import documents
from lightning_wlb.data.stores import parquet
from tests.data.stores.corpora import (
    TOKENS,
    Documents,
    check,
    check_in_workers,
    corpora,
    masks_of,
)


def write_parquet(path: Path, rows: Any, per_group: int = 2, **others: Any) -> Path:
    pq.write_table(pa.table({"input_ids": rows, **others}), path, row_group_size=per_group)
    return path


@settings(max_examples=25, deadline=None)
@given(
    corpora(),
    st.sampled_from([pa.int32(), pa.int64(), pa.uint16(), pa.uint64()]),
    st.sampled_from([pa.list_, pa.large_list]),
    st.sampled_from([None, "loss_mask", "labels"]),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_files_read_as_by_pyarrow(
    tmp_path_factory: pytest.TempPathFactory,
    rows: Documents,
    integers: pa.DataType,
    lists: Any,
    how: str | None,
    per_group: int,
    at_once: int,
) -> None:
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    masks, others = masks_of(rows, 3), {}
    if how == "loss_mask":
        others["loss_mask"] = pa.array(masks)
    if how == "labels":
        others["labels"] = pa.array(
            [np.where(mask, row, -100).tolist() for row, mask in zip(rows, masks, strict=True)]
        )
    write_parquet(
        path, pa.array(rows, lists(integers)), per_group, text=["x"] * len(rows), **others
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_TOKENS_AT_ONCE", at_once)
        store = documents(path)
    read = pq.read_table(path).column("input_ids").to_pylist()
    check(store, read, masks if how else None)


def test_a_file_is_read_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "a.parquet", TOKENS)
    writes: list[Path] = []
    write = parquet._write

    def counted(folder: Path, *rest: Any) -> None:
        writes.append(folder)
        write(folder, *rest)

    monkeypatch.setattr(parquet, "_write", counted)
    check(documents(path), TOKENS)
    assert len(writes) == 1
    kept = list((tmp_path / cached.BESIDE).iterdir())
    write_parquet(path, [[7, 8]])
    check(documents(path), [[7, 8]])
    assert len(writes) == 2
    now = list((tmp_path / cached.BESIDE).iterdir())
    assert len(now) == 1  # what was made of the older file is gone
    assert now != kept
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    documents(path)
    assert len(writes) == 3


def test_where_one_may_not_write_the_users_cache_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps apart files that differ in their folder only."""
    monkeypatch.setattr(cached, "user_cache_dir", lambda name: str(tmp_path / name))
    for name, rows in (("a", [[1, 2]]), ("b", [[3, 4]])):
        (tmp_path / name).mkdir()
        path = write_parquet(tmp_path / name / "train.parquet", rows)
        os.utime(path, ns=(0, 0))
        (tmp_path / name / cached.BESIDE).write_text("a file, in which nothing can be made")
        check(documents(path), rows)
    kept = list((tmp_path / "lightning_wlb").iterdir())
    assert len(kept) == 2
    check(documents(tmp_path / "a" / "train.parquet"), [[1, 2]])
    assert list((tmp_path / "lightning_wlb").iterdir()) == kept


def test_an_interrupted_reading_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "a.parquet", [[1], [2], None, [3]])
    with pytest.raises(ValueError, match="'input_ids' has nulls among rows 2 to 3"):
        documents(path)
    assert list((tmp_path / cached.BESIDE).iterdir()) == []


def test_folders_patterns_and_workers(tmp_path: Path) -> None:
    rows = [[number] * (number + 1) for number in range(9)]
    for number in range(2):
        name = f"train-{number:05d}-of-00002.parquet"
        masks = masks_of(rows[number::2], number)
        write_parquet(tmp_path / name, rows[number::2], loss_mask=masks)
    store = documents(tmp_path)
    assert store.lengths.tolist() == [len(row) for row in rows[::2] + rows[1::2]]
    check_in_workers(store)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match="1 of 2 files are there"):
        documents(tmp_path)
    check(documents(f"{tmp_path}/*.parquet", mask_column=None), rows[::2])


@pytest.mark.parametrize(
    ("rows", "others", "message"),
    [
        ([1, 2], {}, "'input_ids' is of type int64, not lists of integers"),
        ([[1.5]], {}, r"'input_ids' is of type list<element: double>"),
        ([[1], [None]], {}, "'input_ids' has nulls"),
        ([[1], []], {}, r"ParquetDocuments\(.*a.parquet\): 1 of 2 documents have no tokens"),
        ([[2**40]], {}, "not in range"),
        ([[1, 2]], {"loss_mask": [[True]]}, r"a\.parquet: 1 rows .* the first has 2 and 1"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    tmp_path: Path, rows: Any, others: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        documents(write_parquet(tmp_path / "a.parquet", rows, **others))


def test_padded_rows_are_refused_when_read(tmp_path: Path) -> None:
    store = documents(
        write_parquet(tmp_path / "a.parquet", TOKENS, attention_mask=[[1, 1, 0], [1], [1, 1]])
    )
    assert store.read(0, 0, 2).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"document 0 of ParquetDocuments.* is padded"):
        store.read(0, 0, 3)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", TOKENS, 1)
    whole = path.read_bytes()
    for size in range(0, len(whole), 16):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a\.parquet cannot be read as a Parquet file"):
            documents(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"there is no file .*a\.parquet"):
        documents(path)
