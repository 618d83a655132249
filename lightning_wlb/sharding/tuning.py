"""The tuning constants of sharding, each with what set it."""

from __future__ import annotations

CANDIDATES = ("hybrid", "per_document_contiguous", "per_sequence", "ptrr")
"""Every sharding by keys but ``per_document``, whose contiguous form has better tiles. What each is
worth to the others: ``benchmarks/candidate_shardings.py``."""

IDEAL_PERCENT = 102
"""Predicted latency at which the search for a sharding ends, in percent of the ideal: no prediction
is better than that."""

WHOLE_SHARES = (8, 32)
"""``hybrid`` keeps a piece whole up to 1/8 of a rank's work, or up to 1/32; tried in this order,
because whole pieces need no keys of other ranks."""

GOOD_PERMILLE = 20
"""A share of ``hybrid`` is good enough where no rank has more work than the mean by more than
this."""

LEAST_TILES = 4
"""Tiles of a rank's share of a cut piece: two from each end, so that no segment is one tile."""

ALL_TO_ALL_PERCENT = 75
"""The all-to-all is used where its busiest rank moves at most this share of the all-gather's rows.
An all-gather runs at a higher share of a link's speed than messages of different sizes between all
pairs; how much higher was not measured by this project."""
