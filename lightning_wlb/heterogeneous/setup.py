"""The strategies that a run's steps may take: what ``WLBStrategy(dynamic=...)`` was given."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_wlb.distributed.collective_errors import Ranks
from lightning_wlb.heterogeneous.dealing import check_packing
from lightning_wlb.heterogeneous.layouts import Strategy, Weights, strategy_of
from lightning_wlb.heterogeneous.links import Links
from lightning_wlb.heterogeneous.model_check import check_buffers, check_rebuilt
from lightning_wlb.heterogeneous.pipelines import Settings
from lightning_wlb.heterogeneous.pool import Pool
from lightning_wlb.heterogeneous.pool_search import described
from lightning_wlb.heterogeneous.runtime import Elsewhere
from lightning_wlb.heterogeneous.transfer import travel_groups, weights_of
from lightning_wlb.models.config import check_tensor_parallel
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import ActivationCheckpointing, Scheme
from lightning_wlb.planning import DataSettings
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.training.executor import Executor

Dynamic = Literal["off", "auto", False] | Sequence[Sequence[Scheme]]
"""``"off"``, ``"auto"``, or strategies. False is ``"off"``: so YAML reads it without quotes."""


def checked_strategies(given: Dynamic) -> tuple[Strategy, ...]:
    """The strategies that were given; none for ``"off"``, nor for ``"auto"``, which chooses some.

    Raises:
        ValueError: something else than schemes, or pipelines that leave ranks out.
    """
    if given is False or (isinstance(given, str) and given in ("off", "auto")):
        return ()
    try:
        strategies = () if isinstance(given, str) else tuple(map(tuple, given))
    except TypeError:  # a number, or one strategy in place of several
        strategies = ()
    schemes = [scheme for strategy in strategies for scheme in strategy]
    if not (strategies and all(strategies) and all(isinstance(s, Scheme) for s in schemes)):
        raise ValueError(
            f"dynamic={given!r} is neither 'off', 'auto' nor strategies. Give for each a sequence"
            " of lightning_wlb.plan.Scheme, one for each pipeline."
        )
    for strategy in strategies:
        first = 0
        for scheme in strategy:
            if scheme.first != first:
                raise ValueError(
                    f"dynamic: the pipeline on {scheme} begins at rank {scheme.first}, but the next"
                    f" free rank is {first}. Pipelines take consecutive ranks from 0 on."
                )
            first = scheme.ranks.stop
    return strategies


def pool_of(
    strategies: Sequence[Strategy],
    predictor: Predictor | None,
    checkpointing: ActivationCheckpointing,
    data: DataSettings,
    sharding: str,
) -> Pool:
    """What chooses each step's pipelines among strategies that a run may take.

    Args:
        strategies: at least one.
        predictor: of the mesh.
        checkpointing: of all micro-batches.
        data: the data settings.
        sharding: of every micro-batch.

    Raises:
        MisconfigurationException: there is no device profile to choose by, the packing deals to
            equal pipelines only, or a strategy is the mesh's own or does not go with it.
    """
    if predictor is None:
        raise MisconfigurationException(
            "WLBStrategy(dynamic=...) chooses each step's pipelines by simulated times. Give"
            " WLBDataModule(profile=...), a file of `lightning-wlb profile` or a shipped name."
        )
    try:
        check_packing(data.packer)
        return Pool.of(strategies, predictor, checkpointing, sharding)
    except ValueError as error:
        raise MisconfigurationException(f"WLBStrategy(dynamic=...): {error}") from None


def blank_model(module: LanguageModule) -> Decoder:
    """The whole model, without values, as the module's own was before it was split."""
    # As Lightning lets configure_model build it, in the dtype of the run.
    with module.trainer.precision_plugin.module_init_context(), torch.device("meta"):
        model = module.build_model()
        if module.compiles_blocks:
            model.compile_blocks()
    return model


def run_elsewhere(
    executor: Executor,
    strategies: Sequence[Strategy],
    module: LanguageModule,
    per_node: int,
    wide: torch.dtype,
    timeout: timedelta,
) -> None:
    """Let an executor run steps of these strategies; collective over all ranks.

    Args:
        executor: on the mesh, whose parameters are at rest.
        strategies: that steps may have.
        module: builds the model.
        per_node: ranks of a node.
        wide: of the sums of gradients.
        timeout: of process groups.

    Raises:
        MisconfigurationException: a strategy that does not go with the mesh or the model, or a
            model that ``build_model`` does not make again.
    """
    pipeline, model = executor.pipeline, executor.model
    assert isinstance(model, Decoder)
    mesh, rank = pipeline.rank.mesh, pipeline.rank.index
    whole = blank_model(module)
    try:
        check_buffers(whole)
        weights = _weights(whole, strategies, module, mesh.tensor)
        base = strategy_of(mesh, pipeline.stages)
        links = Links(weights, base, rank, per_node)
        for strategy in strategies:
            links.to(strategy)
    except ValueError as error:
        raise MisconfigurationException(f"WLBStrategy(dynamic=...): {error}") from None
    Ranks().each(lambda: check_rebuilt(module, whole))
    settings = Settings(
        partial(blank_model, module),
        pipeline.hidden_size,
        pipeline.schedule,
        pipeline.dtype,
        wide,
        pipeline.device,
        timeout,
    )
    for number, strategy in enumerate(strategies, 1):
        rank_zero_info(
            f"WLBStrategy: in place of the mesh a step may take strategy {number}:"
            f" {described(strategy)}."
        )
    groups = travel_groups(rank, mesh.devices, per_node, timeout, pipeline.device)
    executor.elsewhere = Elsewhere(model, links, groups, settings)


def _weights(
    whole: Decoder, strategies: Sequence[Strategy], module: LanguageModule, tensor: int
) -> Weights:
    sizes = {tensor, *(scheme.tensor for strategy in strategies for scheme in strategy)}
    for size in sizes:
        check_tensor_parallel(module.model_shape, size)
    return weights_of(whole, sorted(sizes))
