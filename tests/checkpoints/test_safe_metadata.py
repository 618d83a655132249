"""The library's metadata comes out as the library reads it; what is none is refused."""

import builtins
import os
import pathlib
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from lightning_wlb.checkpoints import safe_metadata
from lightning_wlb.checkpoints.manifest import Damaged
from tests.checkpoints.small_checkpoints import save

NAME = "model.0.weight"  # of 2 x 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saves") / "run.ckpt"
    save(path, 1.0)
    return path


@pytest.fixture
def library(folder) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def read(folder: Path, tmp_path: Path, changed: Any) -> Metadata:
    for each in folder.iterdir():
        if each.name != ".metadata":
            (tmp_path / each.name).symlink_to(each)
    content = changed if isinstance(changed, bytes) else pickle.dumps(changed)
    (tmp_path / ".metadata").write_bytes(content)
    return safe_metadata.read(tmp_path)


def test_it_is_what_the_library_reads(folder):
    mine, theirs = safe_metadata.read(folder), dcp.FileSystemReader(folder).read_metadata()
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.planner_data == theirs.planner_data
    assert mine.storage_data == theirs.storage_data
    assert len(mine.storage_data) > 20


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "hostile",
    [
        Calls(os.system, "touch ran"),
        Calls(builtins.eval, "open('ran', 'w')"),
        Calls(torch.load, "meta.pt"),
        Calls(pathlib.Path.touch, Path("ran")),
        {"a": [Calls(exec, "open('ran', 'w')")]},
        # Sets an attribute of a class that is allowed.
        b"cpathlib\nPosixPath\n(N}S'exists'\nctorch\nSize\nstb0.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'__init__'\nctorch\nSize\nstb0.",
        b"",
        b"no pickle",
    ],
    ids=["system", "eval", "load", "touch", "exec", "path", "metadata", "empty", "text"],
)
def test_nothing_is_run_or_changed(hostile, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = vars(Metadata).copy(), vars(pathlib.PosixPath).copy()
    with pytest.raises(Damaged, match="cannot be read: "):
        read(folder, tmp_path, hostile)
    assert not (tmp_path / "ran").exists()
    assert (vars(Metadata), vars(pathlib.PosixPath)) == before


def chunk(offsets: tuple, sizes: tuple) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def resized(library: Metadata, size: tuple, *chunks: ChunkStorageMetadata) -> None:
    stored = library.state_dict_metadata
    assert isinstance(stored[NAME], TensorStorageMetadata)
    stored[NAME] = replace(stored[NAME], size=torch.Size(size), chunks=list(chunks))


def placed(library: Metadata, **changes: Any) -> None:
    index = MetadataIndex(NAME, (0, 0))
    place = library.storage_data[index]
    library.storage_data[index] = _StorageInfo(
        **{"relative_path": place.relative_path, "offset": place.offset, "length": place.length}
        | changes
    )


def empty_chunks(library: Metadata, count: int) -> None:
    """Chunks without values, whose offsets could have hashes that somebody has chosen."""
    resized(library, (9999, 0), *[chunk((each, 0), (0, 0)) for each in range(count)])
    place = library.storage_data.pop(MetadataIndex(NAME, (0, 0)))
    for each in range(count):
        library.storage_data[MetadataIndex(NAME, (each, 0))] = place


def places_more(library: Metadata, name: str, *offsets: Any) -> None:
    """A place that no entry needs; offsets of many could have hashes that somebody has chosen."""
    (last, *_) = sorted(library.storage_data.values(), key=lambda each: -each.offset)
    place = _StorageInfo(last.relative_path, last.offset + last.length, 0)
    for offset in offsets:
        library.storage_data[MetadataIndex(name, offset)] = place


def in_chunks(library: Metadata, *chunks: ChunkStorageMetadata) -> None:
    """Two rows of three, in other chunks."""
    resized(library, (2, 3), *chunks)
    place = library.storage_data.pop(MetadataIndex(NAME, (0, 0)))
    for number, each in enumerate(chunks):
        part = replace(place, offset=place.offset + 24 * number, length=24)
        library.storage_data[MetadataIndex(NAME, each.offsets)] = part


@pytest.mark.parametrize(
    "chunks",
    [
        [((0, 0), (1, 3)), ((1, 0), (1, 1)), ((1, 1), (1, 2))],
        [((row, column), (1, 1)) for row in range(2) for column in range(3)],
        [((0, 2), (2, 1)), ((0, 0), (2, 2)), ((0, 3), (2, 0)), ((1, 1), (0, 1))],
    ],
)
def test_chunks_of_a_mesh_are_read(chunks, folder, library, tmp_path):
    in_chunks(library, *(chunk(*each) for each in chunks))
    stored = read(folder, tmp_path, library).state_dict_metadata[NAME]
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in stored.chunks] == chunks


