"""Tapered micro-batches: nothing lost, cap kept, and faster than equal ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.planning.pipeline import pipeline_time, time_bound
from lightning_wlb.planning.taper import Job, taper
from lightning_wlb.planning.workloads import generator_a


def job_of(tokens) -> Job:
    tokens = sorted(tokens, reverse=True)
    return Job(
        tokens,
        [1000 * x + x * x // 49 for x in tokens],
        [3000 * x + 35 * x * x // 490 for x in tokens],
    )


def time_of(job: Job, groups, stages: int) -> int:
    forward = [sum(job.forward[index] for index in group) for group in groups]
    total = [sum(job.total[index] for index in group) for group in groups]
    return pipeline_time(forward, [t - f for t, f in zip(total, forward, strict=True)], stages)


@settings(max_examples=150)
@given(
    tokens=st.lists(st.integers(1, 100), max_size=60),
    nominal=st.integers(1, 6),
    extra=st.integers(0, 6),
    cap=st.integers(100, 250),
    stages=st.integers(1, 6),
)
def test_every_piece_once_under_the_cap(tokens, nominal, extra, cap, stages) -> None:
    job = job_of(tokens)
    groups, time = taper(job, nominal, nominal + extra, cap, stages)
    assert sorted(index for group in groups for index in group) == list(range(len(tokens)))
    assert all(groups)
    assert all(sum(job.tokens[index] for index in group) <= cap for group in groups)
    assert time == time_of(job, groups, stages)
    assert (groups, time) == taper(job, nominal, nominal + extra, cap, stages)


def test_number_of_micro_batches_is_bounded() -> None:
    job = job_of([10] * 400)
    assert len(taper(job, 4, 8, 4000, 4)[0]) <= 8
    assert len(taper(job, 4, 8, 400, 4)[0]) >= 10  # the cap needs more
    assert len(taper(job, 4, 8, 4000, 1)[0]) == 4  # nothing to gain in one stage


def test_beats_equal_micro_batches_on_generator_a() -> None:
    """Steps of 4 windows without delay, 4 stages: 1.95 times the work with equal ones."""
    window = 131_072
    lengths = generator_a(8000, window, 3).tolist()
    tapered = equal = work = bound = 0
    at = 0
    for _ in range(20):
        tokens = []
        while sum(tokens) < 4 * window:
            tokens.append(lengths[at])
            at += 1
        job = job_of(tokens)
        _, time = taper(job, 4, 8, window, 4)
        total = sum(job.total)
        tapered, work = tapered + time, work + total
        equal += total + 3 * max(job.total[0], total // 8)
        bound += time_bound(total, job.total[0], 4)
    assert bound <= tapered <= 0.93 * equal
    assert tapered >= work


def test_grows_to_the_heaviest_and_shrinks_after_it() -> None:
    generator = np.random.default_rng(1)
    job = job_of((generator.random(300) * 60 + 1).astype(int).tolist())
    groups, _ = taper(job, 8, 16, 10_000, 4)
    loads = [sum(job.total[index] for index in group) for group in groups]
    heaviest = loads.index(max(loads))
    assert 0 < heaviest < len(loads) - 1
    assert loads[0] < max(loads) * 0.8
    assert loads[: heaviest + 1] == pytest.approx(sorted(loads[: heaviest + 1]), rel=0.05)
