"""The heterogeneous pipelines that a run's steps may take: ``WLBStrategy(dynamic=...)``.

Those that are given are prepared when a fit is set up. With ``dynamic="auto"`` they are chosen when
the first batch is asked for, behind the measurement of the devices: what is promised is then what
is planned, and a run that is resumed, whose checkpoint has brought the measurement, makes the same
choice on the same mesh. Where none is worth it, the run is planned as without.

Cost: nothing where ``dynamic`` is off; else that of :mod:`lightning_wlb.heterogeneous.setup`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.planning_context import PlanningContext
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
from lightning_wlb.strategy.split_model import SplitModel
from lightning_wlb.supervision.progress import BETWEEN, PROGRESS


class SchemeChoice:
    """Which pipelines steps may take in place of the mesh's, one run after another.

    Args:
        dynamic: the argument of :class:`.WLBStrategy`.

    Attributes:
        automatic: whether each run chooses for itself.
        schemes: those that steps may take; none before an automatic choice is made.
        chooser: gives each step its pipelines; None: those of the mesh.

    Raises:
        ValueError: ``dynamic`` is neither ``"off"``, ``"auto"`` nor pipelines on consecutive ranks.
    """

    def __init__(self, dynamic: Dynamic) -> None:
        self.automatic = isinstance(dynamic, str) and dynamic == "auto"
        self.schemes = checked_schemes(dynamic)
        self.chooser: StepChooser | None = None

    def __str__(self) -> str:
        if self.automatic:
            return "auto"
        return " or ".join("; ".join(map(str, each)) for each in self.schemes) or "off"

    def begin(self) -> None:
        """Begin a run: what an earlier one has chosen is forgotten."""
        self.chooser = None
        if self.automatic:
            self.schemes = ()

    def possible(self, mesh: Mesh, data: WLBDataModule) -> bool:
        """Whether any step might leave the mesh."""
        # Neither a packing that deals to equal pipelines only nor virtual stages can be left.
        able = data.settings.packer.arranges and mesh.virtual_stages == 1
        return bool(self.schemes) or (self.automatic and able)

    def choose(
        self,
        request: Callable[[], MeshRequest],
        context: PlanningContext,
        data: WLBDataModule,
        module: LanguageModule,
    ) -> None:
        """Choose automatically; collective over all ranks. See :func:`.agreed_pool`."""
        PROGRESS.note(BETWEEN, "the choice of strategies")
        given = context.rank.mesh, data.settings.packer, module, context.profile
        self.schemes = agreed_pool(request, *given)

    def prepare(
        self,
        split: SplitModel,
        module: LanguageModule,
        *,
        per_node: int,
        sum_dtype: torch.dtype,
        timeout: timedelta,
    ) -> None:
        """Let the executor run the schemes, if there are any; collective over all ranks.

        Args:
            split: the model; it may be prepared by an earlier run.
            module: builds the model.
            per_node: ranks of a node.
            sum_dtype: of sums of gradients.
            timeout: of process groups.
        """
        prepared_for = self.schemes, timeout
        if self.schemes and split.prepared_for != prepared_for:
            attach_pipelines(split.executor, self.schemes, module, per_node, sum_dtype, timeout)
            split.prepared_for = prepared_for

    def settle(self, context: PlanningContext, data: WLBDataModule) -> None:
        """Make the chooser, if there is a choice.

        Raises:
            MisconfigurationException: there is no device profile to choose by, or the packing or a
                scheme does not go with the mesh.
        """
        if self.schemes:
            given = context.activation_checkpointing, data.settings, data.sharding
            self.chooser = pool_of(self.schemes, context.predictor, *given)
