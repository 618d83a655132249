"""The verdict: what is advised, and the honest refusal."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from lightning_wlb.cli.forecast import Verdict, compare, judged
from lightning_wlb.cli.plan import add_arguments
from lightning_wlb.cli.request import comparison_of
from lightning_wlb.cost.profile import Profile


def verdict_of(lengths: np.ndarray | str, folder: Path, *changes: str) -> Verdict:
    if not isinstance(lengths, str):
        np.save(folder / "lengths.npy", lengths)
        lengths = str(folder / "lengths.npy")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = ["--lengths", lengths, "--model", "550m", "--profile", "h100", "--steps", "8", *changes]
    return judged(compare(comparison_of(parser.parse_args(given))))


LONG = ("--mesh", "2,2,1,1", "--context-window", "65536", "--micro-batches", "8")


def test_long_documents_are_worth_it(tmp_path: Path) -> None:
    verdict = verdict_of("generator-a", tmp_path, *LONG, "--packing", "wlb")
    assert verdict.worth_it
    assert verdict.chosen.packing == "wlb"
    assert verdict.reference.packing == "best_fit"
    speeds = [each.tokens_per_second for each in (verdict.chosen, verdict.reference)]
    assert verdict.gain == pytest.approx(speeds[0] / speeds[1])
    title, advice = verdict.lines
    accuracy = Profile.load("h100").accuracy
    assert title == f"Verdict, simulated with profile h100, {accuracy}:"
    assert accuracy.startswith("which is not measured: others' published figures of such devices")
    assert accuracy.endswith("in the median, none of this package (docs/accuracy.md)")
    assert f"{verdict.gain:.2f} times the tokens/s of best_fit" in advice
    assert "Take packing wlb with sharding adaptive on mesh 2,2,1,1" in advice
    assert f"Tokens wait {verdict.chosen.delay:.2f} steps on average." in advice
    assert all("simulated with" in line and "h100" in line for line in verdict.lines)


def test_short_documents_are_told_that_it_is_not_for_them(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(50, 1000, 20_000)
    # With few micro-batches, fewer and longer ones would pay: they hide more communication.
    mesh = ("--mesh", "4,1,1,1", "--context-window", "8192", "--micro-batches", "64")
    verdict = verdict_of(lengths, tmp_path, *mesh)
    assert not verdict.worth_it
    assert verdict.attention < 0.05
    _, refusal, instead = verdict.lines
    assert refusal.startswith("Not for you: on mesh 4,1,1,1 the best packing compared here, ")
    assert "and 3% more are asked" in refusal
    assert "simulated with h100" in refusal
    assert instead.startswith("Take best_fit with sharding adaptive")
    assert verdict.figures["packing"] == "best_fit"
    assert verdict.figures["worth_it"] is False
