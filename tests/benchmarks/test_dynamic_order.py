"""What is said of the order of ways to run a step, by hand; replays of pipelines that differ."""

from __future__ import annotations

from benchmarks.dynamic_order import agreement
from benchmarks.measured import replayed
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Scheme, Slice, StepPlan


def test_agreement_by_hand() -> None:
    said = [[100, 100], [90, 99], [80, 120]]
    took = [[100, 100], [95, 50], [97, 90]]
    # Step 0: each way is told apart from each other one, and the last two swap places. Step 1: only
    # the third from both others; it is slower than the second, but not than the mesh.
    assert agreement(said, took) == {
        "of_mesh": {"told_apart": 3, "agree": 2},
        "of_all": {"told_apart": 5, "agree": 3},
        "lost_percent": round(100 * ((97 + 50) / (95 + 50) - 1), 2),
    }


def test_pipelines_that_differ_are_replayed_apart() -> None:
    """A pipeline of two ranks beside two single ranks that share a micro-batch."""

    def replica(document: int, tokens: int, *replicas: int) -> ReplicaPlan:
        rows = tokens // len(replicas)
        made = (MicroBatch((0,), "hybrid", rows, replicas),)
        return ReplicaPlan((Slice(document, 0, 0, tokens),), made)

    plan = StepPlan(
        step=0,
        epoch=0,
        replicas=(replica(0, 8, 0), replica(1, 8, 1, 2), replica(1, 8, 1, 2)),
        pieces=(Piece(0, 0, 8, 0), Piece(1, 0, 8, 0)),
        target_tokens=14,
        cap=8,
        micro_batches=2,
        nominal_tokens=16,
        schemes=(Scheme(0, (1, 1)), Scheme(2, (2,)), Scheme(3, (2,))),
    ).validate()
    timings = [
        [("0F0", 1e-3), ("0B0", 2e-3)],
        [("1F0", 4e-3), ("1B0", 8e-3)],
        [("0F0", 3e-3), ("0B0", 5e-3)],
        [("0F0", 2e-3), ("0B0", 6e-3)],
    ]
    ends = [each.compute_ns for each in replayed(Mesh(2, 2), plan, timings)]
    # The single ranks begin their backward together, when the later forward is done.
    assert ends == [15_000_000, 9_000_000, 9_000_000]
