"""A run's mesh, schedule and device profile: given, kept from an earlier run, or searched for.

Given sizes are kept. A module that an earlier Trainer has split keeps its mesh if that mesh has the
given sizes. Otherwise :mod:`lightning_wlb.mesh_search` makes any choice that the sizes leave.

The search needs the documents' lengths, the model's shape and a device profile. Lightning connects
the ranks before it prepares data and builds the model. So the search does both earlier:

1. The first rank of each node prepares the documents, and the others wait as long as it takes, as
   they do when Lightning calls ``prepare_data``. A later call finds everything there.
2. Rank 0 takes the answer from the user's cache folder, or searches. The others wait for it as long
   as for a rank that starts late; if rank 0 fails, all end with its error. (Ranks with other
   documents or devices end in an error before the first step: they compare their plans.)

The answer depends on the request alone and is computed in whole numbers, so that a resumed or
requeued run gets the same mesh again; the cache only saves time.

Cost: the search, and a model built once more on the meta device, both on rank 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import lightning.pytorch as pl
import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_wlb.argument_checks import choice, whole
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.cache import remembered
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.planning_context import shape_of
from lightning_wlb.data.stores.mixture import MixedDocuments
from lightning_wlb.distributed.collective_errors import Ranks, patient_ranks
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.evaluate import MeshChoice, MeshRow
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import choose_mesh, progress_bar
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.profiling.device import shipped_profile
from lightning_wlb.schedule.programs import SCHEDULES, check_stages
from lightning_wlb.strategy.checks import data_module_of
from lightning_wlb.strategy.launch import RunDevices
from lightning_wlb.strategy.rank_agreement import compare_ranks, settings_of
from lightning_wlb.strategy.split_model import SplitModel
from lightning_wlb.supervision.progress import BETWEEN, PROGRESS

Size = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """What a user gives of the mesh: sizes in mesh order; ``"auto"`` or None if it is left open.

    Raises:
        ValueError: for a size that is neither ``"auto"`` nor a whole number of at least 1, or if
            the schedule is unknown or cannot run so many stages per rank.
    """

    sizes: tuple[Size, ...] = ("auto", "auto", "auto", "auto")
    schedule: str = "auto"
    virtual_stages: int | None = None

    def __post_init__(self) -> None:
        sizes = (
            "auto" if size == "auto" else whole(f"{axis}_parallel_size", size, 1)
            for axis, size in zip(AXES, self.sizes, strict=True)
        )
        object.__setattr__(self, "sizes", tuple(sizes))
        choice("schedule", self.schedule, (*SCHEDULES, "auto"))
        if (stages := self.virtual_stages) is not None:
            stages = whole("virtual_pipeline_size", stages, 1)
            object.__setattr__(self, "virtual_stages", stages)
        check_stages(*self.usual)

    @property
    def usual(self) -> tuple[str, int]:
        """The schedule and the stages of a pipeline rank if nothing is searched."""
        schedule, stages = self.schedule, self.virtual_stages
        if schedule == "auto":
            schedule = "1f1b" if stages in (None, 1) else "interleaved"
        return schedule, stages or (2 if schedule == "interleaved" else 1)

    @property
    def _fixed(self) -> int:
        return math.prod(size for size in self.sizes if size != "auto")

    def settles(self, world_size: int) -> bool:
        """Whether only one mesh has the given sizes, so that there is nothing to choose."""
        return self._fixed >= world_size or self.sizes.count("auto") <= 1

    def usual_mesh(self, world_size: int) -> Mesh:
        """The mesh if nothing is searched: the first open size takes the ranks that are left.

        Any further open size is 1.

        Raises:
            MisconfigurationException: the sizes do not fit the number of ranks.
        """
        sizes: list[int] = []
        rest = max(world_size // self._fixed, 1)
        for size in self.sizes:
            sizes.append(rest if size == "auto" else size)
            rest = 1 if size == "auto" else rest
        data, pipeline, context, tensor = sizes
        mesh = Mesh(data, pipeline, context, tensor, self.usual[1])
        if mesh.devices != world_size:
            shown = " × ".join(
                f"{axis} {size}" for axis, size in zip(AXES, self.sizes, strict=True)
            )
            raise MisconfigurationException(
                f"The mesh {shown} needs a multiple of {self._fixed} ranks"
                f"{'' if 'auto' in self.sizes else ' and exactly that many'}, but the Trainer"
                f" runs {world_size} (devices × num_nodes). Change devices or num_nodes, or the"
                " *_parallel_size arguments of WLBStrategy, so that their product is the number"
                ' of ranks; one of them may be "auto".'
            )
        return mesh

    def allow(self, mesh: Mesh, schedule: str, world_size: int) -> bool:
        """Whether a mesh and its schedule fit every given option and ``world_size`` ranks."""
        given = (*self.sizes, self.schedule, self.virtual_stages or "auto")
        has = (*mesh.shape, schedule, mesh.virtual_stages)
        fits = all(asked in ("auto", had) for asked, had in zip(given, has, strict=True))
        return fits and mesh.devices == world_size


def choose_run_mesh(
    options: MeshOptions, devices: RunDevices, trainer: pl.Trainer
) -> tuple[Mesh, str, bool, Profile | None]:
    """The mesh of a run, and what goes with it; collective over all ranks.

    Returns:
        The mesh; its schedule; whether it was searched for, by this run or by the run that has
        split the module; and the device profile by which steps are planned. If that is None, they
        are planned by the data module's profile, or by exact work if it has none.

    Raises:
        MisconfigurationException: the sizes do not fit the ranks, or settings of ranks differ.
        ValueError: no mesh fits in memory; the message says what would.
    """
    data, module = data_module_of(trainer), trainer.lightning_module
    known = "profile=None"
    if data is not None and (data.profile is not None or data.plans_by_work):
        known = 'profile="none"' if data.profile is None else data.profile.provenance
    mine = {name: str(each) for name, each in vars(options).items()} | {"device profile": known}
    # Ranks that branch differently here, or choose different meshes, would wait for each other.
    compare_ranks(lambda: mine | settings_of(trainer))
    backend, earlier = "auto", None
    if isinstance(module, LanguageModule):
        backend, earlier = module.attention_backend, SplitModel.of(module)
    if earlier is not None and options.allow(earlier.mesh, earlier.schedule, devices.count):
        searched, mesh, schedule = earlier.mesh_searched, earlier.mesh, earlier.schedule
    else:
        mesh, (schedule, _) = options.usual_mesh(devices.count), options.usual
        searched, earlier = not options.settles(devices.count), None
    profile = run_profile(devices, backend, data, searched=searched)
    # Without data or module nothing can be trained, which is refused later.
    if searched and earlier is None and data is not None and isinstance(module, LanguageModule):
        if profile is not None:
            PROGRESS.note(BETWEEN, "the choice of a mesh")
            _prepare(trainer, data)
            request = partial(mesh_request, options, devices, data, module, profile)
            mesh, schedule = Ranks().lead(lambda: _answer(request()))
            PROGRESS.begin()
            return mesh, schedule, True, profile
        rank_zero_info(
            f"WLBStrategy: no mesh is chosen: no device profile is known of {devices.device.type}"
            f" devices on {devices.nodes} nodes. Give WLBDataModule(profile=...), or the sizes."
        )
    rank_zero_info(f"WLBStrategy: mesh {mesh}")
    return mesh, schedule, searched, profile


def run_profile(
    devices: RunDevices, backend: str, data: WLBDataModule | None, *, searched: bool
) -> Profile | None:
    """The profile by which a run's steps are planned; None leaves it to the data; collective.

    A search for a mesh needs a profile: the data module's, or the shipped one that is nearest to
    the device. Steps are planned by the same profile, since they may fit in memory only with the
    recomputation that this profile predicts. On GPUs the shipped profile also plans the steps on a
    given mesh, unless the data module gives a profile or says ``profile="none"``. The number of
    devices per node is always the run's, not the profile's.

    Args:
        devices: the run's devices.
        backend: the kernel backend of attention, or ``"auto"``.
        data: the data module, if it is known.
        searched: whether the run's mesh is searched for.
    """
    given = None if data is None else data.profile
    if given is not None and given.device_type != devices.device.type:
        rank_zero_info(
            f"WLBStrategy: steps run on {devices.device.type}, but are planned by the profile"
            f" {given.name!r} of {given.device}, with its times and memory."
        )
    by_work = devices.device.type == "cpu" or (data is not None and data.plans_by_work)
    if given is None and not searched and by_work:
        return None
    profile = shipped_profile(devices.device, backend) if given is None else given
    if profile is None or (devices.nodes > 1 and "network" not in profile.links):
        return None
    return replace(profile, devices_per_node=devices.per_node)


def _prepare(trainer: pl.Trainer, data: WLBDataModule) -> None:
    first = trainer.local_rank == 0 and (data.prepare_data_per_node or trainer.node_rank == 0)
    with patient_ranks() as ranks:
        ranks.each(lambda: data.prepare_data() if first else None)


def mesh_request(
    options: MeshOptions,
    devices: RunDevices,
    data: WLBDataModule,
    module: LanguageModule,
    profile: Profile,
) -> MeshRequest:
    """The request of a search for a mesh: documents, model, settings and devices."""
    store, model = data.store, module.build_blank_model()
    fixed = {axis: n for axis, n in zip(AXES, options.sizes, strict=True) if isinstance(n, int)}
    if "tensor" not in fixed and not can_split(model):
        fixed["tensor"] = 1
    return MeshRequest(
        lengths=np.asarray(store.lengths),
        shape=shape_of(module),
        data=data.settings,
        profile=profile,
        devices=devices.count,
        fixed=fixed,
        schedule=None if options.schedule == "auto" else options.schedule,
        virtual_stages=options.virtual_stages,
        activation_checkpointing=module.checkpointing_with(model),
        rest_dtype=devices.parameter_dtype,
        reduce_dtype=devices.reduce_dtype,
        compiled=module.compiles_blocks,
        overlap=model.overlaps if devices.overlap else "off",
        sharding=data.sharding,
        mixture=store.shares if isinstance(store, MixedDocuments) else (),
    )


def can_split(model: Decoder) -> bool:
    """Whether tensor-parallel ranks can share the model's weights."""
    try:
        model.tensor_parallel_plan(2)
    except ValueError:
        return False
    return True


