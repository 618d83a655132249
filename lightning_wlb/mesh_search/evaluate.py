"""The first steps of a run, planned and simulated on one mesh; their time compares meshes.

The planner that training uses plans the run's first steps, from the same documents in the same
order. The pieces of a step do not depend on the mesh, so all meshes train on the same pieces. Plans
are chosen by the device profile, as in training with a profile.

Cost: planning and simulating ``request.steps`` steps; ``auto`` simulates five to ten plans of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.plan import StepPlan
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import StepPrediction

IDLE = "waiting for other ranks"
COMMUNICATION = ("gathering parameters", "tensor-parallel communication", "exchange of keys")
LOSSES = (IDLE, *COMMUNICATION, "attention imbalance", "recomputation")
"""What ranks spend time on besides arithmetic."""

SAMPLED = 32
"""A sample has the tokens of about so many micro-batches."""


@dataclass(frozen=True)
class MeshRow:
    """One mesh with its simulated steps."""

    mesh: Mesh
    schedule: str
    activation_checkpointing: str  #: the requested mode; with ``"auto"`` micro-batches may differ
    recomputed: float  #: share of the tokens whose micro-batches recompute anything
    steps_ns: int  #: time of all simulated steps
    steps: int
    tokens: int
    flops: int  #: model FLOPs of these steps, without recomputation
    peak_bytes: int  #: bytes of the fullest rank in the fullest step
    shares: Mapping[str, float]  #: share of the ranks' time that is spent on each of :data:`LOSSES`

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step, on average."""
        return self.steps_ns / self.steps / 1e6

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all devices together train on in a second."""
        return self.tokens * 1e9 / self.steps_ns

    @property
    def flops_per_second(self) -> float:
        """Model FLOPs that all devices together do in a second."""
        return self.flops * 1e9 / self.steps_ns

    def times(self, other: MeshRow) -> float:
        """The mesh's time per model FLOP, divided by that of another mesh."""
        return (self.steps_ns / self.flops) / (other.steps_ns / other.flops)

    @property
    def idle(self) -> float:
        """Share of the ranks' time in which they wait, in the pipeline or for slower replicas."""
        return self.shares[IDLE]

    @property
    def communication_ns(self) -> float:
        """Time of all steps that a rank spends on communication."""
        return sum(self.shares[name] for name in COMMUNICATION) * self.steps_ns

    @property
    def bound_by(self) -> str:
        """What takes most of the time besides arithmetic."""
        return max(self.shares, key=lambda name: (self.shares[name], name))

    @property
    def figures(self) -> dict[str, Any]:
        """All figures as plain data, with the derived ones."""
        derived = ("step_ms", "tokens_per_second", "idle", "bound_by")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class LeftOut:
    """Meshes that are not among the rows, for one reason."""

    reason: str
    count: int
    example: str  #: one of these meshes, as ``--mesh`` takes it, with its virtual stages if any


