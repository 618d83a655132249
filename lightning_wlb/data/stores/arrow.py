"""Hugging Face ``datasets`` folders and Arrow IPC files (streams and file format), by memory map.

A row is a document (:mod:`~lightning_wlb.data.stores.lists`); the ``datasets`` library is not
needed to read them. A folder that ``lightning-wlb tokenize`` wrote also says its vocabulary.

Not for compressed Arrow files, which cannot be mapped, and are refused: write them uncompressed, or
as Parquet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_wlb.data.stores.base import Empty
from lightning_wlb.data.stores.columns import AUTO
from lightning_wlb.data.stores.lists import FACTS, ListDocuments, name_of_files, shards

PARTIAL = "lightning_wlb.partial.json"
"""What ``lightning-wlb tokenize`` keeps in a folder that is not complete yet."""


class ArrowDocuments(ListDocuments):
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
        name = f"ArrowDocuments({name_of_files(source)})"
        arguments = {
            "source": source, "column": column, "mask_column": mask_column,
            "vocab_size": vocab_size, "empty": empty,
        }  # fmt: skip
        if isinstance(source, str | Path):
            files, facts = _files(Path(source), name)
        else:
            files, facts = [Path(each) for each in source], {}
        given = facts.get("vocab_size") if vocab_size is None else vocab_size
        mapped = [(path, path) for path in files]
        super().__init__(name, mapped, column, mask_column, given, empty, arguments, facts)


def _files(path: Path, name: str) -> tuple[list[Path], dict[str, Any]]:
    """The Arrow files in order, and what their folder says of them."""
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