def _answer(request: MeshRequest) -> tuple[Mesh, str]:
    """Search for a mesh, or take it from the cache, and log three lines; for rank 0."""

    def search() -> str:
        with progress_bar(f"WLBStrategy: simulating meshes of {request.devices} devices") as tell:
            found = choose_mesh(request, progress=tell)
        return json.dumps({"lines": [*_lines(found, request.profile)], **asdict(found.best)})

    made = json.loads(remembered(f"mesh-{request.digest[:16]}", search))
    for line in made["lines"]:
        rank_zero_info(f"WLBStrategy: {line}")
    return Mesh(**made["mesh"]), made["schedule"]


def _lines(found: MeshChoice, profile: Profile) -> Iterator[str]:
    """Lines for the log: the chosen mesh, the runner-up, and what limits the chosen one."""
    best = found.best
    yield (
        f"chose {_shown(best)}, of {len(found.rows)} meshes that were near, simulated with the"
        f" {'measured' if profile.measured else 'analytic'} profile {profile.name}."
    )
    if len(found.rows) > 1:
        second = found.rows[1]
        faster = second.tokens_per_second > best.tokens_per_second
        why = ": within 1 %, and with more communication" if faster else ""
        yield f"runner-up {_shown(second)}{why}."
    else:
        yield "no other mesh that fits in memory came near."
    yield (
        f"beside arithmetic, {best.bound_by} takes most of the ranks' time there,"
        f" {best.shares[best.bound_by]:.0%}. To skip the search give"
        f" WLBStrategy({', '.join(map(str, best.mesh.shape))}, schedule={best.schedule!r},"
        f" virtual_pipeline_size={best.mesh.virtual_stages})."
    )


def _shown(row: MeshRow) -> str:
    stages = row.mesh.virtual_stages
    schedule = row.schedule + (f" with {stages} stages per rank" if stages > 1 else "")
    return (
        f"mesh {row.mesh}, {f'{schedule}, ' if row.mesh.pipeline > 1 else ''}{row.recomputed:.0%}"
        f" of the tokens recomputed, {row.step_ms:,.1f} ms a step, {row.tokens_per_second:,.0f}"
        " tokens/s"
    )
