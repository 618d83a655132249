"""Reads pickles of checkpoints so that a few bytes cannot ask for much memory or time.

A pickle calls whatever it names. In :class:`NamedRecords` each of the few names that a format needs
becomes a record, which only keeps its arguments. ``torch.load(weights_only=True)`` makes tensors
and plain values by a list of calls. By some of them a few bytes can ask for any memory:
``bytearray(10**12)``, hexadecimal of hexadecimal, compressed records of the archive. So
:func:`load_plain` reads a file as records first, and only then lets torch read it.

A dictionary whose keys all have the same hash takes quadratic time, and the hash of a tuple that
holds the same tuple twice, level after level, takes for ever. So only keys that hardly collide are
allowed (:class:`KeyCheck`), also when a checkpoint is saved. A list that holds the same list twice,
level after level, takes for ever to print. So the values that calls are given, and those that a
file yields, are counted, each as often as it is named.

Cost: both are Python, and take about as long as torch's own reading of the pickle of ``meta.pt``,
which is in Python too; 0.2 ms more for each archive. :func:`load_plain` also computes checksums,
0.3 s for a GB of tensors; those of shards are in the manifest.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from pathlib import Path
from reprlib import repr  # it ends even for a value that contains itself
from typing import IO, Any, ClassVar, cast

import torch

from lightning_wlb.file_checks import open_regular

_CALLS = re.compile(
    r"OrderedDict|Counter|Size|device|set|complex|Parameter|_get_layout|encode|bytearray"
    r"|_rebuild_(tensor(_v[23])?|parameter(_with_state)?|from_type_v2)"
)
"""What torch's safe reader may call: nothing of a size that a number says, such as meta tensors."""

_OF_TENSORS = frozenset(dir(torch.nn.Parameter))
"""Names of a tensor's own attributes, which a pickle may not replace by false ones."""

_MOST_REPEATED = 1 << 20
"""Most values that a file's tensors may repeat: computing with them takes memory for each."""

_MOST_NAMES = 64
"""How often tensors may share a storage, as tied ones do, before its values count as repeated."""


