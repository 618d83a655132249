import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.data.open_documents import documents
from lightning_wlb.data.stores import arrow_and_parquet as parquet
from lightning_wlb.data.stores.arrow_and_parquet import ArrowDocuments
from tests.data.stores.corpora import (
    TOKENS,
    VOCABULARY,
    Documents,
    Masks,
    check,
    corpora,
    masks_of,
    write_arrow,
    write_parquet,
)

INTEGERS = st.sampled_from([pa.int32(), pa.int64(), pa.uint16(), pa.uint32(), pa.uint64()])


def listed(kind: str, values: pa.DataType, rows: list[list[Any]]) -> pa.Array:
    return pa.array(rows, {"list": pa.list_, "large": pa.large_list}[kind](values))


def masked(
    how: str, rows: Documents, masks: Masks, kind: str
) -> tuple[str | None, pa.Array | None]:
    if how == "labels":
        labels = [np.where(mask, row, -100) for row, mask in zip(rows, masks, strict=True)]
        return "labels", listed(kind, pa.int64(), labels)
    if how == "uint8":
        flags = [np.array(mask, np.uint8) for mask in masks]
        return "completion_mask", listed(kind, pa.uint8(), flags)
    return (None, None) if how == "none" else ("loss_mask", listed(kind, pa.bool_(), masks))


@settings(max_examples=90, deadline=None)
@given(
    corpora(),
    INTEGERS,
    st.sampled_from(["list", "large"]),
    st.sampled_from(["none", "bool", "uint8", "labels"]),
    st.integers(1, 4),
    st.sampled_from(["arrow", "parquet"]),
    st.integers(0, 9),
)
def test_files_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory,
    rows: Documents,
    integers: pa.DataType,
    kind: str,
    how: str,
    per_batch: int,
    form: str,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    masks = masks_of(rows, seed)
    columns = {"text": pa.array(["x"] * len(rows)), "tokens": listed(kind, integers, rows)}
    name, mask = masked(how, rows, masks, kind)
    if name is not None:
        columns[name] = mask
    path = folder / f"corpus.{form}"
    if form == "parquet":
        pq.write_table(pa.table(columns), path, row_group_size=per_batch)
    else:
        write_arrow(path, pa.table(columns), per_batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_TOKENS_AT_ONCE", seed + 1)
        check(documents(str(path)), rows, None if how == "none" else masks)


@settings(max_examples=10, deadline=None)
@given(corpora(), st.booleans())
def test_a_folder_of_datasets_reads_as_by_datasets(tmp_path_factory, rows, with_masks):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("hf")
    columns: dict[str, Any] = {"input_ids": rows}
    if with_masks:
        columns["loss_mask"] = masks_of(rows, 1)
    shards = min(len(rows), 2)
    datasets.Dataset.from_dict(columns).save_to_disk(folder, num_shards=shards)
    read = datasets.load_from_disk(folder)
    store = documents(folder, vocab_size=VOCABULARY)
    check(store, list(read["input_ids"]), list(read["loss_mask"]) if with_masks else None)
    assert store.vocab_size == VOCABULARY


def test_rows_of_one_length_and_a_column_by_name(tmp_path: Path) -> None:
    rows = [[1, 2], [3, 4]]
    table = pa.table({"ids": pa.array(rows, pa.list_(pa.int32(), 2)), "other": rows})
    path = write_arrow(tmp_path / "a.arrow", table)
    check(documents({"path": str(path), "column": "ids"}), rows)
    with pytest.raises(ValueError, match=r"several: ids, other .* column=\.\.\."):
        documents(path)
    store = documents(write_arrow(tmp_path / "b.arrow", table.select(["ids"])))
    assert store.lengths.tolist() == [2, 2]


def test_several_files_by_a_pattern_and_by_name(tmp_path: Path) -> None:
    for number, rows in enumerate([TOKENS[:2], TOKENS[2:]]):
        write_arrow(tmp_path / f"part{number}.arrow", pa.table({"input_ids": rows}))
    check(documents(f"{tmp_path}/part*.arrow"), TOKENS)
    check(
        documents([tmp_path / "part1.arrow", str(tmp_path / "part0.arrow")]),
        [TOKENS[2], *TOKENS[:2]],
    )
    check(documents(tmp_path), TOKENS)


def test_batches_without_rows_and_unpadded_rows(tmp_path: Path) -> None:
    table = pa.table({"input_ids": TOKENS, "attention_mask": [[1] * len(row) for row in TOKENS]})
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 1), table.slice(1, 0), table.slice(1)):
            for batch in part.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]:
                writer.write_batch(batch)
    check(documents(tmp_path), TOKENS)
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema):
        pass
    with pytest.raises(ValueError, match="holds no documents"):
        documents(tmp_path)


