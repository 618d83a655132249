"""The folder that tokenised documents are written to, while it is made and when it is whole.

A whole folder is one that ``datasets.load_from_disk`` opens: ``data-00000-of-00003.arrow`` and so
on (Arrow streams; columns ``input_ids``, list of int32, and of chats ``loss_mask``, list of bool),
``dataset_info.json`` and ``state.json``; and beside them ``lightning_wlb.json`` with the number of
documents and tokens, the vocabulary and what was asked for, which is written last. Until then
there is ``lightning_wlb.partial.json`` with what was asked for and the figures of every shard that
is done, and shards have other names: no reader takes the half for the whole.

Every file is written aside and renamed, so that it is there as a whole or not at all.

Cost: a record batch of some megabytes in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa

from lightning_wlb.data.stores.arrow_and_parquet import FACTS, PARTIAL
from lightning_wlb.data.tokenising.texts import Document

FORMAT = 1

_BUCKETS = 40


@dataclass
class Figures:
    """What is in some documents, and what was skipped on the way.

    Args:
        documents: how many there are.
        tokens: of all of them.
        targets: tokens that may be targets by the mask.
        longest: tokens of the longest one.
        skipped: rows of the source that gave no document.
        by_length: documents and tokens by powers of two: number k counts the lengths from
            2^k to 2^(k+1) - 1.
    """

    documents: int = 0
    tokens: int = 0
    targets: int = 0
    longest: int = 0
    skipped: int = 0
    by_length: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in range(_BUCKETS)])

    def count(self, document: Document | None) -> None:
        """Take another row's document in."""
        if document is None:
            self.skipped += 1
            return
        tokens = len(document.tokens)
        self.documents += 1
        self.tokens += tokens
        self.targets += tokens if document.mask is None else int(document.mask.sum())
        self.longest = max(self.longest, tokens)
        bucket = self.by_length[tokens.bit_length() - 1]
        bucket[0] += 1
        bucket[1] += tokens

    @classmethod
    def total(cls, parts: Iterable[Mapping[str, Any]]) -> Self:
        """The figures of several shards together."""
        whole = cls()
        for part in parts:
            for name in ("documents", "tokens", "targets", "skipped"):
                setattr(whole, name, getattr(whole, name) + part[name])
            whole.longest = max(whole.longest, part["longest"])
            for bucket, counts in enumerate(part["by_length"]):
                whole.by_length[bucket][0] += counts[0]
                whole.by_length[bucket][1] += counts[1]
        return whole

    def plain(self) -> dict[str, Any]:
        """As JSON has it, without the lengths that no document has."""
        plain = asdict(self)
        while plain["by_length"] and plain["by_length"][-1] == [0, 0]:
            plain["by_length"].pop()
        return plain


def read_json(path: Path) -> dict[str, Any] | None:
    """What a file of ours holds; None where there is none.

    Raises:
        ValueError: a file that has been damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Remove {path.parent} and begin anew.") from (
            error
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    with _aside(path) as file:
        file.write(json.dumps(content).encode())


def shard_path(folder: Path, shard: int) -> Path:
    """Where a shard lies until the folder is whole."""
    return folder / f"shard-{shard:05d}.part"


def unfinished_files(folder: Path) -> list[Path]:
    """What writers that were ended have left aside; nobody may be writing to the folder."""
    return list(folder.glob(".*.aside"))


def write_shard(
    path: Path, batches: Iterable[list[Document | None]], masked: bool, vocab_size: int
) -> Figures:
    """Write documents, one record batch for each list, as an Arrow stream.

    Args:
        path: of the file.
        batches: documents in order; None in place of what is skipped.
        masked: whether they have masks.
        vocab_size: of the tokenizer, that no token may exceed.

    Raises:
        ValueError: a token outside the vocabulary.
    """
    fields = {"input_ids": pa.list_(pa.int32())} | (
        {"loss_mask": pa.list_(pa.bool_())} if masked else {}
    )
    schema, figures = pa.schema(fields), Figures()
    with _aside(path) as file, pa.ipc.new_stream(file, schema) as stream:
        for batch in batches:
            for document in batch:
                figures.count(document)
            documents = [document for document in batch if document is not None]
            if documents:
                columns = _columns(documents, masked, vocab_size)
                stream.write_batch(pa.record_batch(columns, schema=schema))
    return figures


def finish(
    folder: Path, content: Mapping[str, Any], shards: list[dict[str, Any]], masked: bool
) -> None:
    """Name the shards as they shall be called, and write what makes the folder whole.

    May be called again where an earlier call was cut short.

    Args:
        folder: with every shard written.
        content: of ``lightning_wlb.json``.
        shards: figures of every shard, in order.
        masked: whether documents have masks.
    """
    with_documents = [number for number, each in enumerate(shards) if each["documents"]]
    names = []
    for place, number in enumerate(with_documents):
        names.append(f"data-{place:05d}-of-{len(with_documents):05d}.arrow")
        if shard_path(folder, number).exists():
            shard_path(folder, number).replace(folder / names[-1])
        elif not (folder / names[-1]).exists():
            raise ValueError(
                f"{folder}: {shard_path(folder, number).name}, which was written, is gone. Remove"
                " the folder and begin anew."
            )
    for number in range(len(shards)):
        shard_path(folder, number).unlink(missing_ok=True)
    write_json(folder / "dataset_info.json", _dataset_info(masked))
    fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    write_json(folder / "state.json", _dataset_state(names, fingerprint))
    write_json(folder / FACTS, content)
    (folder / PARTIAL).unlink(missing_ok=True)


def _columns(documents: list[Document], masked: bool, vocab_size: int) -> list[pa.Array]:
    lengths = [len(document.tokens) for document in documents]
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    tokens = np.concatenate([document.tokens for document in documents])
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"The tokenizer made tokens from {tokens.min()} to {tokens.max()}, outside its"
            f" vocabulary of {vocab_size}. Its files do not belong together."
        )
    columns = [pa.ListArray.from_arrays(offsets, pa.array(tokens, pa.int32()))]
    if masked:
        masks = np.concatenate([document.mask for document in documents])
        columns.append(pa.ListArray.from_arrays(offsets, pa.array(masks, pa.bool_())))
    return columns


def _dataset_info(masked: bool) -> dict[str, Any]:
    def lists_of(dtype: str) -> dict[str, Any]:
        return {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"}

    features = {"input_ids": lists_of("int32")}
    if masked:
        features["loss_mask"] = lists_of("bool")
    return {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}


def _dataset_state(files: list[str], fingerprint: str) -> dict[str, Any]:
    return {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }


@contextmanager
def _aside(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when all of it is written."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
