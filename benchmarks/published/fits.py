"""Where the attention rates of the shipped profiles come from: a count of tiles, fitted.

A segment of n tiles of 128 queries takes, for each head, ``unit`` times the key tiles that they
read, 1 + 2 + ... + n where it is causal and n² without a mask, and ``overhead`` of them for each
tile of queries besides. The device works on :data:`AT_ONCE` tiles at the same time; a call ends
as :meth:`lightning_wlb.cost.attention_tiles.last_tiles_end` says. Overhead and unit are the least
squares of the relative errors over published times of the role ``fit``.

``python -m benchmarks.published.fits --write`` puts the rates into the shipped profiles. Prints a
table and, last, one JSON object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import report
from benchmarks.published import facts
from benchmarks.published.attention import WORK
from lightning_wlb.cost import profile as profiles
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.rates import AttentionTable

TILE = 128
QUERIES = tuple(2**power for power in range(7, 16))
RATIOS = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0, 1024.0)
CALL_NS = (8000.0, 16000.0)
AT_ONCE = {"h100": (132, 132), "h100-fa2": (264, 132)}
"""Tiles at once, forward and backward: an H100 has 132 processors. FlashAttention-2's forward takes
128 threads and 64 KiB of shared memory a tile, so that two fit into one of them."""

NOT_MULTICAST = {"h100": 1.25, "h100-fa2": 1.0}
"""What key tiles of segments of a single tile cost more, assumed; see the profiles' sources."""

UNMASKED = {
    # Backward without mask, 16,384 tokens and 2,048 / head size heads: (tokens, TFLOP/s).
    ("h100", 128): ((8192, 559), (16384, 561)),
    ("h100", 64): ((512, 272), (1024, 363), (2048, 422), (4096, 453), (8192, 472), (16384, 474)),
    ("h100-fa2", 128): (
        (512, 214), (1024, 260), (2048, 291), (4096, 310), (8192, 318), (16384, 322),
    ),
    ("h100-fa2", 64): (
        (512, 198), (1024, 238), (2048, 264), (4096, 279), (8192, 287), (16384, 291),
    ),
}  # fmt: skip
"""Figure 6 of FlashAttention-3, arXiv:2407.08608. Of head size 128 of FlashAttention-3 the longest:
short causal segments are slower than those without mask, and ``attention.csv`` has them."""


@dataclass(frozen=True)
class Fit:
    """Overhead in key tiles, time of a key tile and head in ns, and relative errors of the fit."""

    overhead: float
    unit_ns: float
    errors: tuple[float, ...]


def fit(profile: str, head_dim: int, backward: bool) -> Fit:
    """The fit of one pass of one head size."""
    name = "backward" if backward else "forward"
    calls = []  # tokens of a document, documents times heads, ns, whether causal
    for fact in facts("attention"):
        wanted = (fact["profile"], fact.number("head_dim"), fact["pass"], fact.role)
        if wanted != (profile, head_dim, name, "fit"):
            continue
        tokens, heads = fact.number("queries"), fact.number("documents") * fact.number("heads")
        flops = 2 * WORK[name] * heads * tokens**2 * head_dim
        ns = fact.value * 1e6 if fact.unit == "ms" else flops / fact.value / 1e3
        calls.append((tokens, heads, ns, True))
    for tokens, rate in UNMASKED[profile, head_dim] if backward else ():
        heads = 16384 // tokens * 2048 // head_dim
        calls.append((tokens, heads, 10 * heads * tokens**2 * head_dim / rate / 1e3, False))
    rows = []
    for tokens, heads, ns, causal in calls:
        count = tokens // TILE
        read = np.arange(1, count + 1) if causal else np.full(count, count)
        waiting = AT_ONCE[profile][backward] * (read.max() - read.mean()) / 2
        work = np.array((heads * count, heads * read.sum() + waiting))
        rows.append((*work / ns, 1 - CALL_NS[backward] / ns))
    table = np.array(rows)
    (overhead, unit), *_ = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)
    errors = table[:, :2] @ (overhead, unit) - table[:, 2]
    return Fit(float(overhead / unit), float(unit), tuple(errors.round(3).tolist()))


def rates(made: Fit, head_dim: int, backward: bool, single: float) -> list[list[float]]:
    """FLOP/s at :data:`QUERIES` and :data:`RATIOS`; ``single`` is for segments of one tile."""
    result = []
    for queries in QUERIES:
        count = queries // TILE
        row = []
        for ratio in RATIOS:
            before = (ratio - 1) * count
            read = count * before + count * (count + 1) / 2
            pairs = queries * (ratio - 1) * queries + queries * (queries + 1) / 2
            ns = made.unit_ns * (made.overhead * count + read * (single if count == 1 else 1))
            row.append(float(round((10 if backward else 4) * head_dim * pairs / ns * 1e3)) * 1e6)
        result.append(row)
    return result


def tables(profile: str) -> tuple[tuple[AttentionTable, ...], dict[str, Fit]]:
    """The attention tables of a profile, and the fits that they were made from."""
    made, fits = [], {}
    for head_dim in (64, 128):
        forward, backward = (fit(profile, head_dim, each) for each in (False, True))
        if (profile, head_dim) == ("h100", 64):
            # Nobody published causal backwards of this size: a row's overhead is taken to be as
            # long for each element as at head size 128, since it is memory traffic.
            whole = fit(profile, 128, True)
            overhead = whole.overhead * whole.unit_ns / 2 / backward.unit_ns
            backward = replace(backward, overhead=overhead, errors=())
        fits[f"{profile} {head_dim} forward"] = forward
        fits[f"{profile} {head_dim} backward"] = backward
        single = NOT_MULTICAST[profile]
        both: Sequence[Any] = [
            tuple(map(tuple, rates(one, head_dim, way, single)))
            for one, way in ((forward, False), (backward, True))
        ]
        made.append(
            AttentionTable(
                head_dim, TILE, QUERIES, RATIOS, *both, CALL_NS, at_once=AT_ONCE[profile]
            )
        )
    return tuple(made), fits


def write(changed: Profile) -> None:
    """Put a shipped profile in the place of the one of its name."""
    folder = Path(profiles.__file__).with_name("profiles")
    (folder / f"{changed.name}.json").write_text(changed.to_json())


def main(argv: list[str] | None = None) -> None:
    """Fit, print, and write if asked to."""
    parser = report.parser("published.fits", __doc__)
    parser.add_argument("--write", action="store_true", help="into the shipped profiles")
    arguments = parser.parse_args(argv)
    every: dict[str, Fit] = {}
    for name in AT_ONCE:
        attention, fits = tables(name)
        every |= fits
        for other in (name, name.replace("h100", "h200")) if arguments.write else ():
            write(replace(Profile.load(other), attention=attention))
    rows = [
        (
            name,
            f"{one.overhead:.2f}",
            f"{WORK[name.split()[2]] * 4 * TILE**2 * int(name.split()[1]) / one.unit_ns / 1e3:.0f}",
            " ".join(f"{error:+.1%}" for error in one.errors),
        )
        for name, one in every.items()
    ]
    headings = ("profile, head size, pass", "overhead, tiles", "TFLOP/s", "errors")
    Console(width=140).print(report.table("Attention: a count of tiles", headings, rows))
    report.finish({"benchmark": "published.fits", "fits": {k: vars(v) for k, v in every.items()}})


if __name__ == "__main__":
    main()
