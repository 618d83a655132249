"""Hydraulis' systems and ours, simulated on one model, cluster and corpus.

*The paper's systems* choose among tensor × pipeline parallel, one checkpointing for all
micro-batches and no virtual stages (its §5.1, App. F):

* ``megatron``: the best static mesh with best-fit packing to the window, dealt in turn.
* ``deepspeed``: the best number of ranks that exchange heads (Ulysses), packed likewise.
* ``two_stage``: the best static mesh with Hydraulis' two-stage assignment.
* what :func:`paper_steps` simulates on that mesh: packed to the window after dealing, on
  each heterogeneous strategy, each step on the best of them.

*Ours* may compute again in each micro-batch what it must, and have virtual stages:
:data:`OURS`, static meshes without and with context parallel for three packings; and the steps
that leave the mesh (:func:`our_steps`).

Where every step takes the best of all strategies, no choice of a few can be better: such figures
are bounds from below of the time.

Cost: by far most for ``auto``, half a minute to a minute of processor time for 64 devices and four
steps, and as much again for its strategies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.meshes import Setting
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.profile import Profile
from lightning_wlb.links.layout import Strategy, strategy_of
from lightning_wlb.mesh import Mesh
from lightning_wlb.meshes.choice import MeshChoice, MeshRow, name_of
from lightning_wlb.meshes.dynamic import described
from lightning_wlb.meshes.evaluate import evaluate
from lightning_wlb.meshes.legal import Reasons, legal_meshes
from lightning_wlb.meshes.proposal import proposed_strategies
from lightning_wlb.meshes.request import MeshRequest
from lightning_wlb.meshes.search import choose_mesh
from lightning_wlb.plan import ActivationCheckpointing, ReplicaPlan, StepPlan
from lightning_wlb.planning.judge import PredictedJudge
from lightning_wlb.planning.packing.base import MicroBatches, Placement, Rules
from lightning_wlb.planning.packing.best_fit import BestFitPacker, pack_best_fit
from lightning_wlb.planning.planner import Planner, plan_steps
from lightning_wlb.planning.pool import Pool
from lightning_wlb.planning.unequal import Receiver, arrange
from lightning_wlb.prediction.step import MODES
from lightning_wlb.sharding import HEADS

OURS = {
    "best_fit, no context": ("best_fit", False),
    "best_fit": ("best_fit", True),
    "hydraulis, no context": ("hydraulis", False),
    "hydraulis": ("hydraulis", True),
}
"""Packing, and whether meshes may have context parallel; with ``auto`` one search gives both."""


class FullestPacker(BestFitPacker):
    """Best-fit of a pipeline's own pieces: the ablation's packing to the longest length."""

    arranges = True

    def replicas(self, micro_batches: MicroBatches, place: Placement) -> list[ReplicaPlan]:
        """The plan of the one pipeline, whose pieces come in one micro-batch."""
        (pieces,) = micro_batches
        return super().replicas(pack_best_fit(pieces, self.rules.cap), place)


def row_of(row: MeshRow) -> dict[str, Any]:
    """What is kept of a mesh; ``of_all`` are its sizes, virtual stages the last."""
    return {
        "mesh": name_of(row.mesh),
        "of_all": [*row.mesh.shape, row.mesh.virtual_stages],
        "step_ms": round(row.step_ms, 2),
        "flops": row.flops,
        "checkpointing": row.activation_checkpointing,
        "recomputed": round(row.recomputed, 3),
        "gigabytes": round(row.peak_bytes / 1e9, 1),
    }


def mesh_of(row: dict[str, Any]) -> Mesh:
    """The mesh of a kept row."""
    return Mesh(*row["of_all"])


def searched(request: MeshRequest) -> MeshChoice | None:
    """What the search finds; None where no mesh fits."""
    try:
        return choose_mesh(request)
    except ValueError:
        return None


def in_papers_space(request: MeshRequest, mode: ActivationCheckpointing) -> MeshRequest:
    """Tensor × pipeline parallel, with one checkpointing of all micro-batches."""
    return replace(request, fixed={"context": 1}, virtual_stages=1, activation_checkpointing=mode)


def exchanging_heads(request: MeshRequest, mode: ActivationCheckpointing) -> MeshRequest:
    """Context parallel by heads alone, with one checkpointing of all micro-batches."""
    return replace(
        request,
        fixed={"pipeline": 1, "tensor": 1},
        sharding=HEADS,
        activation_checkpointing=mode,
    )


def best(requests: Iterable[MeshRequest]) -> dict[str, Any] | None:
    """The fastest mesh that any of them finds."""
    found = [choice.best for each in requests if (choice := searched(each)) is not None]
    return row_of(min(found, key=lambda row: row.step_ms)) if found else None


def static(setting: Setting, profile: Profile, steps: int) -> dict[str, Any]:
    """The best static mesh of each way; None where no mesh fits."""
    asked = {
        packing: setting.request(packing, profile, steps)
        for packing in ("best_fit", "hydraulis", "auto")
    }
    rows: dict[str, Any] = {
        "megatron": best(in_papers_space(asked["best_fit"], mode) for mode in MODES),
        "deepspeed": best(exchanging_heads(asked["best_fit"], mode) for mode in MODES),
        "two_stage": best(in_papers_space(asked["hydraulis"], mode) for mode in MODES),
    }
    for name, packing in (("megatron", "best_fit"), ("two_stage", "hydraulis")):
        if rows[name]:
            rows[name]["uneven"] = unevenness(asked[packing], rows[name])
    for name, (packing, context) in OURS.items():
        fixed = {} if context else {"context": 1}
        rows[name] = best([replace(asked[packing], fixed=fixed)])
    choice = choose_mesh(asked["auto"])
    rows["auto, no context"] = row_of(choice.best_by("context")[1])
    rows["auto"] = row_of(choice.best)
    # Steps leave a mesh without virtual stages only.
    rows["auto, one stage"] = row_of(choice.best_by("virtual_stages")[1])
    return rows


def unevenness(request: MeshRequest, row: dict[str, Any]) -> list[float]:
    """Of each step, how much earlier the first pipeline ends than the last, as a share."""
    request = replace(request, activation_checkpointing=row["checkpointing"])
    mesh = mesh_of(row)
    judge = PredictedJudge(request.predictor(mesh), request.activation_checkpointing)
    ends = [judge.ends(step.plan.replicas) for step in evaluate(request, mesh).steps]
    return [round(1 - min(each) / max(each), 3) for each in ends]


@dataclass(frozen=True, eq=False)
class Sample:
    """Steps of a run on a mesh without virtual stages.

    Args:
        request: documents, model, settings and device.
        mesh: on which parameters rest.
        plans: of the steps.
        rules: of the packing.
        judge: of the mesh.
    """

    request: MeshRequest
    mesh: Mesh
    plans: Sequence[StepPlan]
    rules: Rules
    judge: PredictedJudge

    @staticmethod
    def of(request: MeshRequest, mesh: Mesh) -> Sample:
        """The first steps."""
        base = request.predictor(mesh)
        judge = PredictedJudge(base, request.activation_checkpointing)
        planner = Planner(
            request.lengths,
            request.data,
            Work.of(request.shape),
            mesh,
            sharding=request.sharding,
            schedule=base.schedule,
            kernel_cost=base.latency.segment_cost,
            judge=judge,
            activation_checkpointing=request.activation_checkpointing,
        )
        return Sample(request, mesh, plan_steps(planner, request.steps), planner.rules, judge)

    @property
    def own(self) -> Strategy:
        """The mesh's pipelines."""
        return strategy_of(self.mesh, self.judge.predictor.stages)

    def receiver(self) -> Receiver:
        """One of the mesh's pipelines."""
        request = self.request
        return Receiver(
            self.own[0], self.judge.predictor, request.activation_checkpointing, request.sharding
        )

    def on_mesh(self) -> list[float]:
        """Milliseconds of each step on the mesh."""
        return [round(self.judge(plan.replicas).time / 1e6, 2) for plan in self.plans]

    def elsewhere(self, strategies: Iterable[Strategy]) -> list[dict[str, Any]]:
        """Milliseconds of each step on each strategy; None where it does not fit."""
        others = [each for each in dict.fromkeys(strategies) if each and each != self.own]
        if not others:
            return []
        request, base = self.request, self.judge.predictor
        pool = Pool.of(others, base, request.activation_checkpointing, request.sharding)
        arranged = [
            pool.arranged(plan.pieces, self.rules, request.data.packer) for plan in self.plans
        ]
        return [
            {
                "strategy": described(each),
                "alike": len({scheme.shape for scheme in each}) == 1,
                "longest": max(kind.longest for kind in pool.kinds[each].values()),
                "ms": [
                    round(step[each].time_ns / 1e6, 2)
                    if each in step and not step[each].excess
                    else None
                    for step in arranged
                ],
            }
            for each in others
        ]


