"""Checkpoints are removed when what follows them is on the disk, and no earlier."""

from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from lightning_wlb.checkpoints.writing import CheckpointContent
from lightning_wlb.strategy import checkpointing as saving
from lightning_wlb.strategy.checkpointing import Checkpointer
from tests.checkpoints.small_checkpoints import write


@pytest.fixture
def checkpoints(monkeypatch) -> Checkpointer:
    """Writes checkpoints of this process; those named "full" cannot be written."""

    def fake(path: Path, parts: CheckpointContent, *_: object) -> None:
        if "full" in path.name:
            raise OSError(28, "No space left on device")
        write(path, 1, 1.0, **parts.rest)

    monkeypatch.setattr(saving, "write", fake)
    return Checkpointer(async_save=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_after_a_save_that_failed_nothing_goes(checkpoints, tmp_path):
    parts = CheckpointContent({}, {})
    for name in ("one.ckpt", "two.ckpt"):
        checkpoints.write(tmp_path / name, parts)
    checkpoints.remove(tmp_path / "one.ckpt")
    assert names(tmp_path) == ["two.ckpt"]
    with pytest.raises(OSError, match="No space"):
        checkpoints.write(tmp_path / "full.ckpt", parts)
    checkpoints.remove(str(tmp_path / "two.ckpt"))
    checkpoints.remove(tmp_path / "full.ckpt")  # was never there
    assert names(tmp_path) == ["two.ckpt"]


def test_weights_do_not_take_the_place_of_what_a_run_resumes_from(checkpoints, tmp_path):
    """A full disk may have room for weights, and not for optimizer state."""
    weights, state = CheckpointContent({}, {}), CheckpointContent({}, {"lr_schedulers": []})
    checkpoints.write(tmp_path / "one.ckpt", state)
    checkpoints.write(tmp_path / "weights-1", weights)
    with pytest.raises(OSError, match="No space"):
        checkpoints.write(tmp_path / "full.ckpt", state)
    checkpoints.remove(tmp_path / "one.ckpt")
    checkpoints.write(tmp_path / "weights-2", weights)
    checkpoints.remove(tmp_path / "weights-1")
    assert names(tmp_path) == ["one.ckpt", "weights-2"]


def test_only_checkpoints_are_removed(checkpoints, tmp_path):
    """ModelCheckpoint takes a save that was refused for one that it may remove later."""
    checkpoints.write(tmp_path / "one.ckpt", CheckpointContent({}, {}))
    for folder in ("one.ckpt", "mine"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "notes.txt").write_text("precious")
        with pytest.warns(match=r"could not be removed: .* it holds .*notes\.txt.*, which would"):
            checkpoints.remove(tmp_path / folder)
        assert (tmp_path / folder / "notes.txt").is_file()
    checkpoints.write(tmp_path / "two.ckpt", CheckpointContent({}, {}))
    (tmp_path / "link.ckpt").symlink_to("two.ckpt")
    checkpoints.remove(tmp_path / "link.ckpt")
    assert names(tmp_path) == ["mine", "one.ckpt", "two.ckpt"]
    # The paths that ModelCheckpoint removes come out of the checkpoint that was resumed from.
    (tmp_path / "file").write_text("precious")
    with pytest.warns(match="file is a file"):
        checkpoints.remove(tmp_path / "mine" / ".." / "file")
    assert (tmp_path / "file").is_file()


def test_what_follows_may_still_be_in_the_background(checkpoints, tmp_path):
    parts, gate = CheckpointContent({}, {}), Event()
    checkpoints.write(tmp_path / "one.ckpt", parts)

    def later() -> None:
        gate.wait()
        checkpoints.write(tmp_path / "two.ckpt", parts)

    checkpoints._jobs.submit(tmp_path / "two.ckpt", later, copies=1)
    checkpoints.remove(tmp_path / "one.ckpt")
    assert names(tmp_path) == ["one.ckpt"]
    gate.set()
    checkpoints.settle()
    assert names(tmp_path) == ["two.ckpt"]


def test_of_those_before_time_limits_the_last_stays(checkpoints, tmp_path):
    parts = CheckpointContent({}, {})
    for name in ("hpc_ckpt_1.ckpt", "last.ckpt", "hpc_ckpt_2.ckpt"):
        checkpoints.write(tmp_path / name, parts)
    assert names(tmp_path) == ["hpc_ckpt_2.ckpt", "last.ckpt"]
    # Another job, in the same folder.
    parts = CheckpointContent({}, {"slurm_job_id": "7"})
    for number in (3, 4):
        checkpoints.write(tmp_path / f"hpc_ckpt_{number}.ckpt", parts)
    assert names(tmp_path) == ["hpc_ckpt_2.ckpt", "hpc_ckpt_4.ckpt", "last.ckpt"]


def test_what_cannot_be_removed_ends_nothing(checkpoints, tmp_path, monkeypatch):
    checkpoints.write(tmp_path / "one.ckpt", CheckpointContent({}, {}))

    def fails(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(saving.atomic_folders, "remove", fails)
    with pytest.warns(match=r"one\.ckpt could not be removed: .*Training goes on\."):
        checkpoints.remove(tmp_path / "one.ckpt")


@pytest.mark.parametrize("first", ["folder", "link", "nothing"])
def test_a_link_takes_its_place_when_what_it_leads_to_is_saved(first, checkpoints, tmp_path):
    parts, gate = CheckpointContent({}, {}), Event()
    last, new = tmp_path / "last.ckpt", tmp_path / "two.ckpt"
    checkpoints.write(last if first == "folder" else tmp_path / "one.ckpt", parts)
    if first == "link":
        last.symlink_to("one.ckpt")

    def later() -> None:
        gate.wait()
        checkpoints.write(new, parts)

    checkpoints._jobs.submit(new, later, copies=1, leaves=new)
    trainer = SimpleNamespace(is_global_zero=True)
    checkpoints._link(trainer, str(new), str(last))
    before = {"folder": ["last.ckpt"], "link": ["last.ckpt", "one.ckpt"], "nothing": ["one.ckpt"]}
    assert names(tmp_path) == before[first]
    gate.set()
    checkpoints.settle()
    assert last.is_symlink()
    assert last.readlink() == Path("two.ckpt")
    checkpoints._link(trainer, str(tmp_path / "unsaved.ckpt"), str(last))
    assert last.readlink() == Path("two.ckpt"), "no link to what was not saved"


def test_a_link_replaces_nothing_but_checkpoints(checkpoints, tmp_path):
    """Lightning would delete the folder."""
    checkpoints.write(tmp_path / "one.ckpt", CheckpointContent({}, {}))
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "notes.txt").write_text("precious")
    with pytest.warns(match=r"last\.ckpt could not be removed: .*notes\.txt"):
        checkpoints.remove(tmp_path / "last.ckpt", tmp_path / "one.ckpt")
    assert (tmp_path / "last.ckpt" / "notes.txt").is_file()
