"""Checks of files and folders that somebody else may have made or may exchange.

Whoever opens a FIFO, a device, or a link to one may wait or read for ever. So every reader of a
cache, a manifest, a store, a profile, a tokenizer's or a model's folder checks files here first
(SECURITY.md lists the readers). Nobody else can write into a folder that passes :func:`own_folder`,
or exchange it, and no link in it is followed. If a library opens a file by its name, the name is
checked just before: whoever may write to the folder can still exchange the file in between.

Cost: two system calls a file. Owners are not checked on systems without them, such as Windows.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, NoReturn

SMALL_BYTES = 1 << 26
"""Most bytes of a file that only describes others: a manifest, a profile, an index, settings."""
_COPY = re.compile(r"( \(\d+\)| - Copy| copy)(?=\.(jsonl|jsonl\.gz|parquet|arrow)$)")
SHARD = re.compile(
    r"(.*[-_.])(\d+)([-_]of[-_])(\d+)(-[0-9a-f]{16})?(\.jsonl|\.jsonl\.gz|\.parquet|\.arrow)$"
)
"""The name of a shard, such as ``data-00000-of-00004.arrow``; the hub once added a hash."""
_KEPT = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow$")
_SPLIT = re.compile(
    r"(?i)(?<![a-z])(?:(train(?:ing)?)|val(?:id(?:ation)?)?|dev|test(?:ing)?|eval(?:uation)?)"
    r"(?![a-z])"
)
_NOWAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
NO_USER = 65534  # as a user namespace shows all users whom it does not have
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def my_user() -> int:
    """The user id of this process; 0 on a system without user ids."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def check_regular(path: str | Path, most: int | None = None, *, links: bool = True) -> int:
    """Refuse anything but a regular file of at most ``most`` bytes; returns its size in bytes.

    Args:
        links: whether a link to a regular file is accepted.

    Raises:
        OSError: the file does not exist, or may not be inspected.
        ValueError: it is not a regular file, has more bytes, or reports none and has some.
    """
    size = _checked(os.stat(path, follow_symlinks=links), path, most)
    if size == 0 and os.access(path, os.R_OK):
        with os.fdopen(os.open(path, os.O_RDONLY | _NOWAIT), "rb", buffering=0) as file:
            # Some files in /proc report 0 bytes and never end; None means that more may come.
            if file.read(8) != b"":
                raise ValueError(
                    f"{path} says that it has no bytes, but more come, and reading it might never"
                    " end. Put a file of a known size there."
                )
    return size


def open_regular(
    path: str | Path, most: int | None = None, *, links: bool = True
) -> io.BufferedReader:
    """Open a regular file to read its bytes; arguments and errors are :func:`check_regular`'s."""
    check_regular(path, most, links=links)  # before opening, to which a device may react
    flags = os.O_RDONLY | _NOWAIT | (0 if links else getattr(os, "O_NOFOLLOW", 0))
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        _checked(os.fstat(file.fileno()), path, most)
    except ValueError:
        file.close()
        raise
    return file


def read_bytes(path: str | Path, most: int = SMALL_BYTES, *, links: bool = True) -> bytes:
    """The content of a regular file; arguments and errors are :func:`check_regular`'s."""
    with open_regular(path, most, links=links) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise _too_large(path, len(content), most)
    return content


def read_json(path: str | Path, most: int = SMALL_BYTES, *, links: bool = True) -> Any:
    """Parse a regular JSON file; errors: :func:`check_regular`'s and :func:`parse_json`'s."""
    return parse_json(read_bytes(path, most, links=links))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError for other text, or if it is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


