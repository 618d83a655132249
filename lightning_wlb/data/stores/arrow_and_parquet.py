"""Arrow and Parquet files: every row is a document, and its columns are mapped into memory.

:class:`ArrowDocuments` opens Hugging Face ``datasets`` folders and Arrow IPC streams without the
``datasets`` library. A folder of ``lightning-wlb tokenize`` also has the size of its vocabulary.
Compressed Arrow files cannot be mapped and are refused.

:class:`ParquetDocuments` opens Parquet files. These are compressed, and reading one document would
unpack its whole row group. So the columns of tokens and masks are written once as an Arrow stream,
row group by row group, into the user's cache folder, and mapped from there. The name of that copy
includes the file's size and time of change. The copy of an older file is removed.

Cost: opening takes some microseconds for each record batch, and reads the list offsets, 4 or 8
bytes for each document and column. A read is a binary search for the record batch and a slice. The
first opening of a Parquet file unpacks the columns and writes 4 bytes for each token and label
(more than Parquet takes). It takes the memory of 64 documents in a row, or of some million tokens.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from bisect import bisect_right
from collections.abc import Sequence
from operator import gt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_wlb import file_checks
from lightning_wlb.data.cache import built_once, fingerprint, remove, shown
from lightning_wlb.data.stores.document_store import Array, CheckedDocuments
from lightning_wlb.data.stores.list_columns import (
    AUTO,
    IGNORED_LABEL,
    LABELS,
    Columns,
    columns_of,
    lengths_of,
    mapped_batches,
)
from lightning_wlb.model_folder_checks import check_beside

FACTS = "lightning_wlb.json"
"""The file that ``lightning-wlb tokenize`` writes last: ``vocab_size``, ``documents``, ..."""

PARTIAL = "lightning_wlb.partial.json"
"""The file that ``lightning-wlb tokenize`` keeps in a folder until the folder is complete."""

_CACHE_VERSION = 2
_TOKENS_AT_ONCE, _ROWS_AT_ONCE = 4_000_000, 64
"""Tokens of a Parquet file that are written at once, and most of its rows that are unpacked."""


class ArrowDocuments(CheckedDocuments):
    """The rows of Arrow files as documents.

    Args:
        source: a folder that ``Dataset.save_to_disk`` or ``lightning-wlb tokenize`` wrote, a folder
            of ``.arrow`` files (in order of their names), a file, or several files.
        column: the tokens' column; None: ``input_ids``, ``tokens``, or the only lists of integers.
        mask_column: the column of masks, lists of booleans or of 0 and 1, or ``labels`` (the token,
            or -100 if it may not be a target); ``"auto"``: whichever of ``loss_mask``,
            ``assistant_masks``, ``completion_mask`` and ``labels`` exists; None: no mask.
        vocab_size: tokens are in ``[0, vocab_size)``; None: as the files say, else not known.

    Raises:
        ValueError: files that are missing, damaged or compressed, columns of another type, masks
            of another length than the tokens, or nulls.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        column: str | None = None,
        mask_column: str | None = AUTO,
        vocab_size: int | None = None,
    ) -> None:
        first, *others = [source] if isinstance(source, str | Path) else source
        name = f"{type(self).__name__}({first}{f' and {len(others)} more' if others else ''})"
        given = Path(source) if isinstance(source, str | Path) else [Path(each) for each in source]
        files, facts = _files(given, name, self._suffix)
        self.vocabulary = facts.get("vocabulary")
        vocab_size = facts.get("vocab_size") if vocab_size is None else vocab_size
        self._batches: list[pa.RecordBatch] = []
        self._columns: Columns | None = None
        parts: list[Array] = []
        for path in files:
            schema, batches = mapped_batches(self._as_arrow(path, column, mask_column))
            columns = columns_of(schema, column, mask_column, str(path))
            if self._columns not in (None, columns):
                raise ValueError(
                    f"{path} has the columns {columns}, {files[0]} has {self._columns}. Name those"
                    " that all files have with column=... and mask_column=..."
                )
            self._columns = columns
            self._batches += batches
            parts += [lengths_of(batch, columns, path) for batch in batches]
        self._starts = np.cumsum([0, *map(len, parts[:-1])]).tolist()
        lengths = np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)
        for fact, found in (("documents", len(lengths)), ("tokens", int(lengths.sum()))):
            if facts.get(fact, found) != found:
                raise ValueError(
                    f"{name} has {found} {fact}, but its {FACTS} says {facts[fact]}. Files were"
                    " changed or lost: make the folder again."
                )
        super().__init__(name, lengths, vocab_size)

    _suffix = ".arrow"
    """The suffix of the files in a folder."""

    @staticmethod
    def _as_arrow(path: Path, column: str | None, mask_column: str | None) -> Path:
        """The Arrow file with a file's columns; by default the file itself."""
        return path

    def _tokens(self, row: int, start: int, stop: int) -> Array:
        assert self._columns is not None
        if self._columns.attention is not None:
            kept = self._values(self._columns.attention, row, start, stop)
            if (kept > 1).any():
                raise ValueError(
                    f"document {row} of {self.name} is packed of several: its attention_mask is"
                    f" {kept.max()} somewhere. Give each document a row of its own."
                )
            padding = np.flatnonzero(kept == 0)
            if len(padding):
                raise ValueError(
                    f"document {row} of {self.name} is padded: its attention_mask is 0 at position"
                    f" {start + int(padding[0])}. Tokenise without padding (steps are packed from"
                    " documents of any length), or leave the column out if it means something else."
                )
        return self._values(self._columns.tokens, row, start, stop)

    def _flags(self, row: int, start: int, stop: int) -> Array | None:
        assert self._columns is not None
        if self._columns.mask is None:
            return None
        flags = self._values(self._columns.mask, row, start, stop)
        if self._columns.mask != LABELS:
            return flags
        tokens = self._values(self._columns.tokens, row, start, stop)
        mask = flags != IGNORED_LABEL
        wrong = np.flatnonzero(mask & (flags != tokens))
        if len(wrong):
            first = int(wrong[0])
            raise ValueError(
                f"document {row} of {self.name}: its label at position {start + first} is"
                f" {flags[first]}, its token {tokens[first]}. Labels equal the tokens or are"
                f" {IGNORED_LABEL}; they are not shifted. Mend them, or set mask_column=None."
            )
        return np.asarray(mask)

    def _values(self, column: str, row: int, start: int, stop: int) -> Array:
        """Values ``[start, stop)`` of the list in a row; a view if they are numbers."""
        number = bisect_right(self._starts, row) - 1
        lists = self._batches[number].column(column)
        return np.asarray(lists[row - self._starts[number]].values[start:stop])


