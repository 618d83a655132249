"""The plan of one optimiser step: which tokens run when, on which replica, in which micro-batch.

A planner writes a :class:`.StepPlan`; the data loader makes tensors from it, a schedule makes
actions from it, the simulator predicts it and the executor runs it. A plan holds only plain
integers and strings, is the same on every rank, and can be printed, validated, and written.

A *piece* is the part of a *document* that attends only to itself, a *slice* the part of a piece
that runs in one micro-batch (docs/design.md, "What the words mean").
"""

from lightning_wlb.plan.micro_batches import ActivationCheckpointing as ActivationCheckpointing
from lightning_wlb.plan.micro_batches import MicroBatch as MicroBatch
from lightning_wlb.plan.micro_batches import Piece as Piece
from lightning_wlb.plan.micro_batches import Recompute as Recompute
from lightning_wlb.plan.micro_batches import ReplicaPlan as ReplicaPlan
from lightning_wlb.plan.micro_batches import Slice as Slice
from lightning_wlb.plan.micro_batches import piece_counts as piece_counts
from lightning_wlb.plan.pipeline_scheme import Scheme as Scheme
from lightning_wlb.plan.pipeline_scheme import Schemes as Schemes
from lightning_wlb.plan.pipeline_scheme import Shape as Shape
from lightning_wlb.plan.pipeline_scheme import alike as alike
from lightning_wlb.plan.pipeline_scheme import check_schemes as check_schemes
from lightning_wlb.plan.pipeline_scheme import rank_in as rank_in
from lightning_wlb.plan.pipeline_scheme import schemes_of as schemes_of
from lightning_wlb.plan.step import StepPlan as StepPlan
