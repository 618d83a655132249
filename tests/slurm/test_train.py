"""The batch script trains under Slurm as a run without it does."""

import re

import pytest

from tests.slurm.jobs import RANKS, STEPS, Run

pytestmark = pytest.mark.slurm


def test_the_batch_script_trains_as_without_slurm(cluster, unbroken, tmp_path):
    run = Run(tmp_path)
    number = run.submit(cluster)
    job = cluster.wait(number, "COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", run.said()
    assert [step for step, _ in unbroken.steps()] == list(range(1, STEPS + 1))
    assert run.steps() == unbroken.steps()
    assert run.parameters() == unbroken.parameters()
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