def _shards(folder: Path, suffix: str, name: str) -> list[Path]:
    """The files of a folder by name; all files of a series ``data-00000-of-00004...`` must exist.

    Hidden files, such as those that macOS leaves beside files, are skipped.

    Raises:
        ValueError: no files, too few, several splits, documents twice, or more in subfolders.
    """
    file_checks.check_none_left_out(folder, suffix)
    files = sorted(each for each in folder.glob(f"*{suffix}") if not each.name.startswith("."))
    if not files:
        raise ValueError(f"{name} has no {suffix} files. Check the folder.")
    file_checks.check_no_copies(files)
    found = [match for path in files if (match := file_checks.SHARD.match(path.name))]
    series = sorted({str(file_checks.shards_of(folder / each.string)) for each in found})
    if len(series) > 1:
        raise ValueError(
            f"{name} has files of several splits. Give one of them: {', '.join(series)}."
        )
    if found and len(found) != (total := int(found[0][4])):
        raise ValueError(
            f"{name}: {len(found)} of {total} files are there, such as {files[0].name}. Copy the"
            f" others, or give a pattern such as {folder / f'*{suffix}'} for what is there."
        )
    file_checks.check_one_split(files, folder)
    return files


def _files(path: Path | list[Path], name: str, suffix: str) -> tuple[list[Path], dict[str, Any]]:
    """The files in order, and the facts in their folder: ``vocab_size``, ``documents``, ..."""
    if isinstance(path, list) or not path.is_dir():
        return path if isinstance(path, list) else [path], {}
    check_beside(path, *(path / name for name in (FACTS, "dataset_dict.json", "state.json")))
    facts = read_json(path / FACTS)
    if not facts and (path / PARTIAL).exists():
        raise ValueError(
            f"{name}: lightning-wlb tokenize has not completed this folder ({PARTIAL} is there,"
            f" {FACTS} is not). Run the same command again: it continues."
        )
    if splits := read_json(path / "dataset_dict.json").get("splits"):
        splits = splits if isinstance(splits, list) else [splits]
        folders = ", ".join(str(path / str(each)) for each in splits)
        raise ValueError(f"{name} has several splits. Give the folder of one: {folders}")
    state = read_json(path / "state.json")
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{name} has an indices file of an old version of datasets. Write it again with"
            " dataset.flatten_indices().save_to_disk(...)."
        )
    try:
        listed = [path / each["filename"] for each in state.get("_data_files", [])]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{name}: its state.json is damaged. Make the folder again.") from error
    if outside := [str(each) for each in listed if each.parent != path or each.name == ".."]:
        raise ValueError(f"{name} names {outside[0]}, which is not in it. Make the folder again.")
    file_checks.check_no_copies(listed)
    files = listed or _shards(path, suffix, name)
    check_beside(path, *files)
    return files, facts


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, empty if there is no file; ValueError if the file is damaged."""
    try:
        content = file_checks.read_json(path) if os.path.lexists(path) else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Make the folder again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no mapping. Make the folder again.")
    return content


class ParquetDocuments(ArrowDocuments):
    """The rows of Parquet files as documents.

    ``source`` is a file, a folder of ``.parquet`` files (in order of their names), or several
    files. The other arguments are those of :class:`.ArrowDocuments`.
    """

    _suffix = ".parquet"

    @staticmethod
    def _as_arrow(path: Path, column: str | None, mask_column: str | None) -> Path:
        """The copy of the file's columns, which is written if there is none."""
        try:
            file_checks.check_regular(path)
            real = path.resolve()  # once, because a link that others control may change meanwhile
            made_of = _fingerprint(real)  # before opening, because the file may be replaced then
            with pq.ParquetFile(real, page_checksum_verification=True) as parquet:
                columns = columns_of(parquet.schema_arrow, column, mask_column, str(path))
                # Column names are hashed: they may be long, or have characters not for file names.
                named = fingerprint([], real.parent, real, columns.names, _CACHE_VERSION)
                prefix = f"parquet-{named}-"
                key = prefix + made_of

                def build(folder: Path) -> None:
                    _write(folder, parquet, columns, path)
                    if _fingerprint(real) != made_of:
                        raise ValueError(
                            f"{path} changed while it was read. Begin again once nothing writes it."
                        )
                    for older in folder.parent.iterdir():
                        if older.name.startswith(prefix) and older.name != key:
                            remove(older)

                return built_once(key, build) / "data.arrow"
        except (pa.ArrowException, OSError) as error:
            code = getattr(error, "errno", None)
            if code in (errno.ENOSPC, errno.EDQUOT):
                raise ValueError(
                    f"The disk is full where the unpacked copy of {path} is kept: {error}. Make"
                    " room, or name another folder (for caches by XDG_CACHE_HOME)."
                ) from error
            if code is not None:
                raise ValueError(
                    f"{path} cannot be read, or its unpacked copy cannot be kept: {error}. Look at"
                    " the file systems of both."
                ) from error
            raise ValueError(
                f"{path} cannot be read as a Parquet file: {error}. It is truncated, damaged or"
                " something else. Make it again."
            ) from error


