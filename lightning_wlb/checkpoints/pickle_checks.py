"""Pickles of a checkpoint that can ask for no more memory or time than their bytes are worth.

A pickle calls what it names. In :func:`load_records` each of the few names that a format needs
becomes a record which only keeps its arguments, so that no function and no class of the process can
be reached, called or changed. ``torch.load(weights_only=True)`` makes tensors and plain values by a
list of calls, some of which a few bytes can let grow without bounds: ``bytearray(10**12)``, a text
encoded in hexadecimal forty times over, a record of the archive that unpacks to a thousand times
its size. :func:`load_plain` goes through a file as records first, and only then lets torch read it.

Refused besides: places in the memo beyond the file's bytes (the reader makes room up to there), and
tuples of the same tuples over and over as keys, whose hash takes for ever.

Cost: :func:`load_records` twice what unpickling takes; :func:`load_plain` twice torch's reading of
the pickle, which is in Python already, and 0.2 ms for each archive; tensors are not looked at.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from reprlib import repr  # which ends, whatever is made up of itself
from typing import IO, Any, ClassVar

import torch

from lightning_wlb.file_checks import open_regular

_STEPS = 100
"""Steps of hashing that each byte of a pickle may take."""
_CALLS = re.compile(
    r"OrderedDict|Counter|Size|device|set|complex|Parameter|_get_layout|encode|bytearray"
    r"|_rebuild_(tensor(_v[23])?|parameter(_with_state)?|sparse_tensor|meta_tensor_no_storage"
    r"|from_type_v2)"
)
"""What torch's safe reader may call, but for what makes room by a number."""


class Record:
    """Stands for an object of another class, and keeps the arguments and state it was made of."""

    __slots__ = ("arguments", "state")
    name: ClassVar[str] = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments: tuple[Any, ...] = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_records(stored: bytes, names: Mapping[str, Collection[str]]) -> Any:
    """Unpickle plain values, records of ``names`` (by module), and torch's dtypes.

    Raises:
        Exception: of any kind, where the pickle is damaged or holds more.
    """
    _check_operations(stored)
    return _RecordUnpickler(io.BytesIO(stored), names).load()


class _RecordUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], names: Mapping[str, Collection[str]]) -> None:
        super().__init__(file)
        self._names = names
        self._known: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A record's class, which only this pickle could change; or a dtype."""
        if name in self._names.get(module, ()):
            return self._known.setdefault(name, type(name, (Record,), {"name": name}))
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


_STEP = re.compile(
    rb"((?:[()\]}NtabesuR\x81\x85-\x89\x93]|[K\x80].|M..|J....|[G\x95].{8})*+)"
    rb"(?:(\x94)|h(.)|j(....)|[C\x8a\x8c](.)|[BX](....)|(\.)|(.?))",
    re.DOTALL,
)
"""Harmless operations, and then: memorise, recall (2), text or bytes (2), the end, or another."""
_TUPLES, _OTHERS = b"t\x85\x86\x87", b"}])R\x81\x93"  # operations that make what is memorised


def _check_operations(stored: bytes) -> None:
    """Go through the operations of a pickle of protocol 4 or 5, and refuse what leads astray."""
    at = memo = 0
    tuples: set[int] = set()
    while (found := _STEP.match(stored, at)) is not None:
        at, kind = found.end(), found.lastindex or 0
        if kind == 2:
            made = found[1][-1:]
            if not made or made not in _TUPLES + _OTHERS:
                raise pickle.UnpicklingError(f"byte {at} memorises what was not made there")
            if made in _TUPLES:
                tuples.add(memo)
            memo += 1
        elif kind in (3, 4):
            if int.from_bytes(found[kind], "little") in tuples:
                raise pickle.UnpicklingError("it uses a tuple twice")
        elif kind == 7:
            return
        elif kind == 8:
            raise pickle.UnpicklingError(f"operation {found[8]!r} before byte {at}")
        else:
            at += int.from_bytes(found[kind], "little")
            if stored[at : at + 1] == b"\x94":
                memo, at = memo + 1, at + 1


