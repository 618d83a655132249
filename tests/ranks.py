"""Real multi-rank runs on one machine; see :mod:`benchmarks.ranks`."""

import multiprocessing

from benchmarks import ranks
from benchmarks.ranks import RankFailed, free_port, run_ranks

__all__ = ["RankFailed", "free_port", "run_ranks"]

# Every test module imports these: once in the fork server, not in each of some hundred ranks.
IMPORTED = ("pytest", "hypothesis", "tests.device", "tests.strategy.harness")
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [*ranks.PRELOADED, *IMPORTED, "tests.frozen"]
)
