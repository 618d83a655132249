"""Whether it pays that steps leave the mesh, and for which pipelines: ``dynamic="auto"``.

1. The *sample* is the run's first n steps. Its first half and :data:`AHEAD` · n/2 steps after it
   are sorted by the sum of their squared lengths and cut into n/2 parts. The step at three quarters
   of each part is used to choose pipelines: steps with long documents gain most and may be rare.
2. An estimate proposes choices of pipelines for these steps (:func:`.candidate_schemes`), which are
   planned on the mesh and on each choice. One after another, the choice that saves most beyond the
   pool enters it, as long as it saves :data:`WORTH_ADDING` of the time, up to :data:`MOST` choices.
3. The second half of the sample measures the pool's gain, which must be above :data:`WORTH`.

All times are simulated, and on other pipelines than the mesh's they include the exchange of
parameters and gradients (:mod:`.exchange_times`). Ties go by the order of proposal. The sample has
the run's first steps even in a resumed run, which thus finds the same pool on the same mesh.

Cost: two to five plans of the pipelines for each of half the sample's steps and each of
:data:`PROPOSED` choices; the estimate takes seconds on 64 devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from lightning_wlb.heterogeneous.planning.candidates import candidate_schemes
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.evaluate import name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import Progress, silent
from lightning_wlb.plan import Schemes, schemes_of
from lightning_wlb.planning.plan_scoring import PlanScore, ProfileScorer
from lightning_wlb.planning.planner import Release, releases_of
from lightning_wlb.planning.step_chooser import PlannedStep, fastest

WORTH = 1.02
"""A pool is used if the time on the mesh divided by the time with the pool is above this."""

WORTH_ADDING = 0.005
"""Share of the time on the mesh that a choice must save in addition to the pool so far."""

AHEAD = 8
"""Steps after the sample that are considered, for each step that is used to choose."""

PROPOSED = 12
"""Choices that are simulated."""

SAMPLE = 8
"""Steps that are simulated, half of them to choose pipelines and half to measure the gain."""

MOST = 4
"""Most choices of a pool. Each costs planning in every step, and process groups on every rank."""


@dataclass(frozen=True)
class PoolChoice:
    """Whether steps should leave the mesh, and the figures that say so."""

    schemes: tuple[Schemes, ...]  #: the pool; empty where it is not worth having
    tried: tuple[Schemes, ...]  #: the choices that save most, whether or not they are worth it
    proposed: int  #: how many choices were simulated
    mesh: Mesh
    mesh_ns: int  #: simulated time of the second half's steps on the mesh
    pool_ns: int  #: their time if each runs on the fastest of the mesh and ``tried``
    chosen: tuple[int, ...]  #: how many of these steps take each of ``tried``
    steps: int  #: how many steps the second half has

    @property
    def gain(self) -> float:
        """Time on the mesh divided by the time with the pool; never below 1."""
        return self.mesh_ns / self.pool_ns

    @property
    def lines(self) -> list[str]:
        """The figure in words, and the pipelines of the pool, each a line."""
        on_mesh = (
            f"simulated, {self.steps} steps take {self.mesh_ns / 1e6:,.1f} ms on the mesh"
            f" {name_of(self.mesh)}"
        )
        if not self.tried:
            return [
                f"Dynamic strategies are not for you: {on_mesh}, and none of {self.proposed} others"
                " is faster."
            ]
        promised = (
            f"{on_mesh}, and {self.pool_ns / 1e6:,.1f} ms where each may leave it for the best"
            f" {len(self.tried)} of {self.proposed} other strategies: {self.gain - 1:.1%} faster"
        )
        if not self.schemes:
            return [
                f"Dynamic strategies are not for you: {promised}, and {WORTH - 1:.0%} are asked."
            ]
        left = self.steps - sum(self.chosen)
        lines = [
            f"Dynamic strategies pay: {promised}.",
            f"  {left} of {self.steps} steps stay on the mesh.",
        ]
        for schemes, count in zip(self.tried, self.chosen, strict=True):
            lines.append(f"  {count} take {described(schemes)}.")
            if count == self.steps and len({scheme.shape for scheme in schemes}) == 1:
                stages, context, tensor = schemes[0].shape
                mesh = Mesh(len(schemes), len(stages), context, tensor)
                lines.append(f"  All of them do, so rather take the mesh {name_of(mesh)}.")
        return lines


def described(schemes: Schemes) -> str:
    """Pipelines in words: the number and the sizes of each run of equal pipelines."""
    found = []
    for (stages, context, tensor), alike in groupby(schemes, key=lambda scheme: scheme.shape):
        count = len(list(alike))
        found.append(f"{count} × (pipeline {len(stages)}, context {context}, tensor {tensor})")
    return " + ".join(found)


class _SampledStep(NamedTuple):
    """A step of the sample: on the mesh, and on each choice of pipelines that can hold it."""

    on_mesh: PlanScore
    arranged: Sequence[PlannedStep]

    def time(self, choices: Sequence[Schemes], limit: int) -> tuple[int, Schemes | None]:
        """The step's time, and the choice of pipelines that it takes; None if it stays."""
        own = {each.schemes: each for each in self.arranged}
        steps = [own[schemes] for schemes in choices if schemes in own]
        chosen = fastest(steps, self.on_mesh, limit)
        if chosen is None:
            return self.on_mesh.time, None
        # Pipelines on which the step fits are taken even if a mesh without enough memory is faster.
        return min(chosen.time_ns, self.on_mesh.time), chosen.schemes