HUGE = 10**12
CORNER = chunk((1, 0), (1, 1))


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda m: resized(m, (HUGE, 3), chunk((0, 0), (HUGE, 3))), "is said to have 12,000,000"),
        (lambda m: resized(m, (HUGE, 3), chunk((0, 0), (2, 3))), "do not fill"),
        (lambda m: resized(m, (2, 3), chunk((1, 0), (2, 3))), r"up to \[3, 3\]"),
        (lambda m: resized(m, (2, 3), chunk((0,), (6,))), "a chunk up to|shorter"),
        (lambda m: resized(m, (2, 3), chunk((0, -1), (2, 3))), "in place of sizes"),
        (lambda m: placed(m, relative_path="../x/__0_0.distcp"), "not the name of a shard"),
        (lambda m: placed(m, relative_path="/etc/passwd"), "not the name of a shard"),
        (lambda m: placed(m, relative_path="meta.pt"), "not the name of a shard"),
        (lambda m: placed(m, relative_path="__7_0.distcp"), "No such file"),
        (lambda m: placed(m, offset=10**9), "should have 1,000,"),
        (lambda m: placed(m, offset=0), "share bytes"),
        (lambda m: placed(m, offset=-1), "bytes from -1 on"),
        (lambda m: placed(m, offset="0"), "bytes from '0' on"),
        (lambda m: placed(m, transform_descriptors=("zstd",)), "transformed"),
        (lambda m: m.storage_data.pop(MetadataIndex(NAME, (0, 0))), "1 chunks, of which .* hold 0"),
        (lambda m: m.planner_data.update({NAME: (NAME,) * 99}), "said to be at"),
        (lambda m: m.planner_data.update({NAME: (NAME, NAME)}), "said to be at"),
        (lambda m: m.planner_data.update({99 * sys.hash_info.modulus: ("a",)}), "cannot be a key"),
        (lambda m: m.state_dict_metadata.update({("a", 1): 1}), "in place of a name"),
        (lambda m: resized(m, (2, 3), *[chunk((0, 0), (2, 3))] * 9), "9 chunks, of which"),
        (lambda m: resized(m, (1,) * 65, chunk((0,) * 65, (1,) * 65)), "in place of sizes"),
        (lambda m: empty_chunks(m, 1001), "do not fill"),
        (lambda m: in_chunks(m, chunk((0, 0), (2, 2)), chunk((0, 1), (1, 2))), "do not fill"),
        (lambda m: in_chunks(m, chunk((0, 0), (1, 3)), chunk((0, 2), (2, 1)), CORNER), "not fill"),
        (lambda m: m.planner_data.update({NAME: ("model", "1.weight")}), "said to be at"),
        (lambda m: m.state_dict_metadata.update({NAME: [1]}), "in place of TensorStorage"),
        (lambda m: places_more(m, "none", torch.Size([1 << 61])), "not described"),
        (
            lambda m: (
                places_more(m, "plain", None, torch.Size([1]))
                or m.state_dict_metadata.update(plain=BytesStorageMetadata())
            ),
            "at 2 places",
        ),
        (lambda m: setattr(m, "storage_data", None), "in place of a dictionary"),
    ],
)
def test_what_does_not_fit_the_files_is_refused(lie, message, folder, library, tmp_path):
    lie(library)
    with pytest.raises(Damaged, match=message):
        read(folder, tmp_path, library)