def tokenised(folder: Path, **facts: Any) -> Path:
    """A folder as ``lightning-wlb tokenize`` writes it."""
    folder.mkdir()
    write_arrow(folder / "data-00000-of-00001.arrow", pa.table({"input_ids": TOKENS}))
    files = [{"filename": "data-00000-of-00001.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "lightning_wlb.partial.json").write_text("{}")
    if facts:
        (folder / "lightning_wlb.json").write_text(json.dumps(facts))
    return folder


def test_a_tokenised_folder_knows_its_vocabulary(tmp_path: Path) -> None:
    store = documents(tokenised(tmp_path / "a", vocab_size=9, documents=3, tokens=6))
    assert store.vocab_size == 9
    with pytest.raises(ValueError, match=r"has not completed this folder .* again: it continues"):
        documents(tokenised(tmp_path / "b"))
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "lightning_wlb.partial.json").write_text("{}")
    with pytest.raises(ValueError, match="has not completed this folder"):
        documents(tmp_path / "e")
    with pytest.raises(ValueError, match=r"has 3 documents, but its lightning_wlb\.json says 4"):
        documents(tokenised(tmp_path / "c", vocab_size=9, documents=4, tokens=6))
    small = documents(tokenised(tmp_path / "d", vocab_size=6, documents=3, tokens=6))
    with pytest.raises(ValueError, match=r"document 2 of Arrow.*token 6 at position 1.*\[0, 6\)"):
        small.read(2, 1, 2)


def test_empty_rows_are_left_out(tmp_path: Path) -> None:
    rows = [[], [1, 2], [], [3], []]
    path = write_arrow(tmp_path / "a.arrow", pa.table({"input_ids": rows}))
    store = documents(path, vocab_size=3)
    check(documents(path), [[1, 2], [3]])
    with pytest.raises(ValueError, match=r"document 3 of ArrowDocuments.* token 3"):
        store.read(1, 0, 1)


def column(values: Any, kind: Any = None) -> pa.Table:
    return pa.table({"input_ids": pa.array(values, kind)})


def beside(name: str, values: Any, kind: Any = None) -> pa.Table:
    return column(TOKENS).append_column(name, pa.array(values, kind))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (column([1, 2]), "'input_ids' is of type int64, not lists of integers"),
        (column([[0.5]]), "'input_ids' is of type list<item: double>"),
        (column(["ab"]), "'input_ids' is of type string"),
        (column([[1], None]), "'input_ids' has nulls: 1 rows, 0 values"),
        (column([[1], [None, 2]]), "'input_ids' has nulls: 0 rows, 1 values"),
        (pa.table({"text": ["ab"]}), r"among its columns text.*lightning-wlb tokenize"),
        (beside("loss_mask", [[1, 0, 1], [1], [1]]), "1 rows .* the first has 2 and 1"),
        (beside("labels", [1, 0, 1]), "'labels' is of type int64, .* mask_column=None"),
        (
            beside("labels", TOKENS).append_column("loss_mask", pa.array(TOKENS)),
            "several columns that may be masks: loss_mask, labels",
        ),
        (
            beside("seq_lengths", [[1, 2], [1], [2]]),
            "a column 'seq_lengths', as rows have that were",
        ),
        (beside("position_ids", [[0, 0, 1], [0], [0, 1]]), "a column 'position_ids', as rows have"),
        (beside("position_ids", [[0.0, 0, 1], [0], [0, 1]]), "'position_ids', as rows have"),
        (beside("seq_lens", pa.array([[3], [1], [2]], pa.list_view(pa.int8()))), "'seq_lens', as"),
        (beside("attention_mask", [[1.0, 1, 0], [1], [1, 1]]), "'attention_mask' is of type list<"),
        (beside("attention_mask", [[[1]], [[1]], [[1]]]), "'attention_mask' is of .* leave it out"),
        (beside("my_mask", pa.array([[1], [0], [1]], pa.list_view(pa.int8()))), "'my_mask', which"),
    ],
)
def test_columns_that_do_not_fit_are_refused(tmp_path: Path, table: pa.Table, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documents(write_arrow(tmp_path / "a.arrow", table))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (column([[1], [2, -5]]), r"document 1 of ArrowDocuments.*token -5 at position 1"),
        (beside("labels", [[1, -100, 3], [4], [5, 7]]), "document 2.*label at position 1 is 7"),
        (beside("loss_mask", [[1, 1, 1], [1], [0, 2]]), "document 2.*value 2 at position 1"),
        (beside("attention_mask", [[1, 1, 1], [1], [1, 0]]), "document 2.*padded: .*position 1"),
    ],
)
def test_values_that_do_not_fit_are_refused_when_read(tmp_path, table, message):
    store = documents(write_arrow(tmp_path / "a.arrow", table))
    last = len(store.lengths) - 1
    store.read(0, 0, 1)
    with pytest.raises(ValueError, match=message):
        store.read(last, 0, 2), store.mask(last, 0, 2)


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_every_truncation_is_refused(tmp_path: Path, form: str) -> None:
    if form == "parquet":
        path = write_parquet(tmp_path / "a.parquet", TOKENS, 1)
    else:
        path = write_arrow(tmp_path / "a.arrow", column(TOKENS), 1)
    whole = path.read_bytes()
    for size in range(0, len(whole), 16):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a\.\w+ (is empty|cannot be read|does not end)"):
            documents(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"/a\.\w+ is no file or folder"):
        documents(path)


