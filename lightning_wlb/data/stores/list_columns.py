"""Columns of lists in Arrow files: which hold tokens and masks, and their rows as numpy views.

Tokens are the column ``input_ids`` or ``tokens``, else the only column of lists of integers. The
mask is the one column named as in ``MASK_COLUMNS``: lists of booleans or of 0 and 1, or ``labels``
in Hugging Face's format. An ``attention_mask`` beside them must be all ones: padded rows are
refused. So are rows of several documents, which ``PACKED_COLUMNS`` indicate. Other columns are
ignored, except that the user must choose or decline a column whose name suggests a mask.

Lengths come from the list offsets, and tokens are slices of the lists' values, directly from the
memory map: no token is read before it is needed. Offsets that lead outside, or fall, are refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_wlb.data.stores.document_store import Array
from lightning_wlb.file_checks import check_regular

TOKEN_COLUMNS = ("input_ids", "tokens")
MASK_COLUMNS = ("loss_mask", "assistant_masks", "completion_mask", "labels")
ATTENTION_COLUMN = "attention_mask"
PACKED_COLUMNS = (
    *("position_ids", "seq_lengths", "seq_lens", "cu_seqlens", "cu_seq_lens", "cu_seq_lens_q"),
    *("seq_idx", "segment_ids", "sequence_ids", "document_ids"),
)
_MAY_BE_MASK = re.compile(
    r"(?<!attention_)(?<!special_tokens_)mask|label|loss|target|weight|(?<![a-z])train"
    r"|assistant|response|completion|supervis",
    re.I,
)
LABELS = "labels"
IGNORED_LABEL = -100
"""The label that Hugging Face gives to a token that may not be a target."""
AUTO = "auto"


class Columns(NamedTuple):
    """The names of the columns that a store reads."""

    tokens: str  #: lists of integers
    mask: str | None  #: which tokens may be targets; None: all may
    attention: str | None  #: which tokens are not padding; None: there is no padding

    @property
    def names(self) -> list[str]:
        """The columns to read: tokens, then the mask and the attention mask if there are any."""
        return [each for each in self if each is not None]


def columns_of(
    schema: pa.Schema, column: str | None, mask_column: str | None, name: str
) -> Columns:
    """The columns to read from a table with this schema; ``name`` is the table's name in errors.

    If ``column`` is None the column of tokens is searched, and if ``mask_column`` is ``"auto"`` the
    column of masks; with ``mask_column`` None there is no mask.

    Raises:
        ValueError: a column that is missing, of another type, or not unique.
    """
    if column is None:
        column = _token_column(schema, name)
    others = [each for each in schema if each.name != column and "list" in str(each.type)]
    if packed := [each.name for each in others if each.name in PACKED_COLUMNS]:
        raise ValueError(
            f"{name} has a column {packed[0]!r}, as rows have that were packed of several"
            " documents, which would attend to each other. Give each document a row of its own,"
            " since steps are packed here; or leave the column out if each row is one document."
        )
    if mask_column == AUTO:
        present = [each for each in MASK_COLUMNS if each in schema.names and each != column]
        if len(present) > 1:
            raise ValueError(
                f"{name} has several columns that may be masks: {', '.join(present)}. Choose one"
                " with mask_column=..., or none with mask_column=None."
            )
        mask_column = present[0] if present else None
        may = [each.name for each in others if _MAY_BE_MASK.search(each.name)]
        if mask_column is None and may:
            raise ValueError(
                f"{name} has a column {may[0]!r}, which may say what is learned. Choose it with"
                " mask_column=... if it is 0 and 1 by token, or none with mask_column=None."
            )
    _check(schema, column, _is_integers, "lists of integers", name)
    if mask_column is not None:
        wanted = "lists of booleans or integers"
        remedy = " Choose another with mask_column=..., or none with mask_column=None."
        _check(schema, mask_column, _is_flags, wanted, name, remedy)
    if ATTENTION_COLUMN not in schema.names:
        return Columns(column, mask_column, None)
    remedy = " Write it so, or leave it out where no row is padded or packed."
    _check(schema, ATTENTION_COLUMN, _is_flags, "lists of booleans or integers", name, remedy)
    return Columns(column, mask_column, ATTENTION_COLUMN)


def _token_column(schema: pa.Schema, name: str) -> str:
    for known in TOKEN_COLUMNS:
        if known in schema.names:
            return known
    lists = [field.name for field in schema if _is_integers(field.type)]
    if len(lists) != 1:
        found = f"several: {', '.join(lists)}" if lists else "no column of lists of integers"
        remedy = (
            "Name the column of tokens with column=..."
            if lists
            else "These are no tokens: write texts or chats as JSON lines (datasets' and pandas'"
            " to_json do) and tokenise them with lightning-wlb tokenize."
        )
        raise ValueError(
            f"{name} has no column {' or '.join(TOKEN_COLUMNS)}, and {found} among its columns"
            f" {_columns(schema)}. {remedy}"
        )
    return lists[0]


def _check(
    schema: pa.Schema,
    column: str,
    fits: Callable[[pa.DataType], bool],
    wanted: str,
    name: str,
    remedy: str = "",
) -> None:
    if (count := schema.names.count(column)) != 1:
        found = f"{count} columns" if count else "no column"
        raise ValueError(f"{name} has {found} {column!r}; its columns are {_columns(schema)}.")
    kind = schema.field(column).type
    if not fits(kind):
        raise ValueError(f"{name}: column {column!r} is of type {kind}, not {wanted}.{remedy}")


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _is_integers(kind: pa.DataType) -> bool:
    return is_list(kind) and pa.types.is_integer(kind.value_type)


def _is_flags(kind: pa.DataType) -> bool:
    return _is_integers(kind) or (is_list(kind) and pa.types.is_boolean(kind.value_type))


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type has a list in each row, of variable or fixed length."""
    types = pa.types
    fixed = types.is_fixed_size_list(kind) and kind.list_size > 0
    return bool(types.is_list(kind) or types.is_large_list(kind) or fixed)


