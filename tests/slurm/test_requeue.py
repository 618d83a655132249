"""A job that is requeued goes on at exactly the next step, however often."""

import time

import pytest

from tests.slurm.cluster import wait_until
from tests.slurm.jobs import RANKS, Run

pytestmark = pytest.mark.slurm


def interrupt(cluster, number: str) -> None:
    """What Slurm does some time before the limit of a job with ``--signal=SIGUSR1``."""
    cluster.run("scancel", "--signal=USR1", number)


def is_unbroken(run: Run, unbroken: Run) -> None:
    """Every step once and in order, with the same losses, to the same parameters."""
    assert run.steps() == unbroken.steps(), run.said()
    assert run.parameters() == unbroken.parameters()


@pytest.mark.timeout(600)
def test_a_job_that_is_requeued_three_times_is_as_an_unbroken_one(cluster, unbroken, tmp_path):
    run = Run(tmp_path, seconds=1.0)
    number = run.submit(cluster)
    for requeued in range(1, 4):
        run.wait_for_steps(3 * requeued - 1)
        interrupt(cluster, number)
        cluster.wait(number, "PENDING", "FAILED", "COMPLETED")
        assert cluster.job(number)["Restarts"] == str(requeued), run.said()
        cluster.wait(number, "RUNNING")
    job = cluster.wait(number, "COMPLETED", "FAILED")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "3"), run.said()
    is_unbroken(run, unbroken)


@pytest.mark.timeout(600)
def test_the_time_limit_requeues(cluster, unbroken, tmp_path):
    # Slurm counts in minutes and looks twice a minute, so the signal comes within the first one.
    run = Run(tmp_path, seconds=7.0)
    number = run.submit(cluster, "--time=2", "--signal=SIGUSR1@60")
    job = cluster.wait(number, "COMPLETED", "FAILED", "TIMEOUT", seconds=400)
    assert job["JobState"] == "COMPLETED", run.said()
    assert int(job["Restarts"]) >= 1
    is_unbroken(run, unbroken)


def test_a_signal_in_start_up_is_obeyed_after_the_first_step(cluster, unbroken, tmp_path):
    run = Run(tmp_path)
    number = run.submit(cluster)
    # They have a Trainer and have not met yet.
    wait_until(
        lambda: run.said().count("Initializing distributed") == RANKS, 60, "the ranks do not start"
    )
    interrupt(cluster, number)
    cluster.wait(number, "PENDING", "FAILED", "COMPLETED")
    assert cluster.job(number)["Restarts"] == "1", run.said()
    assert len(run.steps()) == 1
    job = cluster.wait(number, "COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", run.said()
    is_unbroken(run, unbroken)


def test_a_signal_after_training_changes_nothing(cluster, unbroken, tmp_path):
    run = Run(tmp_path, linger=8.0)
    number = run.submit(cluster)
    wait_until(lambda: len([*tmp_path.glob("rank-*")]) == RANKS, 120, "the run does not end")
    time.sleep(2.0)
    interrupt(cluster, number)
    job = cluster.wait(number, "COMPLETED", "FAILED", "PENDING")
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), run.said()
    is_unbroken(run, unbroken)
