"""A manifest holds what was written, and shows every other content."""

import json
import re
import time
import zlib
from contextlib import nullcontext
from pathlib import Path

import pytest

from lightning_wlb.checkpoints import manifest
from lightning_wlb.checkpoints.manifest import (
    BLOCK_BYTES,
    Damaged,
    File,
    durable,
    make_folder,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "one").write_bytes(b"1" * 1000)
    (tmp_path / "two").write_bytes(b"")
    files = {each.name: manifest.durable(each) for each in tmp_path.iterdir()}
    manifest.write(tmp_path, manifest.Manifest(manifest.EXPORT, "abc", 4, 17, files))
    return tmp_path


def test_it_is_read_as_it_was_written(folder):
    read = manifest.read(folder)
    assert abs(read.time - time.time()) < 60
    one = File(1000, f"{zlib.crc32(b'1' * 1000):08x}")
    two = File(0, "00000000")
    assert read == manifest.Manifest(
        manifest.EXPORT, "abc", 4, 17, {"one": one, "two": two}, time=read.time
    )
    manifest.check(folder)


@pytest.mark.parametrize(
    ("content", "same_size", "said"),
    [
        (None, False, r"one is missing \(No such file or directory\)"),
        (b"1" * 999, False, "one has 999 bytes instead of 1,000"),
        (b"1" * 999 + b"2", True, "the content of one is not what was written"),
    ],
)
def test_damage_is_named(content, same_size, said, folder):
    (folder / "one").unlink()
    if content is not None:
        (folder / "one").write_bytes(content)
    with pytest.raises(Damaged, match=rf"{folder} is damaged: {said}\. Use another checkpoint\."):
        manifest.check(folder)
    # Sizes are compared without reading.
    with nullcontext() if same_size else pytest.raises(Damaged):
        manifest.check_sizes(folder, manifest.read(folder))


def change(folder, honest: bool, **changes) -> None:
    """Change a manifest; honestly: with a checksum that fits."""
    whole = json.loads((folder / "manifest.json").read_text())
    whole["content"].update(changes)
    if honest:
        whole["crc32"] = manifest._checksum(whole["content"])
    (folder / "manifest.json").write_text(json.dumps(whole))


def test_a_manifest_that_was_changed_is_damaged(folder):
    change(folder, False, step=18)
    with pytest.raises(Damaged, match=r"manifest\.json is not what was written"):
        manifest.read(folder)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(Damaged, match=r"manifest\.json is not what was written"):
        manifest.check(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(Damaged, match=r"manifest\.json is missing"):
        manifest.check(folder)


def test_a_newer_format_and_other_folders_are_refused(folder):
    change(folder, True, format=3)
    with pytest.raises(ValueError, match=r"newer version .*format 3.* Update"):
        manifest.read(folder)
    for name in ("../one", "a\0b", "\ud800", "\x1b[2J"):
        change(folder, True, format=2, files={name: {"size": 1, "crc32": ""}})
        with pytest.raises(Damaged, match=rf"names {re.escape(repr(name))}, which is no file of"):
            manifest.read(folder)


def test_the_format_without_who_saved_it_is_read(folder):
    whole = json.loads((folder / "manifest.json").read_text())["content"]
    del whole["by"]
    whole["format"] = 1
    text = json.dumps({"content": whole, "crc32": manifest._checksum(whole)})
    (folder / "manifest.json").write_text(text)
    assert manifest.read(folder).by == manifest.Saver()


@pytest.mark.parametrize(
    "changes",
    [
        *({"time": "late"}, {"step": 1.5}, {"ranks": None}),
        *({"by": []}, {"by": {"number": "1"}}, {"by": {"known": [1]}}),
        *({"files": {"one": {"size": each, "crc32": "0"}}} for each in (None, "1", [])),
        {"files": {"one": {"size": 1, "crc32": 0}}},
    ],
    ids=str,
)
def test_other_types_are_damage(changes, folder):
    change(folder, True, **changes)
    with pytest.raises(Damaged, match=r"manifest\.json is not what was written"):
        manifest.read(folder)


def test_size_and_checksum_of_what_was_written(tmp_path):
    whole = b"one" + b"2" * (BLOCK_BYTES + 1)
    (tmp_path / "file").write_bytes(whole)
    assert durable(tmp_path / "file") == File(len(whole), f"{zlib.crc32(whole):08x}")


def test_a_parent_that_another_run_removes_is_made_again(tmp_path, monkeypatch):
    """A save that ends removes its empty folder while another one begins."""
    aside, made = tmp_path / ".partial" / "mine", Path.mkdir

    def mkdir(folder: Path, **options: bool) -> None:
        if folder == aside:
            monkeypatch.undo()
            aside.parent.rmdir()
        made(folder, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    make_folder(aside)
    assert aside.is_dir()
