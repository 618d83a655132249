"""The tuning constants of planning, each with the measurement that set it.

Constants from a paper are in the file of the paper's method. Where no measurement is named, the
value was compared with its neighbours on Generator A once, without a record. Before changing one,
compare ``benchmarks/packing.py`` (milliseconds) and ``benchmarks/auto_never_beaten.py``.
"""

from __future__ import annotations

# Slicing. Rows "slim" of benchmarks/results/packing.md.

LEAST_SLICE = 512
"""Tokens of the shortest slice: four query tiles, so that no kernel is mostly padding."""

OPEN_GAPS = 400
"""A gap below 1/400 of a pack's target stays open: packs within 0.25 % of each other, few cuts."""

TAPER = (6, 5)
"""Ratio of a tapered pack's work to the next pack's. At N = 4 and 4·N packs of Generator A a step
takes 1.163 times its work per rank, with equal packs 1.193. Other tapers gained hardly more."""

# Sharing of pieces by replicas (DP-Merge).

SHARING_OVERHEAD_PERCENT = 10
"""Extra work of a shared piece, over all its replicas: SlimPack's own assumption."""

UNBALANCED_PERCENT = 102
"""Sharing of pieces is tried where the busiest replica's work exceeds 102 % of the mean: below that
a shared piece's overhead costs more than it can gain."""

SHARED_MULTIPLES = (1, 2, 4, 8)
"""Values of k: shared pieces are cut into MicroPacks as long as those of a step cut into k·N."""

MANY_REPLICAS = 8
"""Replicas above which fewer dealings are tried where memory is known (docs/scale.md)."""

# The search of `auto`.

HALVES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of micro-batches that are tried, in halves of the nominal number (SlimPack §5.1)."""

START = HALVES.index(12)
"""Where the search begins: six times the nominal number."""

NEAR_PER_MILLE = 1003
"""On one stage the fewest micro-batches within 0.3 % of the least predicted time are taken. A
prediction is no better than 2 % (benchmarks/results/simulator.json), but its errors are similar for
plans of the same pieces. No packing shall beat ``auto`` by more than 0.5 %, of which 0.2 % are left
for candidates that the search misses."""

ACTION_OVERHEAD = 100
"""Without a profile, an action's overhead is the forward work of a piece of C/100 tokens."""

SELF_SEARCHING = 4
"""Up to so many replicas, a replica searches itself for any gain, however small."""

SLACK_PER_MILLE = 1003
"""With more replicas, a replica gets a search of its own if it ends later than 1.003 times the
latest that searched (docs/scale.md: searches are most of a plan on thousands of ranks)."""

DEALT_AGAIN = 2
"""Pieces are dealt again, with less work for late replicas, at most so many times."""

EVENED = 2
"""So many of the best dealings are always dealt again. With the best one alone, four of 600 cases
of benchmarks/auto_never_beaten.py took 4 to 12 % longer."""

LATE_PERCENT = 101
"""Pieces are dealt again where the latest replica ends later than 101 % of the mean."""

CLEARLY_PERCENT = 90
"""If estimated bytes are at most 90 % of the limit, they are not counted exactly: estimates were
within 0.1 % on five settings of up to 1,024 ranks (docs/scale.md)."""
