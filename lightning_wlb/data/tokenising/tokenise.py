"""Tokenise a source into a folder: in parallel, resumable, the same with any number of processes.

A :class:`TokeniseRequest` names source, tokenizer and options. Shards (:mod:`.tokenising.sources`)
are dealt to processes as these become free, and each shard is one file of the folder
(:mod:`.tokenising.tokenised_folder`). The same request continues a run that was ended at any
moment: shards that are done stay. A folder that was begun, or made, from other files, with another
tokenizer or other options is refused; the error names the difference. Only one process works on a
folder at a time; others wait, and then find it complete.

docs/design.md explains why this is not ``Dataset.map`` of the ``datasets`` library.

Cost: the tokenizer's, divided by the number of processes; a few megabytes of memory for each.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import stat
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from lightning_wlb.argument_checks import choice, whole, wrong_type
from lightning_wlb.data import loader_workers
from lightning_wlb.data.cache import cache_folder, shown
from lightning_wlb.data.stores.arrow_and_parquet import PARTIAL
from lightning_wlb.data.tokenising import tokenised_folder as folders
from lightning_wlb.data.tokenising.chats import ChatEncoder
from lightning_wlb.data.tokenising.sources import TEXT_COLUMN, Part, Row, Source, checksum, rows
from lightning_wlb.data.tokenising.texts import Document, TextEncoder
from lightning_wlb.data.tokenising.tokenised_folder import FORMAT, Counts
from lightning_wlb.file_checks import check_links, check_owner, follow, is_open, own_folder

Kind = Literal["texts", "chats"]
Encoder = TextEncoder | ChatEncoder

LOCK = ".lightning_wlb.lock"
COLUMNS = {"texts": TEXT_COLUMN, "chats": "messages"}
"""The column that is read for each kind, unless another is named."""

_BATCH_ROWS = 1000
_BATCH_BYTES = 4_000_000
_LOOK_SECONDS = 5.0
_STALLED_SECONDS = 1800.0


@dataclass(frozen=True)
class TokeniseRequest:
    """What is to be tokenised, and how.

    Args:
        source: path of a file or folder (:class:`.Source`).
        tokenizer: a ``tokenizer.json`` file, or the folder or name of a Hugging Face tokenizer.
        kind: ``"texts"``, or ``"chats"``: lists of messages, by the tokenizer's chat template.
        column: the JSON lines' column with texts or chats; None: ``text`` or ``messages``.
        eos: for texts the token that ends a document: True for the tokenizer's own, if it has one;
            a token's text; or False for none. Chats end as their template writes them.

    Raises:
        ValueError: a source, tokenizer, column or token that does not exist or fit the kind.
    """

    source: str | Path
    tokenizer: str | Path
    kind: Kind = "texts"
    column: str | None = None
    eos: bool | str = True

    def __post_init__(self) -> None:
        choice("kind", self.kind, COLUMNS)
        if not self.tokenizer:
            raise ValueError(
                f"The documents {str(self.source)!r} need a tokenizer. Name a tokenizer.json file,"
                " or the folder or name of a Hugging Face tokenizer, as tokenizer=... beside them."
            )
        if not isinstance(self.eos, bool | str):
            token = "the end-of-document token by its text, True for the tokenizer's own"
            raise wrong_type("eos", self.eos, f"{token}, or False for none")
        if self.kind == "chats" and self.eos is not True:
            raise ValueError(
                f"eos={self.eos!r} for chats, whose end the chat template writes. Leave it out."
            )
        if not self.files.is_lines and (self.kind == "chats" or self.column not in (None, "text")):
            raise ValueError(
                f"{self.source} holds text files, which have neither chats nor columns. Give JSON"
                " lines (.jsonl), or leave the kind and the column out."
            )

    @cached_property
    def files(self) -> Source:
        """The files of the source."""
        return Source.open(self.source)

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder that makes documents from rows."""
        column = self.column or COLUMNS[self.kind]
        if self.kind == "chats":
            return ChatEncoder(str(self.tokenizer), column)
        return TextEncoder(str(self.tokenizer), column, self.eos)

    def describe(self) -> str:
        """A description of how documents begin and end, and of the files that are left out."""
        left_out = self.files.left_out
        if not left_out:
            return self.encoder.describe()
        files = f"{len(left_out):,} other file{'' if len(left_out) == 1 else 's'}"
        return f"{self.encoder.describe()}\nLeft out: {files}, such as {left_out[0]}."

    def identity(self) -> dict[str, Any]:
        """Everything that decides the result, in plain values; if equal, folders are equal."""
        return {
            "kind": self.kind,
            "column": self.column or COLUMNS[self.kind],
            "eos": self.eos,
            **self.files.identity(),
            "tokenizer_digest": self.encoder.digest,
            "format": FORMAT,
        }


