"""A checkpoint is read by all ranks together, and compared with its manifest.

Sizes, and the checksums of the small files, are compared first. Those of the shards are computed in
threads while the shards are read, each by one rank, so that every byte is looked at once; what was
read counts when all ranks agree.

Cost: the threads need no interpreter's lock but between blocks, and take their bytes from memory
where the rank reads the shards that it wrote.
"""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from lightning_wlb.checkpoints import atomic_folders, manifest, safe_metadata
from lightning_wlb.checkpoints.writing import OWN, REST, library_errors, unwarned
from lightning_wlb.distributed.collective_errors import Ranks


@dataclass(frozen=True)
class Opened:
    """A checkpoint of which all but the shards is read.

    Attributes:
        folder: where it is.
        rest: what is not in shards.
        stored: which shards there are, and where.
        listed: its manifest; None where an older version saved it.
    """

    folder: Path
    rest: dict[str, Any]
    stored: Metadata
    listed: manifest.Manifest | None


def check(folder: Path) -> bool:
    """Compare all files of a checkpoint with its manifest; one process.

    Returns:
        False where an older version saved it without one, so that nothing can be compared.

    Raises:
        Damaged: naming the file.
    """
    try:
        manifest.check(folder)
    except FileNotFoundError:
        _read_rest(folder, True, None)
        return False
    return True


def open_checkpoint(path: Path, weights_only: bool | None, verify: bool, ranks: Ranks) -> Opened:
    """Read all but the shards; collective over ``ranks``.

    Args:
        path: the folder; that of ``.old`` is taken, with a warning, where a save died between two
            renames.
        weights_only: for ``meta.pt``; None means True.
        verify: compare checksums, not only sizes.
        ranks: who reads.

    Raises:
        FileNotFoundError: it is no checkpoint.
        Damaged: it is not what was written.
        ValueError: it was made to run code, or by a newer version.
    """
    folder = ranks.lead(lambda: _find(path))
    ranks.each(lambda: atomic_folders.see(folder))
    listed = ranks.lead(lambda: _listed(folder, verify))
    rest = ranks.each(lambda: _read_rest(folder, weights_only, listed))
    return Opened(folder, rest, ranks.each(lambda: safe_metadata.read(folder)), listed)


def fill(state: dict[str, Any], opened: Opened, verify: bool, ranks: Ranks) -> None:
    """Fill a state from the shards; collective over ``ranks``.

    While it reads, a thread of each rank compares a share of the files with the manifest.

    Raises:
        Damaged: by the manifest, whatever else went wrong in reading.
        ValueError, OSError: as :func:`.read_shards` does.
    """
    listed, shards = opened.listed, []
    if verify and listed is not None:
        shards = sorted(name for name in listed.files if safe_metadata.SHARD.fullmatch(name))

    def compare() -> None:
        if listed is not None:
            manifest.check_files(opened.folder, listed, shards[ranks.rank :: ranks.size])

    with ThreadPoolExecutor(1) as pool:
        compared = pool.submit(compare)
        problem: Exception | None = None
        try:
            read_shards(state, opened.folder, opened.stored, ranks)
        except (OSError, ValueError) as error:
            problem = error
        ranks.each(compared.result)
    if problem is not None:
        raise problem


def _find(path: Path) -> Path:
    replaced = atomic_folders.replaced_by(path)
    if not path.exists() and (replaced / REST).is_file():
        rank_zero_warn(
            f"{path} is missing: the save that was to replace it broke off. Reading {replaced}, the"
            " checkpoint from before it."
        )
        path = replaced
    if not (path / REST).is_file():
        raise FileNotFoundError(
            f"{path} is not a checkpoint of WLBStrategy: it should be a folder that contains"
            f" {REST}. Pass the folder that ModelCheckpoint or"
            " trainer.save_checkpoint wrote under WLBStrategy. A single file's weights can start a"
            " new run: the module's load_from_checkpoint."
        )
    return path


def _listed(path: Path, verify: bool) -> manifest.Manifest | None:
    """The manifest, where all files have the sizes in it; None where an older version saved."""
    try:
        listed = manifest.read(path)
    except FileNotFoundError:
        rank_zero_warn(
            f"{path} has no {manifest.NAME}: an older version of lightning_wlb saved it, and"
            " whether it is damaged cannot be told."
        )
        return None
    manifest.check_sizes(path, listed)
    if verify:
        small = [name for name in listed.files if not safe_metadata.SHARD.fullmatch(name)]
        manifest.check_files(path, listed, small)
    return listed


def _read_rest(
    path: Path, weights_only: bool | None, listed: manifest.Manifest | None
) -> dict[str, Any]:
    """What is not in shards, if it is of the save that the manifest is of.

    Rank 0 has compared the file; another node may still see that of the save before.
    """
    try:
        rest: dict[str, Any] = torch.load(
            path / REST,
            map_location="cpu",
            weights_only=True if weights_only is None else weights_only,
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path / REST} cannot be read: it is damaged, or holds objects of"
            " classes, which may run code when they are read. If you know who wrote it:"
            f" trainer.fit(..., weights_only=False). ({error})"
        ) from error
    if not isinstance(rest, dict):
        raise ValueError(f"{path / REST} holds a {type(rest).__name__}, no state.")
    own = rest.pop(OWN, {})
    if own != ({} if listed is None else {"save": listed.save}):
        wrong = f"{REST} is of another save than {manifest.NAME}"
        if listed is None:
            wrong = f"{manifest.NAME} is missing"
        raise manifest.Damaged(f"{path} is damaged: {wrong}. Use another checkpoint.")
    return rest


class Reader(dcp.FileSystemReader):
    """The library's reader of a folder of shards, but for ``.metadata``.

    Args:
        folder: of shards.
        stored: its metadata, if it is read already.
    """

    def __init__(self, folder: Path, stored: Metadata | None = None) -> None:
        super().__init__(folder)
        self._stored = stored

    # Without keyword arguments: where this raises, the library is to look for no other metadata.
    def read_metadata(self) -> Metadata:
        """What the folder holds, and where. Raises as :func:`.safe_metadata.read`."""
        return safe_metadata.read(cast(Path, self.path)) if self._stored is None else self._stored


class LoadPlanner(dcp.DefaultLoadPlanner):
    """The library's planner, but for entries that are not tensors: plain types only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an entry into the state that is loaded."""
        plain = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)


def read_shards(state: dict[str, Any], folder: Path, stored: Metadata, ranks: Ranks) -> None:
    """Fill the tensors of a state, and replace what else it holds; collective over ``ranks``.

    Args:
        state: names to tensors and plain values, nested.
        folder: of shards.
        stored: the folder's metadata.
        ranks: who reads.

    Raises:
        OSError: where a rank could not read, on all ranks.
        ValueError: the folder does not hold what the state asks for, or holds more than tensors
            and plain types.
    """
    with library_errors(ValueError), unwarned(ranks):
        dcp.load(
            state,
            storage_reader=Reader(folder, stored),
            planner=LoadPlanner(),
            process_group=ranks.group,
            no_dist=ranks.alone,
        )
