"""The plan of one optimiser step: which tokens run when, on which replica, in which micro-batch.

A planner writes a :class:`.StepPlan`; the data loader turns it into tensors, a schedule turns it
into actions, the simulator predicts it and the executor runs it. A plan holds plain integers and
strings only, is the same on every rank, and can be printed, validated, compared by digest and
sent through JSON.

A *piece* is the part of a *document* that attends only to itself, a *slice* the part of a piece
that runs in one micro-batch (docs/design.md, "What the words mean").
"""

from lightning_wlb.plan.micro_batches import (
    ActivationCheckpointing,
    MicroBatch,
    Piece,
    Recompute,
    ReplicaPlan,
    Slice,
    piece_counts,
)
from lightning_wlb.plan.pipeline_scheme import (
    Scheme,
    Schemes,
    Shape,
    alike,
    check_schemes,
    rank_in,
    schemes_of,
)
from lightning_wlb.plan.step import StepPlan

__all__ = [
    "ActivationCheckpointing",
    "MicroBatch",
    "Piece",
    "Recompute",
    "ReplicaPlan",
    "Scheme",
    "Schemes",
    "Shape",
    "Slice",
    "StepPlan",
    "alike",
    "check_schemes",
    "piece_counts",
    "rank_in",
    "schemes_of",
]