@contextmanager
def written_aside(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing under a hidden name, and rename it when all of it is written."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.aside")
    try:
        with aside.open("xb") as file:  # never through a link
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:  # it may name no file (a full disk), or the hidden one
        if str(error.filename) in ("None", str(aside)):
            error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict of its pairs; ValueError if two pairs have the same name."""
    record = dict(pairs)
    if len(record) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"an object has the name {twice!r} twice, and only one of them can count")
    return record


def check_once(path: str | Path, seen: dict[str, str]) -> None:
    """Add a path to ``seen`` (resolved path -> path given); ValueError if it is there already.

    Its documents would come twice.
    """
    real = str(follow(path)[0])
    if real in seen:
        raise ValueError(
            f"{path} and {seen[real]} are the same by a link, or named twice, so that documents"
            " would come twice. Remove one of them from the source."
        )
    seen[real] = str(path)


def check_no_copies(files: Sequence[Path], links: bool = True) -> None:
    """Raise ValueError for documents that come twice: from copies of a file, or by a link.

    Names show copies: ``a (1).parquet``, ``a copy.jsonl`` or ``a.jsonl.gz`` beside the original,
    shards of two totals, cache files of ``datasets``. ``links=False``: links are checked already.
    """
    seen: dict[str, str] = {}
    for path in files if links else ():
        check_once(path, seen)
    names = set(map(str, files))
    for path in files:
        plain = _COPY.sub("", path.name)
        for original in {plain, plain.removesuffix(".gz")} - {path.name}:
            if str(path.with_name(original)) in names:
                raise ValueError(
                    f"{path} and its copy beside it, {original}, would both be read, and documents"
                    " come twice. Remove or rename one of them."
                )
    written: dict[tuple[Path, str], tuple[str, Path]] = {}
    for path in files:
        shard, pattern = SHARD.match(path.name), shards_of(path)
        marks = [("", pattern.name if _KEPT.match(path.name) else "", pattern)]
        if shard:
            marks += [(shard[1], shard[4], pattern), (shard[1] + shard[2], path.name, path)]
        for series, mark, shown in marks:
            first, other = written.setdefault((path.parent, series), (mark, shown))
            if first != mark:
                raise ValueError(
                    f"{other} and {shown} are two writings, whose documents would come twice."
                    " Give one of them, or move the other elsewhere."
                )


def shards_of(path: Path) -> Path:
    """The pattern of a file and its further shards, such as ``data-*-of-00004.arrow``."""
    pattern = SHARD.sub(lambda m: f"{m[1]}*{m[3]}{m[4]}{'-*' if m[5] else ''}{m[6]}", path.name)
    return path.with_name(pattern)


def check_one_split(files: Sequence[Path], folder: Path) -> None:
    """Raise ValueError if all files name their split, and only some of them are for training."""
    splits = [_SPLIT.search(path.relative_to(folder).as_posix()) for path in files]
    train = {bool(each[1]): path for each, path in zip(splits, files, strict=True) if each}
    if all(splits) and len(train) > 1:
        raise ValueError(
            f"{folder} has files of several splits, such as {train[True]} and {train[False]}. Give"
            " the files of one split, by a folder of their own or a pattern."
        )


def check_none_left_out(folder: Path, *suffixes: str) -> None:
    """Raise ValueError for files that ``folder/*.suffix`` misses: in subfolders, or ``.PARQUET``.

    Names that begin with ``.`` or ``_``, and links to folders, are passed over.
    """
    others = list[Path]()
    for at, below, names in islice(os.walk(folder), 10_000):  # a home may be given by mistake
        below[:] = [name for name in below if name[0] not in "._"]
        found = [Path(at, name) for name in names if name[0] not in "._"]
        others += [each for each in found if each.suffix.lower() in suffixes]
    others = [path for path in others if path.parent != folder or path.suffix not in suffixes]
    if others:
        check_one_split(others, folder)
        files = f"*{min(others).suffix.lower()}"
        raise ValueError(
            f"{min(others)} would be left out: only {folder / files} is read. Give another folder,"
            f" or a pattern: {folder / '**' / files} for all, {folder / files} for the folder's"
            " own files. Rename a file whose suffix has other letters."
        )


def refuse_closed(error: OSError) -> NoReturn:
    """Raise ValueError for a folder that cannot be read; ``os.walk`` skips it without onerror."""
    raise ValueError(
        f"{error.filename} cannot be looked into ({error.strerror}), and what is in it would be"
        " left out without a word. Let this user read it, or take it out of the source."
    ) from error


def printable(text: str) -> str:
    """A text with its control characters escaped, so that a terminal does not obey them."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def own_folder(path: Path) -> Path:
    """Make a folder and its parents, or check an existing one: only this user may write to it.

    Nobody else can exchange it (:func:`check_parents`), so files written to it stay in it. A new
    folder has mode 0700, whatever the umask. An existing one is narrowed to that, unless it has
    entries and others may write to it. Returns its path without links.

    Raises:
        OSError: it cannot be made or inspected.
        ValueError: it is no folder (a link is none), or others may write to it or exchange it.
    """
    path = check_links(path.parent) / path.name  # from here on links are a stranger's
    for each in (*reversed(path.parents), path):
        if not os.path.lexists(each):
            # Refused before it is made: root leaves no folder in a user's home.
            check_parents(each)
            each.mkdir(0o700, exist_ok=True)  # by default a umask of 002 lets the group write
    check_parents(path)
    status = path.lstat()
    rights = stat.S_IMODE(status.st_mode)
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == my_user()
    if mine and rights & 0o077 and not (rights & 0o022 and any(path.iterdir())):
        path.chmod(rights & 0o7700)
    return check_folder(path, 0o700)


def left_behind(mine: Path, names: re.Pattern[str]) -> list[Path]:
    """Folders that killed processes have left: beside ``mine``, with a name that matches ``names``.

    Nothing was written to them for an hour, by the file system's clock: ``mine`` was just made. A
    folder that vanishes meanwhile, or cannot be read, is left out.
    """
    now, found = mine.stat().st_mtime, []
    for other in mine.parent.iterdir():
        if names.fullmatch(other.name):
            with suppress(OSError):
                written = max(each.stat().st_mtime for each in (other, *other.rglob("*")))
                found += [other] if now - written > 3600 else []
    return found


def check_folder(path: Path, mode: int = 0o755) -> Path:
    """Refuse a folder that is not this user's, or gives others more rights than ``mode``.

    Raises:
        OSError: it cannot be inspected.
        ValueError: it is no folder (a link is none), another user's, or gives others more rights.
    """
    status = path.lstat()
    check_owner(status, path)
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{path} is {_kind(status)}, not a folder. Remove it.")
    if hasattr(os, "geteuid") and status.st_mode & ~mode & 0o077:
        raise ValueError(f"{path} may be written to by others than its owner. Remove it.")
    return path


def check_parents(path: Path) -> None:
    """Refuse a path, which has no links, if somebody else could put another in its place.

    Whoever may rename in a parent can. So all parents must belong to this user or root, and neither
    the group nor others may write to one, unless it is sticky. (Access lists show in the group's
    rights. OpenSSH asks the same for its keys.)
    """
    # In a user namespace root may have another number; whoever owns "/" can do anything.
    trusted, strange = {my_user(), 0, Path("/").stat().st_uid}, follow(path)[1]
    for parent in path.parents if hasattr(os, "geteuid") else ():
        status = parent.stat()
        shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if shared or status.st_uid not in trusted or parent in strange:
            mine = status.st_uid == my_user()
            use = f"Take that from them (chmod go-w {parent}), or use" if mine else "Use"
            raise ValueError(
                f"Others may write to {parent} and exchange {path} (user {status.st_uid}, mode"
                f" {stat.S_IMODE(status.st_mode):o}). {use} a folder elsewhere."
            )


def is_open(status: os.stat_result) -> bool:
    """Whether strangers may put their own files into a folder.

    Everybody may write to it, or a group whose members do not trust each other (it is sticky).
    """
    sticky_group = stat.S_IWGRP | stat.S_ISVTX
    return bool(status.st_mode & stat.S_IWOTH) or status.st_mode & sticky_group == sticky_group


def follow(path: str | Path) -> tuple[Path, dict[Path, os.stat_result]]:
    """Where a path leads, and the folders and links on the way that a stranger may have made.

    A stranger's folder or link belongs neither to this user nor to root, and lies in an open folder
    (:func:`is_open`) or behind another stranger's folder or link. Links are followed one by one,
    since a link of this user may lead to a stranger's, and at most 40, as in the kernel. The rest
    behind a step that is absent or closed is kept. ValueError after 500 steps: links may be long.
    """
    found: dict[Path, os.stat_result] = {}
    # If root has the number of all whom a user namespace lacks, strangers may have it too.
    trusted, links = {my_user(), 0} | ({Path("/").stat().st_uid} - {NO_USER}), 0
    at, names, steps = Path("/"), [*reversed(Path(path).absolute().parts)], 0
    with suppress(OSError):
        while names and links <= 40:
            if (steps := steps + 1) > 500:
                raise ValueError(f"{path} leads through more than 500 folders and links. Move it.")
            step = at.parent if names[-1] == ".." else at / names[-1]
            status = step.lstat()
            if status.st_uid not in trusted and (found or is_open(step.parent.stat())):
                found[step] = status
            linked = stat.S_ISLNK(status.st_mode)
            leads = Path(os.readlink(step)).parts if linked else ()
            at, links = at if linked else step, links + linked
            names[-1:] = reversed(leads)
    return Path(os.path.normpath(at.joinpath(*reversed(names)))), found


def check_links(path: Path) -> Path:
    """Where a path leads; ValueError if a stranger's link is on the way (:func:`follow`)."""
    real, found = follow(path)
    if link := next((each for each in found if stat.S_ISLNK(found[each].st_mode)), None):
        raise ValueError(
            f"{path} leads to {real} by {link}, a link of user {found[link].st_uid}, where others"
            f" may put what they like. Use a folder of your own or, if you trust that link, {real}."
        )
    return real


def check_owner(status: os.stat_result, path: Path, owners: Iterable[int] = ()) -> None:
    """Refuse a file that belongs neither to this process's user nor to one of ``owners``."""
    if hasattr(os, "geteuid") and status.st_uid not in {my_user(), *owners}:
        raise ValueError(
            f"{path} belongs to user {status.st_uid}, and this process to user {my_user()}: what"
            " another user has put there is not read. Remove it."
        )


def _checked(status: os.stat_result, path: str | Path, most: int | None) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"{path} is {_kind(status)}. Put a regular file there: reading others might never end."
        )
    if most is not None and status.st_size > most:
        raise _too_large(path, status.st_size, most)
    return status.st_size


def _too_large(path: str | Path, size: int, most: int) -> ValueError:
    return ValueError(
        f"{path} has {size:,} bytes, and no more than {most:,} are read of such a file. It is"
        " damaged, or made to fill the memory: use another."
    )


def _kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
