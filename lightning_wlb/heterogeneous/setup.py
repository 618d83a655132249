"""Attaches the pipelines to a run that ``WLBStrategy(dynamic=...)`` gives or chooses.

Parameters and optimizer state stay where the mesh has them. For a step whose plan has schemes,
:class:`HeterogeneousPipelines` tells the executor what this rank runs: the stage of its pipeline's
scheme (:mod:`.pipelines`), whose parameters are pulled from the shards and whose gradients are
pushed back (:mod:`.parameters`).

For that stage ``build_model`` is called again, since a rank has only its mesh's part of the model.
The rebuilt stage would silently lack changes made to the model after it was built, and buffers that
were read with its weights, so such models are refused.

With ``dynamic="auto"`` pipelines are chosen when a fit is set up, by the profile that plans the
run's steps. A resumed run chooses the same pipelines on the same mesh.

1. If something keeps all steps on the mesh, such as a packing that deals only to equal pipelines,
   the log says what, and the remedy.
2. Else rank 0 reads the answer from the user's cache folder, or simulates. The other ranks wait as
   long as that takes. An error of rank 0 ends all ranks.
3. The log has the gain, whether or not it is worth leaving the mesh for.

Cost: process groups, and modules without values, for each choice of pipelines. ``"auto"`` costs
:func:`.choose_pool` on rank 0 (minutes for many devices), once for each mesh, documents, settings
and profile. An evaluation always runs on the mesh.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.tensor import Shard

from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.cache import remembered
from lightning_wlb.distributed.collective_errors import Ranks, patient_ranks
from lightning_wlb.heterogeneous.parameters import ExchangedParameters
from lightning_wlb.heterogeneous.pipelines import HeterogeneousStage, exchange_group
from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.heterogeneous.planning.pool_search import SAMPLE, choose_pool, described
from lightning_wlb.heterogeneous.planning.sharded_layouts import Weights
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import progress_bar
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.tensor_parallel import placement_of
from lightning_wlb.plan import Scheme, Schemes, StepPlan, check_schemes, schemes_of
from lightning_wlb.planning.packing.base import Packer
from lightning_wlb.planning.step_chooser import check_packing
from lightning_wlb.training.executor import Executor, StepRuntime
from lightning_wlb.training.parallelize import refuse_empty_buffers

Dynamic = Literal["off", "auto", False] | Sequence[Sequence[Scheme]]
"""``"off"``, ``"auto"``, or pipelines to choose from: a sequence of schemes for each choice. False
means ``"off"``, because YAML reads ``off`` without quotes as false."""


def checked_schemes(given: Dynamic) -> tuple[Schemes, ...]:
    """The sets of pipelines that ``dynamic`` lists; empty for ``"off"`` and ``"auto"``.

    Raises:
        ValueError: something other than schemes, or as for :func:`.check_schemes`.
    """
    if given is False or (isinstance(given, str) and given in ("off", "auto")):
        return ()
    try:
        choices = () if isinstance(given, str) else tuple(map(tuple, given))
    except TypeError:  # a number, or one choice in place of several
        choices = ()
    every = [scheme for schemes in choices for scheme in schemes]
    if not (choices and all(choices) and all(isinstance(each, Scheme) for each in every)):
        raise ValueError(
            f"dynamic={given!r} is neither 'off', 'auto' nor strategies. Give for each a sequence"
            " of lightning_wlb.plan.Scheme, one for each pipeline."
        )
    for schemes in choices:
        check_schemes("dynamic", schemes)
    return choices


def attach_pipelines(
    executor: Executor, choices: Sequence[Schemes], module: LanguageModule
) -> None:
    """Let an executor run steps on some sets of pipelines; collective over all ranks.

    Raises:
        MisconfigurationException: pipelines do not fit, or ``build_model`` makes another model.
    """
    pipeline, model = executor.pipeline, executor.model
    assert isinstance(model, Decoder)
    mesh, rank = pipeline.rank.mesh, pipeline.rank.index
    whole = module.build_blank_model()
    try:
        check_buffers(whole)
        every = {(mesh.tensor, mesh.context)}
        every |= {(each.tensor, each.context) for schemes in choices for each in schemes}
        for tensor, context in every:
            module.model_shape.check_tensor_parallel(tensor, context)
        sizes = {tensor for tensor, _ in every}
        weights, base = weights_of(whole, sorted(sizes)), schemes_of(mesh, pipeline.stages)
        redistribute = partial(Redistribution, weights, base, rank=rank)
        for schemes in choices:
            redistribute(schemes)
    except ValueError as error:
        raise MisconfigurationException(f"WLBStrategy(dynamic=...): {error}") from None
    Ranks().each(lambda: check_rebuilt(module, whole))
    for number, schemes in enumerate(choices, 1):
        rank_zero_info(
            f"WLBStrategy: a step may also take strategy {number}: {described(schemes)}."
        )
    group = exchange_group(rank, mesh.devices, pipeline.device)
    executor.heterogeneous = HeterogeneousPipelines(
        executor, module.build_blank_model, redistribute, group
    )


def weights_of(model: Decoder, sizes: Sequence[int]) -> Weights:
    """The parameters of a whole model as plain numbers.

    ``sizes`` are the tensor-parallel sizes of the mesh and of all pipelines.

    Raises:
        ValueError: a parameter outside of embed, layers and head, or a size that cannot split it.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    frozen = frozenset(n for n, each in model.named_parameters() if not each.requires_grad)
    split = {}
    for size in {*sizes} - {1}:
        plan = model.tensor_parallel_plan(size)
        placed = {name: placement_of(name, plan) for name in shapes}
        split[size] = {n: each.dim for n, each in placed.items() if isinstance(each, Shard)}
    return Weights(shapes, split, frozenset(model.tied.values()), frozen)


