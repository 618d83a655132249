"""The order of checkpoints in folders, and what counts as one."""

import os
from pathlib import Path
from unittest.mock import patch

import torch

from lightning_wlb.checkpoints import latest, manifest, sharded, writing


def write(path: Path, step: int, time: float, **rest: object) -> Path:
    with patch.object(manifest.time, "time", lambda: time):
        writing.write(
            path, sharded.collect(torch.nn.Linear(1, 1), [], {"global_step": step, **rest}, {})
        )
    return path


def test_by_the_time_that_the_manifest_records(tmp_path):
    late = write(tmp_path / "late.ckpt", 4, 300.0)
    # Set back to an earlier checkpoint, the run wrote an earlier step later.
    again = write(tmp_path / "again.ckpt", 2, 400.0)
    first = write(tmp_path / "first.ckpt", 9, 100.0)
    os.utime(first)  # as a copy has it
    found = latest.checkpoints_in(tmp_path)
    assert latest.newest_first(found) == [again, late, first]
    # What has no manifest that can be read is as new as its folder.
    (first / manifest.NAME).write_text("{}")
    os.utime(first, (350, 350))
    assert latest.newest_first(found) == [again, first, late]


def test_what_is_a_checkpoint(tmp_path):
    one = write(tmp_path / "one.ckpt", 1, 1.0)
    (tmp_path / ".old").mkdir()
    old = write(tmp_path / ".old" / "two.ckpt", 1, 2.0)
    half = write(tmp_path / "half.ckpt", 1, 3.0)
    (half / "meta.pt").unlink()  # damaged, and to be refused by name
    (tmp_path / "link.ckpt").symlink_to("one.ckpt")
    (tmp_path / "nowhere.ckpt").symlink_to("gone.ckpt")
    (tmp_path / "file.ckpt").write_text("of another strategy")
    (tmp_path / "folder").mkdir()
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "three.ckpt").mkdir()
    manifest.write(tmp_path / "folder", manifest.EXPORT, "save", 1, -1, {})
    assert set(latest.checkpoints_in(tmp_path)) == {one, old, half}
    assert set(latest.checkpoints_in(tmp_path, "t*")) == {old}
    assert latest.checkpoints_in(tmp_path / "nowhere") == []


def test_checkpoints_before_time_limits(tmp_path):
    paths = [write(tmp_path / f"hpc_ckpt_{n}.ckpt", n, 1.0) for n in (2, 9, 10)]
    other = write(tmp_path / "last.ckpt", 1, 1.0)
    assert latest.requeue_number(paths[2]) == 10
    assert latest.requeue_number(other) is None
    assert set(latest.older_requeues(paths[2])) == set(paths[:2])
    assert latest.older_requeues(other) == []


def test_what_the_rest_of_a_checkpoint_says(tmp_path):
    mine = write(tmp_path / "mine.ckpt", 1, 1.0, slurm_job_id="7", lr_schedulers=[])
    weights = write(tmp_path / "weights.ckpt", 1, 1.0)
    assert latest.is_of_job(mine, "7")
    assert not latest.is_of_job(mine, "8")
    assert not latest.is_of_job(weights, "7")
    assert latest.can_resume(mine)
    assert not latest.can_resume(weights)
    (weights / "meta.pt").write_bytes(b"damaged")
    assert latest.can_resume(weights)
    assert latest.is_of_job(weights, "7"), "so that it is refused by name"
