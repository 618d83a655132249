"""Hugging Face ``datasets`` folders and Arrow IPC files (streams and file format), by memory map.

A row is a document. Lengths are the differences of the list offsets, and tokens are slices of the
list's values, straight from the file: opening reads the offsets alone, and neither needs the
``datasets`` library. A folder that ``lightning-wlb tokenize`` wrote also says its vocabulary.

Cost: opening takes some microseconds for each record batch, and 16 bytes of the file for each
document and column. A read is a binary search for the record batch and a slice. Not for compressed
Arrow files, which cannot be mapped, and are refused: write them uncompressed, or as Parquet.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lightning_wlb.data.stores.base import Array, Empty, MappedDocuments, labels_as_mask
from lightning_wlb.data.stores.columns import AUTO, Columns, columns_of

FACTS = "lightning_wlb.json"
"""What ``lightning-wlb tokenize`` writes last: ``vocab_size``, ``documents``, ``tokens``, ..."""
PARTIAL = "lightning_wlb.partial.json"
"""What it keeps in a folder that is not complete yet."""

_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.\w+$")


class ArrowDocuments(MappedDocuments):
    """The rows of Arrow files as documents.

    Args:
        source: a folder that ``Dataset.save_to_disk`` or ``lightning-wlb tokenize`` wrote, a folder
            of ``.arrow`` files (taken by name), a file, or several files.
        column: of the tokens; None: ``input_ids``, ``tokens``, or the only lists of integers.
        mask_column: of the masks, lists of booleans or of 0 and 1, or ``labels`` (the token, or
            -100 where it may not be a target); ``"auto"``: the one of ``loss_mask``,
            ``assistant_masks``, ``completion_mask`` and ``labels`` that is there; None: no mask.
        vocab_size: tokens are in ``[0, vocab_size)``; None: as the folder says, else not known.
        empty: ``"refuse"`` rows without tokens, or ``"drop"`` them.

    Raises:
        ValueError: files that are missing, damaged or compressed, columns of another type, masks
            of another length than the tokens, nulls, or rows without tokens.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        column: str | None = None,
        mask_column: str | None = AUTO,
        vocab_size: int | None = None,
        empty: Empty = "refuse",
    ) -> None:
        shown = source if isinstance(source, str | Path) else ", ".join(map(str, source))
        name = f"ArrowDocuments({shown})"
        arguments = {
            "source": source, "column": column, "mask_column": mask_column,
            "vocab_size": vocab_size, "empty": empty,
        }  # fmt: skip
        files, facts = _files(source, name)
        self._batches: list[_Batch] = []
        first: Columns | None = None
        for path in files:
            schema, batches = _mapped(path)
            columns = columns_of(schema, column, mask_column, str(path))
            if first is not None and columns != first:
                raise ValueError(
                    f"{path} has the columns {columns}, {files[0]} has {first}. Name those that all"
                    " files have with column=... and mask_column=..."
                )
            first = columns
            self._batches += [_Batch.of(batch, columns, path) for batch in batches]
        self._columns = first
        rows = np.cumsum([0, *(len(batch.tokens.offsets) - 1 for batch in self._batches)]).tolist()
        self._starts = rows[:-1]
        lengths = np.empty(rows[-1], np.int64)
        for batch, (start, stop) in zip(self._batches, pairwise(rows), strict=True):
            lengths[start:stop] = batch.tokens.lengths
        _check_facts(facts, lengths, name)
        given = facts.get("vocab_size") if vocab_size is None else vocab_size
        super().__init__(name, lengths, given, empty, arguments)

    def _tokens(self, row: int, start: int, stop: int) -> Array:
        batch, own = self._batch(row)
        return batch.tokens.read(own, start, stop)

    def _flags(self, row: int, start: int, stop: int) -> Array | None:
        assert self._columns is not None  # there is at least one file
        batch, own = self._batch(row)
        if batch.mask is None:
            return None
        flags = batch.mask.read(own, start, stop)
        if self._columns.mask_is_labels:
            tokens = batch.tokens.read(own, start, stop)
            return labels_as_mask(flags, tokens, f"document {row} of {self.name}", start)
        return flags

    def _batch(self, row: int) -> tuple[_Batch, int]:
        """The record batch of a row, and the row's number in it."""
        number = bisect_right(self._starts, row) - 1
        return self._batches[number], row - self._starts[number]


