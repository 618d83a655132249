"""A request of a few shards, and what an unbroken run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_wlb.data.tokenising import sources
from lightning_wlb.data.tokenising import tokenise as job
from lightning_wlb.data.tokenising.tokenise import TokeniseRequest, tokenise
from tests.data.tokenising.support import TEXTS, saved, write_lines


@pytest.fixture
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(sources, "_LEAST_SHARD_BYTES", 2000)
    monkeypatch.setattr(job, "_BATCH_ROWS", 10)


@pytest.fixture
def request_(small_shards, tmp_path) -> TokeniseRequest:
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in [*TEXTS, "", " "]])
    return TokeniseRequest(path, saved(tmp_path), eos="</s>")


@pytest.fixture
def unbroken(request_, tmp_path) -> Path:
    tokenise(request_, tmp_path / "unbroken", workers=1)
    return tmp_path / "unbroken"
