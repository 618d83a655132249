"""No hang: a rank that dies ends the run on every rank, with an error, soon."""

import os
import pickle
import time

import lightning.pytorch as L
import pytest

from lightning_wlb.profiling.ranks import start_ranks
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.strategy.harness import SMALL, data, module, trainer

LIMIT = 60.0  # seconds


class Fails(L.Callback):
    """Ends its process without a word, as a machine that fails does, or raises."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 2 and self.hook == "step":
            os._exit(1)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 1 and self.hook == "optimizer":
            os._exit(1)
        if trainer.global_step == 1 and self.hook == "raises":
            raise ZeroDivisionError("on one rank only")


def fit(rank: int, mesh: tuple[int, ...], victim: int, hook: str) -> int:
    callbacks = [Fails(hook)] if rank == victim else []
    runner = trainer(WLBStrategy(*mesh), 2, max_steps=50, max_epochs=-1, callbacks=callbacks)
    runner.fit(module(SMALL), data(SMALL))
    return runner.global_step


def outcomes(function, world_size: int, *args) -> tuple[list[tuple[bool, str] | None], float]:
    """What each rank ended with, None for one that died, and the seconds that it took."""
    processes, pipes = start_ranks(function, world_size, *args, timeout=LIMIT)
    begin = time.monotonic()
    results: list[tuple[bool, str] | None] = []
    try:
        for rank, pipe in enumerate(pipes):
            left = begin + LIMIT - time.monotonic()
            assert pipe.poll(max(left, 0)), f"rank {rank} still runs after {LIMIT:g} s"
            try:
                results.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                results.append(None)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results, time.monotonic() - begin


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("hook", ["step", "optimizer", "raises"])
@pytest.mark.parametrize("mesh", [(2, 1, 1, 1), (1, 2, 1, 1)], ids=["data", "pipeline"])
def test_a_rank_that_fails_ends_the_run_on_the_other(mesh, hook, victim):
    results, seconds = outcomes(fit, 2, mesh, victim, hook)
    if hook == "raises":
        assert results[victim] is not None
        assert "on one rank only" in results[victim][1]
    else:
        assert results[victim] is None
    survivor = results[1 - victim]
    assert survivor is not None
    fine, text = survivor
    assert not fine, "it cannot have finished its 50 steps"
    assert "Error" in text.splitlines()[-1], text
    assert seconds < LIMIT
