"""Arrow and Parquet files that claim more than they hold are refused before memory is asked for."""

import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_wlb.data.open_documents import documents
from lightning_wlb.data.stores import arrow_and_parquet as parquet
from tests.data.stores.corpora import check, write_arrow, write_parquet


@pytest.mark.parametrize("where", ["tokens", "words"])
def test_compressed_columns_are_refused_before_they_are_unpacked(where, tmp_path):
    """Dictionaries too, and columns that are not read."""
    words = pa.array(["a" * 1000] * 1000)
    kept = words.dictionary_encode() if where == "words" else pa.array(range(1000))
    table = pa.table({"input_ids": [[1, 2, 3]] * 1000, "words": kept})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema, options=options) as new:
        new.write_table(table)
    with (
        mock.patch.object(pa.ipc, "open_stream", side_effect=AssertionError),
        pytest.raises(ValueError, match="is compressed and cannot be mapped"),
    ):
        documents(tmp_path / "a.arrow")


@pytest.mark.parametrize("grows", [True, False])
def test_dictionaries_that_grow_are_refused(grows, tmp_path):
    """Each batch would have a copy: 5 MB took 4.6 GB. A dictionary that is replaced is a view."""
    rows = [
        pa.table({"input_ids": [[1, 2]], "source": pa.array(words).dictionary_encode().slice(0, 1)})
        for words in ([["a"], ["a", "b"]] if grows else [["a"], ["b", "a"]])
    ]
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(tmp_path / "a.arrow", rows[0].schema, options=options) as new:
        for each in rows:
            new.write_table(each)
    if not grows:
        assert documents(tmp_path / "a.arrow").lengths.tolist() == [2, 2]
        return
    with pytest.raises(ValueError, match="cannot be mapped, or its dictionaries grow"):
        documents(tmp_path / "a.arrow")


def test_a_length_that_its_buffers_do_not_have_is_refused(tmp_path):
    """The library would let numpy read behind them."""
    rows = pa.table({"input_ids": pa.array([[1, 2, 3]] * 1000, pa.list_(pa.int32()))})
    whole = write_arrow(tmp_path / "a.arrow", rows).read_bytes()
    length = np.array([1000, 0], "<i8").tobytes()
    assert whole.count(length) >= 1
    huge = whole.replace(length, np.array([1 << 40, 0], "<i8").tobytes())
    (tmp_path / "a.arrow").write_bytes(huge)
    with pytest.raises(ValueError, match="cannot be read as an Arrow file"):
        documents(tmp_path / "a.arrow")


