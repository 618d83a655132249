"""The strategies that a run's steps may take: what ``WLBStrategy(dynamic=...)`` was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.cache import remembered
from lightning_wlb.distributed.collective_errors import Ranks, patient_ranks
from lightning_wlb.heterogeneous.parameters import Linked
from lightning_wlb.heterogeneous.pipelines import OfStrategy, Settings
from lightning_wlb.heterogeneous.planning.exchanges import Links
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.heterogeneous.planning.pool_search import (
    SAMPLE,
    PoolChoice,
    choose_pool,
    described,
)
from lightning_wlb.heterogeneous.planning.sharded_layouts import Weights
from lightning_wlb.heterogeneous.transfer import Groups, travel_groups, weights_of
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import progress_bar
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import ActivationCheckpointing, Scheme, Schemes, StepPlan, schemes_of
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.packing.base import Packer
from lightning_wlb.planning.step_chooser import check_packing
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.training.executor import Executor, StepRuntime
from lightning_wlb.training.parallelize import refuse_empty_buffers

Dynamic = Literal["off", "auto", False] | Sequence[Sequence[Scheme]]
"""``"off"``, ``"auto"``, or strategies. False is ``"off"``: so YAML reads it without quotes."""


def checked_strategies(given: Dynamic) -> tuple[Schemes, ...]:
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
    strategies: Sequence[Schemes],
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
    strategies: Sequence[Schemes],
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
        base = schemes_of(mesh, pipeline.stages)
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
    executor.heterogeneous = Elsewhere(model, links, groups, settings)


def _weights(
    whole: Decoder, strategies: Sequence[Schemes], module: LanguageModule, tensor: int
) -> Weights:
    sizes = {tensor, *(scheme.tensor for strategy in strategies for scheme in strategy)}
    for size in sizes:
        module.model_shape.check_tensor_parallel(size)
    return weights_of(whole, sorted(sizes))


class Elsewhere:
    """What the steps of any strategy run on, of one rank: for ``Executor.elsewhere``.

    Args:
        model: this rank's share of the model at rest.
        links: to any strategy, of this rank.
        groups: for the exchanges of links (:func:`.travel_groups`).
        settings: of the run.
    """

    def __init__(self, model: Decoder, links: Links, groups: Groups, settings: Settings) -> None:
        self._links, self._groups, self._settings = links, groups, settings
        self._model = model
        self._made: dict[Schemes, tuple[OfStrategy, Linked]] = {}

    def __call__(self, plan: StepPlan) -> StepRuntime:
        """What this plan's steps run on; collective over all ranks where its strategy is new, or
        where as many pipelines as never before share a micro-batch.

        Raises:
            ValueError: the strategy is the mesh's.
        """
        link = self._links.to(plan.schemes)
        if link is None:
            raise ValueError(
                f"step {plan.step} has the strategy of the mesh. Plan it without a strategy."
            )
        if plan.schemes not in self._made:
            own = OfStrategy(link, self._settings)
            linked = Linked(own, self._model, self._groups, self._settings)
            self._made[plan.schemes] = own, linked
        own, linked = self._made[plan.schemes]
        return StepRuntime(own.model, own.pipeline, own.groups_of(plan), linked)


def check_rebuilt(module: LanguageModule, rebuilt: Decoder) -> None:
    """Refuse a model of which steps on pipelines of their own would run another one.

    Such steps run stages of what ``build_model`` makes, since a rank has only its mesh's stage of
    the model, with parameters from where they rest.

    Args:
        module: its model may have been split.
        rebuilt: what ``build_model`` makes, whole, on the meta device.

    Raises:
        MisconfigurationException: naming the module or parameter. Another rank may have no such.
    """
    assert module.model is not None
    built = dict(_contents(rebuilt))
    changed = [name for name, each in _contents(module.model) if built.get(name) != each]
    if changed:
        raise MisconfigurationException(
            f"WLBStrategy(dynamic=...): {changed[0]} of the model is not as"
            f" {type(module).__name__}.build_model makes it, but steps on other pipelines run"
            " stages that are built anew. Change the model in build_model: replace modules, and"
            " freeze parameters, there; or use dynamic='off'."
        )


def check_buffers(rebuilt: Decoder) -> None:
    """Refuse a model whose buffers have no values, or other ones, once it is built anew.

    Raises:
        ValueError: naming a buffer, the same on all ranks.
    """
    refuse_empty_buffers(rebuilt)
    kept = [
        f"{path}.{name}"
        for path, each in rebuilt.named_modules()
        for name, buffer in each._buffers.items()
        if buffer is not None and name not in each._non_persistent_buffers_set
    ]
    if kept:
        raise ValueError(
            f"{kept[0]} is a buffer that belongs to the model's weights, and a rank has those of"
            " its mesh's stage only. Make it a parameter, or register it with persistent=False"
            " where build_model computes it; else use dynamic='off'."
        )


def _contents(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Modules by their type, parameters by shape and whether they are trained."""
    for name, module in model.named_modules():
        yield name or "the whole", type(module)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, (parameter.shape, parameter.requires_grad)