def test_files_put_one_after_the_other_are_refused(tmp_path: Path) -> None:
    """Of all but the first nothing would be read."""
    one, two = (write_arrow(tmp_path / f"{n}.arrow", column(TOKENS), n) for n in (1, 2))
    (tmp_path / "both.arrow").write_bytes(one.read_bytes() + two.read_bytes())
    with pytest.raises(ValueError, match=r"both\.arrow goes on behind the end of its Arrow stream"):
        documents(tmp_path / "both.arrow")


def test_offsets_that_are_out_of_order_are_refused(tmp_path: Path) -> None:
    path = write_arrow(
        tmp_path / "a.arrow", pa.table({"input_ids": pa.array(TOKENS, pa.list_(pa.int32()))})
    )
    whole, offsets = path.read_bytes(), np.array([0, 3, 4, 6], "<i4").tobytes()
    assert whole.count(offsets) == 1
    for wrong in ([0, 5, 4, 6], [0, 3, 4, 900], [-4, 3, 4, 6]):
        path.write_bytes(whole.replace(offsets, np.array(wrong, "<i4").tobytes()))
        with pytest.raises(ValueError, match=r"a\.arrow is damaged: .*(offset|Length spanned)"):
            documents(path)


def test_feather_and_missing_files_are_refused(tmp_path: Path) -> None:
    table = pa.table({"input_ids": [list(range(1000))]})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match=r"a\.arrow is of Arrow's file format .*Parquet"):
        documents(tmp_path / "a.arrow")
    folder = tokenised(tmp_path / "b", vocab_size=9)
    (folder / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(ValueError, match=r"data-00000-of-00001\.arrow .*No such file"):
        documents(folder)
    (tmp_path / "c").mkdir()
    write_arrow(tmp_path / "c" / "data-00000-of-00002.arrow", column(TOKENS))
    with pytest.raises(ValueError, match="1 of 2 files are there"):
        documents(tmp_path / "c")
    shutil.copy(tmp_path / "c/data-00000-of-00002.arrow", tmp_path / "c/test-00000-of-00001.arrow")
    with pytest.raises(ValueError, match=r"several splits.*/data-\*-of-00002\.arrow, .*/test-\*-"):
        documents(tmp_path / "c")


def test_folders_that_need_a_word_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"several splits\. Give the folder of one: .*/train, "):
        documents(tmp_path)
    (tmp_path / "dataset_dict.json").unlink()
    (tmp_path / "state.json").write_text('{"_indices_data_files": [{"filename": "i.arrow"}]}')
    with pytest.raises(ValueError, match="flatten_indices"):
        ArrowDocuments(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state\.json cannot be read"):
        ArrowDocuments(tmp_path)
    write_arrow(tmp_path / "a.arrow", pa.table({"input_ids": TOKENS}))
    write_arrow(tmp_path / "b.arrow", pa.table({"tokens": TOKENS}))
    with pytest.raises(ValueError, match=r"b\.arrow has the columns"):
        documents([tmp_path / "a.arrow", tmp_path / "b.arrow"])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["a.arrow", "./a.arrow"], r"a\.arrow are the same by a link, or named twice"),
        (["a.arrow", "link.arrow"], r"link\.arrow and .*a\.arrow are the same by a link"),
        (["a.arrow", "a copy.arrow"], r"a copy\.arrow and its copy beside it, a\.arrow"),
    ],
)
def test_a_state_that_names_documents_twice_is_refused(named, message, tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", pa.table({"input_ids": TOKENS}))
    shutil.copy(tmp_path / "a.arrow", tmp_path / "a copy.arrow")
    (tmp_path / "link.arrow").symlink_to("a.arrow")
    state = {"_data_files": [{"filename": each} for each in named]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=message):
        documents(tmp_path)


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_rows_whose_attention_mask_counts_documents_are_refused(tmp_path: Path, form: str) -> None:
    """As LLaMA-Factory's neat_packing writes them."""
    table = pa.table({"input_ids": [[1, 2, 3, 4]], "attention_mask": [[1, 1, 2, 2]]})
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    store = documents(str(path))
    with pytest.raises(ValueError, match=r"is packed of several: its attention_mask is 2"):
        store.read(0, 0, 4)


@pytest.mark.parametrize(
    "name", ["response_mask", "assistant_mask", "loss_weights", "label_ids", "trainable"]
)
def test_a_column_that_may_be_a_mask_is_chosen_or_not(tmp_path: Path, name: str) -> None:
    kept = {"attention_mask": [[1, 1]], "special_tokens_mask": [[1, 0]]}
    pq.write_table(
        pa.table({"input_ids": [[5, 6]], name: [[0, 1]], **kept}), tmp_path / "a.parquet"
    )
    with pytest.raises(ValueError, match=rf"'{name}', which may say what is learned"):
        documents(str(tmp_path / "a.parquet"))
    chosen = documents(str(tmp_path / "a.parquet"), mask_column=name)
    assert chosen.mask(0, 0, 2).tolist() == [False, True]
    assert documents(str(tmp_path / "a.parquet"), mask_column=None).mask(0, 0, 2) is None


def test_padded_rows_are_refused_when_read(tmp_path: Path) -> None:
    store = documents(
        write_parquet(tmp_path / "a.parquet", TOKENS, attention_mask=[[1, 1, 0], [1], [1, 1]])
    )
    assert store.read(0, 0, 2).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"document 0 of ParquetDocuments.* is padded"):
        store.read(0, 0, 3)
