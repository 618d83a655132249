"""The benchmark of shardings on a few sequences, and that the GPU one asks for a device."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from benchmarks import context_parallel, context_parallel_gpu
from benchmarks.context_parallel import PAPER
from lightning_wlb.attention.kernel import PLAIN
from lightning_wlb.attention.kernels_cpu import cpu_attention
from lightning_wlb.attention.varlen import VarlenAttention
from lightning_wlb.cost.profile import Profile
from lightning_wlb.sharding import SHARDINGS


def test_rows_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = "--windows 65536 --ranks 4 --sequences 4 --overheads 2 --head-sequences 2"
    context_parallel.main([*options.split(), "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "Modelled" in printed
    result = json.loads(printed.splitlines()[-1])
    assert result["modelled"] is True
    rows = {row["sharding"]: row for row in result["rows"]}
    assert set(rows) == set(context_parallel.METHODS)
    best = rows["adaptive (ours)"]
    assert best["modelled_max_over_ideal_mean"] <= 1.02
    assert all(row["rows_max_over_mean"] <= 1.002 for row in result["rows"])
    # Plain: 3 ranks get 16K rows of 2 · 32 heads · 128 · 2 bytes.
    assert best["plain_all_gather_mib"] == 3 * 16_384 * 16_384 / 2**20
    assert best["sent_busiest_rank_mib"] < best["plain_all_gather_mib"]
    # Of 32 key/value heads each rank reads 8; of 8 heads over 8 tensor-parallel ranks all read one.
    speed = {
        (row["model"], row["tensor"]): row["modelled_speed_of_heads"] for row in result["heads"]
    }
    assert speed["7b", 1] > 1 > speed["70b", 8]
    assert json.loads((tmp_path / "context_parallel.json").read_text()) == result
    shown = (tmp_path / "context_parallel.md").read_text().splitlines()[-1]
    assert shown.startswith("| 64K | 4 | 2 |")
    assert shown.endswith(f" {best['sent_busiest_rank_mib']:.0f} | 768 |")
    assert (tmp_path / "context_parallel.png").stat().st_size > 10_000


def test_sequences_fill_the_window() -> None:
    every = context_parallel.sequences(65_536, 5, seed=3)
    assert [sum(lengths) for lengths in every] == [65_536] * 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_gpu_benchmark_says_so() -> None:
    with pytest.raises(SystemExit, match="CUDA device"):
        context_parallel_gpu.main([])


def test_the_gpu_benchmark_runs_through_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Everything but events and CUDA kernels; both ways to attend do the same work."""
    clock = {"calls": 0}

    def milliseconds(function: Callable[[], object]) -> float:
        function()
        clock["calls"] += 1
        return float(clock["calls"])

    def library(q, k, v, **arguments):
        return cpu_attention(q, k, v, SimpleNamespace(**arguments), PLAIN), None

    monkeypatch.setattr(context_parallel_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(context_parallel_gpu, "DTYPE", torch.float32)
    monkeypatch.setattr(context_parallel_gpu, "LENGTHS", (16, 64))
    monkeypatch.setattr(context_parallel_gpu, "milliseconds", milliseconds)
    monkeypatch.setattr(context_parallel_gpu, "flash_library", lambda: (library, (2, 8, 3)))
    monkeypatch.setattr(VarlenAttention, "kernel_name", lambda self, device: "flash_attn 2")
    options = "--windows 2048 --ranks 2 --sequences 1 --keys 64 --tokens 64 --backend cpu"
    arguments = context_parallel_gpu.parsed(options.split())
    monkeypatch.setattr(VarlenAttention, "_kernel_for", lambda self, q: cpu_attention)
    result = context_parallel_gpu.run(arguments, Profile.load("h100"))
    (row,) = result["shardings"]
    assert set(row["ms"]) >= {*SHARDINGS, "heads", "our choice"}
    # Of the calls in order: two of Figure 10, two ranks for each sharding, heads, and the path.
    assert [each["queries"] for each in result["segments"]] == [16, 64]
    assert row["ms"][next(iter(SHARDINGS))] == 4
    assert row["ms"]["heads"] == 3 + 2 * len(SHARDINGS)
    assert row["ms"]["optimal of the paper's"] == min(row["ms"][name] for name in PAPER)
    calls = clock["calls"]
    assert result["path_over_library"] == [(calls - 1) / calls]
    context_parallel_gpu.show(result, Console(width=200))
    assert "Slowest rank" in capsys.readouterr().out
    context_parallel_gpu.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