@dataclass(frozen=True, eq=False)
class HeterogeneousPipelines:
    """Gives the runtime of a rank's steps on other pipelines; for ``Executor.heterogeneous``."""

    executor: Executor
    build: Callable[[], Decoder]  #: makes the whole model, on the meta device
    redistribute: Callable[[Schemes], Redistribution]  #: this rank's exchanges with pipelines
    group: dist.ProcessGroup
    _made: dict[Schemes, tuple[HeterogeneousStage, ExchangedParameters]] = field(
        default_factory=dict, init=False
    )

    def __call__(self, plan: StepPlan) -> StepRuntime:
        """The runtime of a step; collective over all ranks if its pipelines are new, or if more of
        them share a micro-batch than ever before.
        """
        if plan.schemes not in self._made:
            mine, links = self.executor, self.redistribute(plan.schemes)
            stage = HeterogeneousStage(links, self.build, mine.pipeline)
            own = ExchangedParameters(stage, mine.model, self.group, mine.parameters.sum_dtype)
            self._made[plan.schemes] = stage, own
        stage, own = self._made[plan.schemes]
        return StepRuntime(stage.model, stage.pipeline, stage.groups_of(plan), own)


def check_rebuilt(module: LanguageModule, rebuilt: Decoder) -> None:
    """Refuse a model that differs from what ``build_model`` makes, since pipelines run the latter.

    The module's model may be split; ``rebuilt`` is whole, by ``build_model`` on the meta device.

    Raises:
        MisconfigurationException: names the module or parameter; possibly not on all ranks.
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
    """Raise ValueError, on all ranks alike, if buffers would be wrong in a rebuilt model."""
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
    profile: Profile,
) -> tuple[Schemes, ...]:
    """The sets of pipelines that steps may take in place of the mesh's; collective.

    Args:
        request: makes the request of the run's documents, model and ``profile``, with all sizes of
            the mesh open; called on rank 0 only.
        profile: the profile that plans the run's steps.
    """
    reason = _obstacle(mesh, packer)
    if reason is None:  # a rank knows its own stages of the model
        reason = next(filter(None, Ranks().every(lambda: _obstacle_of(module))), None)
    if reason is not None:
        rank_zero_info(f'WLBStrategy: dynamic="auto" leaves all steps on the mesh: {reason}')
        return ()
    with patient_ranks() as ranks:
        lines, schemes = ranks.lead(lambda: _searched_pool(request(), mesh))
    by = "measured" if profile.measured else "analytic"
    rank_zero_info(f'WLBStrategy: dynamic="auto", by the {by} profile {profile.name}:')
    rank_zero_info("\n".join(lines))
    return schemes


def _searched_pool(request: MeshRequest, mesh: Mesh) -> tuple[list[str], tuple[Schemes, ...]]:
    """Lines for the log, and pipelines: from a search, or from the cache of an earlier one."""
    request = replace(request, steps=SAMPLE)
    name = f"pool-{request.digest[:16]}-{'-'.join(map(str, mesh.shape))}"

    def search() -> str:
        with progress_bar(f"WLBStrategy: simulating pipelines of {mesh.devices} devices") as tell:
            choice = choose_pool(request, mesh, progress=tell)
        return json.dumps({"lines": choice.lines, **asdict(choice)})

    made = json.loads(remembered(name, search))
    pool = (tuple(Scheme(**each) for each in schemes) for schemes in made["schemes"])
    return made["lines"], tuple(pool)


def _obstacle(mesh: Mesh, packer: type[Packer]) -> str | None:
    """Why no step can leave the mesh, and the remedy; None if steps can."""
    if mesh.devices == 1:
        return "there is only one rank."
    if mesh.virtual_stages > 1:
        return (
            f"it has {mesh.virtual_stages} stages on each rank, pipelines that differ have one."
            ' Give schedule="1f1b".'
        )
    try:
        check_packing(packer)
    except ValueError as error:
        return str(error)
    return None


def _obstacle_of(module: LanguageModule) -> str | None:
    """Why this rank's model cannot run on other pipelines; None if it can."""
    whole = module.build_blank_model()
    try:
        check_buffers(whole)
        weights_of(whole, [])
        check_rebuilt(module, whole)
    except (ValueError, MisconfigurationException) as error:
        return str(error).removeprefix("WLBStrategy(dynamic=...): ")
    return None
