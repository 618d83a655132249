"""What numba makes of a search is the search."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

# The same 40 random steps, with numba or with its import blocked; prints whether it was there.
PROGRAM = """
import sys
if sys.argv[1] == "plain":
    sys.modules["numba"] = None
import numpy as np
from lightning_wlb.planning import compiled
from lightning_wlb.planning.holding import UNIT, Others, Waiting
from lightning_wlb.planning.slicing import PrefixWork, slice_pieces
from lightning_wlb.planning.subset import Batch, Bins, hold_subset
from lightning_wlb.plan import Piece

rng = np.random.default_rng(0)

def pieces(most):
    tokens = np.sort(rng.integers(16_000, 131_073, rng.integers(0, most)))[::-1].tolist()
    return tokens, [each + each * each // 42_350 for each in tokens]

print("plain" if compiled.njit is None else "numba")
for _ in range(40):
    tokens, costs = pieces(40)
    waiting = Waiting(tokens, costs, (rng.random(len(tokens)) < 0.1).tolist())
    ahead = [Batch(*pieces(6), Others(250_000, 400_000)) for _ in range(rng.integers(0, 3))]
    price = int(rng.integers(1, 256 * UNIT))
    bins = Bins(4, 163_840, 300_000, 230_000, 524_288, price, 131_072)
    print(hold_subset(waiting, Others(300_000, 500_000), ahead, bins))
for step in range(40):
    lengths = np.clip(np.exp(rng.normal(7, 2, rng.integers(1, 60))).astype(int), 1, 131_072)
    pieces = [Piece(number, 5, 5 + int(tokens), 0) for number, tokens in enumerate(lengths)]
    linear, pair = int(rng.integers(1, 1 << 30)), int(rng.integers(0, 1 << 20))
    if step % 4 == 0:  # more than 63 bits
        linear, pair = linear << 40, pair << 40
    work = PrefixWork(linear, pair)
    cap = int(rng.integers(1_000, 131_073))
    print(slice_pieces(pieces, int(rng.integers(1, 20)), cap, work, taper=int(rng.integers(0, 4))))
"""


def answers(kind: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind],
        check=True, capture_output=True, text=True, timeout=240, env=os.environ,
    )  # fmt: skip
    name, *held = done.stdout.splitlines()
    assert name == kind
    return held


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
def test_compiled_and_plain_search_agree() -> None:
    assert answers("numba") == answers("plain")


def test_runs_without_numba() -> None:
    held = answers("plain")
    assert len(held) == 80
    assert any("True" in each for each in held[:40])
    assert all("Slice" in each for each in held[40:])