def agreed_pool(
    request: Callable[[], MeshRequest],
    mesh: Mesh,
    packer: type[Packer],
    module: LanguageModule,
    profile: Profile | None,
) -> tuple[Schemes, ...]:
    """The strategies that steps may take in place of the mesh's pipelines; collective.

    Args:
        request: makes what is searched for: the run's documents, model and ``profile``, with all
            sizes of the mesh open. Called on rank 0 only.
        mesh: of the run.
        packer: the run's packing.
        module: its model.
        profile: by which the run's steps are planned; None: by work.
    """
    reason = _obstacle(mesh, packer, profile)
    if reason is None:  # a rank knows its own stages of the model
        reason = next(filter(None, Ranks().every(lambda: _obstacle_of(module))), None)
    if reason is not None or profile is None:
        rank_zero_info(f'WLBStrategy: dynamic="auto" leaves all steps on the mesh: {reason}')
        return ()
    with patient_ranks() as ranks:
        choice = ranks.lead(lambda: _recalled(request(), mesh))
    by = "measured" if profile.measured else "analytic"
    rank_zero_info(f'WLBStrategy: dynamic="auto", by the {by} profile {profile.name}:')
    rank_zero_info("\n".join(choice.lines))
    return choice.strategies


def _recalled(request: MeshRequest, mesh: Mesh) -> PoolChoice:
    request = replace(request, steps=SAMPLE)
    name = f"pool-{request.digest[:16]}-{'-'.join(map(str, mesh.shape))}"

    def search() -> PoolChoice:
        with progress_bar() as tell:
            return choose_pool(request, mesh, progress=tell)

    return remembered(name, search, PoolChoice.from_json)


def _obstacle(mesh: Mesh, packer: type[Packer], profile: Profile | None) -> str | None:
    """Why no step can leave the mesh, and the remedy; None: some may."""
    if mesh.devices == 1:
        return "there is only one rank."
    if mesh.virtual_stages > 1:
        return (
            f"it has {mesh.virtual_stages} stages on each rank, pipelines that differ have one."
            ' Give schedule="1f1b".'
        )
    if profile is None:
        return (
            "no device profile is known to choose by. Give WLBDataModule(profile=...), a file of"
            " `lightning-wlb profile` or a shipped name."
        )
    try:
        check_packing(packer)
    except ValueError as error:
        return str(error)
    return None


def _obstacle_of(module: LanguageModule) -> str | None:
    """Why this rank's model cannot run elsewhere; None: it can."""
    whole = blank_model(module)
    try:
        check_buffers(whole)
        weights_of(whole, [])
        check_rebuilt(module, whole)
    except (ValueError, MisconfigurationException) as error:
        return str(error).removeprefix("WLBStrategy(dynamic=...): ")
    return None
