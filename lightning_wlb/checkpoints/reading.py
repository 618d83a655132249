"""All ranks read a checkpoint together and compare it with its manifest; no code in it is run.

Sizes, and the checksums of the small files, are compared first. The checksums of all files are
computed in threads while the shards are read, each file by one of the ranks that see the same
folder: a node may have a copy on a disk of its own. Reading succeeds if all ranks agree.

torch.distributed.checkpoint unpickles any object in ``.metadata``, and in entries that are not
tensors (an optimizer's settings), which may run any code. Here :mod:`.safe_metadata` reads
``.metadata``, and ``torch.load(weights_only=True)`` reads such entries.

Cost: torch's own reading. The threads need Python's lock only between blocks, and read from memory
if the rank reads the shards that it wrote. Only for file systems, not for object stores.
"""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _ReaderView

from lightning_wlb.checkpoints import atomic_folders, manifest, safe_metadata
from lightning_wlb.checkpoints.manifest import Manifest
from lightning_wlb.checkpoints.pickle_checks import check_archive, load_state
from lightning_wlb.checkpoints.writing import OWN, REST, torch_errors
from lightning_wlb.distributed.collective_errors import Ranks


def open_checkpoint(path: Path, ranks: Ranks) -> tuple[Path, dict[str, Any], Metadata, Manifest]:
    """Read everything but the shards of a folder; collective over ``ranks``.

    If a save died while it replaced this one, the older one in ``.old`` is read, with a warning.

    Returns:
        The folder, all state that is not in shards, which shards there are, and the manifest.

    Raises:
        FileNotFoundError: ``path`` is not a checkpoint.
        Damaged: it is not what was written.
        ValueError: it was made to run code, or a newer version wrote it.
    """
    folder = ranks.lead(lambda: _find(path))
    ranks.each(lambda: atomic_folders.require_shared(folder))
    listed = ranks.lead(lambda: _read_manifest(folder))
    rest = ranks.each(lambda: _read_rest(folder, listed))
    return folder, rest, ranks.each(lambda: safe_metadata.read(folder)), listed


def fill(
    state: dict[str, Any],
    folder: Path,
    stored: Metadata,
    ranks: Ranks,
    listed: Manifest,
    compare: bool = True,
) -> None:
    """Fill the tensors of a nested state, and replace its other values; collective over ``ranks``.

    Args:
        state: its names are those of the shards.
        stored: the folder's metadata, by :func:`.safe_metadata.read`.
        listed: the folder's manifest, read before ``stored``.
        compare: whether a thread of each rank meanwhile compares its part of the files with it.

    Raises:
        Damaged: a file is not what was written, whatever else went wrong in reading; or another
            save has taken the folder's place.
        OSError: a rank could not read a file.
        ValueError: the folder lacks what the state asks for, or not only plain types.
    """
    with ThreadPoolExecutor(1) as pool:
        compared = None
        if compare:
            mine = _share(folder, sorted(listed.files), ranks)
            compared = pool.submit(manifest.check_files, folder, listed, mine)
        problem: Exception | None = None
        try:
            with torch_errors(ValueError, ranks):
                dcp.load(
                    state,
                    storage_reader=_SafeReader(folder, stored),
                    planner=_SafeLoadPlanner(),
                    process_group=ranks.group,
                    no_dist=ranks.alone,
                )
        except (OSError, ValueError) as error:
            problem = error
        if compared is not None:
            ranks.each(compared.result)
    if problem is not None:
        raise problem
    ranks.each(lambda: manifest.check_same(folder, listed))


def _share(folder: Path, names: list[str], ranks: Ranks) -> list[str]:
    """The files that this rank compares: each file of each copy has one rank; collective.

    Copies are told apart by the inode and change time of their manifests, which no copying keeps.
    """
    status = (folder / manifest.NAME).stat
    seen = ranks.every(lambda: (status().st_ino, status().st_ctime_ns))
    peers = [rank for rank, each in enumerate(seen) if each == seen[ranks.rank]]
    return names[peers.index(ranks.rank) :: len(peers)]


class _SafeReader(dcp.FileSystemReader):
    """torch's reader of shards, which takes their metadata from us instead of unpickling it."""

    def __init__(self, folder: Path, stored: Metadata) -> None:
        super().__init__(folder)
        self._stored = stored

    def read_metadata(self) -> Metadata:
        """What the folder holds, and where."""
        return self._stored

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        """The bytes of an entry, which are refused if they could grow in reading."""
        part = cast(IO[bytes], _EntryBytes(file, sinfo.offset, sinfo.length))
        check_archive(part)
        return part


class _EntryBytes(_ReaderView):
    """The bytes of an entry in a shard. Its ``seek`` from the end is right, torch's is not."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset, whence = self.len + offset, os.SEEK_SET
        return super().seek(offset, whence) - self.offset


class _SafeLoadPlanner(dcp.DefaultLoadPlanner):
    """torch's planner, which reads entries that are not tensors as plain types only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an entry into the state that is loaded."""
        plain = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)


def _find(path: Path) -> Path:
    """The folder to read: ``path``, or the folder that a save was replacing there when it died."""
    replaced = atomic_folders.old_folder(path)
    if not path.exists() and (replaced / REST).is_file():
        if atomic_folders.strangers([replaced], path.parent):
            raise FileNotFoundError(
                f"{path} is missing, and {replaced} is not this user's, in a folder where others"
                " may put files. To go on from it give its own path."
            )
        rank_zero_warn(
            f"{path} is missing: the save that was to replace it broke off. Reading {replaced}, the"
            " checkpoint from before it."
        )
        path = replaced
    if not (path / REST).is_file():
        raise FileNotFoundError(
            f"{path} is not a checkpoint of WLBStrategy: it should be a folder with {REST}. Pass"
            " what ModelCheckpoint or trainer.save_checkpoint wrote under it. A single file's"
            " weights can start a new run: the module's load_from_checkpoint."
        )
    return path


def _read_manifest(folder: Path) -> Manifest:
    """The manifest, if the sizes of all files and the content of the small ones agree with it."""
    listed = manifest.read(folder)
    manifest.check_sizes(folder, listed)
    small = [name for name in listed.files if not safe_metadata.SHARD.fullmatch(name)]
    manifest.check_files(folder, listed, small)
    return listed


def _read_rest(folder: Path, listed: Manifest) -> dict[str, Any]:
    """The content of ``meta.pt``, if it belongs to the same save as the manifest.

    Rank 0 has compared the file's checksum; another node may still see the file of an older save.
    """
    rest = load_state(folder / REST)
    if rest.pop(OWN, None) != {"save": listed.save}:
        raise manifest.Damaged(
            f"{folder} is damaged, {REST} is of another save than {manifest.NAME}. Use another."
        )
    return rest
