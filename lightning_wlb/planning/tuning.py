"""The tuning constants of planning, each with the measurement that set it.

Those that a paper gives stand with the paper's method in its file. Where no measurement is named
the value was taken once and tried against its neighbours on Generator A without a record; change it
and compare ``benchmarks/packing.py`` (steps and milliseconds) and
``benchmarks/auto_never_beaten.py`` (how far ``auto`` is behind the best other packing).
"""

from __future__ import annotations

# Slicing. Rows "slim" of benchmarks/results/slimpack.md.

LEAST_SLICE = 512
"""Tokens of the shortest slice, about: four query tiles, so that no kernel is mostly padding."""

OPEN_GAPS = 400
"""A gap below 1/400 of a pack's target stays open: packs within 0.25 % of each other, few cuts."""

TAPER = (6, 5)
"""A tapered pack's work to that of the one after it. Rows "tapered" of slimpack.md against plain
ones: 1.163 for 1.193 at N = 4 and 4·N packs. Other profiles of work gained hardly more."""

# Sharing of pieces by replicas (DP-Merge).

SHARING_OVERHEAD_PERCENT = 10
"""Extra work, over all replicas, of a piece that they share: SlimPack's own assumption."""

UNBALANCED_PERCENT = 102
"""Work of the busiest replica to the mean above which sharing of pieces is tried: below it a shared
piece's overhead costs more than it can gain."""

SHARED_MULTIPLES = (2, 4, 8)
"""MicroPacks of shared pieces take as long as those of a step cut into k·N."""

MANY_REPLICAS = 8
"""Replicas above which fewer dealings are tried where memory is known (docs/scale.md)."""

# The search of `auto`.

HALVES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of micro-batches that are tried, over half of the nominal number (SlimPack §5.1)."""

START = HALVES.index(12)
"""Where the search begins: six times the nominal number."""

NEAR_PERCENT = 102
"""On one stage the fewest micro-batches within 2 % of the least predicted time are taken: 2 % is
the error of a prediction (benchmarks/results/simulator.json)."""

ACTION_OVERHEAD = 100
"""Without a profile an action costs the forward of a short piece of C/100 tokens beside its
work."""

SELF_SEARCHING = 4
"""Replicas up to which each searches for itself where that makes the step any shorter."""

SLACK_PER_MILLE = 1003
"""How late other replicas may be, to the latest one so far, without a search of their own
(docs/scale.md: searches are most of a plan on thousands of ranks)."""

DEALT_AGAIN = 2
"""Times at most that pieces are dealt again, knowing which replicas were late."""

LATE_PERCENT = 101
"""The latest replica's end to the mean above which pieces are dealt again."""

CLEARLY_PERCENT = 90
"""Bytes that are estimated to be at most so much of the limit are not counted exactly: estimates
were within 0.1 % on five settings of up to 1,024 ranks (docs/scale.md)."""
