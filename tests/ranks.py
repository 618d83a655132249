"""Real multi-rank runs on one machine; see :mod:`lightning_wlb.profiling.ranks`."""

from lightning_wlb.profiling.ranks import RankFailed, free_port, run_ranks

__all__ = ["RankFailed", "free_port", "run_ranks"]
