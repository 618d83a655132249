"""torch's ``.metadata`` of a checkpoint, a pickle, read without running anything in it.

A pickle calls what it names. Here each of the few names that the format needs becomes a record that
only keeps its arguments, so that no function and no class of the process can be reached, called or
changed; any other name is refused. The records are then checked like any foreign data: each field
has its type, each chunk lies in its tensor, the chunks fill it, each entry lies in a file of the
folder, and no two entries share bytes. So no tensor is larger than the files, whatever size is
claimed.

Cost: about twice torch's own reading. Other storages, and entries that were transformed (as by
compression), are not supported.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_wlb.checkpoints.manifest import Damaged

NAME = ".metadata"
SHARD = re.compile(r"__\d+_\d+\.distcp")
"""The names of files with shards."""

_LIBRARY = "torch.distributed.checkpoint."
_RECORDS = {
    _LIBRARY + "metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    _LIBRARY + "filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


def read(folder: Path) -> Metadata:
    """Read which shards a folder holds, and where.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        Damaged: it names what the format does not need, or does not fit the folder's files.
    """
    stored = (folder / NAME).read_bytes()
    try:
        found = _Unpickler(io.BytesIO(stored)).load()
        return _metadata(folder, found)
    except Exception as error:  # a pickle of anything else can lead to any
        raise Damaged(
            f"{folder} cannot be read as a checkpoint: {NAME} is damaged, or was made to do more"
            f" than describe weights ({type(error).__name__}: {error}). Nothing in it was run. Use"
            " another checkpoint."
        ) from error


class _Record:
    """Stands for an object of another class, and keeps the arguments and state it was made of."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A record's class, a new one each time since a pickle may change it; or a dtype."""
        if name in _RECORDS.get(module, ()):
            return type(name, (_Record,), {"name": name})
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


# Each of the functions below returns what a record, or a plain value, stands for. It raises
# ValueError, KeyError or another error if that is not what its name says.


def _metadata(folder: Path, found: Any) -> Metadata:
    state = _state(found, "Metadata")
    stored = {
        _text(name): _bytes(each)
        if isinstance(each, _Record) and "Bytes" in each.name
        else _tensor(each)
        for name, each in _dict(state["state_dict_metadata"]).items()
    }
    places = {_index(index): _place(place) for index, place in _dict(state["storage_data"]).items()}
    paths = {_text(name): path for name, path in _dict(state["planner_data"] or {}).items()}
    for name, path in paths.items():
        if not isinstance(path, tuple) or ".".join(path) != name:
            raise ValueError(f"{name} is said to be at {path!r}")
    for name, each in stored.items():
        for index, size in _entries(name, each):
            if index not in places:
                raise ValueError(f"no file holds {index}")
            if places[index].length < size:
                raise ValueError(
                    f"{name} is said to have {size:,} bytes in {places[index].length:,}"
                )
    _check_places(folder, list(places.values()))
    return Metadata(stored, planner_data=paths, storage_data=places)


def _entries(
    name: str, stored: TensorStorageMetadata | BytesStorageMetadata
) -> list[tuple[MetadataIndex, int]]:
    """The indices under which an entry is stored, and the bytes that each takes at least."""
    if isinstance(stored, BytesStorageMetadata):
        return [(MetadataIndex(name), 0)]
    width = stored.properties.dtype.itemsize
    return [
        (MetadataIndex(name, chunk.offsets), math.prod(chunk.sizes) * width)
        for chunk in stored.chunks
    ]


def _check_places(folder: Path, places: list[_StorageInfo]) -> None:
    """Check that every entry lies in its file, and none over another."""
    ends: dict[str, int] = {}
    for place in sorted(places, key=lambda each: (each.relative_path, each.offset)):
        if place.offset < ends.get(place.relative_path, 0):
            raise ValueError(f"two entries share bytes of {place.relative_path}")
        ends[place.relative_path] = place.offset + place.length
    for name, end in ends.items():
        size = (folder / name).stat().st_size
        if end > size:
            raise ValueError(f"{name} should have {end:,} bytes, and has {size:,}")


def _tensor(found: _Record) -> TensorStorageMetadata:
    state = _state(found, "TensorStorageMetadata")
    dtype, layout = _record(state["properties"], "TensorProperties").state[:2]
    if not isinstance(dtype, torch.dtype) or layout.arguments != ("torch.strided",):
        raise ValueError(f"{dtype!r} in place of a type of numbers, {layout!r} of a layout")
    size = _size(state["size"])
    fields = [_state(each, "ChunkStorageMetadata") for each in state["chunks"]]
    chunks = [ChunkStorageMetadata(_size(each["offsets"]), _size(each["sizes"])) for each in fields]
    for chunk in chunks:
        corner = [a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(corner) != len(size) or any(a > b for a, b in zip(corner, size, strict=True)):
            raise ValueError(f"a chunk up to {corner} of a tensor of {list(size)}")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"chunks that do not fill a tensor of {list(size)}")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _bytes(found: _Record) -> BytesStorageMetadata:
    _record(found, "BytesStorageMetadata")
    return BytesStorageMetadata()


def _index(found: Any) -> MetadataIndex:
    state = _state(found, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(_text(state["fqn"]), None if offset is None else _size(offset))


def _place(found: Any) -> _StorageInfo:
    state = _state(found, "_StorageInfo")
    name, offset, length = _text(state["relative_path"]), state["offset"], state["length"]
    if not SHARD.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a shard in the folder")
    if state.get("transform_descriptors") is not None:
        raise ValueError("transformed entries are not supported")
    if not all(type(each) is int and each >= 0 for each in (offset, length)):
        raise ValueError(f"bytes from {offset!r} on, {length!r} of them")
    return _StorageInfo(name, offset, length)


def _state(found: Any, name: str) -> dict[str, Any]:
    return _dict(_record(found, name).state)


def _record(found: Any, name: str) -> _Record:
    if not isinstance(found, _Record) or found.name != name:
        raise ValueError(f"{found!r} in place of {name}")
    return found


def _size(found: Any) -> torch.Size:
    (values,) = _record(found, "Size").arguments
    if not all(type(each) is int and each >= 0 for each in values):
        raise ValueError(f"{values!r} in place of sizes")
    return torch.Size(values)


def _dict(found: Any) -> dict[Any, Any]:
    if type(found) is not dict:
        raise ValueError(f"{found!r} in place of a dictionary")
    return found


def _text(found: Any) -> str:
    if type(found) is not str:
        raise ValueError(f"{found!r} in place of a name")
    return found
