"""A failure beside a step, where parameters are handed on in a node: all ranks end, and say why."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_wlb.heterogeneous import transfer
from lightning_wlb.plan import Scheme
from lightning_wlb.strategy import run_planning
from lightning_wlb.supervision import heartbeat, watchdog
from tests.soak.test_strategies import fit
from tests.strategy.test_failures import SAID, outcomes

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
STRATEGY = (Scheme(0, (1, 1)), Scheme(2, (2,), tensor=2))


def fail(rank: int, victim: int, after: int, folder: Path) -> None:
    """Two nodes of two ranks; the victim's forwarder fails when it has posted so often."""
    sys.stderr = open(folder / f"{rank}.err", "w", buffering=1)  # noqa: SIM115
    heartbeat.PATIENCE, watchdog.GRACE = 1.0, 3.0
    attach_pipelines, posts = run_planning.attach_pipelines, 0

    def of_two_nodes(executor, strategies, module, per_node, *given) -> None:
        attach_pipelines(executor, strategies, module, per_node // 2, *given)

    class Failing(transfer.RunningExchange):
        def __init__(self, *given: Any) -> None:
            nonlocal posts
            posts += threading.current_thread() is not threading.main_thread()
            if rank == victim and posts > after:
                raise MemoryError(SAID)
            super().__init__(*given)

    run_planning.attach_pipelines = of_two_nodes
    transfer.RunningExchange = Failing  # type: ignore[misc]
    fit(rank, (1, 2, 1, 2), (STRATEGY,), max_epochs=-1)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 3, 6])  # pulls of the first step, and its pushes
def test_a_failure_in_another_thread_ends_all_ranks(victim: int, after: int, tmp_path) -> None:
    results, seconds = outcomes(fail, 4, victim, after, tmp_path)
    assert seconds < 40
    for rank, result in enumerate(results):
        fine, text = result or (False, "")
        assert not fine
        text += (tmp_path / f"{rank}.err").read_text()
        why = r"MemoryError: " if rank == victim else rf"rank {victim} failed, step \d+.*"
        assert re.search(why + SAID, text), (rank, text)
