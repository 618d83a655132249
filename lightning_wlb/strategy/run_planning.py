"""What the steps of a run are planned for: the profile, and the pipelines that a step may take.

Both are settled when a fit is set up, before the data module makes a loader. The heterogeneous
pipelines of ``WLBStrategy(dynamic=...)`` are then chosen and prepared
(:mod:`lightning_wlb.heterogeneous.setup`).

Cost: where ``dynamic`` is not off, that of :mod:`lightning_wlb.heterogeneous.setup`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn

from lightning_wlb.cost.overlap import chunks_of, default_chunks
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.planning_context import PlanningContext, shape_of
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.heterogeneous.setup import (
    Dynamic,
    agreed_pool,
    attach_pipelines,
    checked_schemes,
)
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.planning.step_chooser import StepChooser, check_packing
from lightning_wlb.strategy.launch import RunDevices
from lightning_wlb.strategy.mesh_choice import MeshOptions, mesh_request
from lightning_wlb.strategy.split_model import SplitModel
from lightning_wlb.supervision.progress import BETWEEN, PROGRESS


class RunPlanning:
    """What the steps of a strategy's runs are planned for, one run after another.

    Attributes:
        profile: the run's device profile; None: the data module's, if it has one.
        schemes: the heterogeneous pipelines that steps may take in place of the mesh's; with
            ``dynamic="auto"`` there are none until they are chosen.

    Raises:
        ValueError: ``dynamic`` is neither ``"off"``, ``"auto"`` nor pipelines on consecutive ranks.
    """

    def __init__(self, dynamic: Dynamic) -> None:
        self.profile: Profile | None = None
        self.schemes = checked_schemes(dynamic)
        self._automatic = isinstance(dynamic, str) and dynamic == "auto"
        self._chooser: StepChooser | None = None
        self._run: tuple[SplitModel, LanguageModule, RunDevices] | None = None

    def chunks(self, data: WLBDataModule | None) -> Callable[[int, int], int] | None:
        """In how many chunks an attached model sends its rows, see :class:`.ProcessGroups`."""
        assert self._run is not None
        split, _, devices = self._run
        if not devices.overlap:
            return None
        if split.executor.model.overlaps != "all":
            return lambda rows, ranks: 1  # others send rows whole, and overlap in backward only
        predictor = None if data is None else self.context(data).predictor
        if predictor is None:
            return default_chunks
        latency = predictor.latency

        @cache
        def chunks(rows: int, ranks: int) -> int:
            return chunks_of(replace(latency, mesh=replace(latency.mesh, tensor=ranks)), rows)

        return chunks

    @property
    def asked(self) -> str:
        """The argument ``dynamic`` as a text."""
        if self._automatic:
            return "auto"
        return " or ".join("; ".join(map(str, each)) for each in self.schemes) or "off"

    def begin(self, profile: Profile | None) -> None:
        """Begin a run with this profile; an earlier run's choice of pipelines is forgotten."""
        self.profile, self._chooser, self._run = profile, None, None
        if self._automatic:
            self.schemes = ()

    def attach(
        self,
        split: SplitModel,
        module: LanguageModule,
        devices: RunDevices,
        data: WLBDataModule | None,
    ) -> None:
        """Plan for a split model; collective over all ranks.

        Raises:
            MisconfigurationException: steps may leave the mesh, but no device profile is known, or
                pipelines do not fit the mesh, the model or the packing.
        """
        self._run = split, module, devices
        if self.asked == "off" or data is None or module.trainer.state.fn != TrainerFn.FITTING:
            return
        context = self.context(data)
        if context.profile is None:
            raise MisconfigurationException(
                "WLBStrategy(dynamic=...) chooses each step's pipelines by simulated times, so give"
                ' WLBDataModule(profile=...) a `lightning-wlb profile` file, or a name like "cpu".'
            )
        if self._automatic:
            profile = context.profile

            def request() -> MeshRequest:
                options = MeshOptions(schedule=context.schedule)
                return mesh_request(options, devices, data, module, profile)

            PROGRESS.note(BETWEEN, "the choice of strategies")
            self.schemes = agreed_pool(request, split.mesh, data.settings.packer, module, profile)
            PROGRESS.begin()
        if not self.schemes:
            return
        if split.prepared_for != self.schemes:
            attach_pipelines(split.executor, self.schemes, module)
            split.prepared_for = self.schemes
        # A new context, whose predictor knows the process groups of these pipelines.
        predictor = self.context(data).predictor
        assert predictor is not None
        recompute = context.activation_checkpointing
        try:
            check_packing(data.settings.packer)
            self._chooser = Pool.of(self.schemes, predictor, recompute, data.sharding)
        except ValueError as error:
            raise MisconfigurationException(f"WLBStrategy(dynamic=...): {error}") from None

    def context(self, data: WLBDataModule) -> PlanningContext:
        """The planning context of the run, with everything that is known so far."""
        assert self._run is not None
        split, module, devices = self._run
        pipeline = split.executor.pipeline
        return PlanningContext(
            shape=shape_of(module),
            rank=pipeline.rank,
            schedule=pipeline.schedule,
            stages=pipeline.stages,
            profile=self.profile or data.profile,
            parameter_dtype=devices.parameter_dtype,
            reduce_dtype=devices.reduce_dtype,
            schemes=self.schemes,
            chooser=self._chooser,
            activation_checkpointing=module.planned_checkpointing,
            compiled=module.compiles_blocks,
            overlap=split.executor.model.overlaps if devices.overlap else "off",
        )