def load_plain(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """Read what ``torch.save`` wrote, if it is tensors and plain values, to the CPU.

    Args:
        source: a regular file, or a stream, which is read from its beginning.
        mmap: whether to map the tensors of a file into memory.

    Raises:
        OSError, ValueError: there is no such file, or no regular one.
        pickle.UnpicklingError, RuntimeError, EOFError: it holds more, or is damaged.
    """
    if isinstance(source, Path):
        with open_regular(source) as file:
            check_archive(file)
            if not mmap:
                return torch.load(file, map_location="cpu", weights_only=True)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    check_archive(source)
    return torch.load(source, map_location="cpu", weights_only=True)


def check_archive(file: IO[bytes]) -> None:
    """Go through an archive that torch is to read, and leave the file at its beginning."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            file.seek(0, io.SEEK_END)
            size = file.tell()
            # Nothing is packed, or there twice: by name, by place, or as a second archive.
            if (
                any(each.compress_type != zipfile.ZIP_STORED for each in records)
                or sum(max(each.file_size, each.compress_size) for each in records) > size
                or len({each.filename.lower() for each in records}) < len(records)
                or min(each.header_offset for each in records) != 0
                or archive.comment
            ):
                raise ValueError("its archive is not as torch writes it")
            (name,) = (each for each in archive.namelist() if each.endswith("/data.pkl"))
            _DryRun(archive.read(name)).load()
    except Exception as error:  # what is made up can lead to any
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
    file.seek(0)


class _Weighed(tuple[Any, ...]):
    """A tuple, with the steps that its hash takes: those of what is in it, as often as it is."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.weight = 1 + sum(map(_weight, items))

    __hash__ = object.__hash__


def _weight(value: Any) -> int:
    return value.weight if type(value) is _Weighed else 1


class _DryRun(pickle._Unpickler):
    """Goes through a pickle of torch's as records; what would go into dictionaries is left out."""

    dispatch: ClassVar[dict[int, Any]]
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, stored: bytes) -> None:
        super().__init__(io.BytesIO(stored))
        self._steps = _STEPS * len(stored)
        self._known: dict[str, type[Record]] = {}
        given = torch.serialization.get_safe_globals()
        self._allowed = {
            each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}"
            for each in given
        }

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        return self._known.setdefault(path, type(path, (Record,), {"name": path}))

    def persistent_load(self, pid: Any) -> Any:
        return Record(pid)

    def _load_tuple(self, count: int | None = None) -> None:
        items = self.pop_mark() if count is None else self.stack[-count:]
        del self.stack[len(self.stack) - (count or 0) :]
        self.stack.append(_Weighed(items))

    def _load_call(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        path, first = called.name, arguments[0] if arguments else ""
        name = path.rpartition(".")[2]
        bounded = {
            "encode": type(first) is str and arguments[1:] == ("latin1",),
            "bytearray": type(first) is str or getattr(first, "name", "") == "_codecs.encode",
            "OrderedDict": not arguments,
            "_rebuild_from_type_v2": "._rebuild_tensor" in getattr(first, "name", ""),
        }
        if path not in self._allowed and not (_CALLS.fullmatch(name) and bounded.get(name, True)):
            raise ValueError(f"it calls {path} with {repr(arguments)}")
        self._hash(each for items in arguments if type(items) is list for each in items)
        self.stack.append(called(*arguments))

    def _load_items(self) -> None:
        self._hash(self.pop_mark()[::2])

    def _load_item(self) -> None:
        self._hash([self.stack[-2]])
        del self.stack[-2:]

    def _hash(self, keys: Iterable[Any]) -> None:
        self._steps -= sum(map(_weight, keys))
        if self._steps < 0:
            raise ValueError("its keys are tuples of the same tuples over and over")


_DryRun.dispatch = {
    **{each: _DryRun.dispatch[each] for each in b"\x80cb()]}Nae.Q\x88\x89KMJGX\x8ahjqr"},
    **dict.fromkeys(b"R\x81", _DryRun._load_call),
    **dict.fromkeys(b"t", _DryRun._load_tuple),
    **{0x84 + each: partial(_DryRun._load_tuple, count=each) for each in (1, 2, 3)},
    **dict.fromkeys(b"s", _DryRun._load_item),
    **dict.fromkeys(b"u", _DryRun._load_items),
}
