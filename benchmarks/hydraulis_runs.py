"""Hydraulis' systems and ours, simulated on one model, cluster and corpus.

*The paper's systems* choose among tensor × pipeline parallel, one checkpointing for all
micro-batches and one stage for each rank (its §5.1, App. F):

* ``megatron``: the best static mesh with best-fit packing to the window, dealt in turn.
* ``deepspeed``: the best number of ranks that exchange heads (Ulysses), packed likewise.
* ``two_stage``: the best static mesh with Hydraulis' two-stage assignment.
* what :func:`paper_steps` simulates on that mesh: packed to the window after dealing, on
  each heterogeneous strategy, each step on the best of them.

*Ours* may compute again in each micro-batch what it must, and have virtual stages: static meshes
without and with context parallel, with best-fit packing, with the two-stage assignment (on meshes
of one stage for each rank; with context parallel those that the search for best-fit simulates) and
with ``auto``; and steps that leave the mesh (:func:`our_steps`).

Documents are dealt by Algorithm 1, to different kinds of pipelines with corrections
(:func:`.arrange`). Equation 1 is solved greedily, since its solver would be asked thousands of
times. Where every step takes the best of all strategies, no choice of a few can be better: such
times are bounds from below.

Cost: by far most for ``auto``, half a minute of processor time for 64 devices and four steps, and
as much again for its strategies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from benchmarks.hydraulis_proposal import proposed_strategies
from benchmarks.meshes import Setting
from benchmarks.ulysses import split_by_heads
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.profile import Profile
from lightning_wlb.heterogeneous.planning.candidates import candidate_schemes
from lightning_wlb.heterogeneous.planning.dealing import PipelineKind, arrange
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.heterogeneous.planning.pool_search import PROPOSED, described
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.evaluate import MeshChoice, MeshRow, evaluate, name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import choose_mesh, legal_meshes
from lightning_wlb.plan import (
    ActivationCheckpointing,
    Piece,
    ReplicaPlan,
    Schemes,
    Shape,
    schemes_of,
)
from lightning_wlb.planning.packing.base import MicroBatches, Packer, Rules
from lightning_wlb.planning.packing.hydraulis import HydraulisPacker
from lightning_wlb.planning.plan_scoring import Placement, ProfileScorer
from lightning_wlb.planning.planner import Planner
from lightning_wlb.planning.step_chooser import PlannedStep
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.prediction.predictor import Predictor


class GreedyPacker(HydraulisPacker):
    """Equation 1 with MaxLen of the pipeline (App. B.1) as the cap."""

    _longest = 0

    def replicas(self, micro_batches: MicroBatches, place: Placement) -> list[ReplicaPlan]:
        """The plans of pipelines that are alike."""
        (pieces,) = micro_batches
        self._longest = max(piece.tokens for piece in pieces)
        return super().replicas(micro_batches, place)

    def cap(self, place: Placement) -> int:
        """What a pipeline holds in as many micro-batches as it has stages; the longest piece."""
        scorer = place.scorer
        assert isinstance(scorer, ProfileScorer)
        given = scorer.activation_checkpointing
        mode = MODES[-1] if given == "auto" else given
        held = scorer.predictor.longest_micro_batch(place.mesh.pipeline, mode)
        return max(self._longest, min(self.rules.cap, held))


class FullestPacker(GreedyPacker):
    """As few micro-batches as hold the pieces: the ablation's packing to the longest length."""

    @property
    def utilised(self) -> int:
        """More than what a micro-batch may have, so that no number but the least is tried."""
        return self.rules.cap


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


def exchanging_heads(request: MeshRequest) -> dict[str, Any] | None:
    """The best context parallel by heads alone, with one checkpointing of all micro-batches."""
    alone = replace(request, fixed={"pipeline": 1, "tensor": 1}, sharding="per_sequence")
    with split_by_heads():
        return best(replace(alone, activation_checkpointing=mode) for mode in MODES)


def best(requests: Iterable[MeshRequest]) -> dict[str, Any] | None:
    """The fastest mesh that any of them finds."""
    found = [choice.best for each in requests if (choice := searched(each)) is not None]
    return row_of(min(found, key=lambda row: row.step_ms)) if found else None


