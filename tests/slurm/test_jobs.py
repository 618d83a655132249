"""Jobs of Slurm train as a run without it does, also requeued, cancelled and on dead nodes."""

import re
import time

import pytest

from tests.slurm.cluster import NODES, wait_until
from tests.slurm.jobs import RANKS, STEPS, Run

pytestmark = pytest.mark.slurm


def is_unbroken(run: Run, unbroken: Run) -> None:
    """Every step once and in order, with the same losses, to the same parameters."""
    assert run.steps() == unbroken.steps(), run.said()
    assert run.parameters() == unbroken.parameters()


def test_the_batch_script_trains_as_without_slurm(cluster, unbroken, tmp_path):
    run = Run(tmp_path)
    number = run.submit(cluster)
    job = cluster.wait(number, "COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", run.said()
    assert [step for step, _ in unbroken.steps()] == list(range(1, STEPS + 1))
    is_unbroken(run, unbroken)
    nodes = [(tmp_path / f"node-{rank}").read_text() for rank in range(RANKS)]
    assert nodes == ["wlb1", "wlb1", "wlb2", "wlb2"]


def test_options_of_the_command_line_win(cluster, unbroken, tmp_path):
    run = Run(tmp_path)
    number = run.submit(
        cluster,
        "--job-name=mine",
        "--time=5",
        "--nodes=1",
        training=("--trainer.max_steps=3", "--wlb.pipeline_parallel_size=1"),
    )
    job = cluster.wait(number, "COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", run.said()
    assert (job["JobName"], job["TimeLimit"], job["NumNodes"]) == ("mine", "00:05:00", "1")
    assert "mesh data 2 × pipeline 1" in run.said()
    # Another mesh: the same steps, up to rounding.
    want = [float.fromhex(loss) for _, loss in unbroken.steps()[:3]]
    got = [float.fromhex(loss) for _, loss in run.steps()]
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--wlb.context_parallel_size=3", r"needs a multiple of 6 ranks, but the Trainer runs 4"),
        ("--trainer.devices=1", r"devices=1.*--ntasks-per-node=2.*Set `devices=2`"),
        ("--trainer.num_nodes=1", r"num_nodes=1.*--nodes=2.*Set `num_nodes=2`"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(cluster, tmp_path, option, problem):
    run = Run(tmp_path)
    job = cluster.wait(run.submit(cluster, training=(option,)), "COMPLETED", "FAILED", seconds=60)
    assert job["JobState"] == "FAILED"
    assert re.search(problem, run.said()), run.said()
    assert "Traceback" not in run.said()


def interrupt(cluster, number: str) -> None:
    """What Slurm does some time before the limit of a job with ``--signal=SIGUSR1``."""
    cluster.run("scancel", "--signal=USR1", number)


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


@pytest.mark.parametrize("saves", [True, False])
def test_a_cancelled_job_ends_soon_and_saves_if_it_is_to(cluster, unbroken, tmp_path, saves):
    run = Run(tmp_path, seconds=1.0, save_on_exception=saves, save_top_k=0)
    number = run.submit(cluster)
    run.wait_for_steps(4)
    # SIGTERM to all processes of the job, loader workers too.
    cluster.run("scancel", number)
    job = cluster.wait(number, "CANCELLED", "FAILED", "COMPLETED", seconds=60)
    assert job["JobState"] == "CANCELLED"
    left = f"SLURM_JOB_ID={number}"
    wait_until(lambda: not cluster.processes(left), 5, "processes are left")
    done = run.steps()
    assert 4 <= len(done) < STEPS
    assert "Killed" not in run.said(), "they ended by themselves"
    if not saves:
        assert run.checkpoints() == []
        return
    assert len(run.checkpoints()) == 1
    again = run.submit(cluster, training=("--ckpt_path=last",))
    job = cluster.wait(again, "COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", run.said()
    is_unbroken(run, unbroken)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("node", NODES)  # the first one runs the batch script too
def test_a_job_whose_node_dies_goes_on_from_its_newest_checkpoint(
    cluster, unbroken, tmp_path, node
):
    run = Run(tmp_path, seconds=1.0, every_n_train_steps=2, save_top_k=-1)
    number = run.submit(cluster)
    run.wait_for_steps(3)
    cluster.run("scancel", "--signal=USR1", number)
    cluster.wait(number, "PENDING", "FAILED", "COMPLETED")
    requeued = run.steps()[-1][0]
    cluster.wait(number, "RUNNING")
    run.wait_for_steps(7)
    cluster.kill_node(node)
    cluster.wait(number, "PENDING", "FAILED", "COMPLETED")
    assert cluster.job(number)["Restarts"] == "2", run.said()
    cluster.start_node(node)
    # Slurm may still end the earlier start on a node that is back. That is what its delay is for.
    job = cluster.wait(number, "COMPLETED", "FAILED", seconds=400, hurry=False)
    assert job["JobState"] == "COMPLETED", run.said() + cluster.said()
    lost = [step for start, step, _ in run.taken() if start == 1]
    first = next(step for start, step, _ in run.taken() if start == 2)
    # The newest checkpoint is at an even step, and not the older one of the requeue.
    assert first in (lost[-1], lost[-1] + 1)
    assert first % 2 == 1
    assert first > requeued + 1
    assert {*run.steps()} == {*unbroken.steps()}, run.said() + cluster.said()
    assert run.parameters() == unbroken.parameters()