def tokenised_once(request: TokeniseRequest) -> Path:
    """The folder with the documents in the user's cache, tokenised now if they were not before.

    The folder's name is a fingerprint of the source (path, files, sizes, times of change), the
    tokenizer and the options: if any of these changes, there is a new folder. One rank on a node
    does the work while the others wait. Old folders stay until removed. For a corpus that takes
    hours, ``lightning-wlb tokenize`` writes the same into any folder, with visible progress.

    Raises:
        ValueError: as :func:`tokenise`.
        TimeoutError: another process tokenises the same and makes no progress.
    """
    identity = request.identity()
    # A link is a separate source, since it may lead elsewhere while it is read.
    source = Path(request.source).absolute()
    key = hashlib.sha256(json.dumps([str(source), identity], sort_keys=True).encode()).hexdigest()
    folder = own_folder(cache_folder() / "documents") / f"{source.stem[:50]}-{key[:16]}"
    if folders.finished(folder, identity) is None:
        _say(f"Tokenising {source} into {folder}, once. {request.describe()}")
        tokenise(request, folder)
    return folder


def tokenise(
    request: TokeniseRequest, out: str | Path, workers: int | None = None
) -> dict[str, Any]:
    """Tokenise a source into a folder, or continue an earlier run; a complete folder is kept.

    A terminal shows a progress bar.

    Args:
        request: source, tokenizer and options.
        out: the folder, which is made if there is none.
        workers: processes; None: one for each core of this process.

    Returns:
        The content of the folder's ``lightning_wlb.json``.

    Raises:
        ValueError: the folder holds something else or (part of) another request's documents, or is
            another user's in a place where others can write; or a line cannot be read (with file
            and line).
        TimeoutError: another process works on the folder and makes no progress.
    """
    out = Path(out)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    workers = whole("workers", cores if workers is None else workers, 1)
    identity = folders.as_made(out, request.identity(), request.files)
    if (made := folders.finished(out, identity)) is not None:
        _check_mine(out)
        return made
    folders.check_free(out)
    check_links(out).mkdir(parents=True, exist_ok=True)
    _check_mine(out)
    with _alone(out):
        made = folders.finished(out, identity)
        if made is None:
            made = _work(request, identity, out, workers)
        (out / LOCK).unlink(missing_ok=True)
    return made


def _check_mine(out: Path) -> None:
    """Refuse another user's folder or link in a place where others can write: it may be forged."""
    if is_open(out.absolute().parent.stat()) or follow(out)[1]:
        for status in (out.lstat(), out.stat()):  # the link and the folder to which it leads
            check_owner(status, out)
        check_links(out)
    for each in out.iterdir() if is_open(out.stat()) else ():
        check_owner(each.lstat(), each)


def _work(
    request: TokeniseRequest, identity: dict[str, Any], out: Path, workers: int
) -> dict[str, Any]:
    """Tokenise the shards that earlier runs have not done, and complete the folder."""
    done = folders.begun(out, identity)
    folders.write_json(out / PARTIAL, {"request": identity, "done": done})
    shards, encoder = request.files.shards(), request.encoder
    todo = {number: parts for number, parts in enumerate(shards) if str(number) not in done}
    for number, counts in shown(
        _tokenised(todo, encoder, out, workers), "Tokenising", len(shards), len(done)
    ):
        done[str(number)] = counts
        folders.write_json(out / PARTIAL, {"request": identity, "done": done})
    now = replace(request.files)  # a copy reads the sizes again
    if folders.as_made(out, identity | now.identity(), now) != identity:
        raise ValueError(
            f"{request.source} has changed while it was read. Remove {out} (rm -r '{out}') and"
            " begin anew, once nothing writes to the source."
        )
    counts_of_shards = [done[str(number)] for number in range(len(shards))]
    if not any(counts["documents"] for counts in counts_of_shards):
        skipped = sum(counts["skipped"] for counts in counts_of_shards)
        raise ValueError(
            f"{request.source} holds no documents: {skipped} rows, and nothing to learn in any of"
            f" them. Remove {out} (rm -r '{out}') and give another source."
        )
    about = {
        "vocab_size": encoder.vocab_size,
        "vocabulary": encoder.vocabulary,
        "tokenizer": str(request.tokenizer),
        "source": str(request.source),
        "format": FORMAT,
        "request": identity,
        # In order of shards, because workers end in any order.
        "done": {str(number): done[str(number)] for number in range(len(shards))},
    }
    return folders.finish(out, about, counts_of_shards)


