"""The strategies that ``WLBStrategy(dynamic="auto")`` takes: what :mod:`.meshes.dynamic` answers.

They are chosen when the first batch is asked for, by the profile that the run's steps are planned
by: what is promised is then what is planned, and a run that is resumed, whose checkpoint has
brought that profile, makes the same choice on the same mesh.

1. Where something keeps all steps on the mesh, such as a packing that deals to equal pipelines
   only, a line says what, and what to do about it.
2. Else rank 0 takes the answer from the user's cache folder, or simulates; the others wait for it
   as long as it takes, and end with rank 0's error where it has one.
3. The log has the figure, whether or not it is worth leaving the mesh for.

Cost: that of :func:`~lightning_wlb.heterogeneous.pool_search.choose_pool` on rank 0, minutes for
many devices,
once for a mesh, its documents, settings and profile; and the whole model is built once more,
without memory. Not for an evaluation, which runs on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.cache import remembered
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.distributed.collective_errors import Ranks, patient_ranks
from lightning_wlb.heterogeneous.dealing import check_packing
from lightning_wlb.heterogeneous.layouts import Strategy
from lightning_wlb.heterogeneous.model_check import check_buffers, check_rebuilt
from lightning_wlb.heterogeneous.pool_search import SAMPLE, PoolChoice, choose_pool
from lightning_wlb.heterogeneous.setup import blank_model
from lightning_wlb.heterogeneous.transfer import weights_of
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import progress_bar
from lightning_wlb.models.language_module import LanguageModule


def agreed_pool(
    request: Callable[[], MeshRequest],
    mesh: Mesh,
    data: WLBDataModule,
    module: LanguageModule,
    profile: Profile | None,
) -> tuple[Strategy, ...]:
    """The strategies that steps may take in place of the mesh's pipelines; collective.

    Args:
        request: makes what is searched for: the run's documents, model and ``profile``, with all
            sizes of the mesh open. Called on rank 0 only.
        mesh: of the run.
        data: its data module.
        module: its model.
        profile: by which the run's steps are planned; None: by work.
    """
    reason = _obstacle(mesh, data, profile)
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


def _obstacle(mesh: Mesh, data: WLBDataModule, profile: Profile | None) -> str | None:
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
        check_packing(data.settings.packer)
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
