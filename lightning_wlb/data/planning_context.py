"""What a run tells its data module: this rank's place in the mesh, and what plans depend on.

A strategy that runs step plans is a :class:`PlanningStrategy`. The data module asks it for a
:class:`PlanningContext` when it makes a loader; by then the layers are split into stages. With any
other strategy a run has one rank, and :meth:`PlanningContext.of_one_rank` is its context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import lightning.pytorch as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.cost.communication import communicators, heterogeneous_communicators
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.overlap import Overlap
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Rank
from lightning_wlb.plan import ActivationCheckpointing, Scheme
from lightning_wlb.planning.step_chooser import StepChooser
from lightning_wlb.prediction.predictor import Predictor

if TYPE_CHECKING:
    from lightning_wlb.data.datamodule import WLBDataModule


@dataclass(frozen=True, kw_only=True)
class PlanningContext:
    """All that plans depend on besides documents and data settings."""

    shape: ModelShape  #: gives the model's work on documents
    rank: Rank  #: the place of this rank in the mesh
    stages: tuple[range, ...]  #: the layers of each pipeline stage
    #: what micro-batches recompute; ``"auto"``: the least that fits
    activation_checkpointing: ActivationCheckpointing
    schedule: str = "1f1b"  #: a name in ``lightning_wlb.schedule.programs.SCHEDULES``
    profile: Profile | None = None  #: predicts times and memory; None: plans go by exact work
    #: the dtype in which a rank keeps parameters and optimizer state
    parameter_dtype: str = "float32"
    reduce_dtype: str = "float32"  #: the dtype in which tensor- and context-parallel ranks sum
    #: the choices of heterogeneous pipelines on which a step may run in place of the mesh's, each a
    #: sequence of schemes on consecutive ranks
    schemes: tuple[tuple[Scheme, ...], ...] = ()
    #: chooses among ``schemes`` for each step; None: all steps run on the mesh
    chooser: StepChooser | None = None
    compiled: bool = False  #: whether blocks of the model are compiled
    overlap: Overlap = "off"  #: which messages overlap products

    @staticmethod
    def of_one_rank(module: object, shape: ModelShape, profile: Profile | None) -> PlanningContext:
        """The context of a run on one rank with a strategy that does not run step plans."""
        return PlanningContext(
            shape=shape,
            rank=Rank(),
            stages=(range(shape.layers),),
            profile=profile,
            activation_checkpointing=getattr(module, "planned_checkpointing", "none"),
        )

    @property
    def predictor(self) -> Predictor | None:
        """A predictor of this model's steps on this mesh by the profile; None without a profile.

        If steps may leave the mesh, the process groups of the other pipelines always take memory.
        """
        if self.profile is None:
            return None
        mesh, elsewhere = self.rank.mesh, heterogeneous_communicators(self.schemes)
        return Predictor(
            LatencyModel(
                self.profile, self.shape, mesh, self.reduce_dtype, self.compiled, self.overlap
            ),
            self.stages,
            self.schedule,
            self.parameter_dtype,
            groups=communicators(mesh) + elsewhere if elsewhere else None,
        )


@runtime_checkable
class PlanningStrategy(Protocol):
    """A Lightning strategy whose ranks run their parts of step plans: :class:`.WLBStrategy`."""

    def planning_context(self, data: WLBDataModule) -> PlanningContext:
        """The context of the run, once the model is split."""


def shape_of(module: object) -> ModelShape:
    """The ``model_shape`` of a LightningModule; raises MisconfigurationException if it has none."""
    shape = getattr(module, "model_shape", None)
    if not isinstance(shape, ModelShape):
        raise MisconfigurationException(
            f"WLBDataModule cannot weigh documents: {type(module).__name__} has"
            f" model_shape={shape!r}. Give the LightningModule a property `model_shape`, a"
            " lightning_wlb.cost.shape.ModelShape, as LanguageModule has."
        )
    return shape


def context_of(trainer: L.Trainer, data: WLBDataModule) -> PlanningContext:
    """The context of a Trainer's run.

    Raises:
        MisconfigurationException: no model shape, or ranks whose strategy does not divide the plan.
    """
    if isinstance(trainer.strategy, PlanningStrategy):
        return trainer.strategy.planning_context(data)
    if trainer.world_size != 1:
        raise MisconfigurationException(
            f"{trainer.world_size} data-parallel ranks under {type(trainer.strategy).__name__}"
            " would all train on the same documents; use strategy='wlb'."
        )
    module = trainer.lightning_module
    return PlanningContext.of_one_rank(module, shape_of(module), data.profile)
