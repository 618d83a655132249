"""The tuning constants of planning, each with the measurement that set it.

Constants from a paper are in the file of the paper's method. Where no measurement is named, the
value was compared with its neighbours on Generator A once, without a record. Before changing one,
compare ``benchmarks/packing.py`` (steps and milliseconds) and ``benchmarks/auto_never_beaten.py``
(how far ``auto`` is behind the best other packing).
"""

from __future__ import annotations

# Slicing. Rows "slim" of benchmarks/results/packing.md.

LEAST_SLICE = 512
"""Tokens of the shortest slice, about: four query tiles, so that no kernel is mostly padding."""

OPEN_GAPS = 400
"""A gap below 1/400 of a pack's target stays open: packs within 0.25 % of each other, few cuts."""

TAPER = (6, 5)
"""Ratio of a tapered pack's work to that of the pack after it. At N = 4 and 4·N packs of
Generator A it has 1.163 where equal packs have 1.193. Other tapers gained hardly more."""

# Sharing of pieces by replicas (DP-Merge).

SHARING_OVERHEAD_PERCENT = 10
"""Extra work, over all replicas, of a piece that they share: SlimPack's own assumption."""

UNBALANCED_PERCENT = 102
"""Work of the busiest replica to the mean above which sharing of pieces is tried: below it a shared
piece's overhead costs more than it can gain."""

SHARED_MULTIPLES = (1, 2, 4, 8)
"""Shared pieces are cut into MicroPacks as long as those of a step cut into k·N."""

MANY_REPLICAS = 8
"""Replicas above which fewer dealings are tried where memory is known (docs/scale.md)."""

# The search of `auto`.

HALVES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of micro-batches that are tried, in halves of the nominal number (SlimPack §5.1)."""

START = HALVES.index(12)
"""Where the search begins: six times the nominal number."""

NEAR_PER_MILLE = 1003
"""On one stage the fewest micro-batches within 0.3 % of the least predicted time are taken. A
prediction is no better than 2 % (benchmarks/results/simulator.json), but its errors are much alike
for plans of the same pieces. ``auto`` is not to be beaten by more than 0.5 %, of which 0.2 % are
left for ways that the search misses."""

ACTION_OVERHEAD = 100
"""Without a profile, an action's overhead is the forward work of a piece of C/100 tokens."""

SELF_SEARCHING = 4
"""Replicas up to which each searches for itself where that makes the step any shorter."""

SLACK_PER_MILLE = 1003
"""A replica gets a search of its own where it ends later than 1.003 times the latest one so far
(docs/scale.md: searches are most of a plan on thousands of ranks)."""

DEALT_AGAIN = 2
"""Times at most that pieces are dealt again, knowing which replicas were late."""

EVENED = 2
"""Dealings, the best ones, that are always dealt again so. With one alone, four of 600 cases of
benchmarks/auto_never_beaten.py took 4 to 12 % longer."""

LATE_PERCENT = 101
"""The latest replica's end to the mean above which pieces are dealt again."""

CLEARLY_PERCENT = 90
"""Bytes that are estimated to be at most so much of the limit are not counted exactly: estimates
were within 0.1 % on five settings of up to 1,024 ranks (docs/scale.md)."""
