"""torch's ``.metadata`` of a checkpoint, a pickle, read without running anything in it.

Each of the few names that the format needs becomes a record (:mod:`.pickle_checks`), and any other
is refused. The records are then checked like any foreign data: each field has its type, each chunk
lies in its tensor, the chunks fill it, each entry lies in a file of the folder, and no two entries
share bytes. So no tensor is larger than the files, whatever size is claimed, and a pickle that
refers to one object many times does not have it checked many times.

Cost: about twice torch's own reading. Only for file systems, and only for entries that were not
transformed (by compression, for example).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from reprlib import repr  # it ends even for a value that contains itself
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_wlb.checkpoints.manifest import Damaged
from lightning_wlb.checkpoints.pickle_checks import NamedRecords, Record, check_sizes
from lightning_wlb.file_checks import check_regular, read_bytes

_T = TypeVar("_T")
NAME = ".metadata"
_MOST_BYTES = 1 << 30
"""Most bytes of ``.metadata``: several million shards."""
SHARD = re.compile(r"__\d+_\d+\.distcp")
"""The names of files with shards."""

_CLASSES = (
    *(Metadata, MetadataIndex, StorageMeta, TensorProperties, _MEM_FORMAT_ENCODING, _StorageInfo),
    *(BytesStorageMetadata, ChunkStorageMetadata, TensorStorageMetadata),
)
_RECORDS = {
    *(f"{each.__module__}.{each.__name__}" for each in _CLASSES),
    *("torch.Size", "torch.serialization._get_layout"),
    *("pathlib.PosixPath", "pathlib.WindowsPath"),
    *("pathlib._local.PosixPath", "pathlib._local.WindowsPath"),
}
_MOST_EMPTY = 1000
"""Most empty chunks of a tensor: no bytes of a file bound their number."""


def read(folder: Path) -> Metadata:
    """Read which shards a folder holds, and where.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        Damaged: it names what the format does not need, or does not fit the folder's files.
    """
    (folder / NAME).lstat()  # a missing file is not a damaged one
    try:
        stored = read_bytes(folder / NAME, _MOST_BYTES)
        return _metadata(folder, NamedRecords(stored, _RECORDS).load())
    except Exception as error:  # a forged pickle can lead to any
        raise Damaged(
            f"{folder} cannot be read: {NAME} is damaged, or made to do more than describe weights"
            f" ({type(error).__name__}: {error}). Nothing in it was run. Use another checkpoint."
        ) from error


# Each of the functions below makes torch's object from a record or a plain value. It raises
# ValueError, KeyError or another error if the function's name does not describe the value.


def _metadata(folder: Path, found: Any) -> Metadata:
    state = _state(found, "Metadata")
    # Tensor's name -> offsets of its chunk, as a text whose hash nobody can choose -> place.
    places: dict[str, dict[str, tuple[MetadataIndex, _StorageInfo]]] = {}
    for each, place in _plain(state["storage_data"], dict).items():
        index = _index(each)
        places.setdefault(index.fqn, {})[str(index.offset)] = index, _place(place)
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, each in _plain(state["state_dict_metadata"], dict).items():
        there = places.get(_plain(name, str), {})
        plain = isinstance(each, Record) and each.name.endswith("BytesStorageMetadata")
        stored[name] = BytesStorageMetadata() if plain else _tensor(each, len(there))
        if plain and len(there) > 1:
            raise ValueError(f"{name} is said to be at {len(there)} places")
        for offset, size in _entries(stored[name]):
            if offset not in there:
                raise ValueError(f"no file holds {name} from {offset} on")
            if (length := there[offset][1].length) < size:
                raise ValueError(f"{name} is said to have {size:,} bytes in {length:,}")
    # Refused, since many could share the hash of their offsets, and take quadratic time below.
    if others := places.keys() - stored.keys():
        raise ValueError(f"{repr(others.pop())} lies in a file, and is not described")
    paths = {
        _plain(name, str): path for name, path in _plain(state["planner_data"] or {}, dict).items()
    }
    for name, path in paths.items():
        long = type(path) is not tuple or len(path) + sum(map(len, path)) > len(name) + 1
        if long or ".".join(path) != name:
            raise ValueError(f"{name} is said to be at {repr(path)}")
    every = [each for there in places.values() for each in there.values()]
    _check_places(folder, [place for _, place in every])
    return Metadata(stored, planner_data=paths, storage_data=dict(every))


def _entries(stored: TensorStorageMetadata | BytesStorageMetadata) -> list[tuple[str, int]]:
    """For each chunk of a stored value its offsets, as text, and the least bytes that it takes."""
    if isinstance(stored, BytesStorageMetadata):
        return [(str(None), 0)]
    width = stored.properties.dtype.itemsize
    return [(str(chunk.offsets), math.prod(chunk.sizes) * width) for chunk in stored.chunks]


def _check_places(folder: Path, places: list[_StorageInfo]) -> None:
    """Check that every entry lies within its file, and that no two entries overlap."""
    ends: dict[str, int] = {}
    for place in sorted(places, key=lambda each: (each.relative_path, each.offset)):
        if place.offset < ends.get(place.relative_path, 0):
            raise ValueError(f"two entries share bytes of {place.relative_path}")
        ends[place.relative_path] = place.offset + place.length
    for name, end in ends.items():
        size = check_regular(folder / name)
        if end > size:
            raise ValueError(f"{name} should have {end:,} bytes, and has {size:,}")


def _tensor(found: Record, count: int) -> TensorStorageMetadata:
    state = _state(found, "TensorStorageMetadata")
    dtype, layout = _record(state["properties"], "TensorProperties").state[:2]
    if not isinstance(dtype, torch.dtype) or layout.arguments != ("torch.strided",):
        raise ValueError(f"{repr(dtype)} in place of a type of numbers, {repr(layout)} of a layout")
    size = _size(state["size"])
    if len(state["chunks"]) != count:
        raise ValueError(f"{len(state['chunks'])} chunks, of which the files hold {count}")
    fields = [_state(each, "ChunkStorageMetadata") for each in state["chunks"]]
    chunks = [ChunkStorageMetadata(_size(each["offsets"]), _size(each["sizes"])) for each in fields]
    for chunk in chunks:
        corner = [a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(corner) != len(size) or any(a > b for a, b in zip(corner, size, strict=True)):
            raise ValueError(f"a chunk up to {corner} of a tensor of {list(size)}")
    volumes = [math.prod(chunk.sizes) for chunk in chunks]
    filled = [chunk for chunk, volume in zip(chunks, volumes, strict=True) if volume]
    full = sum(volumes) == math.prod(size) and _are_apart(filled, len(size))
    if not full or len(chunks) - len(filled) > _MOST_EMPTY:
        raise ValueError(f"chunks that do not fill a tensor of {list(size)}")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _are_apart(chunks: list[ChunkStorageMetadata], dims: int) -> bool:
    """Whether cuts separate all chunks: of the tensor along dim 0, of each slab along dim 1, ...

    Chunks that a save makes are separated so, even if it shards every dim. O(dims n log n).
    """
    slabs = [chunks]
    for dim in range(dims):
        whole, slabs = slabs, []
        for slab in whole:
            end = 0
            for chunk in sorted(slab, key=lambda each: each.offsets[dim]):
                if chunk.offsets[dim] >= end:
                    slabs.append([])
                slabs[-1].append(chunk)
                end = max(end, chunk.offsets[dim] + chunk.sizes[dim])
    return len(slabs) >= len(chunks)


def _index(found: Any) -> MetadataIndex:
    state = _state(found, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(_plain(state["fqn"], str), None if offset is None else _size(offset))


def _place(found: Any) -> _StorageInfo:
    state = _state(found, "_StorageInfo")
    name, offset, length = _plain(state["relative_path"], str), state["offset"], state["length"]
    if not SHARD.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a shard in the folder")
    if state.get("transform_descriptors") is not None:
        raise ValueError("transformed entries are not supported")
    if not all(type(each) is int and each >= 0 for each in (offset, length)):
        raise ValueError(f"bytes from {repr(offset)} on, {repr(length)} of them")
    return _StorageInfo(name, offset, length)


def _state(found: Any, name: str) -> dict[str, Any]:
    return _plain(_record(found, name).state, dict)


def _record(found: Any, name: str) -> Record:
    if not isinstance(found, Record) or found.name.rpartition(".")[2] != name:
        raise ValueError(f"{repr(found)} in place of {name}")
    return found


def _size(found: Any) -> torch.Size:
    (values,) = _record(found, "Size").arguments
    return torch.Size(check_sizes(values))


def _plain(found: Any, kind: type[_T]) -> _T:
    if type(found) is not kind:
        raise ValueError(f"{repr(found)} in place of a {'name' if kind is str else 'dictionary'}")
    return found
