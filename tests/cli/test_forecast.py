"""The verdict: what is advised, the honest refusal, and where the gain ends."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_wlb.cli.forecast import LEAST_WINDOW, WORTH, Shorter, Verdict, compare, judged
from lightning_wlb.cli.plan import add_arguments
from lightning_wlb.cli.request import Request
from lightning_wlb.cost.flops import attention_flops, linear_flops


def verdict_of(lengths: np.ndarray | str, folder: Path, *changes: str) -> Verdict:
    if not isinstance(lengths, str):
        np.save(folder / "lengths.npy", lengths)
        lengths = str(folder / "lengths.npy")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = ["--lengths", lengths, "--model", "550m", "--profile", "h100", "--steps", "8", *changes]
    return judged(compare(Request.of(parser.parse_args(given))))


LONG = ("--mesh", "2,2,1,1", "--context-window", "65536", "--micro-batches", "8")


def test_long_documents_are_worth_it_down_to_a_length(tmp_path: Path) -> None:
    verdict = verdict_of("generator-a", tmp_path, *LONG, "--packing", "wlb")
    assert verdict.worth_it
    assert verdict.chosen.packing == "wlb"
    assert verdict.reference.packing == "best_fit"
    speeds = [row.tokens / row.total_ns for row in (verdict.chosen, verdict.reference)]
    assert verdict.gain == pytest.approx(speeds[0] / speeds[1])
    pays, fails = verdict.pays, verdict.fails
    assert fails is not None
    assert fails.gain < WORTH <= verdict.gain
    assert fails.window == 65536 // fails.factor >= LEAST_WINDOW
    assert fails.longest <= fails.window
    if pays is None:
        assert fails.factor == 2
    else:
        assert pays.gain >= WORTH
        assert fails.factor == 2 * pays.factor
    title, advice, threshold = verdict.lines
    assert title == "Verdict, simulated with profile h100, which is not measured:"
    assert f"{verdict.gain:.2f} times the tokens/s of best_fit" in advice
    assert "Take packing wlb with sharding adaptive on mesh 2,2,1,1" in advice
    assert f"only {fails.gain:.2f} times with documents 1/{fails.factor} as long" in threshold
    assert f"Tokens wait {verdict.chosen.delay:.2f} steps on average." in advice
    assert all("simulated with" in line and "h100" in line for line in verdict.lines)


def test_short_documents_are_told_that_it_is_not_for_them(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(50, 1000, 20_000)
    # Of few micro-batches fewer and longer ones would be worth it: they hide more of the traffic.
    mesh = ("--mesh", "4,1,1,1", "--context-window", "8192", "--micro-batches", "64")
    verdict = verdict_of(lengths, tmp_path, *mesh)
    assert not verdict.worth_it
    assert verdict.pays is verdict.fails is None
    assert verdict.attention < 0.05
    _, refusal, instead = verdict.lines
    assert refusal.startswith("Not for you: on mesh 4,1,1,1 no packing compared here has 3% more")
    assert "simulated with h100" in refusal
    assert instead.startswith("Take best_fit with sharding adaptive")
    assert verdict.figures["packing"] == "best_fit"
    assert verdict.figures["worth_it"] is False


def test_the_share_of_attention_counts_pieces_of_the_window(tmp_path: Path) -> None:
    lengths = np.array([3000, 70_000, 65_536, 3000] * 20)
    verdict = verdict_of(lengths, tmp_path, *LONG, "--packing", "best_fit", "--steps", "2",
                         "--long-documents", "split")  # fmt: skip
    shape = verdict.request.shape
    pieces = [3000, 65_536, 70_000 - 65_536, 65_536, 3000]
    attention = sum(attention_flops(shape, tokens) for tokens in pieces)
    linear = sum(linear_flops(shape, tokens) for tokens in pieces)
    assert verdict.attention == pytest.approx(attention / (attention + linear))
    # Compared with itself alone, there is nothing to gain.
    assert verdict.gain == 1


def test_what_is_said_where_no_length_fails_or_none_was_tried(tmp_path: Path) -> None:
    verdict = verdict_of("generator-a", tmp_path, *LONG, "--packing", "wlb", "--steps", "4")
    shorter = Shorter(factor=4, window=16_384, longest=16_000, mean=300.4, gain=1.2345)
    assert replace(verdict, pays=shorter, fails=None).lines[-1] == (
        "It is worth it on shorter documents, too: still 1.23 times with documents 1/4 as long"
        " (longest 16,000 tokens, mean 300) in windows of 16,384, simulated with h100."
    )
    none = replace(verdict, pays=None, fails=None)
    assert none.lines[-1].startswith("No shorter documents were tried")
