"""What the argument ``overlap`` makes of a run: parts by the profile, the same gradients, off."""

from typing import Any

import numpy as np
import pytest

from lightning_wlb.cost.overlap import chunks_of
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import CASES, Recorder, data, module, relative_error, trainer

ROWS = (64, 4096, 1_000_000)
WAYS: tuple[tuple[str, str], ...] = (
    ("auto", "none"),
    ("auto", "none"),
    ("off", "none"),
    ("auto", "cpu"),
)


def ran(rank: int) -> list[tuple[list[dict[str, Any]], Any, Any]]:
    """Gradients of a run with each way, the parts of some rows, and the predictor's."""
    results = []
    for overlap, profile in WAYS:
        recorder, strategy = Recorder(), WLBStrategy(1, 1, 1, 2, overlap=overlap)
        runner = trainer(strategy, 2, callbacks=[recorder], max_steps=1)
        made = data(CASES[0], profile=profile)
        runner.fit(module(CASES[0]), made)
        chunks, predictor = strategy.executor.chunks, strategy.planning_context(made).predictor
        results.append((
            recorder.gradients,
            chunks and [chunks(rows, 2) for rows in ROWS],
            predictor and [chunks_of(predictor.latency, rows) for rows in ROWS],
        ))  # fmt: skip
    return results


def test_parts_follow_the_profile_and_gradients_do_not_follow_them() -> None:
    for once, again, off, known in run_ranks(ran, 2, process_group=False):
        assert once[1] == again[1] == [1, 4, 4]
        assert off[1:] == (None, None)
        assert known[1] == known[2]
        assert known[1][-1] > 1
        for first, second, open_, last in zip(once[0], again[0], off[0], known[0], strict=True):
            for name, gradient in first.items():
                assert np.array_equal(gradient, second[name]), name
                assert relative_error(gradient, open_[name]) <= 1e-13, name
                assert relative_error(gradient, last[name]) <= 1e-13, name


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="overlap='always' is not one of auto, off"):
        WLBStrategy(overlap="always")
