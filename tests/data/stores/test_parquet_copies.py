"""What is kept of a Parquet file: made once, anew when the file changes, and only whole."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_wlb.data import cache as cached
from lightning_wlb.data.open_documents import documents
from lightning_wlb.data.stores import arrow_and_parquet as parquet
from tests.data.stores.corpora import TOKENS, check, check_in_workers, masks_of, write_parquet


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, which is made where something is kept."""
    monkeypatch.setattr(cached, "user_cache_dir", lambda name: str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path, monkeypatch, kept):
    path = write_parquet(tmp_path / "a.parquet", TOKENS)
    writes: list[Path] = []
    write = parquet._write

    def counted(folder: Path, *rest: Any) -> None:
        writes.append(folder)
        write(folder, *rest)

    monkeypatch.setattr(parquet, "_write", counted)
    check(documents(path), TOKENS)
    assert len(writes) == 1
    before = list(kept.iterdir())
    write_parquet(path, [[7, 8]])
    check(documents(path), [[7, 8]])
    assert len(writes) == 2
    now = list(kept.iterdir())
    assert len(now) == 1  # what was made of the older file is gone
    assert now != before
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    documents(path)
    assert len(writes) == 3
    # An archive sets the size and the time of change, but not the time of the change of status.
    status = path.stat()
    write_parquet(path, [[9, 8]])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    check(documents(path), [[9, 8]])


def test_files_that_differ_in_their_folder_only_are_kept_apart(tmp_path, kept):
    for name, rows in (("a", [[1, 2]]), ("b", [[3, 4]])):
        (tmp_path / name).mkdir()
        path = write_parquet(tmp_path / name / "train.parquet", rows)
        os.utime(path, ns=(0, 0))
        check(documents(path), rows)
    both = list(kept.iterdir())
    assert len(both) == 2
    check(documents(tmp_path / "a" / "train.parquet"), [[1, 2]])
    assert list(kept.iterdir()) == both


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch) -> None:
    """Else the copy of what it was before would be kept as that of what it is now."""
    path = write_parquet(tmp_path / "a.parquet", [[1, 2], [3]])
    other = write_parquet(tmp_path / "b.parquet", [[7, 8], [9]])
    columns_of = parquet.columns_of

    def exchanged(*given: Any) -> Any:
        if other.exists():
            other.replace(path)
        return columns_of(*given)

    monkeypatch.setattr(parquet, "columns_of", exchanged)
    with pytest.raises(ValueError, match=r"a\.parquet changed while it was read"):
        documents(path)
    assert documents(path).read(0, 0, 2).tolist() == [7, 8]


def test_a_link_that_leads_elsewhere_for_a_moment_gives_no_other_words(
    tmp_path, monkeypatch
) -> None:
    """Else a stranger's link would put them into what is kept of the file that it leads to."""
    paths = [
        write_parquet(tmp_path / name, [[at]]) for at, name in enumerate(["a.parquet", "b.parquet"])
    ]
    link = tmp_path / "link.parquet"
    link.symlink_to(paths[0])
    opened = parquet.pq.ParquetFile

    def lead_to(path: Path) -> None:
        link.unlink()
        link.symlink_to(path)

    def swapped(*given: Any, **options: Any) -> Any:
        lead_to(paths[1])
        made = opened(*given, **options)
        lead_to(paths[0])
        return made

    monkeypatch.setattr(parquet.pq, "ParquetFile", swapped)
    for path in (link, paths[0]):
        assert documents(path).read(0, 0, 1).tolist() == [0]


def test_a_file_system_that_takes_no_copy_is_not_told_as_damage(tmp_path, monkeypatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", [[1, 2], [3]])

    def fails(*_: Any) -> Any:
        raise OSError(errno.EFBIG, "File too large")

    for name in ("_write", "built_once"):
        with monkeypatch.context() as patch:
            patch.setattr(parquet, name, fails)
            with pytest.raises(ValueError, match=r"cannot be kept: .*File too large. Look at the"):
                documents(path)


def test_an_interrupted_reading_leaves_nothing(tmp_path, kept):
    path = write_parquet(tmp_path / "a.parquet", [[1], [2], [2**40], [3]])
    with pytest.raises(ValueError, match="not in range"):
        documents(path)
    assert list(kept.iterdir()) == []


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
        ([[1, 2]], {"loss_mask": [[True]]}, r"a\.parquet: 1 rows .* the first has 2 and 1"),
    ],
)
def test_parquet_columns_that_do_not_fit_are_refused(tmp_path, rows, others, message):
    with pytest.raises(ValueError, match=message):
        documents(write_parquet(tmp_path / "a.parquet", rows, **others))
