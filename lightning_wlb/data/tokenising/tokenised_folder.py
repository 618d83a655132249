"""The folder of tokenised documents, while it is made and when it is complete.

A complete folder has ``data-00000-of-00003.arrow`` and so on (Arrow streams; columns ``input_ids``,
list of int32, and for chats ``loss_mask``, list of bool), and ``lightning_wlb.json`` with the
figures of the documents, the vocabulary and the request, which is written last. Until then there is
``lightning_wlb.partial.json`` with the request and the figures of every finished shard, and shards
have other names, so no reader takes an incomplete folder for a complete one. Both files have the
``checksum`` of each shard's source, which tells files with new times from changed files, and the
checksum of the shard as ``written``; shards that differ are made again. Before a complete folder
is used for a request, sizes of ``files`` are compared, and up to 256 MB also checksums.

The figures are plain values: the numbers of ``documents``, ``tokens``, ``targets`` (tokens that may
be targets) and ``skipped`` rows, the ``longest`` document's tokens, and ``by_length``: entry k
holds the number of documents of 2^k to 2^(k+1) - 1 tokens, and their tokens. Lengths are as stored.

Every file is written under another name and renamed, so that it is complete or does not exist.

Cost: a record batch of some megabytes in memory; at the end, 8 bytes for each document. Complete
folders of at most 256 MB are read, and so are finished shards of any size when a run continues.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_wlb.data.cache import described, remove
from lightning_wlb.data.stores.arrow_and_parquet import (
    FACTS,
    PARTIAL,
    ArrowDocuments,
    check_room,
    read_json,
)
from lightning_wlb.data.tokenising.sources import Part, Source, checksum
from lightning_wlb.data.tokenising.texts import Document
from lightning_wlb.file_checks import check_regular, written_aside

FORMAT = 2

Counts = dict[str, int]
"""The ``documents``, ``targets`` and ``skipped`` rows of a shard, the ``checksum`` of its source,
and the checksum of its file as ``written``."""

_SUMMED_BYTES = 1 << 28
_SUMMED = ("documents", "targets", "skipped")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file completely or not at all."""
    with written_aside(path) as file:
        file.write(json.dumps(content).encode())


def shard_path(folder: Path, shard: int) -> Path:
    """The path of a shard until the folder is complete and shards get their final names."""
    return folder / f"shard-{shard:05d}.part"


def as_made(out: Path, identity: dict[str, Any], source: Source) -> dict[str, Any]:
    """The request saved in a folder, if only the files' digest differs and not their bytes.

    Other permissions, links and copies change the times of files, so the sources of finished shards
    are read again; their checksums include how each is read. Another request is returned as it is.
    """
    digest, shards = {"files_digest": identity["files_digest"]}, dict(enumerate(source.shards()))
    for saved in (_saved(out / FACTS), _saved(out / PARTIAL)):
        there, done = saved.get("request"), saved.get("done")
        if done and isinstance(there, dict) and identity != there and there | digest == identity:
            sums = {number: checksum(shards.get(int(number), [])) for number in done}
            if all(sums[number] == counts.get("checksum") for number, counts in done.items()):
                return dict(there)
    return identity


