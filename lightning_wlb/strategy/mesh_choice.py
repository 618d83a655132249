"""The mesh of a run whose sizes leave a choice: what :mod:`lightning_wlb.mesh_search` answers.

The search needs the documents' lengths, the model's shape and a device profile. Lightning connects
the ranks before it prepares data and builds the model, so they are asked for early, when the ranks
are connected and the process groups of a mesh are not made yet:

1. The first rank of each node prepares the documents while the others wait, as long as it takes,
   as Lightning lets them wait for ``prepare_data``. Then every rank opens them. (Lightning calls
   ``prepare_data`` again later, which finds everything made.)
2. Every rank says what it would choose a mesh for. Where one says other than rank 0, all end in an
   error that names the ranks and what differs.
3. Rank 0 takes the answer from the user's cache folder, or searches; the others wait for it as long
   as for a rank that starts late, and end with rank 0's error where it has one.

The answer follows from what is asked for, in whole numbers, so that a run which is resumed or
requeued gets the same mesh again; the cache saves time and decides nothing.

Cost: that of the search, on rank 0; two exchanges of some hundred bytes; and a model of the user's
own is built once more, without memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import lightning.pytorch as pl
import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.cache import remembered
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.planning_context import shape_of
from lightning_wlb.data.stores.mixture import MixedDocuments
from lightning_wlb.distributed.collective_errors import Ranks, patient_ranks
from lightning_wlb.heterogeneous.setup import blank_model
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.evaluate import MeshChoice, MeshRow
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import choose_mesh, progress_bar
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule


class MeshArguments(NamedTuple):
    """What a run says of its mesh.

    Attributes:
        sizes: of the axes, in mesh order.
        schedule: its name, or ``"auto"``.
        virtual_stages: of each pipeline rank; None: to be chosen.
        devices: of all nodes.
        devices_per_node: of each.
        rest_dtype: of parameters and optimizer state at rest.
        reduce_dtype: of sums over tensor- and context-parallel ranks.
    """

    sizes: Sequence[int | str]
    schedule: str
    virtual_stages: int | None
    devices: int
    devices_per_node: int
    rest_dtype: str
    reduce_dtype: str


def agreed_mesh(
    asked: MeshArguments,
    trainer: pl.Trainer,
    data: WLBDataModule,
    module: LanguageModule,
    profile: Profile,
) -> tuple[Mesh, str]:
    """The mesh and its schedule; collective over all ranks.

    Args:
        asked: sizes that are given, and devices.
        trainer: that is to run.
        data: its data module.
        module: its model.
        profile: of the devices, the same on all ranks.

    Raises:
        MisconfigurationException: ranks would choose for different documents, models, settings or
            devices.
        ValueError: no mesh fits; the message says what would.
    """
    _prepare(trainer, data)
    ranks, requests = Ranks(), []

    def facts() -> dict[str, str]:
        requests.append(request_of(asked, trainer, data, module, profile))
        return _facts(requests[0])

    compare(ranks.every(facts))
    (request,) = requests
    return ranks.lead(lambda: _answer(request))


def _prepare(trainer: pl.Trainer, data: WLBDataModule) -> None:
    first = trainer.local_rank == 0 and (data.prepare_data_per_node or trainer.node_rank == 0)
    with patient_ranks() as ranks:
        ranks.each(lambda: data.prepare_data() if first else None)


def request_of(
    asked: MeshArguments,
    trainer: pl.Trainer,
    data: WLBDataModule,
    module: LanguageModule,
    profile: Profile,
) -> MeshRequest:
    """What a mesh, or a pool of strategies, is chosen for.

    Args:
        asked: sizes that are given, and devices.
        trainer: that is to run.
        data: its data module.
        module: its model.
        profile: of the devices.
    """
    store, model = data.store, blank_model(module)
    fixed = {axis: n for axis, n in zip(AXES, asked.sizes, strict=True) if isinstance(n, int)}
    if "tensor" not in fixed and not _can_split(model):
        fixed["tensor"] = 1
    return MeshRequest(
        lengths=np.asarray(store.lengths),
        shape=shape_of(module, data.model_shape),
        data=data.settings,
        profile=profile,
        devices=asked.devices,
        devices_per_node=asked.devices_per_node,
        fixed=fixed,
        schedule=None if asked.schedule == "auto" else asked.schedule,
        virtual_stages=asked.virtual_stages,
        activation_checkpointing=module.checkpointing_with(model),
        rest_dtype=asked.rest_dtype,
        reduce_dtype=asked.reduce_dtype,
        sharding=data.sharding,
        mixture=store.shares if isinstance(store, MixedDocuments) else (),
    )


def _can_split(model: Decoder) -> bool:
    """Whether the model has a plan by which tensor-parallel ranks share its weights."""
    try:
        model.tensor_parallel_plan(2)
    except ValueError:
        return False
    return True


def _facts(request: MeshRequest) -> dict[str, str]:
    """What a mesh is chosen for, in words, with digests of what the words leave out."""
    lengths = np.ascontiguousarray(request.lengths, "<i8")
    shape, profile = request.shape, request.profile
    return {
        "documents": f"{len(lengths):,} with {int(lengths.sum()):,} tokens"
        f" ({_digest(lengths.tobytes())})",
        "a model": f"{shape.layers} layers of width {shape.dim} ({_digest(repr(shape).encode())})",
        "data settings": f"{request.data}",
        "a device profile": f"{profile.name}, {profile.memory_bytes / 1e9:.1f} GB"
        f" ({_digest(repr(profile).encode())})",
        "a mesh": f"{request.devices} devices, {request.devices_per_node} to a node,"
        f" {request.fixed}, {request.schedule}, {request.virtual_stages} virtual stages,"
        f" activation checkpointing {request.activation_checkpointing}, sharding {request.sharding}"
        f" ({request.digest[:12]})",
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def compare(everyone: Sequence[dict[str, str]]) -> None:
    """Raise MisconfigurationException where a rank has other facts than rank 0.

    Args:
        everyone: for each rank what it is to have in common with the others, by name, in words.
    """
    for name, own in everyone[0].items():
        if others := [rank for rank, facts in enumerate(everyone) if facts[name] != own]:
            raise MisconfigurationException(
                f"WLBStrategy cannot choose a mesh: rank 0 sees {name} of {own}, but ranks"
                f" {others[:8]}{' and more' if len(others) > 8 else ''} of"
                f" {everyone[others[0]][name]}. Let all ranks see the same documents and run the"
                " same program with the same arguments, or give WLBStrategy all four sizes."
            )


def _answer(request: MeshRequest) -> tuple[Mesh, str]:
    """What the search finds, or has found; in three lines of the log. For rank 0."""
    found = _recalled(request)
    best, profile = found.best, request.profile
    rank_zero_info(
        f"WLBStrategy: chose {_shown(best)}, of {len(found.rows) + len(found.others)} meshes"
        f" simulated with the {'measured' if profile.measured else 'analytic'} profile"
        f" {profile.name}."
    )
    others = (*found.rows[1:], *found.others)
    rank_zero_info(
        f"WLBStrategy: runner-up {_shown(others[0])}."
        if others
        else "WLBStrategy: no other mesh was simulated that fits in memory."
    )
    rank_zero_info(
        f"WLBStrategy: beside arithmetic, {best.bound_by} takes most of the ranks' time there,"
        f" {best.shares[best.bound_by]:.0%}. To have this mesh without a search give"
        f" WLBStrategy({', '.join(map(str, best.mesh.shape))}, schedule={best.schedule!r},"
        f" virtual_pipeline_size={best.mesh.virtual_stages})."
    )
    return best.mesh, best.schedule


def _shown(row: MeshRow) -> str:
    stages = row.mesh.virtual_stages
    schedule = row.schedule + (f" with {stages} stages per rank" if stages > 1 else "")
    return (
        f"mesh {row.mesh}, {schedule}, {row.recomputed:.0%} of the tokens recomputed,"
        f" {row.step_ms:,.1f} ms a step,"
        f" {row.tokens_per_second:,.0f} tokens/s"
    )


def _recalled(request: MeshRequest) -> MeshChoice:
    """The answer in the cache folder, or the search's, which is put there."""

    def search() -> MeshChoice:
        with progress_bar() as tell:
            return choose_mesh(request, progress=tell)

    return remembered(f"mesh-{request.digest[:16]}", search, MeshChoice.from_json)
