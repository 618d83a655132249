"""How a run comes by its mesh, its schedule and its device profile: of WLBStrategy the part before
there are process groups.

Sizes that are given stay. A module that an earlier Trainer has split keeps its mesh where that has
the sizes given. Else, where the sizes leave a choice, the mesh is searched for (:mod:`.searching`).

A run whose mesh was searched for, and any on a GPU, also plans its steps by the device profile,
which knows how much memory there is, unless the data module has one of its own. Where that, a
pipeline or adaptive sharding lets times decide, the devices are then measured (:mod:`.automatic`),
and that is what a run on several ranks plans by. It is agreed on when the first batch is asked for:
a checkpoint is loaded by then, and has what the run before it was planned by. What is left, such as
replicas alone on CPUs, or documents packed by their tokens, is planned by work alone.

Strategies that steps may take in place of the mesh's pipelines are prepared at set-up of a fit.
With ``dynamic="auto"`` they are chosen behind the measurement (:mod:`.pooling`), and prepared then;
where none is worth it, the run is planned as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_wlb.arguments import choice, whole
from lightning_wlb.attention.backends import kernel_name
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.planning_context import PlanningContext, shape_of
from lightning_wlb.distributed.collective_errors import Ranks
from lightning_wlb.distributed.device_mesh import Size, is_settled
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.heterogeneous.setup import (
    Dynamic,
    agreed_pool,
    checked_strategies,
    pool_of,
    run_elsewhere,
)
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import Schemes
from lightning_wlb.schedule.programs import SCHEDULES, check_stages
from lightning_wlb.sharding import ADAPTIVE
from lightning_wlb.strategy import mesh_choice as searching
from lightning_wlb.strategy.checkpointing import CheckpointStrategy
from lightning_wlb.strategy.profile_choice import (
    Measurement,
    agreed_profile,
    decoder_like,
    profile_of,
)
from lightning_wlb.supervision.progress import BETWEEN, PROGRESS
from lightning_wlb.training.executor import Executor
from lightning_wlb.training.precision import WLBPrecision, name_of


class ChoosingStrategy(CheckpointStrategy):
    """A mesh of processes some of whose sizes may be left open.

    Args:
        sizes: of the axes, in mesh order; ``"auto"`` leaves one open.
        schedule: of the pipeline; ``"auto"`` leaves it open.
        virtual_stages: of each pipeline rank; None leaves it open.
        process_group_backend: as the others, of :class:`.CheckpointStrategy`.
        timeout: see there.
        async_save: see there.
        on_save_failure: see there.
        verify_checkpoints: see there.
        reduce_dtype: ``"float32"``, ``"bfloat16"`` or None.
        dynamic: see :class:`.WLBStrategy`.

    Attributes:
        dynamic: strategies that a step may take in place of the mesh's pipelines; with ``"auto"``
            none before the first batch of a fit is asked for.
        executor: of this rank, once its model is split.
        schedule: of the run.
        profile: by which the run's steps are planned; None: by the data module's, if it has one.

    Raises:
        MisconfigurationException: for a size that is none.
        ValueError: if the schedule is unknown or cannot run so many stages per rank, or ``dynamic``
            holds something else than strategies.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        schedule: str,
        virtual_stages: int | None,
        process_group_backend: str | None,
        timeout: timedelta | None,
        async_save: bool,
        on_save_failure: str,
        verify_checkpoints: bool,
        reduce_dtype: str | None,
        dynamic: Dynamic,
    ) -> None:
        if reduce_dtype is not None:
            choice("reduce_dtype", reduce_dtype, ("float32", "bfloat16"))
        self._asked_reduce_dtype = reduce_dtype
        self._chooses_pool = isinstance(dynamic, str) and dynamic == "auto"
        self.dynamic = checked_strategies(dynamic)
        choice("schedule", schedule, (*SCHEDULES, "auto"))
        if virtual_stages is not None:
            virtual_stages = whole("virtual_pipeline_size", virtual_stages, 1)
        self._asked_schedule = schedule, virtual_stages
        self.schedule, usual = _usual(schedule, virtual_stages)
        check_stages(self.schedule, usual)  # whether the two go together
        super().__init__(
            sizes,
            usual,
            process_group_backend,
            timeout,
            async_save,
            on_save_failure,
            verify_checkpoints,
        )
        self.profile: Profile | None = None
        self._base: Profile | None = None  # what it is where nothing is measured
        self._has_settled = False
        self._pool: Pool | None = None
        self.executor: Executor | None = None
        # Strategies that the executor is prepared for, and how long their operations may wait.
        self._runs: tuple[tuple[Schemes, ...], timedelta] | None = None

    def _chosen(self, mesh: Mesh) -> Mesh:
        """The mesh, schedule and profile of this run; ranks given others are refused."""
        self._has_settled, self._pool = False, None
        if self._chooses_pool:
            self.dynamic = ()
        module: Any = self.lightning_module
        trainer, precision = module.trainer, self.precision_plugin
        assert isinstance(precision, WLBPrecision)
        data = getattr(trainer, "datamodule", None)
        given = getattr(data, "profile", None)
        previous = getattr(getattr(module, "model", None), "parallelized_by", None)
        # Ranks that go different ways here, or to different meshes, would wait for each other.
        searching.compare(Ranks().every(lambda: self._arguments(data)))
        if previous is not None and previous._is_as_asked_by(self):
            self.schedule = previous.schedule
            self.profile = self._base = self._profile(given, settled=previous._base is None)
            return super()._chosen(previous.mesh)
        self.schedule, _ = _usual(*self._asked_schedule)
        settled = is_settled(self.world_size, self._asked)
        self.profile = self._base = self._profile(given, settled)
        if settled or not isinstance(data, WLBDataModule) or not isinstance(module, LanguageModule):
            # Without the two nothing can be trained, which is answered later.
            return super()._chosen(mesh)
        if self.profile is None:
            rank_zero_info(
                "WLBStrategy: no mesh is chosen, since no device profile is known of"
                f" {self.root_device.type} devices on {self.num_nodes} nodes. Give"
                " WLBDataModule(profile=...), or the sizes."
            )
            return super()._chosen(mesh)
        asked = self._searched_for(*self._asked_schedule)
        PROGRESS.note(BETWEEN, "the choice of a mesh")
        mesh, self.schedule = searching.agreed_mesh(asked, trainer, data, module, self.profile)
        PROGRESS.begin()
        return mesh

    def _profile(self, given: Profile | None, settled: bool) -> Profile | None:
        """By which a mesh is chosen and steps are planned; None: by the data module's, if any."""
        on_cpu = self.root_device.type == "cpu"
        if settled and (on_cpu or given is not None):
            return None
        backend = getattr(self.lightning_module, "attention_backend", "auto")
        profile = profile_of(self.root_device, backend) if given is None else given
        if profile is None or (self.num_nodes > 1 and "network" not in profile.links):
            return None
        return replace(profile, devices_per_node=self.num_processes)

    def _searched_for(self, schedule: str, virtual_stages: int | None) -> searching.MeshArguments:
        precision = self.precision_plugin
        assert isinstance(precision, WLBPrecision)
        return searching.MeshArguments(
            self._asked,
            schedule,
            virtual_stages,
            self.world_size,
            self.num_processes,
            name_of(precision.parameter_dtype),
            name_of(self.reduce_dtype),
        )

    def planning_context(self, data: WLBDataModule) -> PlanningContext:
        """What is known by now of the run that steps are planned for."""
        module, precision = self.lightning_module, self.precision_plugin
        assert isinstance(module, LanguageModule)
        assert isinstance(precision, WLBPrecision)
        assert self.executor is not None
        return PlanningContext(
            shape=shape_of(module, data.model_shape),
            rank=self.rank,
            schedule=self.schedule,
            stages=self.executor.pipeline.stages,
            profile=self.profile or data.profile,
            parameter_dtype=name_of(precision.parameter_dtype),
            reduce_dtype=name_of(self.reduce_dtype),
            schemes=self.dynamic,
            chooser=self._pool,
            activation_checkpointing=module.planned_checkpointing,
        )

    def settle_planning(self, data: WLBDataModule) -> None:
        """Settle what this run's steps are planned by, and which strategies they may take.

        Collective over all ranks at its first call in a run.
        """
        if self._has_settled:
            return
        self._has_settled = True
        self._measure(data)
        module: Any = self.lightning_module
        if self._chooses_pool and module.trainer.state.fn == TrainerFn.FITTING:
            PROGRESS.note(BETWEEN, "the choice of strategies")
            self.dynamic = self._chosen_strategies(data, module)
            self._prepare_strategies()
            if not (self.dynamic or self._depends_on_times(data)):
                self.profile = self._base
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._make_pool(data)

    def _chosen_strategies(
        self, data: WLBDataModule, module: LanguageModule
    ) -> tuple[Schemes, ...]:
        profile = self.profile or data.profile

        def request() -> MeshRequest:
            assert profile is not None
            asked = self._searched_for(self.schedule, None)._replace(
                sizes=["auto"] * len(AXES),
                # Nodes as steps are planned for, or strategies could be refused that are chosen.
                devices_per_node=profile.devices_per_node,
            )
            return searching.request_of(asked, module.trainer, data, module, profile)

        return agreed_pool(request, self.mesh, data.settings.packer, module, profile)

    def _make_pool(self, data: WLBDataModule) -> None:
        """Make what chooses each step's pipelines, if there are strategies to choose from."""
        if not self.dynamic:
            return
        context = self.planning_context(data)
        given = context.activation_checkpointing, data.settings, data.sharding
        self._pool = pool_of(self.dynamic, context.predictor, *given)

    def _prepare_strategies(self) -> None:
        """Let the executor run the strategies, if there are any; collective over all ranks."""
        module, precision = self.lightning_module, self.precision_plugin
        asked = self.dynamic, self._timeout
        if not self.dynamic or asked == self._runs:
            return
        assert isinstance(module, LanguageModule)
        assert isinstance(precision, WLBPrecision)
        assert self.executor is not None
        given = self.num_processes, precision.sum_dtype, self._timeout
        run_elsewhere(self.executor, self.dynamic, module, *given)
        self._runs = asked

    def _measure(self, data: WLBDataModule) -> None:
        """Plan by what the devices of this run are measured to take, where that is to be known.

        What a checkpoint has brought is not measured again, so that a resumed run gets the plans of
        an unbroken one; but it is where another number of ranks shares a node now, whose memory and
        links are others for each.
        """
        asked = self._to_measure(data)
        if asked is None:
            return
        kernel = kernel_name(asked.backend, asked.device)
        own = (asked.device.type, name_of(asked.dtype), kernel, f"{asked.ranks} ranks a node")
        if data.measured is not None:
            kept = Profile.from_json(data.measured) if data.measured else None
            if kept is None or (
                _devices_of(kept) == own and (asked.network is None or "network" in kept.links)
            ):
                if kept is not None:
                    rank_zero_info(
                        f"WLBStrategy: steps are planned by {kept.provenance}, as before."
                    )
                    self.profile = kept
                return
            rank_zero_info(
                f"WLBStrategy: the run was planned by {kept.provenance}. Here it goes on with"
                f" {', '.join(own)}, which is measured anew."
            )
        PROGRESS.note(BETWEEN, "the measurement of the device")
        profile = agreed_profile(asked)
        data.keep_measurement(profile)
        self.profile = profile or self.profile

    def _to_measure(self, data: WLBDataModule) -> Measurement | None:
        """What is to be measured for a run; None where nothing depends on times, or is known."""
        module, precision, device = self.lightning_module, self.precision_plugin, self.root_device
        if (
            not isinstance(module, LanguageModule)
            or module.trainer.state.fn != TrainerFn.FITTING
            or not data.measures
            or self.mesh.devices == 1
            or not (
                self._depends_on_times(data)
                or self.dynamic
                or (
                    self._chooses_pool
                    and data.settings.packer.arranges
                    and self.mesh.virtual_stages == 1  # no step leaves others
                )
            )
            or (
                self.num_nodes > 1 and (self.profile is None or "network" not in self.profile.links)
            )
            or device.type not in ("cpu", "cuda")
        ):
            return None
        config = decoder_like(module.model_shape)
        if config is None:
            rank_zero_info(
                "WLBStrategy: this device is not measured, since layers of this model are not like"
                " those of the reference decoder. WLBDataModule(profile=...) takes a profile."
            )
            return None
        assert isinstance(precision, WLBPrecision)
        base = self.profile
        several = base is not None and self.num_nodes > 1
        return Measurement(
            config,
            device,
            precision.compute_dtype,
            module.attention_backend,
            self.num_processes,
            base.links["node"] if base and several else None,
            base.links["network"] if base and several else None,
            None if base is None else base.memory_bytes,
        )

    def _depends_on_times(self, data: WLBDataModule) -> bool:
        """Whether plans of steps on the mesh do."""
        judges, mesh = data.settings.packer.judges, self.mesh
        return (judges and (mesh.pipeline > 1 or self._base is not None)) or (
            data.sharding == ADAPTIVE and mesh.context > 1
        )

    @property
    def reduce_dtype(self) -> torch.dtype:
        """In which what tensor- and context-parallel ranks add up travels."""
        precision = self.precision_plugin
        assert isinstance(precision, WLBPrecision)
        asked: torch.dtype = getattr(torch, self._asked_reduce_dtype or "float32")
        return torch.promote_types(asked, precision.compute_dtype)

    def _arguments(self, data: object) -> dict[str, str]:
        """What all ranks have to be given alike."""
        schedule, virtual_stages = self._asked_schedule
        given = getattr(data, "profile", None)
        otherwise = "whatever is measured" if getattr(data, "measures", False) else "none"
        return {
            "sizes": f"{self._asked}, schedule {schedule}, {virtual_stages} virtual stages",
            "reduce_dtype": name_of(self.reduce_dtype),
            "dynamic": "auto"
            if self._chooses_pool
            else " or ".join("; ".join(map(str, each)) for each in self.dynamic) or "off",
            "a device profile": otherwise if given is None else given.provenance,
        }

    def _is_as_asked_by(self, other: ChoosingStrategy) -> bool:
        """Whether this strategy's mesh and schedule have what another one's arguments give."""
        schedule, virtual_stages = other._asked_schedule
        asked = (*other._asked, schedule, virtual_stages or "auto")
        own = (*self.mesh.shape, self.schedule, self.mesh.virtual_stages)
        return self.mesh.devices == other.world_size and all(
            wanted in ("auto", had) for wanted, had in zip(asked, own, strict=True)
        )


def _devices_of(kept: Profile) -> tuple[str, ...]:
    """What another run has measured, in words."""
    ranks = f"{kept.devices_per_node} ranks a node"
    return kept.device_type, kept.dtype, kept.kernel, ranks


def _usual(schedule: str, virtual_stages: int | None) -> tuple[str, int]:
    """What schedule and stages per rank come to where nothing is chosen."""
    if schedule == "auto":
        schedule = "1f1b" if virtual_stages in (None, 1) else "interleaved"
    return schedule, virtual_stages or (2 if schedule == "interleaved" else 1)
