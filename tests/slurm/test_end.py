"""Jobs that end before their time: cancelled, or with a node that dies."""

import pytest

from tests.slurm.cluster import NODES, wait_until
from tests.slurm.jobs import STEPS, Run

pytestmark = pytest.mark.slurm


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
    assert run.steps() == unbroken.steps()
    assert run.parameters() == unbroken.parameters()


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
