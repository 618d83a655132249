from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_wlb.data import cache as cached
from lightning_wlb.data.cache import BESIDE, built_before, built_once, fingerprint


def test_it_is_built_once_beside_its_source(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "made").write_text("whole")

    assert built_before("key", tmp_path / "source") is None
    first = built_once("key", build, tmp_path / "source")
    assert built_before("key", tmp_path / "source") == first
    assert first == tmp_path / BESIDE / "key"
    assert built_once("key", lambda _: pytest.fail("built again"), tmp_path / "source") == first
    assert [path.name for path in first.iterdir()] == ["made"]


def test_a_rank_that_was_first_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "user_cache_dir", lambda name: str(tmp_path / name))

    def build(folder: Path) -> None:
        (folder / "made").write_text("second")
        (tmp_path / "lightning_wlb" / "key").mkdir()
        (tmp_path / "lightning_wlb" / "key" / "made").write_text("first")

    assert (built_once("key", build) / "made").read_text() == "first"
    assert [path.name for path in (tmp_path / "lightning_wlb").iterdir()] == ["key"]


def test_what_failed_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built_once("key", build, tmp_path / "source")
    assert list((tmp_path / BESIDE).iterdir()) == []


def test_a_fingerprint_changes_with_files_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("text")
    first = fingerprint([path], tmp_path, "uint16")
    assert first == fingerprint([path], tmp_path, "uint16")
    assert first != fingerprint([path], tmp_path, "int32")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert first != fingerprint([path], tmp_path, "uint16")
