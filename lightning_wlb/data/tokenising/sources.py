"""Files of texts and chats, cut into shards, and their rows with the place of each row.

A source is a file of JSON lines (``.jsonl``, ``.jsonl.gz``), a text file (``.txt``, ``.md``: one
document), or a folder of one of these kinds, searched recursively, in order of path. Links are
followed. Files that are found twice through links are refused, as are copies and files of several
splits (:func:`.check_no_copies`, :func:`.check_one_split`). Hidden files and folders are skipped,
and so are text files beside JSON lines.

Shards are about equal byte ranges of the concatenated files. They depend only on the files' sizes,
never on the number of processes that read them. A line belongs to the shard in which it begins;
text files and compressed files are not divided.

Cost: every file's size and times of change; a shard is read twice, for its rows and its checksum.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from lightning_wlb import file_checks
from lightning_wlb.data.cache import fingerprint
from lightning_wlb.model_folder_checks import check_beside

LINES = (".jsonl", ".jsonl.gz")
TEXTS = (".txt", ".md")
TEXT_COLUMN = "text"
MOST_BYTES = 1 << 28
"""Most bytes of a document: a small compressed file may contain an endless line."""

_MOST_SHARDS = 1024
_LEAST_SHARD_BYTES = 4 << 20


class Part(NamedTuple):
    """Bytes ``[start, stop)`` of a file: the lines that begin there, or a whole file."""

    path: Path
    start: int
    stop: int


class Row(NamedTuple):
    """One record, which begins at byte ``at`` of the (uncompressed) file and has ``size`` bytes."""

    record: dict[str, Any]
    path: Path
    at: int
    size: int

    def place(self) -> str:
        """``file:line``, or a text file's path; slow, since it counts lines, so only for errors."""
        return _place(self.path, self.at)