@dataclass(frozen=True)
class MeshChoice:
    """Which mesh to take.

    Args:
        rows: simulated meshes, best first; at least one. The first has the least communication
            among the meshes within :data:`~.search.CLOSE` of the fastest; the others go by time.
        left_out: meshes without all steps simulated, or that do not fit in memory.
    """

    rows: tuple[MeshRow, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def best(self) -> MeshRow:
        """The mesh to take."""
        return self.rows[0]


def name_of(mesh: Mesh) -> str:
    """A mesh as ``--mesh`` takes it, with its virtual stages if it has any."""
    virtual = f" with {mesh.virtual_stages} virtual stages" if mesh.virtual_stages > 1 else ""
    return ",".join(map(str, mesh.shape)) + virtual


class Evaluation:
    """The first steps of a run on a mesh, planned and simulated on demand.

    Attributes:
        steps: the predicted steps so far.
        ps: picoseconds per token on all devices, of these steps or, before them, of a sample.
        fits: whether these steps or the sample stay within the device's memory.
    """

    def __init__(self, request: MeshRequest, mesh: Mesh) -> None:
        self._request, self.mesh = request, mesh
        self._predictor = request.predictor(mesh)
        self._scorer = ProfileScorer(self._predictor, request.activation_checkpointing)
        self._planner = request.planner(self._predictor, self._scorer)
        self.steps: list[StepPrediction] = []
        self.ps, self.fits = 0, True

    def go_on(self, steps: int) -> None:
        """Plan and simulate steps until there are so many; 0: a sample of the first step.

        A sample has as many tokens for each replica as the step. If the step has many micro-batches
        the sample has fewer replicas, with the memory and the links of the whole mesh.
        """
        data, mesh, predictor = self._request.data, self.mesh, self._predictor
        most = 1 if steps else max(data.micro_batches // SAMPLED, 1)
        parts = max(each for each in range(1, most + 1) if mesh.data % each == 0)
        if parts == 1:
            plans = plan_steps(self._planner, max(steps, 1) - len(self.steps))
            self.steps += map(predictor.predict, plans)
            tokens = sum(step.plan.tokens for step in self.steps)
            ns, peak = self.steps_ns, max(step.peak_bytes for step in self.steps)
        else:
            part = replace(data, micro_batches=data.micro_batches // parts)
            planner = replace(self._request, data=part).planner(
                predictor, self._scorer, mesh=replace(mesh, data=mesh.data // parts)
            )
            (plan,) = plan_steps(planner, 1)
            ns, peak = self._scorer(plan.replicas)
            tokens = parts * plan.tokens
        self.ps, self.fits = 1000 * ns // tokens, peak <= predictor.usable_bytes

    @property
    def steps_ns(self) -> int:
        """Time of the steps so far."""
        return sum(step.total_ns for step in self.steps)

    @property
    def row(self) -> MeshRow:
        """Figures of the steps so far, at least one."""
        plans = [step.plan for step in self.steps]
        return MeshRow(
            mesh=self.mesh,
            schedule=self._predictor.schedule,
            activation_checkpointing=self._request.activation_checkpointing,
            recomputed=recomputed_share(plans),
            steps_ns=self.steps_ns,
            steps=len(plans),
            tokens=sum(plan.tokens for plan in plans),
            flops=sum(step.flops for step in self.steps),
            peak_bytes=max(step.peak_bytes for step in self.steps),
            shares=_shares(self._predictor, self.steps),
        )


def evaluate(request: MeshRequest, mesh: Mesh) -> Evaluation:
    """All ``request.steps`` steps of a mesh."""
    made = Evaluation(request, mesh)
    made.go_on(request.steps)
    return made


def recomputed_share(plans: Sequence[StepPlan]) -> float:
    """The share of tokens whose micro-batches recompute anything."""
    tokens = (
        replica.tokens_of(each) / len(each.replicas)
        for plan in plans
        for replica in plan.replicas
        for each in replica.forward
        if each.recompute != "none"
    )
    return sum(tokens) / sum(plan.tokens for plan in plans)


def _shares(predictor: Predictor, steps: Iterable[StepPrediction]) -> dict[str, float]:
    """The share of all pipeline ranks' time that is spent on each of :data:`LOSSES`."""
    latency = predictor.latency
    counts, layers = latency.shape.kinds.values(), latency.shape.layers

    def of_layers(layer_ns: Iterable[Sequence[int]]) -> int:
        return sum(n * sum(of_kind) for n, of_kind in zip(counts, layer_ns, strict=True))

    spent = dict.fromkeys(LOSSES, 0.0)
    whole = 0
    for step in steps:
        ranks = latency.mesh.pipeline * latency.mesh.data
        whole += ranks * step.total_ns
        spent[IDLE] += sum(sum(each.idle_ns) for each in step.simulations)
        spent["gathering parameters"] += latency.mesh.pipeline * sum(
            each.begin_ns + each.synchronisation_ns for each in step.simulations
        )
        spent["tensor-parallel communication"] += step.waited_ns[0]
        for cost in (cost for of_replica in step.costs for cost in of_replica):
            least = cost.by_mode[0]
            rows = of_layers(kind.rows_ns(cost.rows)[:2] for kind in latency.kinds)
            attention = layers * sum(least.attention_ns)
            spent["attention imbalance"] += attention - layers * sum(least.mean_attention_ns)
            spent["exchange of keys"] += of_layers(least.layer_ns) - rows - attention
            spent["recomputation"] += of_layers(cost.times.layer_ns) - of_layers(least.layer_ns)
    return {name: spent[name] / whole for name in LOSSES}