def fastest(rows: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The fastest of rows of the same steps; None where there is none."""
    return min(filter(None, rows), key=lambda row: row["step_ms"], default=None)


def released(request: MeshRequest) -> tuple[list[list[Piece]], Rules]:
    """The pieces of the first steps of packings that hold nothing back, and the packing's rules."""
    planner = Planner(request.lengths, request.data, Work.of(request.shape))
    steps: list[list[Piece]] = []
    while len(steps) < request.steps:
        if (release := planner.release()) is not None:
            steps.append(sorted(piece for own in release.micro_batches for piece in own))
    return steps, planner.rules


@dataclass(frozen=True, eq=False)
class Sample:
    """Steps of a run on a mesh without virtual stages.

    Args:
        request: documents, model, settings and device.
        mesh: on which parameters rest.
    """

    request: MeshRequest
    mesh: Mesh

    @cached_property
    def base(self) -> Predictor:
        """On the mesh."""
        return self.request.predictor(self.mesh)

    @property
    def scorer(self) -> ProfileScorer:
        """The scorer of plans on the mesh."""
        return ProfileScorer(self.base, self.request.activation_checkpointing)

    @cached_property
    def own(self) -> Schemes:
        """The mesh's pipelines."""
        return schemes_of(self.mesh, self.base.stages)

    @cached_property
    def kinds(self) -> dict[Shape, PipelineKind]:
        """What the mesh's pipelines can do."""
        request = self.request
        modes, sharding = request.activation_checkpointing, request.sharding
        return {
            self.own[0].shape: PipelineKind(self.own[0], self.base, modes, sharding, len(self.own))
        }

    def on_mesh(
        self, pieces: Iterable[Sequence[Piece]], rules: Rules, packer: type[Packer]
    ) -> list[PlannedStep]:
        """Steps whose pieces are dealt to the mesh's pipelines, and packed in each."""
        return [arrange(each, self.own, self.kinds, rules, packer) for each in pieces]

    def elsewhere(
        self,
        strategies: Iterable[Schemes],
        pieces: Iterable[Sequence[Piece]],
        rules: Rules,
        packer: type[Packer],
    ) -> list[dict[str, Any]]:
        """Milliseconds of each step on each strategy; None where it does not fit."""
        others = [each for each in dict.fromkeys(strategies) if each and each != self.own]
        if not others:
            return []
        request = self.request
        pool = Pool.of(others, self.base, request.activation_checkpointing, request.sharding)
        arranged = [pool.arranged(each, rules, packer) for each in pieces]
        return [
            {
                "strategy": described(each),
                "alike": len({scheme.shape for scheme in each}) == 1,
                "longest": max(kind.longest for kind in pool.kinds[each].values()),
                "ms": [
                    milliseconds(step[each].time_ns)
                    if each in step and not step[each].excess
                    else None
                    for step in arranged
                ],
            }
            for each in others
        ]


def milliseconds(ns: int) -> float:
    return round(ns / 1e6, 2)


def two_stage(request: MeshRequest, meshes: Iterable[Mesh], flops: int) -> dict[str, Any] | None:
    """The fastest of some meshes with Hydraulis' assignment; None where none holds a window.

    Args:
        request: with the packing ``hydraulis``.
        meshes: to try, without virtual stages.
        flops: of the steps.
    """
    pieces, rules = released(request)
    found = None
    for mesh in meshes:
        sample = Sample(request, mesh)
        (kind,) = sample.kinds.values()
        if kind.longest < request.data.context_window:
            continue
        steps = sample.on_mesh(pieces, rules, GreedyPacker)
        time = sum(step.time_ns for step in steps) / len(steps)
        if any(step.excess for step in steps) or (found and found["step_ms"] <= time / 1e6):
            continue
        ends = [sample.scorer.ends(step.replicas) for step in steps]
        found = {
            "mesh": name_of(mesh),
            "of_all": [*mesh.shape, 1],
            "step_ms": milliseconds(round(time)),
            "flops": flops,
            "checkpointing": request.activation_checkpointing,
            "uneven": [unevenness(each) for each in ends],
        }
    return found


def unevenness(ends: Sequence[int]) -> float:
    """How much earlier the first pipeline ends than the last, as a share."""
    return round(1 - min(ends) / max(ends), 3)


def with_auto(setting: Setting, profile: Profile, steps: int) -> dict[str, Any]:
    """The best static mesh with ``auto``, that without context parallel, and that of one stage."""
    request = setting.request("auto", profile, steps)
    return {
        "auto, no context": row_of(choose_mesh(replace(request, fixed={"context": 1})).best),
        "auto": row_of(choose_mesh(request).best),
        # Steps leave a mesh without virtual stages only.
        "auto, one stage": row_of(choose_mesh(replace(request, virtual_stages=1)).best),
    }


def static(setting: Setting, profile: Profile, steps: int, flops: int) -> dict[str, Any]:
    """The best static mesh of each other way; None where no mesh fits.

    Args:
        setting: model, cluster and documents.
        profile: of the device.
        steps: how many.
        flops: of the steps, all documents in the step in which they arrive.

    Raises:
        ValueError: no mesh of the paper's space fits.
    """
    packed, dealt = (
        setting.request(packing, profile, steps) for packing in ("best_fit", "hydraulis")
    )
    spaces = [in_papers_space(dealt, mode) for mode in MODES]
    without = legal_meshes(in_papers_space(dealt, "auto"))
    alone = two_stage(dealt, without, flops)
    choice = choose_mesh(packed)
    meshes = [row.mesh for row in choice.rows + choice.others if row.mesh.virtual_stages == 1]
    tried = [mesh for mesh in meshes if mesh.context > 1]
    rows: dict[str, Any] = {
        "megatron": best(in_papers_space(packed, mode) for mode in MODES),
        "deepspeed": exchanging_heads(packed),
        "two_stage": fastest(two_stage(space, without, flops) for space in spaces),
        "best_fit, no context": best([replace(packed, fixed={"context": 1})]),
        "best_fit": row_of(choice.best),
        "hydraulis, no context": alone,
        "hydraulis": fastest([alone, two_stage(dealt, tried, flops)]),
    }
    if rows["megatron"] is None or rows["two_stage"] is None:
        raise ValueError(
            f"no tensor × pipeline mesh of {setting.devices} devices holds {setting.window} tokens"
            f" of a {setting.model}. Give it more devices or a shorter window."
        )
    rows["megatron"]["uneven"] = _uneven(packed, rows["megatron"])
    return rows


def _uneven(request: MeshRequest, row: dict[str, Any]) -> list[float]:
    sample = Sample(in_papers_space(request, row["checkpointing"]), mesh_of(row))
    made = evaluate(sample.request, sample.mesh)
    return [unevenness(sample.scorer.ends(step.plan.replicas)) for step in made.steps]


def paper_steps(setting: Setting, profile: Profile, steps: int, row: dict[str, Any]) -> Any:
    """Steps with Hydraulis' assignment on its best static mesh, and on other strategies.

    Args:
        setting: model, cluster and documents.
        profile: of the device.
        steps: how many.
        row: ``two_stage`` of :func:`static`.
    """
    request = in_papers_space(setting.request("hydraulis", profile, steps), row["checkpointing"])
    sample = Sample(request, mesh_of(row))
    pieces, rules = released(request)
    full, own = (
        [milliseconds(step.time_ns) for step in sample.on_mesh(pieces, rules, packer)]
        for packer in (FullestPacker, GreedyPacker)
    )
    return {
        "mesh": row["mesh"],
        "longest": [max(piece.tokens for piece in step) for step in pieces],
        "window": setting.window,
        "packed_full_ms": full,
        "on_mesh_ms": own,
        "strategies": sample.elsewhere(paper_strategies(sample), pieces, rules, GreedyPacker),
    }


def paper_strategies(sample: Sample) -> Iterator[Schemes]:
    """Hydraulis' proposals of tensor × pipeline parallel; the mesh's own pipelines beside others.

    Of the latter all with one, two, four ... of the mesh's pipelines, and all other ranks in
    smaller ones of another kind.
    """
    request = sample.request
    for each in proposed_strategies(request):
        if all(scheme.context == 1 for scheme in each):
            yield each
    large, own = sample.own[0], len(sample.own)
    for mesh in legal_meshes(request):
        (small, *_) = strategy = schemes_of(mesh, request.predictor(mesh).stages)
        yield strategy
        number = 1
        while number < own and small.size < large.size:
            rest = range(number * large.size, request.devices, small.size)
            yield sample.own[:number] + tuple(replace(small, first=first) for first in rest)
            number *= 2


def our_steps(setting: Setting, profile: Profile, steps: int, row: dict[str, Any]) -> Any:
    """Steps with ``auto`` on a mesh, and on the strategies that are proposed for these steps.

    Args:
        setting: model, cluster and documents.
        profile: of the device.
        steps: how many.
        row: ``auto, one stage`` of :func:`with_auto`.
    """
    request = setting.request("auto", profile, steps)
    sample = Sample(request, mesh_of(row))
    pieces, rules = released(request)
    made = evaluate(request, sample.mesh)
    return {
        "mesh": row["mesh"],
        "on_mesh_ms": [milliseconds(step.total_ns) for step in made.steps],
        "strategies": sample.elsewhere(
            candidate_schemes(request, pieces, PROPOSED, sample.own),
            pieces,
            rules,
            request.data.packer,
        ),
    }
