"""A save ends with the old checkpoint or with the new one, wherever it ends."""

import errno
import os
import re
import shutil
import sys
import warnings
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_wlb.checkpoints import atomic_folders, manifest, sharded, writing
from tests.checkpoints.small_checkpoints import load, model, save
from tests.ranks import run_ranks


def killed_at(point: str, path: Path, value: float, exchange: bool) -> bool:
    """Save in a process that is gone when the save comes to a point; whether it came to it."""
    child = os.fork()
    if child == 0:
        reached = atomic_folders.reached
        atomic_folders.reached = lambda each: os._exit(9) if each == point else reached(each)
        if not exchange:
            atomic_folders._exchange = lambda one, other: False
        save(path, value)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def saves_that_are_killed(rank: int, scratch: Path, exchange: bool) -> dict:
    """Point -> whether it was reached, whether the name was there, and what was loaded."""
    found = {}
    for point in atomic_folders.POINTS:
        path = scratch / point / "run.ckpt"
        save(path, 1.0)
        reached = killed_at(point, path, 2.0, exchange)
        there = path.is_dir()
        found[point] = reached, there, load(path)
        # Whatever is left, a later save takes its place.
        save(path, 3.0)
        assert load(path) == 3.0
    return found


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_a_save_that_is_killed_leaves_one_whole_checkpoint(exchange, tmp_path):
    if exchange and not sys.platform.startswith("linux"):
        pytest.skip("renameat2 is Linux's")
    (found,) = run_ranks(saves_that_are_killed, 1, tmp_path, exchange, process_group=False)
    new = atomic_folders.POINTS.index("named")
    for at, point in enumerate(atomic_folders.POINTS):
        moved = point == "moved"
        reached = not (moved and exchange)
        assert found[point] == (
            reached,
            not moved or exchange,
            2.0 if at >= new or not reached else 1.0,
        ), point


def test_nothing_is_replaced_before_what_replaces_it_is_on_the_disk(tmp_path, monkeypatch):
    """Files, then the folder that holds them, then its name; only then the old one goes."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to see what is synchronised")
    path, events = tmp_path / "new" / "run.ckpt", []
    sync, remove = os.fsync, shutil.rmtree

    def synchronise(descriptor: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def delete(folder: Path, **options) -> None:
        events.append("delete")
        remove(folder, **options)

    monkeypatch.setattr(os, "fsync", synchronise)
    monkeypatch.setattr(shutil, "rmtree", delete)
    monkeypatch.setattr(atomic_folders, "reached", lambda point: events.append(f"<{point}>"))
    save(path, 1.0)
    # A folder that is new is in its parent on the disk, too.
    assert events[:3] == [tmp_path.name, "new", ".partial"]
    events.clear()
    save(path, 2.0)
    (aside,) = {each for each in events if each.startswith("run.ckpt-")}
    assert [each for each in events if each != "<writing>"] == [
        "new",
        ".partial",
        "<begun>",
        "__0_0.distcp",
        ".metadata",
        "meta.pt",
        "<written>",
        "manifest.json",
        aside,
        "<listed>",
        "<named>",
        "new",
        "<synchronised>",
        "delete",
        "<removed>",
    ]


def full_disk(rank: int, scratch: Path) -> None:
    path, opened = scratch / "run.ckpt", Path.open
    if not Path("/dev/full").exists():
        return  # Linux's
    save(path, 1.0)

    # Of what is larger than a buffer torch's writer has an error of its own, without the disk's.
    for name, by, width in (
        ("__1_0.distcp", "rank 1: ", 2),
        ("__1_0.distcp", "rank 1: ", 5000),
        ("meta.pt", "", 2),
    ):

        def full(file: Path, *mode: str, name: str = name) -> Any:
            return opened(Path("/dev/full") if file.name == name else file, *mode)

        layers, optimizer = model(2.0, width)
        rest = {"global_step": 2, "text": "." * 100_000}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "open", full)
            try:
                raise PermissionError(errno.EACCES, "what ends the run")
            except PermissionError:
                with pytest.raises(OSError, match="No space left") as info:
                    writing.write(path, sharded.collect(layers, [optimizer], rest, {}))
        assert info.value.errno == errno.ENOSPC
        for said in ("run.ckpt was not saved", f"{by}No space left on device", name, "bytes free"):
            assert said in str(info.value)
        the_old_one_stands(path)


def the_old_one_stands(path: Path) -> None:
    """A failed save has left nothing, and the checkpoint of before is whole."""
    dist.barrier()
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert load(path) == 1.0


def errors_of_rank_0(rank: int, scratch: Path) -> None:
    """What only rank 0 does fails: the folder aside, meta.pt, the manifest, each name."""
    path = scratch / "run.ckpt"
    save(path, 1.0)

    def fails(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "somewhere")

    places = (atomic_folders, "make_folder"), (writing, "_write_rest"), (manifest, "write")
    for module, name in (*places, (atomic_folders, "_exchange"), (atomic_folders, "sync_folder")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(module, name, fails)
            with pytest.raises(OSError, match=r"run\.ckpt was not saved .*: somewhere") as info:
                save(path, 2.0)
        assert info.value.errno == errno.EACCES
        the_old_one_stands(path)


def no_shared_disk(rank: int, scratch: Path) -> None:
    """Each rank has a disk of its own."""
    atomic_folders._LATE_SECONDS = 0.1
    mine = scratch / str(rank)
    mine.mkdir()
    os.chdir(mine)
    with pytest.raises(ValueError, match=r"(?s)^rank 1 on .*file system that all nodes share"):
        save(Path("run.ckpt"), 1.0)
    assert list(mine.iterdir()) == []


def lost_file(rank: int, scratch: Path) -> None:
    """Rank 0 does not see a file that rank 1 has written."""
    atomic_folders._LATE_SECONDS = 0.1
    reached = atomic_folders.reached

    def lose(point: str) -> None:
        reached(point)
        if rank == 1 and point == "written":
            (shard,) = scratch.glob(".partial/*/__1_0.distcp")
            shard.unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_folders, "reached", lose)
        with pytest.raises(ValueError, match="is not there on") as info:
            save(scratch / "run.ckpt", 1.0)
    assert "__1_0.distcp of" in str(info.value)
    assert "which rank 1 wrote" in str(info.value)
    assert rank > 0 or list(scratch.iterdir()) == [], "rank 0 has made it, and removes it"


def rank_1_breaks_off(rank: int, scratch: Path) -> None:
    """Rank 1 loses its connection while rank 0 is about to give the folder its name."""
    path, given_up = scratch / "run.ckpt", scratch / "given up"
    save(path, 1.0)
    gather, reached, gathers = dist.all_gather_object, atomic_folders.reached, []

    def note(point: str) -> None:
        reached(point)
        if point == "written":
            gathers.append(0)
        if point == "listed":
            assert atomic_folders.wait_for(given_up)

    def lose(found: list, mine: object, group: object = None) -> None:
        if rank == 1 and gathers:
            gathers.append(1)
            if len(gathers) == 3:  # the second one since, in which ranks wait for the name
                raise RuntimeError("Connection closed by peer")
        gather(found, mine, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_folders, "reached", note)
        patch.setattr(dist, "all_gather_object", lose)
        if rank == 0:
            save(path, 2.0)
        else:
            with pytest.raises(RuntimeError, match="Connection closed"):
                save(path, 2.0)
            given_up.touch()
            gather([None, None], (None, None))  # rank 0 waits there
    assert load(path) == 2.0, "it takes nothing from what rank 0 finishes"


def other_averages(rank: int, scratch: Path) -> None:
    """Only rank 0's state is saved: tensors of which ranks have others are a warning."""
    rest = {"callbacks": {"Mine": {"same": torch.ones(()), "average": torch.ones(3) * rank}}}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        writing.write(scratch / "run.ckpt", writing.CheckpointContent({}, rest))
        rest["callbacks"]["Mine"].pop("average")
        writing.write(scratch / "run.ckpt", writing.CheckpointContent({}, rest))
    [found] = [str(each.message) for each in said if "of rank 0 alone" in str(each.message)]
    assert "tensors in 'Mine'" in found


