"""A folder has its final name only when it is whole."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_wlb.checkpoints import folders


def write(path: Path, text: str) -> None:
    folders.begin(path)
    (folders.aside_of(path) / "file").write_text(text)


def test_what_stood_there_stays_until_the_new_folder_is_whole(tmp_path):
    path = tmp_path / "folder"
    write(path, "one")
    assert not path.exists()
    folders.finish(path)
    write(path, "two")
    assert (path / "file").read_text() == "one"
    folders.finish(path)
    assert (path / "file").read_text() == "two"
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_what_died_is_removed_under_this_name_at_once_and_under_others_when_stale(tmp_path):
    for name in ("mine", "fresh", "stale"):
        write(tmp_path / name, "half")
    stale = folders.aside_of(tmp_path / "stale")
    for each in (stale, stale / "file"):
        os.utime(each, (0, 0))
    folders.begin(tmp_path / "mine")
    assert sorted(each.name for each in stale.parent.iterdir()) == ["fresh", "mine"]
    assert not any(folders.aside_of(tmp_path / "mine").iterdir())