def check_sizes(found: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets of up to 64 dims, which is torch's limit, else a ValueError."""
    fits = type(found) is tuple and len(found) <= 64
    if not fits or not all(type(each) is int and 0 <= each < 1 << 63 for each in found):
        raise ValueError(f"{repr(found)} in place of sizes")
    return cast(tuple[int, ...], found)


class KeyCheck:
    """Refuses keys of dictionaries, and members of sets, whose hashes somebody can choose.

    Hashes of texts and bytes differ from process to process, and few floats and 64-bit integers
    have the same hash. Tuples may be keys as long as all of them together have 10,000 members.
    """

    _KINDS = frozenset({str, bytes, bool, float, type(None), torch.dtype, type})

    def __init__(self) -> None:
        self._members = 10_000

    def __call__(self, keys: Iterable[Any]) -> None:
        """Raise ValueError at the first key whose type or size is not allowed."""
        for key in keys:
            kind = type(key)
            if kind is tuple:
                self._members -= 1 + len(key)
                if self._members < 0:
                    raise ValueError("too many of its keys are tuples: make texts of them")
                self(key)
            elif kind not in self._KINDS and not (kind is int and key.bit_length() <= 64):
                raise ValueError(
                    f"{repr(key)} cannot be a key: it takes a text, or a number of up to 64 bits"
                )


class Record:
    """Stands for an object of another class, and keeps the arguments and state that it is given."""

    __slots__ = ("arguments", "entries", "state")
    name: ClassVar[str] = ""  # of the class, with its module

    def __init__(self, *arguments: Any) -> None:
        self.arguments: tuple[Any, ...] = arguments
        self.entries: dict[Any, Any] = {}  # of an ordered dictionary
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Records(pickle._Unpickler):
    """Reads a pickle as plain values and records; only records' classes can be called in it."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]]
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    _other_keys: tuple[type, ...] = ()

    def __init__(self, stored: bytes) -> None:
        super().__init__(io.BytesIO(stored))
        self._known: dict[str, type[Record]] = {}
        self._check_keys = KeyCheck()
        self._room = _MOST_REPEATED + 16 * len(stored)  # honest pickles have one value per byte

    def count(self, value: Any) -> None:
        """Raise ValueError for too many values; each counts as often as it is named."""
        left = [value]
        while left and self._room >= 0:
            each = left.pop()
            if type(each) is dict:
                each = [*each, *each.values()]
            elif isinstance(each, Record):
                each = [each.arguments, each.entries, each.state]
            if type(each) in (list, tuple):
                self._room -= len(each)
                left += each if self._room >= 0 else ()
            elif type(each) is str:
                self._room -= len(each) // 4  # a letter takes up to 10 where it is printed
            elif type(each) is int:
                self._room -= each.bit_length() // 32
        if self._room < 0:
            raise ValueError("too many values: it names the same, or itself, again and again")

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        return self._known.setdefault(path, type(path, (Record,), {"name": path}))

    def _check_call(self, called: type[Record], arguments: tuple[Any, ...]) -> None:
        """Refuse a call that a subclass does not allow; here none is refused."""

    def _load_call(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        self.count(arguments)
        self._check_call(called, arguments)
        self.stack.append(called(*arguments))

    def _load_state(self) -> None:
        state = self.stack.pop()
        self.stack[-1].__setstate__(state)

    def _set(self, items: list[Any]) -> None:
        self._check_keys(each for each in items[::2] if not isinstance(each, self._other_keys))
        made = self.stack[-1]
        entries = made if type(made) is dict else made.entries
        entries.update(zip(items[::2], items[1::2], strict=True))


_Records.dispatch = {
    **{
        each: pickle._Unpickler.dispatch[each]
        for each in b"\x80c()]}Nae.Qt\x85\x86\x87\x88\x89KMJGBCX\x8a\x8c\x93\x94\x95hjqr"
    },
    **dict.fromkeys(b"R\x81", _Records._load_call),
    **dict.fromkeys(b"b", lambda self: self._load_state()),
    **dict.fromkeys(b"s", lambda self: self._set([self.stack.pop(-2), self.stack.pop()])),
    **dict.fromkeys(b"u", lambda self: self._set(self.pop_mark())),
}


class NamedRecords(_Records):
    """Unpickles plain values, records of ``names`` (with modules), and torch's dtypes.

    Its ``load`` raises an exception of any kind where the pickle is damaged or holds more.
    """

    _other_keys = (Record,)  # each is a key of its own

    def __init__(self, stored: bytes, names: Collection[str]) -> None:
        super().__init__(stored)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        """The record class of a name, for this pickle alone, which may change it; or a dtype."""
        if f"{module}.{name}" in self._names:
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def load_plain(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """Read a file of ``torch.save`` to the CPU, if it holds only tensors and plain values.

    With ``mmap`` the tensors of a file are mapped into memory.

    Raises:
        OSError, ValueError: there is no such file, or no regular one.
        pickle.UnpicklingError, RuntimeError, EOFError: it holds more, or is damaged.
    """
    with open_regular(source) if isinstance(source, Path) else nullcontext(source) as file:
        check_archive(file, sums=True)
        held = f"/proc/self/fd/{file.fileno()}" if mmap else ""  # not another file of this name
        given = (held if os.path.exists(held) else source) if mmap else file
        return torch.load(given, map_location="cpu", weights_only=True, mmap=mmap)


def load_state(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The state in a checkpoint's file; ``mmap`` is as in :func:`load_plain`.

    Raises:
        OSError, ValueError: there is no file, or it holds more than plain state, or is damaged.
    """
    try:
        state = load_plain(path, mmap=mmap)
    except (OSError, ValueError):
        raise
    except Exception as error:  # torch's reader raises any kind for odd arguments
        raise ValueError(
            f"{path} cannot be read as a checkpoint: it is damaged, or was made to hold objects of"
            f" classes, which may run code when they are read ({error}). Use another checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise ValueError(
            f"{path} is no checkpoint: it holds a {type(state).__name__}, not what a Trainer saves."
        )
    return state


def check_archive(file: IO[bytes], *, sums: bool = False) -> None:
    """Check an archive before torch reads it, and leave the file at its beginning.

    ``sums``: also compare its records with their checksums, which torch does not do.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            size = file.seek(0, io.SEEK_END)
            file.seek(max(0, size - 98))
            tail, place = file.read(), struct.pack("<4sIQI", b"PK\x06\x07", 0, size - 98, 1)
            large = tail[-42:-38] == place[:4]
            directory = int.from_bytes(tail[-50:-42] if large else tail[-6:-2], "little")
            file.seek(0)  # torch takes a file that begins otherwise for an old format
            # No record is compressed, there twice (by name, by place, or in a second archive),
            # elsewhere, a folder (which torch counts as read), or named otherwise for a C reader.
            if (
                file.read(4) != b"PK\x03\x04"
                or tail[-22:-18] != b"PK\x05\x06"
                or (large and (tail[-42:-22] != place or tail[-98:-94] != b"PK\x06\x06"))
                or archive.start_dir != directory  # zipfile corrects a wrong place
                or any(each.filename != each.orig_filename for each in records)
                or any(each.compress_type != zipfile.ZIP_STORED for each in records)
                or any(each.external_attr & 0x10 or each.is_dir() for each in records)
                or not all(map(_is_in_one_place, records))
                or any(each.file_size != each.compress_size for each in records)
                or sum(each.file_size for each in records) > size
                or len({each.filename.lower() for each in records}) < len(records)
            ):
                raise ValueError("its archive is not as torch writes it")
            sizes = {each.filename: each.file_size for each in records}
            # torch finds one in capitals too
            (name,) = (each for each in sizes if each.lower().endswith("/data.pkl"))
            run = _DryRun(archive.read(name), name[: -len("data.pkl")], sizes)
            run.count(run.load())
            if sums and (damaged := archive.testzip()):
                raise ValueError(f"{damaged} is not what was written")
    except Exception as error:  # a forged file can lead to any
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
    file.seek(0)


def _is_in_one_place(record: zipfile.ZipInfo) -> bool:
    """Whether the directory gives a record's place once: of two, readers may take either."""
    block = int.from_bytes(record.extra[2:4], "little") + 4
    return len(record.extra) in (0, block)


class _DryRun(_Records):
    """Reads a pickle of torch's as records; ``sizes``: bytes of the archive's files."""

    def __init__(self, stored: bytes, folder: str, sizes: dict[str, int]) -> None:
        super().__init__(stored)
        self._folder, self._sizes = folder, sizes
        self._named, self._repeated = Counter[str](), 0
        given = [
            each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
            for each in torch.serialization.get_safe_globals()
        ]
        # torch's own entries take any arguments: a DeviceMesh begins process groups.
        self._refused = {name for each, name in given if f"{each.__module__}.".startswith("torch.")}
        self._allowed = {name for _, name in given} - self._refused

    def find_class(self, module: str, name: str) -> Any:
        """The record class of a name; names in torch's own safe list are refused."""
        if f"{module}.{name}" in self._refused:
            raise ValueError(f"it names {module}.{name}")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """A storage; it may not claim more values than its file has bytes, as a mapped one can."""
        _, _, key, _, values = pid
        held = self._sizes.get(f"{self._folder}data/{key}", 0) if type(key) is str else -1
        if not 0 <= values <= held:
            raise ValueError(f"a storage of {values:,} values in {held:,} bytes")
        return Record(pid)

    def _load_state(self) -> None:
        """Give a state to a state dict or to a user's class only: a tensor's state is a size.

        An ordered dictionary's state could replace its methods and hide its entries from checks.
        """
        made, state = getattr(type(self.stack[-2]), "name", ""), self.stack[-1]
        plain = type(state) is dict and state.keys() <= {"_metadata"}  # as in a module's state dict
        if made not in self._allowed and not (made == "collections.OrderedDict" and plain):
            raise ValueError(f"it gives a state to {made or repr(self.stack[-2])}")
        super()._load_state()

    def _check_call(self, called: type[Record], arguments: tuple[Any, ...]) -> None:
        path, first = called.name, cast(Any, arguments[0] if arguments else "")
        name = path.rpartition(".")[2]
        bounded = {
            "encode": type(first) is str and arguments[1:] == ("latin1",),
            # Other codecs take quadratic time (punycode), or decompress.
            "bytearray": (type(first) is str and arguments[1:] in (("latin-1",), ("latin1",)))
            or (not arguments[1:] and getattr(first, "name", "") == "_codecs.encode")
            or not arguments,
            "OrderedDict": not arguments,
            # Not a tensor: without values it may have any number of rows.
            "set": not arguments or type(first) in (list, tuple),
            "Counter": not arguments or type(first) is dict,
            "Size": type(first) is tuple,
            "_rebuild_from_type_v2": "._rebuild_tensor" in getattr(first, "name", ""),
        }
        if path not in self._allowed and not (_CALLS.fullmatch(name) and bounded.get(name, True)):
            raise ValueError(f"it calls {path} with {repr(arguments)}")
        if name == "_rebuild_from_type_v2":
            self._check_call(first, arguments[2])
        if name in ("_rebuild_from_type_v2", "_rebuild_parameter_with_state"):
            state = arguments[3]  # attributes, or a tuple of attributes and slots
            for each in state if type(state) is tuple else (state,):
                if each and not (type(each) is dict and _OF_TENSORS.isdisjoint(each)):
                    raise ValueError(f"it gives a tensor other attributes: {repr(each)}")
        if name.startswith("_rebuild_tensor"):
            _, _, key, _, held = first.arguments[0]  # of the storage, as persistent_load checked it
            values = math.prod(check_sizes(arguments[2]))
            check_sizes(arguments[3])  # strides
            before = max(self._named[key] - _MOST_NAMES * held, 0)
            self._named[key] += values
            again = max(self._named[key] - _MOST_NAMES * held, 0) - before
            self._repeated += max(values - held, again)
            if self._repeated > _MOST_REPEATED:
                raise ValueError(
                    f"a tensor of {repr(arguments[2])} in {held:,} values, and with those before it"
                    f" {self._repeated:,} that are repeated"
                )
        for items in arguments:
            if type(items) is list or (type(items) is tuple and name in ("set", "Counter")):
                self._check_keys(items)