def all_failures(rank: int, scratch: Path) -> None:
    for fails in (
        full_disk,
        errors_of_rank_0,
        rank_1_breaks_off,
        no_shared_disk,
        lost_file,
        other_averages,
    ):
        folder = scratch / fails.__name__
        folder.mkdir(exist_ok=True)
        fails(rank, folder)
        dist.barrier()


def test_what_fails_on_one_rank_ends_the_save_on_all_and_leaves_nothing(tmp_path):
    run_ranks(all_failures, 2, tmp_path)


def test_state_that_could_not_be_read_again_is_refused_before_anything_is_written(tmp_path):
    layers, optimizer = model(1.0)
    rest = {"callbacks": {"Mine": {"folder": [tmp_path]}}}
    with pytest.raises(ValueError, match=r"\['callbacks'\]\['Mine'\]\['folder'\]\[0\]: an obj"):
        writing.write(tmp_path / "run.ckpt", sharded.collect(layers, [optimizer], rest, {}))
    optimizer.param_groups[0]["name"] = tmp_path
    with pytest.raises(ValueError, match=r"\['optimizer_0'\].*pathlib"):
        writing.write(tmp_path / "run.ckpt", sharded.collect(layers, [optimizer], {}, {}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "where", "kind"),
    [
        ({"a": {"b": [1, np.float64(2)]}}, "['a']['b'][1]", "numpy.float64"),
        ({"a": (np.arange(2),)}, "['a'][0]", "numpy.ndarray"),
        ({"a": Path()}, "['a']", f"{type(Path()).__module__}.PosixPath"),
        ({"a": deque([1])}, "['a']", "collections.deque"),
        ({"a": lambda: 1}, "['a']", "builtins.function"),
        ({"a": {np.int64(1): 1}}, "the key 1 in ['a']", "numpy.int64"),
    ],
)
def test_what_could_not_be_read_is_named(state, where, kind):
    said = f"cannot hold {where}: an object of {kind} could"
    with pytest.raises(ValueError, match=re.escape(said)):
        writing.check_plain(state)


@pytest.mark.parametrize("key", [2**65, 1j, torch.Size([1])])
def test_a_key_that_would_not_be_read_is_not_written(key):
    said = "cannot hold the keys of ['a']: "
    with pytest.raises(ValueError, match=re.escape(said)):
        writing.check_plain({"a": {key: 1}})


def test_a_state_that_would_not_be_read_as_a_whole_is_not_written(tmp_path):
    """Each dictionary is as it should be, and all of them together have too many tuples."""
    rest = {str(part): {(part, each): 0 for each in range(2000)} for part in range(3)}
    with pytest.raises(RuntimeError, match="too many of its keys are tuples"):
        writing.write(tmp_path / "run.ckpt", writing.CheckpointContent({}, rest))
    assert not (tmp_path / "run.ckpt").exists()


def test_what_can_be_read_passes():
    writing.check_plain(
        {
            "plain": [None, True, 1, 1.0, 1j, "text", b"bytes", (), {}],
            7: torch.ones(2),
            "more": [torch.float32, torch.Size((1,)), OrderedDict(a=1), {1, 2}],
        }
    )
