"""Real multi-rank runs on one machine; see :mod:`benchmarks.ranks`."""

import multiprocessing

from benchmarks import ranks
from benchmarks.ranks import RankFailed, free_port, run_ranks

__all__ = ["RankFailed", "free_port", "run_ranks"]

# What ranks import: once in the fork server, not in each of some hundred ranks (0.1 to 0.5 s each).
IMPORTED = (
    "pytest",
    "hypothesis",
    "peft",
    "lightning_wlb.strategy.wlb",
    "tests.strategy.harness",
    "tests.models.huggingface.support",
)
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [*ranks.PRELOADED, *IMPORTED, "tests.frozen"]
)
