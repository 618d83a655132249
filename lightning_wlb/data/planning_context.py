"""What planning needs to know of a run, from its Trainer: the model, the mesh and the pipeline.

The data module asks when it makes a loader: by then the strategy has built its mesh and split the
layers.
"""

from __future__ import annotations

import lightning.pytorch as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.cost.communication import communicators, communicators_elsewhere
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.heterogeneous.dealing import check_packing
from lightning_wlb.heterogeneous.pool import Pool
from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.plan import ActivationCheckpointing, Scheme
from lightning_wlb.planning import DataSettings
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.sharding import ADAPTIVE


def shape_of(trainer: L.Trainer, given: ModelShape | None) -> ModelShape:
    """The shape by which documents are weighed: the given one, or else the LightningModule's.

    Raises:
        MisconfigurationException: there is no shape.
    """
    shape = given or getattr(trainer.lightning_module, "model_shape", None)
    if not isinstance(shape, ModelShape):
        raise MisconfigurationException(
            f"WLBDataModule cannot weigh documents: {type(trainer.lightning_module).__name__}"
            f" has model_shape={shape!r}. Pass WLBDataModule(model_shape=ModelShape(...)), or"
            " give the LightningModule a property `model_shape`, as LanguageModule does."
        )
    return shape


def rank_of(trainer: L.Trainer) -> Rank:
    """Where this rank stands in the strategy's mesh.

    Raises:
        MisconfigurationException: several ranks under a strategy that does not divide the plan.
    """
    rank = getattr(trainer.strategy, "rank", None)
    if isinstance(rank, Rank):
        return rank
    if trainer.world_size == 1:
        return Rank()
    raise MisconfigurationException(
        f"{trainer.world_size} ranks under {type(trainer.strategy).__name__}: data parallel without"
        " strategy='wlb' would train every rank on the same documents; use strategy='wlb'."
    )


def predictor_of(
    trainer: L.Trainer, profile: Profile | None, shape: ModelShape, mesh: Mesh
) -> Predictor | None:
    """What the profile predicts of this model on this mesh; None without a profile.

    The strategy's own, if it has one, is that by which it has chosen the mesh. Where steps may
    leave the mesh, the process groups for that take room of every step.
    """
    profile = getattr(trainer.strategy, "profile", None) or profile
    if profile is None:
        return None
    reduced = str(getattr(trainer.strategy, "reduce_dtype", "float32")).removeprefix("torch.")
    latency = LatencyModel(profile, shape, mesh, reduced)
    pipeline = getattr(getattr(trainer.strategy, "executor", None), "pipeline", None)
    if pipeline is None:
        return Predictor(latency, (range(shape.layers),))
    precision = getattr(trainer.strategy, "precision_plugin", None)
    at_rest = str(getattr(precision, "parameter_dtype", "float32")).removeprefix("torch.")
    elsewhere = communicators_elsewhere(_strategies(trainer), profile.devices_per_node)
    groups = communicators(mesh) + elsewhere if elsewhere else None
    return Predictor(latency, pipeline.stages, pipeline.schedule, at_rest, groups=groups)


def _strategies(trainer: L.Trainer) -> tuple[tuple[Scheme, ...], ...]:
    """Those that steps may take in place of the mesh's pipelines."""
    found: tuple[tuple[Scheme, ...], ...] = getattr(trainer.strategy, "dynamic", ())
    return found


def pool_of(
    trainer: L.Trainer | None,
    predictor: Predictor | None,
    data: DataSettings,
    sharding: str = ADAPTIVE,
) -> Pool | None:
    """The strategies that a step may take in place of the mesh's pipelines; None: none.

    Args:
        trainer: whose strategy may have some, as ``WLBStrategy(dynamic=...)``.
        predictor: of the mesh.
        data: the data settings.
        sharding: of every micro-batch.

    Raises:
        MisconfigurationException: there is no device profile to choose by, the packing deals to
            equal pipelines only, or a strategy is the mesh's own or does not go with it.
    """
    strategies = () if trainer is None else _strategies(trainer)
    if trainer is None or not strategies:
        return None
    if predictor is None:
        raise MisconfigurationException(
            "WLBStrategy(dynamic=...) chooses each step's pipelines by simulated times. Give"
            " WLBDataModule(profile=...), a file of `lightning-wlb profile` or a shipped name."
        )
    try:
        check_packing(data.packer)
        return Pool.of(strategies, predictor, checkpointing_of(trainer), sharding)
    except ValueError as error:
        raise MisconfigurationException(f"WLBStrategy(dynamic=...): {error}") from None


def checkpointing_of(trainer: L.Trainer) -> ActivationCheckpointing:
    """The activation checkpointing of plans; a module without a word of it recomputes nothing."""
    asked: ActivationCheckpointing = getattr(
        trainer.lightning_module, "planned_checkpointing", "none"
    )
    return asked
