"""The input of a mesh search: documents, model, settings, device, and fixed sizes of the mesh.

Everything that decides the answer is in a :class:`MeshRequest` and in its digest: two ranks, or two
runs, with the same digest and the same code get the same answer.

Cost: the digest is one pass over the lengths. A model is split once for each number of stages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.argument_checks import choice, whole
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.memory_model import USABLE_PERCENT
from lightning_wlb.cost.overlap import Overlap
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.plan import ActivationCheckpointing
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.mixture import StoreShare
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.planner import Planner
from lightning_wlb.prediction.predictor import Predictor, mean_context_of, model_stages
from lightning_wlb.schedule.programs import SCHEDULES, check_stages
from lightning_wlb.sharding import ADAPTIVE, SHARDINGS

MOST_DEVICES = 1 << 20
"""Most devices for which steps are planned: the cost grows with replicas and mesh sizes."""


@dataclass(frozen=True, eq=False)
class MeshRequest:
    """What decides which mesh is chosen.

    Args:
        lengths: int64 [documents], tokens of each document.
        data: the data settings, packing included; ``max_tokens`` is ignored.
        profile: rates and memory of the device; its devices per node are replaced by
            ``devices_per_node``.
        devices_per_node: how many devices share a node's link; None: as the profile says.
        fixed: sizes of axes that the search may not change, by :data:`~lightning_wlb.mesh.AXES`.
        schedule: a name in ``lightning_wlb.schedule.programs.SCHEDULES``; None: whichever is
            fastest of 1F1B and interleaved.
        virtual_stages: stages of each pipeline rank; None: 1, 2 or 4 if ``schedule`` can run
            several.
        activation_checkpointing: what all micro-batches recompute in backward; ``"auto"``: for
            each micro-batch the least that fits.
        rest_dtype: the dtype in which a rank keeps parameters and optimizer state.
        reduce_dtype: the dtype in which tensor- and context-parallel ranks add up.
        compiled: whether blocks of the model are compiled.
        overlap: which messages overlap products.
        sharding: how tokens are spread over context-parallel ranks, as for the planner.
        mixture: the share of each of several stores, as for the planner.
        steps: how many steps are planned and simulated on each mesh.

    Raises:
        ValueError: a value out of range, or sizes that ``devices`` or the schedule cannot have.
    """

    lengths: NDArray[np.int64]
    shape: ModelShape
    data: DataSettings
    profile: Profile
    devices: int
    devices_per_node: int | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)
    schedule: str | None = None
    virtual_stages: int | None = None
    activation_checkpointing: ActivationCheckpointing = "auto"
    rest_dtype: str = "float32"
    reduce_dtype: str = "float32"
    compiled: bool = False
    overlap: Overlap = "off"
    sharding: str = ADAPTIVE
    mixture: tuple[StoreShare, ...] = ()
    steps: int = 3

    def __post_init__(self) -> None:
        for name in ("devices", "devices_per_node", "virtual_stages", "steps"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(name, value, 1))
        if self.devices > MOST_DEVICES:
            raise ValueError(f"devices={self.devices} is more than {MOST_DEVICES:,}. Give fewer.")
        per_node = self.devices_per_node or self.profile.devices_per_node
        object.__setattr__(self, "devices_per_node", per_node)
        object.__setattr__(self, "profile", replace(self.profile, devices_per_node=per_node))
        object.__setattr__(self, "data", replace(self.data, max_tokens=None))
        object.__setattr__(self, "mixture", tuple(self.mixture))
        checkpointing = get_args(ActivationCheckpointing)
        choice("activation_checkpointing", self.activation_checkpointing, checkpointing)
        choice("sharding", self.sharding, (ADAPTIVE, *SHARDINGS))
        if self.schedule is not None:
            choice("schedule", self.schedule, SCHEDULES)
            if self.virtual_stages is not None:
                check_stages(self.schedule, self.virtual_stages)
        fixed = {choice("fixed", axis, AXES): whole(axis, n, 1) for axis, n in self.fixed.items()}
        object.__setattr__(self, "fixed", fixed)
        product = int(np.prod(list(fixed.values()), dtype=object)) if fixed else 1
        if self.devices % product or (len(fixed) == len(AXES) and product != self.devices):
            given = ", ".join(f"{axis} {size}" for axis, size in fixed.items())
            raise ValueError(
                f"{given}: together {product}, which does not go into {self.devices} devices."
                " Give other sizes, fewer of them, or another number of devices."
            )

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits of everything that decides the answer."""
        packing, lengths = self.data.packing_choice, np.ascontiguousarray(self.lengths, "<i8")
        facts = {each.name: getattr(self, each.name) for each in fields(self)} | {
            "lengths": [len(lengths), hashlib.sha256(lengths.data).hexdigest()],
            "shape": asdict(self.shape),
            "data": asdict(self.data) | {"packing": [packing.method, asdict(packing.options)]},
            "profile": asdict(self.profile),
        }
        text = json.dumps(facts, sort_keys=True, default=str)  # a packing is a class
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that may be filled; a mesh's process groups may leave less."""
        return self.profile.memory_bytes * USABLE_PERCENT // 100

    @property
    def mesh(self) -> Mesh:
        """The mesh, where the sizes of all axes are given."""
        return Mesh(**self.fixed, virtual_stages=self.virtual_stages or 1)

    def schedule_of(self, mesh: Mesh) -> str:
        """The schedule that a mesh runs."""
        if self.schedule is not None:
            return self.schedule
        return "interleaved" if mesh.virtual_stages > 1 else "1f1b"

    def predictor(self, mesh: Mesh) -> Predictor:
        """Predicts steps on a mesh; ValueError if the model or the schedule cannot run on it."""
        return Predictor(
            LatencyModel(
                self.profile, self.shape, mesh, self.reduce_dtype, self.compiled, self.overlap
            ),
            self._stages_of(mesh.stages),
            self.schedule_of(mesh),
            self.rest_dtype,
        )

    def planner(
        self, predictor: Predictor, scorer: ProfileScorer | None, mesh: Mesh | None = None
    ) -> Planner:
        """The run's planner on the predictor's mesh; without a scorer it goes by exact work.

        ``mesh`` may be one of fewer replicas, for which the predictor is valid as well.
        """
        return Planner(
            self.lengths,
            self.data,
            Work.of(self.shape),
            mesh or predictor.latency.mesh,
            sharding=self.sharding,
            kernel_cost=predictor.latency.segment_cost,
            scorer=scorer,
            activation_checkpointing=self.activation_checkpointing,
            mixture=self.mixture,
        )

    @cached_property
    def _stages_of(self) -> Callable[[int], tuple[range, ...]]:
        """Number of stages -> the layers of each stage; split once for each number."""
        mean_context = mean_context_of(self.lengths, self.data.context_window)
        return cache(lambda number: tuple(model_stages(self.shape, number, mean_context)))