def finished(out: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The content of a complete folder's ``lightning_wlb.json``; None if it is not complete.

    Raises:
        ValueError: the folder was made for another request, or its files are not as written.
    """
    content = read_json(out / FACTS)
    if content:
        _check_same(out, content.get("request"), identity, "was made")
        if content.get("files") != _described(out):
            raise ValueError(
                f"{out}: its documents are not those that were written. They were damaged, or"
                f" exchanged. Remove the folder, and they are made anew: rm -r '{out}'"
            )
    return content or None


def check_free(out: Path) -> None:
    """Refuse a folder that holds something else."""
    if out.is_file():
        raise ValueError(f"{out} is a file. Name a folder that does not exist yet.")
    # A run that was ended in its first moments leaves only hidden files.
    names = [each.name for each in out.iterdir()] if out.is_dir() else []
    found = sorted(name for name in names if not name.startswith("."))
    if found and PARTIAL not in found:
        raise ValueError(
            f"{out} holds something else ({', '.join(found[:3])}). Name an empty folder, or one"
            " that does not exist yet."
        )


def begun(out: Path, identity: dict[str, Any]) -> dict[str, Counts]:
    """Counts of the shards that earlier runs have finished, by number; removes unfinished files.

    Shards that are not as written are removed and left out, with a warning.

    Raises:
        ValueError: shards were made for another request.
    """
    for left in out.glob(".*.aside"):
        remove(left)
    partial = _saved(out / PARTIAL)
    nothing_done = isinstance(partial.get("request"), dict) and not partial.get("done")
    if partial and not nothing_done:
        _check_same(out, partial.get("request"), identity, "was begun")
    done: dict[str, Counts] = partial.get("done", {})
    ours = {int(number): counts for number, counts in done.items() if counts["documents"]}
    for number, name in _final_names(ours).items():  # if :func:`finish` was interrupted
        if os.path.lexists(out / name):
            (out / name).replace(shard_path(out, number))
    with ThreadPoolExecutor() as pool:
        as_written = pool.map(lambda number: _is_as_written(out, number, ours[number]), ours)
        differing = [number for number, good in zip(ours, as_written, strict=True) if not good]
    for number in differing:
        remove(shard_path(out, number))
        del done[str(number)]
    if differing:
        first = shard_path(out, differing[0]).name
        warnings.warn(
            f"{out}: {len(differing)} of {len(ours)} shards that an earlier run has done, such as"
            f" {first}, are tokenised again. They are not as they were written, or by a version"
            " that kept no checksum of them.",
            stacklevel=2,
        )
    return done


def file_checksum(path: Path) -> int:
    """The checksum of a file's bytes and of their number."""
    return checksum([Part(path, 0, check_regular(path, links=False))])


def write_shard(
    path: Path, batches: Iterable[list[Document | None]], masked: bool, vocab_size: int
) -> Counts:
    """Write documents, one record batch for each list, as an Arrow stream.

    Documents are in order, with None for a skipped row.

    Raises:
        ValueError: a token outside the tokenizer's vocabulary.
    """
    columns = [("input_ids", pa.list_(pa.int32()))]
    schema = pa.schema(columns + [("loss_mask", pa.list_(pa.bool_()))] * masked)
    counts = dict.fromkeys(_SUMMED, 0)
    with written_aside(path) as file, pa.ipc.new_stream(file, schema) as stream:
        for batch in batches:
            documents = [document for document in batch if document is not None]
            counts["documents"] += len(documents)
            counts["skipped"] += len(batch) - len(documents)
            if documents:
                lists = [pa.array([each.tokens for each in documents], pa.list_(pa.int32()))]
                _check_tokens(lists[0].values, vocab_size)
                if masked:
                    lists.append(pa.array([each.mask for each in documents], pa.list_(pa.bool_())))
                targets = lists[-1].values
                counts["targets"] += targets.true_count if masked else len(targets)
                check_room(path.parent, sum(each.nbytes for each in lists), path)
                stream.write_batch(pa.record_batch(lists, schema=schema))
    return counts


def finish(folder: Path, about: Mapping[str, Any], shards: list[Counts]) -> dict[str, Any]:
    """Give the shards their final names, and write the file that completes the folder.

    If a call is interrupted, :func:`begun` reverts the names. ``shards`` are the counts of every
    shard in order; at least one has a document.

    Returns:
        The content of ``lightning_wlb.json``: the figures, and the entries of ``about``.
    """
    names = _final_names(number for number, each in enumerate(shards) if each["documents"])
    for number, name in names.items():
        shard_path(folder, number).replace(folder / name)
    for number in range(len(shards)):
        shard_path(folder, number).unlink(missing_ok=True)
    lengths = ArrowDocuments([folder / name for name in names.values()]).lengths
    if len(lengths) != (counted := sum(each["documents"] for each in shards)):
        raise ValueError(
            f"{folder}: its files hold {len(lengths)} documents, and {PARTIAL} says {counted}. It"
            f" is damaged. Remove the folder, and they are made anew: rm -r '{folder}'"
        )
    powers = np.frexp(lengths)[1] - 1
    by_length = np.stack([np.bincount(powers), np.bincount(powers, lengths)], axis=1)
    content = {
        **{name: sum(each[name] for each in shards) for name in _SUMMED},
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "by_length": by_length.astype(int).tolist(),
        "files": _described(folder),
        **about,
    }
    write_json(folder / FACTS, content)
    (folder / PARTIAL).unlink(missing_ok=True)
    return content


def _final_names(shards: Iterable[int]) -> dict[int, str]:
    """By number, the names that shards with documents have in a complete folder."""
    order = sorted(shards)
    return {
        number: f"data-{place:05d}-of-{len(order):05d}.arrow" for place, number in enumerate(order)
    }


def _saved(path: Path) -> dict[str, Any]:
    """A folder's record, whose counts of shards are checked; empty if there is none."""
    content = read_json(path)
    try:
        done = content.get("done", {}).items()
        good = all(str(int(number)) == number and len(number) < 10 for number, _ in done)
        good &= all(type(counts[name]) is int for _, counts in done for name in _SUMMED)
    except (AttributeError, TypeError, ValueError, KeyError):
        good = False
    if not good:
        raise ValueError(
            f"{path} is damaged: its counts of finished shards are invalid. Remove the folder, and"
            f" its documents are made anew: rm -r '{path.parent}'"
        )
    return content


def _is_as_written(folder: Path, number: int, counts: Counts) -> bool:
    try:
        return file_checksum(shard_path(folder, number)) == counts.get("written")
    except (OSError, ValueError):  # the file is missing, a link, or something else
        return False


def _described(folder: Path) -> dict[str, Any]:
    """The bytes of each file of documents, and in a small folder the checksums of their content.

    Every rank compares them at every start, which in a large corpus would read everything.
    """
    files = list(folder.glob("data-*.arrow"))
    most = _SUMMED_BYTES if sum(each.lstat().st_size for each in files) <= _SUMMED_BYTES else 0
    return {each.name: described(each, most) for each in files}


def _check_same(out: Path, saved: Any, identity: dict[str, Any], how: str) -> None:
    saved = saved if isinstance(saved, dict) else {}
    differing = [
        f"{name} {saved.get(name)!r} there, {identity.get(name)!r} here"
        for name in {**identity, **saved}
        if saved.get(name) != identity.get(name)
    ]
    if differing:
        raise ValueError(
            f"{out} {how} for another request: {'; '.join(differing)}. (The digests are of the"
            " source files' names, sizes and times of change, and of the tokenizer.) Ask for the"
            f" same again, name another folder, or remove this one: rm -r '{out}'"
        )


def _check_tokens(tokens: pa.Array, vocab_size: int) -> None:
    least, most = (pc.min_max(tokens)[name].as_py() for name in ("min", "max"))
    if least < 0 or most >= vocab_size:
        raise ValueError(
            f"The tokenizer made tokens from {least} to {most}, outside its vocabulary of"
            f" {vocab_size}. Its files do not belong together."
        )