def _tokenised(
    shards: dict[int, list[Part]], encoder: Encoder, out: Path, workers: int
) -> Iterator[tuple[int, Counts]]:
    """Write every shard, and yield its number and counts when it is done."""
    workers = min(workers, len(shards))
    if workers <= 1:
        for number, parts in shards.items():
            yield number, _tokenise_shard(parts, encoder, folders.shard_path(out, number))
        return
    # Forked: a new interpreter takes seconds to import all. Other systems send the encoder.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    with loader_workers.safe_path():
        pool = ProcessPoolExecutor(workers, context, _begin_worker, (encoder, out))
    others, done = set(multiprocessing.active_children()), False
    try:
        with loader_workers.safe_path():
            waiting = {pool.submit(_worker_shard, each, shards[each]): each for each in shards}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
        done = True
    except BrokenProcessPool as error:
        raise ValueError(
            f"A worker process died, perhaps for want of memory. What is done lies in {out}: the"
            " same command goes on from there; try fewer workers."
        ) from error
    finally:
        if not done:
            # Unfinished shards may take minutes, so they are dropped. Their files get their names
            # only when they are complete.
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
        pool.shutdown(cancel_futures=True)


_worker: tuple[Encoder, Path] | None = None


def _begin_worker(encoder: Encoder, out: Path) -> None:
    global _worker
    _worker = encoder, out
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Else a process that waits for work would outlive the process that gives it.
    loader_workers.begin()


def _worker_shard(number: int, parts: list[Part]) -> Counts:
    assert _worker is not None
    encoder, out = _worker
    return _tokenise_shard(parts, encoder, folders.shard_path(out, number))


def _tokenise_shard(parts: list[Part], encoder: Encoder, path: Path) -> Counts:
    def batches() -> Iterator[list[Document | None]]:
        """The documents of the shard, at most some thousand rows or some megabytes at a time."""
        batch: list[Row] = []
        size = 0
        for row in (row for part in parts for row in rows(part)):
            batch.append(row)
            size += row.size
            if len(batch) >= _BATCH_ROWS or size >= _BATCH_BYTES:
                yield encoder.documents(batch)
                batch, size = [], 0
        if batch:
            yield encoder.documents(batch)

    read = checksum(parts)  # first, so that a change while rows are read is detected
    counts = folders.write_shard(path, batches(), encoder.masked, encoder.vocab_size)
    return counts | {"checksum": read, "written": folders.file_checksum(path)}


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Lock the folder for this process; wait while another process works on it.

    Raises:
        ValueError: something else has the lock's name.
        TimeoutError: the other process has written nothing for half an hour.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG((out / LOCK).lstat().st_mode):
            raise ValueError(
                f"{out / LOCK} is no file, and nobody can lock it. It is a link, a folder or"
                f" something else that came with {out}. Remove it: rm -r '{out / LOCK}'"
            )
    lock, seen, since = FileLock(out / LOCK, mode=0o600), None, 0.0
    while True:
        try:
            lock.acquire(timeout=0 if seen is None else _LOOK_SECONDS)
            break
        except Timeout as error:
            if seen is None:
                _say(f"Waiting for another process that tokenises into {out}.")
            if (there := _sizes(out)) != seen:
                seen, since = there, time.monotonic()
            if time.monotonic() - since > _STALLED_SECONDS:
                raise TimeoutError(
                    f"Another process has {out} and has written nothing there for"
                    f" {_STALLED_SECONDS / 60:.0f} minutes. End it, or give it more cores; if there"
                    f" is none on any node, remove {out / LOCK}."
                ) from error
    try:
        yield
    finally:
        lock.release()


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file; they grow while a shard is written, which may take hours."""
    found = {}
    for each in folder.iterdir():
        with suppress(FileNotFoundError):  # the file was renamed
            found[each.name] = each.stat().st_size
    return found


def _say(text: str) -> None:
    # Imported here: Lightning takes seconds, which would delay errors on the command line.
    from lightning.pytorch.utilities import rank_zero_info

    rank_zero_info(text)