@dataclass(frozen=True)
class Source:
    """The files of a source in order, and the names of files in its folder that are not read."""

    path: Path
    files: tuple[Path, ...]
    left_out: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> Source:
        """Find the files of a source.

        Raises:
            ValueError: there is no such path, no readable file, or an unreadable folder; a file or
                folder is found twice; or there are files of several splits.
        """
        path = Path(path)
        known = f"files ending in {', '.join([*LINES, *TEXTS])}, or a folder of such files"
        if path.is_file():
            if not path.name.endswith(LINES + TEXTS):
                raise ValueError(f"{path} is not a source of texts. Give {known}.")
            return cls(path, (path,))
        if not path.is_dir():
            raise ValueError(f"{path} is neither a file nor a folder. Give {known}.")
        found = _files_below(path)
        chosen = [each for each in found if each.name.endswith(LINES)]
        chosen = chosen or [each for each in found if each.name.endswith(TEXTS)]
        if not chosen:
            raise ValueError(
                f"{path} holds {len(found)} files and none that can be read. Give {known}."
            )
        check_beside(path, *chosen)
        file_checks.check_no_copies(chosen, links=False)
        file_checks.check_one_split(chosen, path)
        left = sorted(set(found) - set(chosen))
        return cls(path, tuple(chosen), tuple(each.relative_to(path).as_posix() for each in left))

    @property
    def is_lines(self) -> bool:
        """Whether the files hold JSON lines, rather than one text each."""
        return self.files[0].name.endswith(LINES)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every file."""
        return tuple(each.stat().st_size for each in self.files)

    def identity(self) -> dict[str, Any]:
        """The numbers of files and bytes, and a fingerprint of names, sizes and times.

        It includes the times of change of status, since copies and archives set the other times.
        """
        root = self.path if self.path.is_dir() else self.path.parent
        digest = fingerprint(self.files, root, [each.stat().st_ctime_ns for each in self.files])
        return {"files": len(self.files), "bytes": sum(self.sizes), "files_digest": digest}

    def shards(self) -> list[list[Part]]:
        """The files cut into shards; every byte is in exactly one part."""
        most = max(_LEAST_SHARD_BYTES, -(-sum(self.sizes) // _MOST_SHARDS))
        shards: list[list[Part]] = [[]]
        room = most
        for path, size in zip(self.files, self.sizes, strict=True):
            start = 0
            if not size and not path.name.endswith(LINES):
                shards[-1].append(Part(path, 0, 0))  # An empty text, which counts as skipped.
            while start < size:
                if room <= 0:
                    shards.append([])
                    room = most
                stop = min(start + room, size) if path.suffix == ".jsonl" else size
                shards[-1].append(Part(path, start, stop))
                room -= stop - start
                start = stop
        return shards


def checksum(parts: list[Part]) -> int:
    """The CRC-32 of a shard's bytes, of the bounds of its files, and of how each file is read.

    A file's name decides that: equal bytes are other documents as lines, as a text, or compressed.
    """
    found = 0
    for part in parts:
        how = part.path.suffix if part.path.name.endswith(LINES) else "text"
        found = zlib.crc32(f"{how} {part.start}-{part.stop}".encode(), found)
        with file_checks.open_regular(part.path) as file:
            left = part.stop - file.seek(part.start)
            while block := file.read(min(left, 1 << 20)):
                found, left = zlib.crc32(block, found), left - len(block)
    return found


def rows(part: Part) -> Iterator[Row]:
    """The rows of a part, without blank lines.

    Raises:
        ValueError: a line is not a JSON object or not UTF-8; names file and line.
    """
    if not part.path.name.endswith(LINES):
        content = file_checks.read_bytes(part.path, MOST_BYTES)
        try:
            yield Row({TEXT_COLUMN: content.decode("utf-8-sig")}, part.path, 0, len(content))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{part.path}: byte {error.start} is no UTF-8. Convert the file to UTF-8."
            ) from error
        return
    compressed = part.path.suffix == ".gz"  # a few bytes of which could be gigabytes of values
    most = min(MOST_BYTES, max(1 << 24, 64 * part.stop)) if compressed else MOST_BYTES
    try:
        with _opened(part.path) as file:
            at = blank = part.start  # `blank`: where the last line begins that is not blank
            if at:
                # A line that has begun before this part belongs to the part before.
                file.seek(at - 1)
                at += len(file.readline(MOST_BYTES)) - 1
            while (compressed or at < part.stop) and (line := file.readline(most + 1)):
                if len(line) > most:
                    raise ValueError(
                        f"{_place(part.path, at)} has more than {most:,} bytes, and a line is one"
                        " document. Divide it, or remove it."
                    )
                if not line.isspace():
                    yield Row(_record(line, part.path, at), part.path, at, len(line))
                    blank = at
                elif compressed and at - blank > most:
                    raise ValueError(f"{part.path} has {at - blank:,} bytes of blank lines.")
                at += len(line)
    except (zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{part.path} cannot be unpacked: {error}. Compress it again.") from error


def folders_below(folder: str | Path, seen: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Walk a folder and those below it, links too, with their files' names; not hidden folders.

    Raises:
        ValueError: a folder cannot be read, comes twice (:func:`.check_once`), or is 100 deep.
    """
    for at, below, names in os.walk(folder, onerror=file_checks.refuse_closed, followlinks=True):
        file_checks.check_once(at, seen)
        if at.count(os.sep) > 100:
            raise ValueError(f"{at} is more than 100 folders deep. Move it further up.")
        # A file system's own lost+found is root's alone.
        below[:] = [name for name in below if name[0] != "." and name != "lost+found"]
        yield at, names


def _files_below(folder: Path) -> list[Path]:
    found: list[Path] = []
    seen: dict[str, str] = {}
    for at, names in folders_below(folder, seen):
        found += [Path(at, name) for name in names if not name.startswith(".")]
    links = [path for path in found if path.is_symlink()]
    for path in links:
        if not path.exists():
            raise ValueError(f"{path} is a link that leads to nothing. Mend or remove it.")
    for path in found if links else []:
        file_checks.check_once(path, seen)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _opened(path: Path) -> BinaryIO:
    file_checks.check_regular(path)
    return cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb"))


def _record(line: bytes, path: Path, at: int) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"), object_pairs_hook=file_checks.unambiguous)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{_place(path, at)} is no UTF-8 from byte {error.start} of the line on. Convert it."
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{_place(path, at)} is no JSON: {error.msg} at character {error.pos + 1} of the line."
            " Mend or remove the line; each line is one JSON object."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_place(path, at)}: {error}. Mend or remove the line.") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{_place(path, at)} holds a {type(record).__name__}, but each line is one JSON object,"
            ' as in {"text": "..."}. Mend or remove the line.'
        )
    return record


def _place(path: Path, at: int) -> str:
    if not path.name.endswith(LINES):
        return str(path)
    lines, left = 1, at
    with _opened(path) as file:
        while left and (block := file.read(min(left, 1 << 20))):
            lines += block.count(b"\n")
            left -= len(block)
    return f"{path}:{lines}"
