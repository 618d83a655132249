from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.data import cache as cached
from lightning_wlb.data.open_documents import documents
from tests.data.stores.corpora import (
    TOKENS,
    Documents,
    check,
    check_in_workers,
    corpora,
    masks_of,
)


def write_flat(folder: Path, rows: Documents, dtype: str = "uint16") -> dict[str, Any]:
    """Tokens and offsets; what to open them by."""
    np.save(folder / "tokens.npy", np.concatenate(rows).astype(dtype))
    np.save(folder / "offsets.npy", np.cumsum([0, *map(len, rows)], dtype=np.int64))
    return {"tokens": str(folder / "tokens.npy"), "offsets": str(folder / "offsets.npy")}


@settings(max_examples=30, deadline=None)
@given(
    corpora(),
    st.sampled_from(["uint16", "int32", "uint32", "int64"]),
    st.sampled_from([None, np.bool_, np.uint8]),
    st.booleans(),
)
def test_arrays_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: Documents, dtype: str, flags: Any, raw: bool
) -> None:
    folder = tmp_path_factory.mktemp("flat")
    spec, masks = write_flat(folder, rows, dtype), masks_of(rows, 0)
    if flags is not None:
        np.save(folder / "mask.npy", np.concatenate(masks).astype(flags))
        spec["mask"] = folder / "mask.npy"
    if raw:
        np.load(folder / "tokens.npy").tofile(folder / "tokens.bin")
        spec |= {"tokens": folder / "tokens.bin", "dtype": dtype}
    check(documents(spec), rows, None if flags is None else masks)


@settings(max_examples=15, deadline=None)
@given(corpora(), st.booleans())
def test_a_token_can_end_documents(
    tmp_path_factory: pytest.TempPathFactory, rows: Documents, last_ends: bool
) -> None:
    folder = tmp_path_factory.mktemp("flat")
    rows = [[token + 1 for token in row if token < 50_000] + [0] for row in rows]
    if not last_ends and len(rows) > 1:
        rows[-1] = [*rows[-1][:-1], 7]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_wlb.data.stores.flat._BLOCK", 5)
        path = write_flat(folder, rows)["tokens"]
        check(documents({"tokens": path, "end_of_document": 0}), rows)
    assert len(list(folder.glob(".lightning_wlb/tokens.npy-offsets-*/offsets.npy"))) == 1


def test_the_ends_of_documents_are_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"tokens": write_flat(tmp_path, TOKENS)["tokens"], "end_of_document": 4}
    check(documents(spec), [[1, 2, 3, 4], [5, 6]])
    with monkeypatch.context() as patch:
        patch.setattr(cached.Path, "rename", None)
        check(documents(spec), [[1, 2, 3, 4], [5, 6]])
    write_flat(tmp_path, [*TOKENS, [4, 9]])
    check(documents(spec), [[1, 2, 3, 4], [5, 6, 4], [9]])


def test_workers_share_the_map(tmp_path: Path) -> None:
    check_in_workers(
        documents(write_flat(tmp_path, [[number] * (number + 1) for number in range(9)]))
    )


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 3, 4], "run from 0 to 4, but there are 6 tokens"),
        ([1, 3, 4, 6], "run from 1 to 6"),
        ([0, 4, 3, 6], "out of order: document 1 runs from 4 to 3"),
        (np.empty(0, int), "run from 0 to 0"),
        ([0.0, 6.0], r"offsets\.npy is an array of float64 .* not of integers"),
        (np.array([[0, 6]]), r"with shape \(1, 2\)"),
        ([0, 3, 3, 6], "1 of 3 documents have no tokens, the first is document 1. .*'drop'"),
    ],
)
def test_wrong_offsets_are_refused(tmp_path: Path, offsets: Any, message: str) -> None:
    spec = write_flat(tmp_path, TOKENS)
    np.save(tmp_path / "offsets.npy", offsets)
    with pytest.raises(ValueError, match=message):
        documents(spec)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    spec = write_flat(tmp_path, TOKENS, "int32")
    whole = (tmp_path / "tokens.npy").read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        (tmp_path / "tokens.npy").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"tokens\.npy cannot be read"):
            documents(spec)
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 3, 4, -5, 6]))
    with pytest.raises(ValueError, match=r"document 2 of FlatDocuments.*token -5 at position 0"):
        documents(spec).read(2, 0, 2)
    np.save(tmp_path / "mask.npy", np.ones(5, bool))
    for wrong, message in (
        ({"mask": tmp_path / "mask.npy"}, "has 5 entries, .* has 6 tokens"),
        ({"offsets": tmp_path / "no.npy"}, r"no\.npy cannot be read"),
        ({"offsets": None}, r"give either offsets=\.\.\."),
        ({"end_of_document": 3}, r"give either offsets=\.\.\."),
        ({"dtype": "uint16"}, r"tokens\.npy with dtype='uint16'"),
        ({"tokens": tmp_path / "tokens.bin"}, r"tokens\.bin with dtype=None"),
        ({"tokens": tmp_path / "offsets.bin", "dtype": "uint99"}, "uint99"),
        ({"of": 3}, "no option 'of'"),
    ):
        with pytest.raises(ValueError, match=message):
            documents({**spec, **wrong})
    for end in (99, 1 << 40):
        with pytest.raises(ValueError, match=f"end_of_document={end} is nowhere among its 6 tok"):
            documents({**spec, "offsets": None, "end_of_document": end})
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"odd\.bin cannot be read: .*multiple"):
        documents({**spec, "tokens": tmp_path / "odd.bin", "dtype": "uint16"})
