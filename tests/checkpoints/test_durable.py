"""Size and checksum are those of the file."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import pytest

from lightning_wlb.checkpoints.durable import BLOCK_BYTES, DurableFile, checksum, make_folder


def test_size_and_checksum_are_known_when_the_file_is_closed(tmp_path):
    parts = [b"one", b"2" * (BLOCK_BYTES + 1), b"", bytearray(b"three"), memoryview(b"4")]
    with DurableFile(tmp_path / "file") as file:
        for part in parts:
            assert file.write(part) == len(part)
    whole = b"".join(map(bytes, parts))
    assert (tmp_path / "file").read_bytes() == whole
    assert file.size == len(whole)
    assert file.crc32 == f"{zlib.crc32(whole):08x}" == checksum(tmp_path / "file")
    with pytest.raises(FileExistsError):
        DurableFile(tmp_path / "file")


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's full disk")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    opened = io.FileIO
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "FileIO", lambda path, mode: opened("/dev/full", "w"))
        file = DurableFile(tmp_path / "file")
    file.write(b"fits into the buffer")
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/file'"):
        file.close()