class _Lists(NamedTuple):
    """A column of lists: those of row i are ``values[offsets[i]:offsets[i + 1]]``."""

    offsets: Array
    values: Array
    packed: bool
    """Whether the values are bits, eight to a byte."""

    @property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    def read(self, row: int, start: int, stop: int) -> Array:
        begin = int(self.offsets[row])
        start, stop = begin + start, begin + stop
        if not self.packed:
            return self.values[start:stop]
        bits = np.unpackbits(self.values[start // 8 : -(-stop // 8)], bitorder="little")
        return bits[start % 8 : start % 8 + stop - start].view(np.bool_)

    @staticmethod
    def of(column: Any, named: str) -> _Lists:
        """The lists of a column of a record batch; ``named`` is how errors call it."""
        if column.null_count or column.values.null_count:
            raise ValueError(
                f"{named} has nulls: {column.null_count} rows, {column.values.null_count} values."
                " Every row must be a list of numbers. Mend the source."
            )
        if pa.types.is_fixed_size_list(column.type):
            offsets = (np.arange(len(column) + 1) + column.offset) * column.type.list_size
        else:
            offsets = column.offsets.to_numpy()
        values, count = column.values, len(column.values)
        ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        if ends[0] < 0 or ends[1] > count or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"{named}: its list offsets run from {ends[0]} to {ends[1]} over {count} values, or"
                " decrease. The file is damaged: make it again."
            )
        packed = pa.types.is_boolean(values.type)
        if packed:
            buffer = values.buffers()[1]
            bits = np.frombuffer(buffer, np.uint8) if buffer else np.empty(0, np.uint8)
            return _Lists(offsets + values.offset, bits, packed)
        return _Lists(offsets, values.to_numpy(), packed)


class _Batch(NamedTuple):
    """The columns of a record batch."""

    tokens: _Lists
    mask: _Lists | None

    @staticmethod
    def of(batch: Any, columns: Columns, path: Path) -> _Batch:
        lists = [
            _Lists.of(batch.column(batch.schema.get_field_index(column)), f"{path}: {column!r}")
            for column in columns.names
        ]
        tokens, mask = lists[0], lists[1] if len(lists) > 1 else None
        if mask is not None:
            differing = np.flatnonzero(tokens.lengths != mask.lengths)
            if len(differing):
                row = int(differing[0])
                raise ValueError(
                    f"{path}: {len(differing)} rows of a record batch of {len(tokens.lengths)}"
                    f" differ in length between {columns.tokens!r} and {columns.mask!r}; the first"
                    f" has {tokens.lengths[row]} and {mask.lengths[row]}. Mend the source."
                )
        return _Batch(tokens, mask)


def _mapped(path: Path) -> tuple[Any, list[Any]]:
    """The schema and the record batches of an Arrow file, as views of its memory map."""
    try:
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty, it holds no Arrow data. Make it again.")
        mapped = pa.memory_map(str(path))
        whole = mapped.read_buffer()
        if whole[: len(_FILE_MAGIC)].to_pybytes() == _FILE_MAGIC:
            reader = pa.ipc.open_file(whole)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            reader = pa.ipc.open_stream(whole)
            if whole[-len(_END_OF_STREAM) :].to_pybytes() != _END_OF_STREAM:
                raise ValueError(
                    f"{path} does not end with the mark of an Arrow stream's end: it is truncated,"
                    " or its writer was not closed. Make it again."
                )
            batches = iter(reader)
        end = whole.address + whole.size
        found = []
        for batch in batches:
            for buffer in (each for column in batch.columns for each in column.buffers()):
                if buffer and buffer.size and not whole.address <= buffer.address < end:
                    raise ValueError(
                        f"{path} is compressed, and cannot be mapped into memory. Write it without"
                        " compression, or as Parquet."
                    )
            found.append(batch)
        return reader.schema, found
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as an Arrow file: {error}. It is truncated, damaged or"
            " something else. Make it again."
        ) from error


def _files(
    source: str | Path | Sequence[str | Path], name: str
) -> tuple[list[Path], dict[str, Any]]:
    """The Arrow files in order, and what the folder says of them."""
    if not isinstance(source, str | Path):
        return [Path(each) for each in source], {}
    path = Path(source)
    if not path.is_dir():
        return [path], {}
    facts = _json(path / FACTS)
    if not facts and (path / PARTIAL).exists():
        raise ValueError(
            f"{name}: lightning-wlb tokenize has not completed this folder ({PARTIAL} is there,"
            f" {FACTS} is not). Run the same command again: it continues."
        )
    splits = _json(path / "dataset_dict.json").get("splits")
    if splits:
        raise ValueError(
            f"{name} has several splits. Give the folder of one: "
            + ", ".join(str(path / split) for split in splits)
        )
    state = _json(path / "state.json")
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{name} has an indices file of an old version of datasets. Write it again with"
            " dataset.flatten_indices().save_to_disk(...)."
        )
    listed = [path / each["filename"] for each in state.get("_data_files", [])]
    return listed or shards(path, ".arrow", name), facts


def shards(folder: Path, suffix: str, name: str) -> list[Path]:
    """The files of a folder by name; those called ``data-00000-of-00004...`` must all be there.

    Raises:
        ValueError: none, not as many as their names say, or those of several splits.
    """
    files = sorted(folder.glob(f"*{suffix}"))
    if not files:
        raise ValueError(f"{name} has no {suffix} files. Check the folder.")
    found = [match for path in files if (match := _SHARD.match(path.name))]
    series = sorted({(match[1], int(match[2])) for match in found})
    if len(series) > 1:
        patterns = ", ".join(str(folder / f"{prefix}-*{suffix}") for prefix, _ in series)
        raise ValueError(f"{name} has files of several splits. Give one of them: {patterns}.")
    if series and len(found) != series[0][1]:
        raise ValueError(
            f"{name}: {len(found)} of {series[0][1]} files are there, such as {files[0].name}. Copy"
            f" the others, or give a pattern such as {folder / f'*{suffix}'} for what is there."
        )
    return files


def _json(path: Path) -> dict[str, Any]:
    """What a file says; empty where there is none."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Make the folder again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no mapping. Make the folder again.")
    return content


def _check_facts(facts: dict[str, Any], lengths: npt.NDArray[np.int64], name: str) -> None:
    for fact, found in (("documents", len(lengths)), ("tokens", int(lengths.sum()))):
        if facts.get(fact, found) != found:
            raise ValueError(
                f"{name} has {found} {fact}, but its {FACTS} says {facts[fact]}. Files were"
                " changed or lost: make the folder again."
            )