_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def lengths_of(batch: Any, columns: Columns, path: Path) -> Array:
    """The lengths of the documents in a record batch of a file.

    Raises:
        ValueError: a damaged batch, nulls, or columns whose lists differ in length.
    """
    try:  # else numpy would read past a buffer that is too short, or at wrong offsets
        batch.select(columns.names).validate(full=True)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is damaged: {error}. Make it again.") from error
    lengths = _lengths(batch.column(columns.tokens), f"{path}: {columns.tokens!r}")
    for name in columns.names[1:]:
        others = _lengths(batch.column(name), f"{path}: {name!r}")
        differing = np.flatnonzero(lengths != others)
        if len(differing):
            row = int(differing[0])
            raise ValueError(
                f"{path}: {len(differing)} rows of a record batch of {len(lengths)} differ in"
                f" length between {columns.tokens!r} and {name!r}; the first has {lengths[row]}"
                f" and {others[row]}. Mend the source."
            )
    return lengths


def _lengths(column: pa.Array, named: str) -> Array:
    """The lengths of a column's lists; ``named`` is the column's name in errors."""
    nulls = column.values.null_count
    if column.null_count or nulls:
        raise ValueError(
            f"{named} has nulls: {column.null_count} rows, {nulls} values. Give lists of numbers."
        )
    return np.asarray(pc.list_value_length(column))


def _cannot_be_mapped(message: Any) -> bool:
    """Whether an Arrow message is compressed, or adds to a dictionary, which would be copied."""
    if message.type not in ("record batch", "dictionary"):
        return False
    batch = _field(message.metadata, 0, 2)  # Message.header, of Message.fbs
    if message.type == "dictionary" and batch is not None:
        if _field(message.metadata, batch, 2) is not None:  # DictionaryBatch.isDelta
            return True
        batch = _field(message.metadata, batch, 1)  # DictionaryBatch.data
    return batch is not None and _field(message.metadata, batch, 3) is not None


def _field(data: Any, table: int, number: int) -> int | None:
    """The position to which a field of a flatbuffers table points; None: the field is not set.

    ``table`` is the position of the table; 0 means the root table.
    """
    table = table or struct.unpack_from("<I", data)[0]
    fields = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, fields)[0]:
        return None
    at = struct.unpack_from("<H", data, fields + 4 + 2 * number)[0]
    return table + at + struct.unpack_from("<I", data, table + at)[0] if at else None


def mapped_batches(path: Path) -> tuple[Any, list[Any]]:
    """The schema and the record batches of an Arrow file, as views of its memory map."""
    try:
        if check_regular(path) == 0:
            raise ValueError(f"{path} is empty, it holds no Arrow data. Make it again.")
        whole = pa.memory_map(str(path)).read_buffer()
        if whole[: len(_FILE_MAGIC)].to_pybytes() == _FILE_MAGIC:
            raise ValueError(
                f"{path} is of Arrow's file format (Feather), which is not supported. Write it as"
                " an Arrow stream, as datasets' save_to_disk does, or as Parquet."
            )
        if any(map(_cannot_be_mapped, pa.ipc.MessageReader.open_stream(whole))):
            raise ValueError(
                f"{path} is compressed and cannot be mapped, or its dictionaries grow. Write it"
                " without that, or as Parquet."
            )
        source = pa.BufferReader(whole)
        batches = pa.ipc.open_stream(source)
        if whole[-len(_END_OF_STREAM) :].to_pybytes() != _END_OF_STREAM:
            raise ValueError(
                f"{path} does not end with the mark of an Arrow stream's end: it is truncated, or"
                " its writer was not closed. Make it again."
            )
        found = list(batches)
        if source.tell() != whole.size:
            raise ValueError(
                f"{path} goes on behind the end of its Arrow stream, as concatenated files do: the"
                " rest would not be read. Give each file separately."
            )
        return batches.schema, found
    except (pa.ArrowException, OSError, struct.error, IndexError) as error:
        raise ValueError(
            f"{path} cannot be read as an Arrow file: {error}. It is truncated, damaged or"
            " something else. Make it again."
        ) from error