def paper_steps(setting: Setting, profile: Profile, steps: int, row: dict[str, Any]) -> Any:
    """Steps with Hydraulis' assignment on its best static mesh, and on other strategies.

    Args:
        setting: model, cluster and documents.
        profile: of the device.
        steps: how many.
        row: ``two_stage`` of :func:`static`.
    """
    asked = setting.request("hydraulis", profile, steps)
    request = in_papers_space(asked, row["checkpointing"])
    sample = Sample.of(request, mesh_of(row))
    alone = {sample.own[0].shape: sample.receiver()}
    fullest = [
        arrange(plan.pieces, sample.own, alone, sample.rules, FullestPacker)
        for plan in sample.plans
    ]
    return {
        "mesh": row["mesh"],
        "longest": [max(piece.tokens for piece in plan.pieces) for plan in sample.plans],
        "window": setting.window,
        "packed_full_ms": [round(each.time_ns / 1e6, 2) for each in fullest],
        "on_mesh_ms": sample.on_mesh(),
        "strategies": sample.elsewhere(paper_strategies(request, sample)),
    }


def paper_strategies(request: MeshRequest, sample: Sample) -> Iterator[Strategy]:
    """Hydraulis' proposals of tensor × pipeline parallel; the mesh's own pipelines beside others.

    Of the latter all with one, two, four ... of the mesh's pipelines, and all other ranks in
    smaller ones of another kind.
    """
    for each in proposed_strategies(request):
        if all(scheme.context == 1 for scheme in each):
            yield each
    large, own = sample.own[0], len(sample.own)
    for mesh in legal_meshes(request, Reasons()):
        (small, *_) = strategy = strategy_of(mesh, request.predictor(mesh).stages)
        yield strategy
        number = 1
        while number < own and small.size < large.size:
            begin = number * large.size
            rest = range(begin, request.devices, small.size)
            yield sample.own[:number] + tuple(replace(small, first=first) for first in rest)
            number *= 2


def our_steps(setting: Setting, profile: Profile, steps: int, row: dict[str, Any]) -> Any:
    """Steps with ``auto`` on a mesh, and on the strategies that are proposed.

    Args:
        setting: model, cluster and documents.
        profile: of the device.
        steps: how many.
        row: ``auto, one stage`` of :func:`static`.
    """
    request = setting.request("auto", profile, steps)
    sample = Sample.of(request, mesh_of(row))
    return {
        "mesh": row["mesh"],
        "on_mesh_ms": sample.on_mesh(),
        "strategies": sample.elsewhere(proposed_strategies(request)),
    }
