"""WLBStrategy(dynamic="auto"): runs that find out by themselves whether leaving the mesh pays."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from lightning_wlb.plan import StepPlan
from lightning_wlb.strategy import pooling
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import Case, Recorder, data, module, trainer

CASE = Case("slim", "adaptive", tied=True, layers=2)


def on_two_ranks(rank: int, folder: Path):
    said = []
    import time

    t = time.time()
    with (
        mock.patch("lightning_wlb.data.cached.user_cache_dir", return_value=str(folder)),
        mock.patch.object(pooling, "rank_zero_info", said.append),
    ):
        strategy, recorder = WLBStrategy(1, 1, 1, 2, dynamic="auto"), Recorder()
        runner = trainer(strategy, 2, callbacks=[recorder], max_steps=8)
        runner.fit(module(CASE), data(CASE, profile="cpu"))
    print(said, strategy.dynamic, time.time() - t)
    for p in recorder.plans:
        print(StepPlan.from_json(p).strategy)
    return said


def test_x(tmp_path):
    run_ranks(on_two_ranks, 2, tmp_path, process_group=False)