def choose_pool(request: MeshRequest, mesh: Mesh, *, progress: Progress = silent) -> PoolChoice:
    """The pipelines that are worth having beside a mesh; none if the gain is too small.

    The request's ``steps``, two or more, are the sample.

    Raises:
        ValueError: a mesh with virtual stages, or a packing that cannot deal to such pipelines.
    """
    base = request.predictor(mesh)
    scorer = ProfileScorer(base, request.activation_checkpointing)
    own = schemes_of(mesh, base.stages)
    planner = request.planner(base, scorer)
    half = request.steps // 2
    releases = releases_of(planner, request.steps + AHEAD * half)
    others = releases[:half] + releases[request.steps :]
    given, judged = _sampled_by_length(others, half), releases[half : request.steps]
    plans = {release.step: planner.place(release) for release in (*given, *judged)}

    def sampled(pool: Pool, releases: Sequence[Release]) -> list[_SampledStep]:
        steps = []
        for release in releases:
            progress("simulating pipelines", list(plans).index(release.step), len(plans))
            plan = plans[release.step]
            arranged = pool.arranged(plan.pieces, planner.packer)
            steps.append(_SampledStep(scorer(plan.replicas), arranged))
        return steps

    pieces = [plans[release.step].pieces for release in given]
    proposed = candidate_schemes(request, pieces, PROPOSED, beside=own)
    tried: list[Schemes] = []
    if proposed:
        pool = Pool.of(proposed, base, request.activation_checkpointing, request.sharding)
        tried = _best_together(sampled(pool, given), proposed, scorer.limit)
    if not tried:
        mesh_ns = sum(scorer(plans[release.step].replicas).time for release in judged)
        return PoolChoice((), (), len(proposed), mesh, mesh_ns, mesh_ns, (), len(judged))
    rest = sampled(Pool({each: pool.kinds[each] for each in tried}), judged)
    times = [step.time(tried, scorer.limit) for step in rest]
    mesh_ns, pool_ns = sum(step.on_mesh.time for step in rest), sum(time for time, _ in times)
    taken = [schemes for _, schemes in times]
    return PoolChoice(
        schemes=tuple(tried) if mesh_ns > WORTH * pool_ns else (),
        tried=tuple(tried),
        proposed=len(proposed),
        mesh=mesh,
        mesh_ns=mesh_ns,
        pool_ns=pool_ns,
        chosen=tuple(map(taken.count, tried)),
        steps=len(rest),
    )


def _sampled_by_length(releases: Sequence[Release], count: int) -> list[Release]:
    """``count`` of these steps, from steps of short documents to steps of long ones.

    The steps are sorted by their sums of squared lengths and cut into ``count`` parts. The step at
    three quarters of each part is taken, so that the last one is among the longest.
    """

    def squares(release: Release) -> int:
        return sum(piece.tokens**2 for packed in release.micro_batches for piece in packed)

    ordered = sorted(releases, key=squares)
    return [ordered[(4 * part + 3) * len(ordered) // (4 * count)] for part in range(count)]


def _best_together(
    steps: Sequence[_SampledStep], proposed: Sequence[Schemes], limit: int
) -> list[Schemes]:
    """The choices that save most in these steps, each in addition to those taken before it."""

    def total(choices: Sequence[Schemes]) -> int:
        return sum(step.time(choices, limit)[0] for step in steps)

    on_mesh = least = total(())
    chosen: list[Schemes] = []
    while len(chosen) < MOST:
        others = [each for each in proposed if each not in chosen]
        times = {each: total([*chosen, each]) for each in others}
        best = min(times, key=times.__getitem__, default=None)
        if best is None or least - times[best] <= WORTH_ADDING * on_mesh:
            break
        least = times[best]
        chosen.append(best)
    return chosen
