from pathlib import Path

import pytest

from lightning_wlb.data import cache as cached
from lightning_wlb.data.cache import built_once


def test_a_rank_that_was_first_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "user_cache_dir", lambda name: str(tmp_path / name))

    def build(folder: Path) -> None:
        (folder / "made").write_text("second")
        (tmp_path / "lightning_wlb" / "key").mkdir()
        (tmp_path / "lightning_wlb" / "key" / "made").write_text("first")

    assert (built_once("key", build) / "made").read_text() == "first"
    assert [path.name for path in (tmp_path / "lightning_wlb").iterdir()] == ["key"]