def test_a_file_that_unpacks_to_more_than_there_is_room_for_is_refused(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", [[7] * 1000] * 1000)
    assert path.stat().st_size < 200_000
    usage = shutil.disk_usage(tmp_path)._replace(free=3_999_999)
    monkeypatch.setattr(parquet.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=r"unpacks to 4,004,000 bytes, but .* has 3,999,999 left"):
        documents(path)
    both = pa.table({"input_ids": [[7] * 1000] * 1000, "labels": [[7] * 1000] * 1000})
    pq.write_table(both, tmp_path / "both.parquet")
    with pytest.raises(ValueError, match="unpacks to 8,008,000 bytes"):
        documents(tmp_path / "both.parquet")
    monkeypatch.undo()
    monkeypatch.setattr(parquet, "_token_counts", lambda *_: [999] * 1000)
    with pytest.raises(ValueError, match="row group 0 unpacks to more tokens than it says"):
        documents(path)


def test_no_file_has_many_rows_unpacked_by_saying_that_they_are_short(tmp_path, monkeypatch):
    seen = []
    read = pq.ParquetFile.iter_batches

    def reads(self, rows, **options):
        seen.append(rows)
        return read(self, rows, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", reads)
    texts = [[number] * (number % 7 + 1) for number in range(1000)]
    monkeypatch.setattr(parquet, "_TOKENS_AT_ONCE", 500)  # the copy is written in several parts
    pq.write_table(pa.table({"input_ids": texts}), tmp_path / "a.parquet")
    check(documents(tmp_path / "a.parquet"), texts)
    both = pa.table({"input_ids": [[7]] * 1000, "loss_mask": [[True] * 1000] * 1000})
    pq.write_table(both, tmp_path / "both.parquet")
    monkeypatch.setattr(parquet, "_token_counts", lambda *_: [1000])
    with pytest.raises(ValueError, match=r"'loss_mask' has more values than tokens"):
        documents(tmp_path / "both.parquet")
    assert max(seen) == 64


def test_hidden_files_are_passed_over_and_copies_refused(tmp_path):
    path = write_parquet(tmp_path / "train-00000-of-00001.parquet", [[7] * 10])
    shutil.copy(path, tmp_path / ".x.parquet")
    (tmp_path / "._train-00000-of-00001.parquet").write_bytes(b"of macOS")
    assert len(documents(tmp_path)) == 1
    twice = r" \(1\)\.parquet and its copy beside it, train-00000-of-00001.parquet, would"
    shutil.copy(path, tmp_path / "train-00000-of-00001 (1).parquet")
    for source in (tmp_path, str(tmp_path / "*.parquet")):
        with pytest.raises(ValueError, match=twice):
            documents(source)


def test_files_of_several_splits_and_kept_results_of_map_are_refused(tmp_path):
    for name in ("train.parquet", "validation.parquet"):
        write_parquet(tmp_path / name, [[7] * 10])
    with pytest.raises(ValueError, match=r"several splits, such as .*/train.* and .*/validation"):
        documents(tmp_path)
    assert len(documents(str(tmp_path / "*.parquet"))) == 2
    table = pa.table({"input_ids": [[7] * 10]})
    (tmp_path / "kept").mkdir()
    for name in ("x-train.arrow", "cache-0123456789abcdef.arrow"):
        write_arrow(tmp_path / "kept" / name, table)
    kept = r"/cache-0123456789abcdef\.arrow and .*/x-train\.arrow are two writings, whose documents"
    for source in (tmp_path / "kept", f"{tmp_path}/kept/*.arrow", f"{tmp_path}/**/*.arrow"):
        with pytest.raises(ValueError, match=kept):
            documents(source)
    assert len(documents(f"{tmp_path}/kept/cache-*.arrow")) == 1
    write_arrow(tmp_path / "kept/cache-0123456789abcdef_00000_of_00002.arrow", table)
    with pytest.raises(ValueError, match=r"cdef\.arrow and .*cdef_\*_of_00002\.arrow are two writ"):
        documents(f"{tmp_path}/kept/cache-*.arrow")


def test_shards_by_the_hubs_older_names_are_shards(tmp_path):
    """Which end in a hash of each file."""
    one, two = (f"train-0000{at}-of-00002-{'abcdef01' * 2}" for at in range(2))
    write_parquet(tmp_path / f"{one}.parquet", [[7] * 10])
    with pytest.raises(ValueError, match=r"1 of 2 files are there"):
        documents(tmp_path)
    write_parquet(tmp_path / f"{two}.parquet", [[7] * 10])
    assert len(documents(tmp_path)) == 2
    for other, said in (
        (one[:-1] + "0", rf"/{one[:-1]}0\.parquet and .*/{one}\.parquet are two writings"),
        (
            "train-00000-of-00001-" + "0" * 16,
            r"-of-00001-\*\.parquet and .*-of-00002-\*\.parquet are",
        ),
    ):
        write_parquet(tmp_path / f"{other}.parquet", [[7] * 10])
        for source in (tmp_path, f"{tmp_path}/*.parquet"):
            with pytest.raises(ValueError, match=said):
                documents(source)
        (tmp_path / f"{other}.parquet").unlink()


def test_shards_of_two_writings_are_refused(tmp_path):
    """``datasets`` leaves those of another ``num_shards`` where they are."""
    for name in ("b-0-of-1", "a-0-of-2", "a-1-of-2", "a-0-of-3", "a-1-of-3", "a-2-of-3"):
        write_parquet(tmp_path / f"{name}.parquet", [[7] * 10])
    for source in (tmp_path, f"{tmp_path}/a-*.parquet"):
        with pytest.raises(
            ValueError, match=r"/a-\*-of-2\.parquet and .*/a-\*-of-3\.parquet are two"
        ):
            documents(source)
    assert len(documents(f"{tmp_path}/a-*-of-3.parquet")) == 3
    assert len(documents(f"{tmp_path}/*-of-[12].parquet")) == 3
    named = [tmp_path / f"a-0-of-{total}.parquet" for total in (2, 3)]
    assert len(documents(named)) == 2
    (tmp_path / "a-0-of-2.parquet").unlink()
    (tmp_path / "a-1-of-2.parquet").unlink()
    with pytest.raises(
        ValueError, match=r"of them: .*/a-\*-of-3\.parquet, .*/b-\*-of-1\.parquet\.$"
    ):
        documents(tmp_path)


@pytest.mark.parametrize("name", ["more/b.parquet", "date=1/hour=2/b.parquet", "b.PARQUET"])
@pytest.mark.parametrize("own", [True, False])
def test_a_folder_leaves_no_files_out_without_a_word(own, name, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    write_parquet(tmp_path / name, [[7] * 10])
    (tmp_path / "round").symlink_to("/")  # nor is the whole machine looked through
    (tmp_path / "README.md").touch()
    if own:
        write_parquet(tmp_path / "a.parquet", [[7] * 10])
    said = f"{name} would be left out: .* a pattern: {tmp_path}/\\*\\*/\\*.parquet for all"
    with pytest.raises(ValueError, match=said):
        documents(tmp_path)
    if own:
        assert len(documents(f"{tmp_path}/*.parquet")) == 1


def test_hidden_folders_and_splits_below(tmp_path):
    for name in ("a", "_delta_log/1.checkpoint", ".cache/b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_parquet(tmp_path / f"{name}.parquet", [[7] * 10])
    assert len(documents(tmp_path)) == 1
    for name in ("train/0", "test/0"):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        write_parquet(tmp_path / f"in/{name}.parquet", [[7] * 10])
    with pytest.raises(ValueError, match=r"in has files of several splits, such as .*train"):
        documents(tmp_path / "in")


def test_a_small_file_has_no_more_rows_than_are_believed_of_it(tmp_path):
    lists = pa.ListArray.from_arrays(np.zeros(1_200_001, np.int32), pa.array([], pa.int32()))
    pq.write_table(pa.table({"input_ids": lists}), path := tmp_path / "a.parquet")
    assert path.stat().st_size < 25_000
    with pytest.raises(ValueError, match="has more rows than are believed of a file of its size"):
        documents(path)


def test_two_attention_masks_are_refused(tmp_path):
    names = ["input_ids", "attention_mask", "attention_mask"]
    table = pa.table([[[1, 2]], [[1, 1]], [[1, 0]]], names=names)
    with pytest.raises(ValueError, match="has 2 columns 'attention_mask'"):
        documents(write_arrow(tmp_path / "a.arrow", table))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_disk_that_fills_up_is_no_damage_of_the_file(tmp_path, monkeypatch):
    path, new_stream = write_parquet(tmp_path / "a.parquet", [[7] * 1000] * 1000), pa.ipc.new_stream
    monkeypatch.setattr(pa.ipc, "new_stream", lambda _, schema: new_stream("/dev/full", schema))
    with pytest.raises(ValueError, match="The disk is full where"):
        documents(path)


@pytest.mark.parametrize(
    ("name", "column"),
    [("a", "tokens/ids"), ("a", "out.ids"), ("a", ".."), ("a", "a\0b"), ("c" * 240, "input_ids")],
)
def test_names_that_no_folder_can_have_are_read_all_the_same(name, column, tmp_path):
    path, rows = tmp_path / f"{name}.parquet", pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.int32()))
    pq.write_table(pa.table({column: rows}), path)
    check(documents(path), [[1, 2, 3], [4, 5]])


def test_offsets_whose_differences_overflow_are_refused(tmp_path):
    """They would look like the lengths of documents of two billion tokens."""
    places = pa.py_buffer(np.array([0, 2**31 - 1, -2, 9], np.int32).tobytes())
    lists = pa.Array.from_buffers(
        pa.list_(pa.int32()), 3, [None, places], children=[pa.array(range(9), pa.int32())]
    )
    write_arrow(tmp_path / "a.arrow", pa.table({"input_ids": lists}))
    with pytest.raises(ValueError, match=r"a\.arrow is damaged: .*offset"):
        documents(tmp_path / "a.arrow")


def test_any_number_of_lists_of_nothing_is_refused(tmp_path):
    kind = pa.list_(pa.int32(), 0)
    lists = pa.Array.from_buffers(kind, 2**31 - 1, [None], children=[pa.array([], pa.int32())])
    write_arrow(tmp_path / "a.arrow", pa.table({"input_ids": lists}))
    assert (tmp_path / "a.arrow").stat().st_size < 1000
    with pytest.raises(ValueError, match=r"\[0\], not lists of integers"):
        documents(tmp_path / "a.arrow")


def test_a_mask_that_is_longer_than_its_tokens_is_not_unpacked(tmp_path):
    mask = pa.array([[True] * 1_000_000], pa.list_(pa.bool_()))
    path = tmp_path / "a.parquet"
    parquet.pq.write_table(pa.table({"input_ids": [[1]], "loss_mask": mask}), path)
    with (
        mock.patch.object(parquet.pq.ParquetFile, "iter_batches", side_effect=AssertionError),
        pytest.raises(ValueError, match="'loss_mask' has more values than 'input_ids'"),
    ):
        documents(path)


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_pages_are_held_to_their_checksums(compression, tmp_path):
    rows = [list(range(each, each + 1000)) for each in range(100)]
    table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))})
    options = {"compression": compression, "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, tmp_path / "a.parquet", **options)
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    whole[len(whole) // 3] ^= 0x10
    (tmp_path / "a.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match=r"cannot be read as a Parquet file.*Make it again"):
        documents(tmp_path / "a.parquet")
