"""Files of texts and chats, cut into shards, and their rows with the place of each.

A source is a file of JSON lines (``.jsonl``, ``.jsonl.gz``), a text file (``.txt``, ``.md``: one
document), or a folder of one of these kinds, searched with everything below it, in order of path.
Links are followed, and what is found twice by them is refused, as are copies and files of several
splits (:func:`.check_no_copies`, :func:`.check_one_split`). Hidden files and folders are passed
over, and so are text files beside JSON lines.

Shards are ranges of bytes of the files one after another, about equal, and depend on the files'
sizes alone: never on how many processes read them. A line belongs to the shard in which it begins;
text files and compressed files are not divided.

Cost: one look at every file's size and times of change; a shard is read from its first byte, once
for its rows and once for its checksum.
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

LINES = (".jsonl", ".jsonl.gz")
TEXTS = (".txt", ".md")
TEXT_COLUMN = "text"
MOST_BYTES = 1 << 28
"""Most bytes of a document: a few bytes of a compressed file may stand for a line without end."""

_MOST_SHARDS = 1024
_LEAST_SHARD_BYTES = 4 << 20


class Part(NamedTuple):
    """Bytes ``[start, stop)`` of a file: the lines that begin there, or a file as a whole."""

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
        """``file:line``, or the file where it is one document; counts lines, so for errors only."""
        return _place(self.path, self.at)


@dataclass(frozen=True)
class Source:
    """The files of a source in order, and the names of those in its folder that are not read."""

    path: Path
    files: tuple[Path, ...]
    left_out: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> Source:
        """Find the files of a source.

        Raises:
            ValueError: nothing is there, nothing that can be read, or a folder that cannot; a file
                or folder twice, or files of several splits.
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
        file_checks.check_no_copies(chosen, links=False)
        file_checks.check_one_split(chosen, path)
        left = sorted(set(found) - set(chosen))
        return cls(path, tuple(chosen), tuple(each.relative_to(path).as_posix() for each in left))

    @property
    def is_lines(self) -> bool:
        """Whether the files hold JSON lines, and not one text each."""
        return self.files[0].name.endswith(LINES)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every file."""
        return tuple(each.stat().st_size for each in self.files)

    def identity(self) -> dict[str, Any]:
        """How many files and bytes there are, and a fingerprint of names, sizes and times.

        It knows the times of change of status, too, since copies and archives set the others.
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
                shards[-1].append(Part(path, 0, 0))  # An empty text, which is counted.
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
    """The CRC-32 of a shard's bytes, of where its files begin and end, and how each is read.

    That is by its name: the same bytes are other documents as lines, as a text, or to be unpacked.
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
    """The rows of a part, blank lines left out.

    Raises:
        ValueError: naming file and line of what is no JSON object, or no UTF-8.
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
    compressed = part.path.suffix == ".gz"  # of which few bytes could be gigabytes of values
    most = min(MOST_BYTES, max(1 << 24, 64 * part.stop)) if compressed else MOST_BYTES
    try:
        with _opened(part.path) as file:
            at = blank = part.start  # the last byte that was no blank line's
            if at:
                # The line that is under way here belongs to the part in which it begins.
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


def _files_below(folder: Path) -> list[Path]:
    found: list[Path] = []
    seen: dict[str, str] = {}
    for at, below, names in os.walk(folder, onerror=file_checks.refuse_closed, followlinks=True):
        file_checks.check_once(at, seen)
        below[:] = [name for name in below if not name.startswith(".")]
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
            f"{_place(path, at)} is no UTF-8 from byte {error.start} of the line on. Convert the"
            " file to UTF-8."
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
