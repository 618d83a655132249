"""Tokenise a source into a folder: in parallel, resumable, the same with any number of processes.

A :class:`TokeniseRequest` says what is asked for. Shards (:mod:`.tokenising.sources`) are dealt to
processes as these become free, and each is one file of the folder (:mod:`.tokenising.folder`). A
run that was ended, at any moment, is continued by the same request: shards that are done stay. A
folder that was begun, or made, from other files, with another tokenizer or other options is
refused, naming what differs.

Only one process works on a folder at a time; others that want it wait, and then find it whole.

Cost: the tokenizer's, over the number of processes; memory of a few megabytes each.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_info

from lightning_wlb.arguments import choice, whole
from lightning_wlb.data.cache import cache_folders
from lightning_wlb.data.stores.arrow_and_parquet import FACTS, PARTIAL
from lightning_wlb.data.tokenising import folder as folders
from lightning_wlb.data.tokenising.chats import ChatEncoder
from lightning_wlb.data.tokenising.folder import FORMAT, Figures
from lightning_wlb.data.tokenising.sources import TEXT_COLUMN, Part, Row, Source, rows
from lightning_wlb.data.tokenising.texts import Document, Encoder, TextEncoder

Kind = Literal["texts", "chats"]

LOCK = ".lightning_wlb.lock"
COLUMNS = {"texts": TEXT_COLUMN, "chats": "messages"}
"""The column that is read of each kind, unless another is named."""

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
        column: of JSON lines that holds them; None: ``text`` or ``messages``.
        eos: for texts the token that ends a document: True, the tokenizer's own where it has one;
            a token, by its text; False, none. Chats end as their template writes them.

    Raises:
        ValueError: a source, tokenizer, column or token that is not there, or does not go together
            with the kind.
    """

    source: str | Path
    tokenizer: str
    kind: Kind = "texts"
    column: str | None = None
    eos: bool | str = True

    def __post_init__(self) -> None:
        choice("kind", self.kind, COLUMNS)
        if not isinstance(self.eos, bool | str):
            raise ValueError(
                f"eos={self.eos!r} is of type {type(self.eos).__name__}. Give the end-of-document"
                " token by its text, True for the tokenizer's own, or False for none."
            )
        if self.kind == "chats" and self.eos is not True:
            raise ValueError(
                f"eos={self.eos!r} for chats, whose end is what the chat template writes. Leave it"
                " out."
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
        """What makes documents of rows."""
        column = self.column or COLUMNS[self.kind]
        if self.kind == "chats":
            return ChatEncoder(self.tokenizer, column)
        return TextEncoder(self.tokenizer, column, self.eos)

    def describe(self) -> str:
        """How documents begin and end, and which files are left out, in words."""
        left_out = self.files.left_out
        if not left_out:
            return self.encoder.describe()
        files = f"{len(left_out):,} other file{'' if len(left_out) == 1 else 's'}"
        return f"{self.encoder.describe()}\nLeft out: {files}, such as {left_out[0]}."

    def identity(self) -> dict[str, Any]:
        """What decides the result, in plain values; requests with the same give the same folder."""
        return {
            "kind": self.kind,
            "column": self.column or COLUMNS[self.kind],
            "eos": self.eos,
            "files": len(self.files.files),
            "bytes": sum(self.files.sizes),
            "files_digest": self.files.digest(),
            "tokenizer_digest": self.encoder.digest,
            "format": FORMAT,
        }


Progress = Callable[[int], None]
"""Is told how many further bytes of the source are done."""


def tokenise(
    request: TokeniseRequest, out: str | Path, workers: int | None = None, show: bool = True
) -> dict[str, Any]:
    """Tokenise a source into a folder, or go on with it; does nothing where it is whole already.

    Args:
        request: what is asked for.
        out: the folder, which is made where there is none.
        workers: processes; None: one for each core of this process.
        show: a progress bar, where someone is watching.

    Returns:
        What is in the folder's ``lightning_wlb.json``.

    Raises:
        ValueError: a folder that holds something else, another request's documents, or part of
            them; a line that cannot be read, by file and line.
        TimeoutError: another process has this folder and does not get on.
    """
    out = Path(out)
    workers = whole("workers", _cores() if workers is None else workers, 1)
    identity = request.identity()
    if (made := finished(out, identity)) is not None:
        return made
    _check_free(out)
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        made = finished(out, identity)
        if made is None:
            done = _begun(out, identity)
            made = _work(request, identity, out, done, workers, show)
        (out / LOCK).unlink(missing_ok=True)
    return made


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def finished(out: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What a whole folder says of itself; None where the folder is not whole.

    Raises:
        ValueError: it was made for another request.
    """
    content = folders.read_json(out / FACTS)
    if content is not None:
        _check_same(out, content["request"], identity, "was made")
    return content


def _check_free(out: Path) -> None:
    """Refuse a folder in which something else lies."""
    if out.is_file():
        raise ValueError(f"{out} is a file. Name a folder that does not exist yet.")
    # A run that was ended in its first moments leaves hidden files alone.
    names = [each.name for each in out.iterdir()] if out.is_dir() else []
    found = sorted(name for name in names if not name.startswith("."))
    if found and PARTIAL not in found:
        raise ValueError(
            f"{out} holds something else ({', '.join(found[:3])}). Name an empty folder, or one"
            " that does not exist yet."
        )


def _begun(out: Path, identity: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Figures of the shards that an earlier run has done, by number."""
    for left in folders.unfinished_files(out):
        left.unlink()
    partial = folders.read_json(out / PARTIAL)
    if partial is None:
        return {}
    _check_same(out, partial["request"], identity, "was begun")
    return {int(number): figures for number, figures in partial["done"].items()}


def _check_same(out: Path, saved: dict[str, Any], identity: dict[str, Any], how: str) -> None:
    differing = [
        f"{name} {saved.get(name)!r} there, {identity.get(name)!r} here"
        for name in {**identity, **saved}
        if saved.get(name) != identity.get(name)
    ]
    if differing:
        raise ValueError(
            f"{out} {how} for another request: {'; '.join(differing)}. (The digests are of the"
            " source files' names, sizes and times of change, and of the tokenizer.) Ask for the"
            f" same again, name another folder, or remove this one: rm -r {out}"
        )


def _work(
    request: TokeniseRequest,
    identity: dict[str, Any],
    out: Path,
    done: dict[int, dict[str, Any]],
    workers: int,
    show: bool,
) -> dict[str, Any]:
    shards, encoder = request.files.shards(), request.encoder
    sizes = [sum(part.stop - part.start for part in shard) for shard in shards]

    def note(number: int | None = None, figures: dict[str, Any] | None = None) -> None:
        if number is not None and figures is not None:
            done[number] = figures
        content = {"request": identity, "done": {str(each): done[each] for each in sorted(done)}}
        folders.write_json(out / PARTIAL, content)

    note()
    left = {number: shards[number] for number in range(len(shards)) if number not in done}
    with _progress(show, sum(sizes), sum(sizes[number] for number in done)) as advance:
        for number, figures in _results(left, encoder, out, workers):
            note(number, figures)
            advance(sizes[number])
    if request.files.digest() != identity["files_digest"]:
        raise ValueError(
            f"{request.source} has changed while it was read. Remove {out} (rm -r {out}) and begin"
            " anew, once nothing writes to the source."
        )
    total = Figures.total(done[number] for number in range(len(shards)))
    if not total.documents:
        raise ValueError(
            f"{request.source} holds no documents: {total.skipped} rows, and nothing to learn in"
            f" any of them. Remove {out} (rm -r {out}) and give another source."
        )
    content = {
        "vocab_size": encoder.vocab_size,
        **total.plain(),
        "tokenizer": str(request.tokenizer),
        "source": str(request.source),
        "format": FORMAT,
        "request": identity,
    }
    folders.finish(out, content, [done[number] for number in range(len(shards))], encoder.masked)
    return content


def _results(
    shards: dict[int, list[Part]], encoder: Encoder, out: Path, workers: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and figures of each shard, as they are done."""
    workers = min(workers, len(shards))
    if workers <= 1:
        for number, parts in shards.items():
            yield number, _tokenise_shard(parts, encoder, folders.shard_path(out, number))
        return
    # Forked, since a new interpreter would take seconds to import all this. Where that cannot be
    # the encoder is sent.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (encoder, out))
    others, done = set(multiprocessing.active_children()), False
    try:
        waiting = {pool.submit(_worker_shard, number, shards[number]): number for number in shards}
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
            # Nobody waits for shards under way, which may take minutes. Their files are not named
            # before they are whole.
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
        pool.shutdown(cancel_futures=True)


_worker: tuple[Encoder, Path] | None = None


def _begin_worker(encoder: Encoder, out: Path) -> None:
    global _worker
    _worker = encoder, out
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # An interrupt from the keyboard reaches all processes, and is for the first to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process that waits for work does not see by itself that nobody is left to give any."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _worker_shard(number: int, parts: list[Part]) -> dict[str, Any]:
    assert _worker is not None
    encoder, out = _worker
    return _tokenise_shard(parts, encoder, folders.shard_path(out, number))


def _tokenise_shard(parts: Iterable[Part], encoder: Encoder, path: Path) -> dict[str, Any]:
    documents = _batches(parts, encoder)
    return folders.write_shard(path, documents, encoder.masked, encoder.vocab_size).plain()


def _batches(parts: Iterable[Part], encoder: Encoder) -> Iterator[list[Document | None]]:
    """The documents of a shard, some thousand rows or some megabytes at a time."""
    batch: list[Row] = []
    size = 0
    for part in parts:
        for row in rows(part):
            batch.append(row)
            size += row.size
            if len(batch) >= _BATCH_ROWS or size >= _BATCH_BYTES:
                yield encoder.documents(batch)
                batch, size = [], 0
    if batch:
        yield encoder.documents(batch)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the folder, once whoever has it has let go of it.

    Raises:
        TimeoutError: the other has done no shard for half an hour.
    """
    lock, said, since = FileLock(out / LOCK), False, time.time()
    while True:
        try:
            lock.acquire(timeout=_LOOK_SECONDS if said else 0)
            break
        except Timeout as error:
            if not said:
                rank_zero_info(f"Waiting for another process that tokenises into {out}.")
                said = True
            partial = out / PARTIAL
            newest = max(since, partial.stat().st_mtime) if partial.exists() else since
            if time.time() - newest > _STALLED_SECONDS:
                raise TimeoutError(
                    f"Another process has {out} and has done no part of it for"
                    f" {_STALLED_SECONDS / 60:.0f} minutes. End it, or give it more cores."
                ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _progress(show: bool, total: int, done: int) -> Iterator[Progress]:
    if not show or not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("Tokenising"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda size: bar.advance(task, size)


def tokenised_texts(
    source: str | Path,
    tokenizer: str | Path | None = None,
    column: str | None = None,
    eos: bool | str = True,
) -> Path:
    """The folder with the documents of texts, tokenised now if they were not before.

    Args:
        source: a ``.jsonl``, ``.jsonl.gz``, ``.txt`` or ``.md`` file, or a folder of these.
        tokenizer: a ``tokenizer.json`` file, or the folder or name of a Hugging Face tokenizer.
        column: of JSON lines that holds the text; None: ``text``.
        eos: the end-of-document token: True, the tokenizer's own where it has one; a token, by its
            text; False, none.

    Raises:
        ValueError: no tokenizer is named, or as for :class:`.TokeniseRequest` and
            :func:`.tokenise`.
        TimeoutError: another process tokenises the same and does not get on.
    """
    return _tokenised(TokeniseRequest(source, _named(source, tokenizer), "texts", column, eos))


def tokenised_chats(
    source: str | Path, tokenizer: str | Path | None = None, column: str | None = None
) -> Path:
    """The folder with the documents of chats, tokenised now if they were not before.

    Args:
        source: a ``.jsonl`` or ``.jsonl.gz`` file, or a folder of these.
        tokenizer: the folder or name of a Hugging Face tokenizer with a chat template.
        column: that holds the messages; None: ``messages``.

    Raises:
        ValueError: no tokenizer is named, or as for :class:`.TokeniseRequest` and
            :func:`.tokenise`.
        TimeoutError: another process tokenises the same and does not get on.
    """
    return _tokenised(TokeniseRequest(source, _named(source, tokenizer), "chats", column))


def _named(source: str | Path, tokenizer: Any) -> str:
    if not tokenizer:
        raise ValueError(
            f"The documents {str(source)!r} need a tokenizer. Name a tokenizer.json file, or the"
            " folder or name of a Hugging Face tokenizer, as tokenizer=... beside them."
        )
    return str(tokenizer)


def _tokenised(request: TokeniseRequest) -> Path:
    identity = request.identity()
    source = Path(request.source).resolve()
    key = hashlib.sha256(json.dumps([str(source), identity], sort_keys=True).encode()).hexdigest()
    folder = _cache_folder() / f"{source.stem}-{key[:16]}"
    if finished(folder, identity) is None:
        rank_zero_info(f"Tokenising {source} into {folder}, once. {request.describe()}")
        tokenise(request, folder)
    return folder


def _cache_folder() -> Path:
    for folder in cache_folders():
        try:
            (folder / "documents").mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder / "documents", os.W_OK):
            return folder / "documents"
    raise ValueError(
        f"None of the cache folders {', '.join(map(str, cache_folders()))} can be written to."
        " Tokenise by the command (lightning-wlb tokenize) and give its folder as documents."
    )