def _fingerprint(path: Path) -> str:
    """Changes with a file's size and times; no archive can set the time of change of status."""
    return fingerprint([path], path.parent, path.stat().st_ctime_ns)


def _write(folder: Path, parquet: Any, columns: Columns, path: Path) -> None:
    kinds = [(name, _small(parquet.schema_arrow.field(name).type)) for name in columns.names]
    schema = pa.schema(kinds)
    counts, bits = _token_counts(parquet.metadata, columns.tokens), 0
    for name, kind in kinds:
        values = _token_counts(parquet.metadata, name)
        if any(map(gt, values, counts)):
            raise ValueError(f"{path}: {name!r} has more values than {columns.tokens!r}. Mend it.")
        bits += kind.value_type.bit_width * sum(values) + 32 * parquet.metadata.num_rows
    check_room(folder.parent, bits // 8, path)
    # A few bytes can encode any number of rows, and each row takes memory, even an empty one.
    most = 8 * path.stat().st_size + 1_000_000
    with pa.ipc.new_stream(str(folder / "data.arrow"), schema) as writer:
        for group in shown(range(parquet.num_row_groups), f"Reading {path.name}"):
            rows, held, waiting = parquet.metadata.row_group(group).num_rows, [], 0
            # Few rows at once, because a file may say that its rows have fewer tokens.
            at_once = min(_ROWS_AT_ONCE, _TOKENS_AT_ONCE * rows // max(1, rows, counts[group]))
            for batch in parquet.iter_batches(
                max(1, at_once), row_groups=[group], columns=columns.names
            ):
                tokens = len(batch.column(columns.tokens).values)
                counts[group], waiting = counts[group] - tokens, waiting + tokens
                longer = [name for name in columns.names if len(batch.column(name).values) > tokens]
                if longer:
                    raise ValueError(f"{path}: {longer[0]!r} has more values than tokens. Mend it.")
                if counts[group] < 0:
                    raise ValueError(
                        f"{path}: row group {group} unpacks to more tokens than it says. The file"
                        " is damaged: make it again."
                    )
                most -= batch.num_rows
                if most < 0:
                    raise ValueError(
                        f"{path} has more rows than are believed of a file of its size: 8 a byte,"
                        " and a million. Leave empty rows out, or make the file again."
                    )
                held.append(batch.select(columns.names).cast(schema))
                if waiting >= _TOKENS_AT_ONCE:
                    writer.write_table(pa.Table.from_batches(held).combine_chunks())
                    held, waiting = [], 0
            writer.write_table(pa.Table.from_batches(held, schema).combine_chunks())


def check_room(folder: Path, needed: int, source: Path) -> None:
    """Refuse to write more bytes than the disk has left."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{source} unpacks to {needed:,} bytes, but their folder, {folder}, has {free:,} left."
            " Make room, name another folder (for caches by XDG_CACHE_HOME), or check the file."
        )


def _small(kind: pa.DataType) -> pa.DataType:
    """The type of a column in the copy: lists of integers of at most 32 bits."""
    value = kind.value_type
    return pa.list_(pa.int32() if value.bit_width > 32 or value == pa.uint32() else value)


def _token_counts(metadata: Any, column: str) -> list[int]:
    """The number of tokens in each row group, as the file's metadata gives it."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    leaves = [map(group.column, range(group.num_columns)) for group in groups]
    # A column's name may have dots; at most two further levels are those of its lists.
    known = re.compile(re.escape(column) + r"(\.[^.]*){0,2}")
    return [
        sum(leaf.num_values for leaf in own if known.fullmatch(leaf.path_in_schema))
        for own in leaves
    ]
