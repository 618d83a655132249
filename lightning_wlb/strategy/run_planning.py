"""What the steps of a run are planned for: the profile, and the pipelines that a step may take.

The data module asks for it twice. When it makes a loader the model is split, and what is known is
told. When the first batch is asked for a checkpoint is loaded, too; then the devices are measured
where times decide (:mod:`.profile_choice`), and with ``WLBStrategy(dynamic="auto")`` heterogeneous
pipelines are chosen behind the measurement: what is promised is then what is planned, and a run
that is resumed, whose checkpoint has brought the measurement, makes the same choice on the same
mesh. Where none is worth it, the run is planned as without. Pipelines that are given are prepared
when a fit is set up.

Cost: that of a measurement, once for a model and device; and where ``dynamic`` is not off, that of
:mod:`lightning_wlb.heterogeneous.setup`.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.planning_context import PlanningContext, shape_of
from lightning_wlb.heterogeneous.setup import (
    Dynamic,
    agreed_pool,
    attach_pipelines,
    checked_schemes,
    pool_of,
)
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.planning.step_chooser import StepChooser
from lightning_wlb.strategy.launch import RunDevices
from lightning_wlb.strategy.mesh_choice import MeshOptions, mesh_request
from lightning_wlb.strategy.profile_choice import ProfileChoice
from lightning_wlb.strategy.split_model import SplitModel
from lightning_wlb.supervision.progress import BETWEEN, PROGRESS


class RunPlanning:
    """What the steps of a strategy's runs are planned for, one run after another.

    Args:
        dynamic: the argument of :class:`.WLBStrategy`.

    Attributes:
        profiles: the device profile.
        schemes: the heterogeneous pipelines that steps may take in place of the mesh's; with
            ``dynamic="auto"`` none before they are chosen.

    Raises:
        ValueError: ``dynamic`` is neither ``"off"``, ``"auto"`` nor pipelines on consecutive ranks.
    """

    def __init__(self, dynamic: Dynamic) -> None:
        self.profiles = ProfileChoice()
        self.schemes = checked_schemes(dynamic)
        self._automatic = isinstance(dynamic, str) and dynamic == "auto"
        self._chooser: StepChooser | None = None
        self._settled = False
        self._run: tuple[SplitModel, LanguageModule, RunDevices, timedelta] | None = None

    @property
    def asked(self) -> str:
        """The argument ``dynamic``, in words."""
        if self._automatic:
            return "auto"
        return " or ".join("; ".join(map(str, each)) for each in self.schemes) or "off"

    def begin(self) -> None:
        """Begin a run: what an earlier one has settled is forgotten."""
        self._settled, self._chooser, self._run = False, None, None
        if self._automatic:
            self.schemes = ()

    def attach(
        self,
        split: SplitModel,
        module: LanguageModule,
        devices: RunDevices,
        timeout: timedelta,
        data: WLBDataModule | None,
    ) -> None:
        """Plan for a split model; collective over all ranks.

        Args:
            timeout: how long operations between heterogeneous pipelines may wait.

        Raises:
            MisconfigurationException: pipelines do not go with the mesh, the model or the packing.
        """
        self._run = split, module, devices, timeout
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._prepare()
            if data is not None and not data.measures:
                self._make_chooser(data)  # Else when the devices have been measured.

    def context(self, data: WLBDataModule) -> PlanningContext:
        """What is known by now."""
        assert self._run is not None
        split, module, devices, _ = self._run
        pipeline = split.executor.pipeline
        return PlanningContext(
            shape=shape_of(module, data.model_shape),
            rank=pipeline.rank,
            schedule=pipeline.schedule,
            stages=pipeline.stages,
            profile=self.profiles.profile or data.profile,
            parameter_dtype=devices.parameter_dtype,
            reduce_dtype=devices.reduce_dtype,
            schemes=self.schemes,
            chooser=self._chooser,
            activation_checkpointing=module.planned_checkpointing,
        )

    def settle(self, data: WLBDataModule) -> None:
        """Measure and choose, at the first call in a fit; collective over all ranks."""
        assert self._run is not None
        split, module, devices, _ = self._run
        if self._settled or module.trainer.state.fn != TrainerFn.FITTING:
            return
        self._settled = True
        leaves = self.may_leave(split.mesh, data)
        self.profiles.measure(devices, split.mesh, data, module, leaves_mesh=leaves)
        if self._automatic:
            context = self.context(data)

            def request() -> MeshRequest:
                assert context.profile is not None
                options = MeshOptions(schedule=context.schedule)
                return mesh_request(options, devices, data, module, context.profile)

            PROGRESS.note(BETWEEN, "the choice of strategies")
            given = split.mesh, data.settings.packer, module, context.profile
            self.schemes = agreed_pool(request, *given)
            self._prepare()
            if not (self.schemes or self.profiles.decides(split.mesh, data)):
                self.profiles.profile = self.profiles.unmeasured
        self._make_chooser(data)

    def may_leave(self, mesh: Mesh, data: WLBDataModule) -> bool:
        """Whether any step might leave the mesh."""
        # Neither a packing that deals to equal pipelines only nor virtual stages can be left.
        able = data.settings.packer.arranges and mesh.virtual_stages == 1
        return bool(self.schemes) or (self._automatic and able)

    def _prepare(self) -> None:
        """Let the executor run the schemes, if there are any; collective over all ranks."""
        assert self._run is not None
        split, module, devices, timeout = self._run
        if self.schemes and split.prepared_for != (self.schemes, timeout):
            sums = torch.promote_types(devices.compute_dtype, torch.float32)
            given = module, devices.per_node, sums, timeout
            attach_pipelines(split.executor, self.schemes, *given)
            split.prepared_for = self.schemes, timeout

    def _make_chooser(self, data: WLBDataModule) -> None:
        if self.schemes:
            context = self.context(data)
            given = context.activation_checkpointing, data.settings, data.sharding
            self._chooser = pool_of(self.schemes, context.predictor, *given)
