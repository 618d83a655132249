"""Hugging Face ``datasets`` folders and Arrow IPC files (streams and file format), by memory map.

A row is a document (:mod:`~lightning_wlb.data.stores.lists`); the ``datasets`` library is not
needed to read them. A folder that ``lightning-wlb tokenize`` wrote also says its vocabulary.

Not for compressed Arrow files, which cannot be mapped, and are refused: write them uncompressed, or
as Parquet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_wlb.data.stores.lists import FACTS, ListDocuments, shards

PARTIAL = "lightning_wlb.partial.json"
"""What ``lightning-wlb tokenize`` keeps in a folder that is not complete yet."""


class ArrowDocuments(ListDocuments):
    """The rows of Arrow files as documents.

    ``source`` is a folder that ``Dataset.save_to_disk`` or ``lightning-wlb tokenize`` wrote, a
    folder of ``.arrow`` files (taken by name), a file, or several files. The other arguments are
    those of :class:`.ListDocuments`.
    """

    @staticmethod
    def _find(
        source: Path | list[Path], name: str, column: str | None, mask_column: str | None
    ) -> tuple[list[tuple[Path, Path]], Mapping[str, Any]]:
        files, facts = (source, {}) if isinstance(source, list) else _files(source, name)
        return [(path, path) for path in files], facts


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
