"""Which columns of a table hold the tokens of a document and their mask.

Tokens are the column ``input_ids`` or ``tokens``, else the only column of lists of integers. The
mask is the one column named as in ``MASK_COLUMNS``, lists of booleans or of 0 and 1, or ``labels``
as Hugging Face's models take them. An ``attention_mask`` beside them must be all ones: rows that
were padded are refused. Other columns are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

TOKEN_COLUMNS = ("input_ids", "tokens")
MASK_COLUMNS = ("loss_mask", "assistant_masks", "completion_mask", "labels")
ATTENTION_COLUMN = "attention_mask"
LABELS = "labels"
AUTO = "auto"


@dataclass(frozen=True)
class Columns:
    """The columns that a store reads.

    Args:
        tokens: name of the column of tokens.
        mask: name of the column of masks; None: every token may be a target.
        attention: name of the column that says which tokens are no padding; None: none is.
    """

    tokens: str
    mask: str | None
    attention: str | None

    @property
    def names(self) -> list[str]:
        """Of those that there are."""
        return [each for each in (self.tokens, self.mask, self.attention) if each is not None]

    @property
    def mask_is_labels(self) -> bool:
        """Whether the mask is written as labels: the token, or -100."""
        return self.mask == LABELS


def columns_of(
    schema: pa.Schema, column: str | None, mask_column: str | None, name: str
) -> Columns:
    """The columns to read of a table with this schema.

    Args:
        schema: of the table.
        column: of the tokens; None: find it.
        mask_column: of the mask; ``"auto"``: find it; None: no mask.
        name: how errors call the table.

    Raises:
        ValueError: a column that is not there, of another type, or one of several.
    """
    if column is None:
        column = _token_column(schema, name)
    if mask_column == AUTO:
        present = [each for each in MASK_COLUMNS if each in schema.names and each != column]
        if len(present) > 1:
            raise ValueError(
                f"{name} has several columns that may be masks: {', '.join(present)}. Choose one"
                " with mask_column=..., or none with mask_column=None."
            )
        mask_column = present[0] if present else None
    _check(schema, column, _is_integers, "lists of integers", name)
    if mask_column is not None:
        wanted = "lists of booleans or integers"
        remedy = " Choose another with mask_column=..., or none with mask_column=None."
        _check(schema, mask_column, _is_flags, wanted, name, remedy)
    padded = ATTENTION_COLUMN in schema.names and _is_flags(schema.field(ATTENTION_COLUMN).type)
    return Columns(column, mask_column, ATTENTION_COLUMN if padded else None)


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
    if schema.names.count(column) != 1:
        raise ValueError(f"{name} has no column {column!r}; its columns are {_columns(schema)}.")
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
    """Whether the type is one of lists, of any or of one length."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
