"""Parquet files: the columns that are read, written once as Arrow files beside them.

Parquet is compressed and cannot be mapped, and to read one document of it is to unpack all those of
its row group. So the column of tokens, and that of masks, are written once as an Arrow stream,
row group by row group, into the folder ``.lightning_wlb`` beside the file (or, where one may not
write there, the user's cache folder), and mapped from there. The name of what is kept holds the
file's size and time of change: a file that was changed is read again, and what was made of the
older one is removed from beside it.

Cost: the first opening unpacks the columns and writes 4 bytes for each token (more than Parquet
takes, with compression); later ones read lengths alone. Memory is bounded by a few million tokens,
and by one document.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightning_wlb.data.cache import BESIDE, built_once, fingerprint, shown
from lightning_wlb.data.stores.columns import Columns, columns_of
from lightning_wlb.data.stores.lists import ListDocuments, shards

_CACHE_VERSION = 1
_TOKENS_AT_ONCE = 4_000_000


class ParquetDocuments(ListDocuments):
    """The rows of Parquet files as documents.

    ``source`` is a file, a folder of ``.parquet`` files (taken by name), or several files. The
    other arguments are those of :class:`.ListDocuments`.
    """

    @staticmethod
    def _find(
        source: Path | list[Path], name: str, column: str | None, mask_column: str | None
    ) -> tuple[list[tuple[Path, Path]], Mapping[str, Any]]:
        if isinstance(source, list):
            files = source
        else:
            files = shards(source, ".parquet", name) if source.is_dir() else [source]
        return [(_as_arrow(path, column, mask_column), path) for path in files], {}


def _as_arrow(path: Path, column: str | None, mask_column: str | None) -> Path:
    """The Arrow file of a Parquet file's columns, written where there is none."""
    try:
        with pq.ParquetFile(path) as parquet:
            columns = columns_of(parquet.schema_arrow, column, mask_column, str(path))
            prefix = f"{path.name}-{'-'.join(columns.names)}-v{_CACHE_VERSION}-"
            key = prefix + fingerprint([path], path.parent, path.resolve())
            folder = built_once(key, lambda folder: _write(folder, parquet, columns, path), path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as a Parquet file: {error}. It is truncated, damaged or"
            " something else. Make it again."
        ) from error
    # Beside the file its name is its own; the user's cache may hold files of that name elsewhere.
    if folder.parent.name == BESIDE:
        for older in folder.parent.iterdir():
            if older.name.startswith(prefix) and older != folder:
                shutil.rmtree(older, ignore_errors=True)
    return folder / "data.arrow"


def _write(folder: Path, parquet: Any, columns: Columns, path: Path) -> None:
    source = parquet.schema_arrow
    kinds = [(name, _small(source.field(name).type)) for name in columns.names]
    if columns.attention is not None:
        kinds[-1] = columns.attention, pa.list_(pa.bool_())
    schema = pa.schema(kinds)
    row = 0
    with pa.ipc.new_stream(str(folder / "data.arrow"), schema) as writer:
        for group in shown(range(parquet.num_row_groups), f"Reading {path.name}"):
            for batch in parquet.iter_batches(
                _rows_at_once(parquet.metadata.row_group(group), columns.tokens),
                row_groups=[group],
                columns=columns.names,
            ):
                lists = [batch.column(batch.schema.get_field_index(n)) for n in columns.names]
                for name, rows in zip(columns.names, lists, strict=True):
                    if rows.null_count or rows.values.null_count:
                        raise ValueError(
                            f"{path}: column {name!r} has nulls among rows {row} to"
                            f" {row + len(batch) - 1}. Every row must be a list of numbers. Mend"
                            " the source."
                        )
                small = [rows.cast(field.type) for rows, field in zip(lists, schema, strict=True)]
                writer.write_batch(pa.record_batch(small, schema=schema))
                row += len(batch)


def _small(kind: pa.DataType) -> pa.DataType:
    """The list type in which a column is kept: no token and no label needs more than 32 bits."""
    value = kind.value_type
    return pa.list_(pa.int32() if value.bit_width > 32 or value == pa.uint32() else value)


def _rows_at_once(group: Any, column: str) -> int:
    """Rows of a row group that hold about :data:`_TOKENS_AT_ONCE` tokens."""
    leaves = [group.column(number) for number in range(group.num_columns)]
    tokens = max(
        (leaf.num_values for leaf in leaves if leaf.path_in_schema.split(".")[0] == column),
        default=1,
    )
    return max(1, _TOKENS_AT_ONCE * max(group.num_rows, 1) // max(tokens, 1))
