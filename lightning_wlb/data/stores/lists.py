"""Documents that are rows of Arrow files with a column of lists, mapped by pyarrow.

Lengths are the differences of the list offsets, and tokens are slices of the lists' values,
straight from the file: no token is read before it is asked for.

Cost: opening takes some microseconds for each record batch, and reads the offsets: 4 or 8 bytes for
each document and column. A read is a binary search for the record batch and a slice.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lightning_wlb.data.documents import labels_as_mask
from lightning_wlb.data.stores.base import Array, Empty, MappedDocuments
from lightning_wlb.data.stores.columns import AUTO, Columns, columns_of

FACTS = "lightning_wlb.json"
"""What ``lightning-wlb tokenize`` writes last: ``vocab_size``, ``documents``, ``tokens``, ..."""

_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.\w+$")


class ListDocuments(MappedDocuments):
    """The rows of files as documents; a subclass finds the Arrow files that hold them.

    Args:
        source: a path, or several files.
        column: of the tokens; None: ``input_ids``, ``tokens``, or the only lists of integers.
        mask_column: of the masks, lists of booleans or of 0 and 1, or ``labels`` (the token, or
            -100 where it may not be a target); ``"auto"``: the one of ``loss_mask``,
            ``assistant_masks``, ``completion_mask`` and ``labels`` that is there; None: no mask.
        vocab_size: tokens are in ``[0, vocab_size)``; None: as the files say, else not known.
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
        arguments = {
            "source": source,
            "column": column,
            "mask_column": mask_column,
            "vocab_size": vocab_size,
            "empty": empty,
        }
        name = f"{type(self).__name__}({name_of_files(source)})"
        given = Path(source) if isinstance(source, str | Path) else [Path(each) for each in source]
        files, facts = self._find(given, name, column, mask_column)
        if vocab_size is None:
            vocab_size = facts.get("vocab_size")
        self._batches: list[_Batch] = []
        parts: list[Array] = []
        first: Columns | None = None
        for path, source in files:
            schema, batches = _mapped(path)
            columns = columns_of(schema, column, mask_column, str(source))
            if first is not None and columns != first:
                raise ValueError(
                    f"{source} has the columns {columns}, {files[0][1]} has {first}. Name those"
                    " that all files have with column=... and mask_column=..."
                )
            first = columns
            for batch in batches:
                lists, own = _Batch.of(batch, columns, source)
                self._batches.append(lists)
                parts.append(own)
        self._labels = first is not None and first.mask_is_labels
        self._starts = np.cumsum([0, *map(len, parts[:-1])]).tolist()
        lengths = np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)
        _check_facts(facts, lengths, name)
        super().__init__(name, lengths, vocab_size, empty, arguments)

    @staticmethod
    def _find(
        source: Path | list[Path], name: str, column: str | None, mask_column: str | None
    ) -> tuple[list[tuple[Path, Path]], Mapping[str, Any]]:
        """The Arrow files in order, each with the file that it was made of, which errors name.

        The second result is what is known of them: ``vocab_size``, and how many ``documents`` and
        ``tokens`` there must be.
        """
        raise NotImplementedError

    def _tokens(self, row: int, start: int, stop: int) -> Array:
        batch, own = self._batch(row)
        if batch.attention is not None:
            padding = np.flatnonzero(batch.attention.read(own, start, stop) == 0)
            if len(padding):
                raise ValueError(
                    f"document {row} of {self.name} is padded: its attention_mask is 0 at position"
                    f" {start + int(padding[0])}. Tokenise without padding (steps are packed from"
                    " documents of any length), or leave the column out if it means something else."
                )
        return batch.tokens.read(own, start, stop)

    def _flags(self, row: int, start: int, stop: int) -> Array | None:
        batch, own = self._batch(row)
        if batch.mask is None:
            return None
        flags = batch.mask.read(own, start, stop)
        if not self._labels:
            return flags
        tokens = batch.tokens.read(own, start, stop)
        remedy = "Mend the source, or open it with mask_column=None to ignore them."
        return labels_as_mask(flags, tokens, f"document {row} of {self.name}", start, remedy)

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

    def read(self, row: int, start: int, stop: int) -> Array:
        begin = int(self.offsets[row])
        start, stop = begin + start, begin + stop
        if not self.packed:
            return self.values[start:stop]
        bits = np.unpackbits(self.values[start // 8 : -(-stop // 8)], bitorder="little")
        return bits[start % 8 : start % 8 + stop - start].view(np.bool_)

    @staticmethod
    def of(column: Any, named: str) -> tuple[_Lists, Array]:
        """The lists of a column of a record batch, and their lengths.

        Args:
            column: lists of numbers.
            named: how errors call it.
        """
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
        lengths = np.diff(offsets)
        if ends[0] < 0 or ends[1] > count or (len(lengths) and lengths.min() < 0):
            raise ValueError(
                f"{named}: its list offsets run from {ends[0]} to {ends[1]} over {count} values, or"
                " decrease. The file is damaged: make it again."
            )
        packed = pa.types.is_boolean(values.type)
        if packed:
            buffer = values.buffers()[1]
            bits = np.frombuffer(buffer, np.uint8) if buffer else np.empty(0, np.uint8)
            return _Lists(offsets + values.offset, bits, packed), lengths
        return _Lists(offsets, values.to_numpy(), packed), lengths


class _Batch(NamedTuple):
    """The columns of a record batch."""

    tokens: _Lists
    mask: _Lists | None
    attention: _Lists | None

    @staticmethod
    def of(batch: Any, columns: Columns, path: Path) -> tuple[_Batch, Array]:
        """The columns of a record batch of a file, and the lengths of its documents."""
        lists = {
            name: _Lists.of(batch.column(batch.schema.get_field_index(name)), f"{path}: {name!r}")
            for name in columns.names
        }
        tokens, lengths = lists[columns.tokens]
        for name, (_, others) in lists.items():
            differing = np.flatnonzero(lengths != others)
            if len(differing):
                row = int(differing[0])
                raise ValueError(
                    f"{path}: {len(differing)} rows of a record batch of {len(lengths)} differ in"
                    f" length between {columns.tokens!r} and {name!r}; the first has {lengths[row]}"
                    f" and {others[row]}. Mend the source."
                )
        mask, attention = (
            None if name is None else lists[name][0] for name in (columns.mask, columns.attention)
        )
        return _Batch(tokens, mask, attention), lengths


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


def _check_facts(facts: Mapping[str, Any], lengths: npt.NDArray[np.int64], name: str) -> None:
    for fact, found in (("documents", len(lengths)), ("tokens", int(lengths.sum()))):
        if facts.get(fact, found) != found:
            raise ValueError(
                f"{name} has {found} {fact}, but its {FACTS} says {facts[fact]}. Files were"
                " changed or lost: make the folder again."
            )


def name_of_files(source: str | Path | Sequence[str | Path]) -> str:
    """How a path, or the first of several with their number, is written in a store's name."""
    if isinstance(source, str | Path):
        return str(source)
    return f"{source[0]} and {len(source) - 1} more" if len(source) > 1 else str(source[0])


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
