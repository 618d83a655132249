"""Whether steps that leave the mesh would pay, and for which pipelines: ``dynamic="auto"``.

1. A sample of the run's first steps is taken. Its first half, and :data:`AHEAD` times as many steps
   after the sample, are put in order of the squares of their lengths and cut into parts; of each
   part a step beyond its middle is *chosen by*. For the steps that gain most may come seldom: those
   with the longest documents.
2. Choices of pipelines are proposed for these steps by an estimate (:func:`.candidate_schemes`).
   The steps are planned on the mesh and on each choice. The pool takes, one after another, the one
   that saves most beside those that it has, as long as that is :data:`WORTH_ADDING` of the time;
   :data:`MOST` at most.
3. The second half of the sample says what the pool would gain, for a choice looks better on the
   steps that it was made by. Only above :data:`WORTH` are there to be such steps at all.

All times are simulated, and those of steps that leave the mesh hold the exchange of parameters and
gradients (:mod:`.exchange_times`). Ties go by the order of proposal. The sample is of a run's first
steps wherever the run stands, so one that is resumed on the same mesh and chooses again has the
same pool.

Cost: half the sample times :data:`PROPOSED` choices, and two to five plans of its pipelines for
each; the estimate takes seconds on 64 devices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import NamedTuple

from lightning_wlb.cost.flops import Work
from lightning_wlb.heterogeneous.planning.candidates import candidate_schemes
from lightning_wlb.heterogeneous.planning.pool import Pool, fastest
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.evaluate import name_of
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import Progress
from lightning_wlb.plan import Scheme, Schemes, schemes_of
from lightning_wlb.planning.plan_scoring import PlanScore, ProfileScorer
from lightning_wlb.planning.planner import Planner, Release
from lightning_wlb.planning.step_chooser import PlannedStep

WORTH = 1.02
"""Time on the mesh over that with the pool, above which it is worth having."""

WORTH_ADDING = 0.005
"""Share of the time on the mesh that a choice must save beside those of the pool already."""

AHEAD = 8
"""Times as many steps as are chosen by, among which these are looked for beside the sample."""

PROPOSED = 12
"""Choices that are simulated."""

SAMPLE = 8
"""Steps that are simulated: as many to choose by as to judge the choice."""

MOST = 4
"""Choices of a pool. Each costs every step its planning, and a rank its process groups."""


@dataclass(frozen=True)
class PoolChoice:
    """Whether steps should leave the mesh, and the figures by which.

    Args:
        schemes: the pool; empty where it is not worth having.
        tried: the choices that save most, whether or not they are worth it.
        proposed: how many were tried.
        mesh: of the run.
        mesh_ns: simulated time of the steps of the second half on the mesh.
        pool_ns: that of the same steps, each on the fastest of mesh and ``tried``.
        chosen: of these steps, how many take each of ``tried``.
        steps: of the second half.
    """

    schemes: tuple[Schemes, ...]
    tried: tuple[Schemes, ...]
    proposed: int
    mesh: Mesh
    mesh_ns: int
    pool_ns: int
    chosen: tuple[int, ...]
    steps: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> PoolChoice:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: text that it did not write.
        """
        try:
            made = json.loads(text)
            pools = {
                name: tuple(tuple(Scheme(**each) for each in one) for one in made[name])
                for name in ("schemes", "tried")
            }
            given = {"mesh": Mesh(**made["mesh"]), "chosen": tuple(made["chosen"])}
            return PoolChoice(**made | pools | given)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the choice of a pool: {error!r}.") from error

    @property
    def gain(self) -> float:
        """Time on the mesh over that with the pool; never below 1."""
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
    """Pipelines in words, as many at once as are alike."""
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
        """What it takes with these to choose from, and which it chooses; None: the mesh."""
        own = {each.schemes: each for each in self.arranged}
        steps = [own[schemes] for schemes in choices if schemes in own]
        chosen = fastest(steps, self.on_mesh, limit)
        if chosen is None:
            return self.on_mesh.time, None
        # Where the mesh has no room, the pipelines that have may take longer.
        return min(chosen.time_ns, self.on_mesh.time), chosen.schemes


def choose_pool(
    request: MeshRequest, mesh: Mesh, *, progress: Progress | None = None
) -> PoolChoice:
    """The pipelines that are worth having beside a mesh; none where the gain is too small.

    Args:
        request: documents, model, settings and device; its ``steps``, two or more, are the sample.
        mesh: of the run.
        progress: is told how far the choice is.

    Raises:
        ValueError: a mesh with virtual stages, or a packing that cannot deal to pipelines that
            differ.
    """
    base = request.predictor(mesh)
    scorer = ProfileScorer(base, request.activation_checkpointing)
    own = schemes_of(mesh, base.stages)
    planner = Planner(
        request.lengths,
        request.data,
        Work.of(request.shape),
        mesh,
        sharding=request.sharding,
        schedule=base.schedule,
        kernel_cost=base.latency.segment_cost,
        scorer=scorer,
        activation_checkpointing=request.activation_checkpointing,
        mixture=request.mixture,
    )
    half = request.steps // 2
    releases = _releases(planner, request.steps + AHEAD * half)
    others = releases[:half] + releases[request.steps :]
    given, judged = _varied(others, half), releases[half : request.steps]
    plans = {release.step: planner.place(release) for release in (*given, *judged)}

    def sampled(pool: Pool, releases: Sequence[Release]) -> list[_SampledStep]:
        steps = []
        for release in releases:
            if progress is not None:
                progress("simulating pipelines", list(plans).index(release.step), len(plans))
            plan = plans[release.step]
            arranged = pool.arranged(plan.pieces, planner.rules, request.data.packer)
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


def _releases(planner: Planner, count: int) -> list[Release]:
    """What enters the next steps, over the ends of epochs."""
    found: list[Release] = []
    while len(found) < count:
        if (release := planner.release()) is not None:
            found.append(release)
    return found


def _varied(releases: Sequence[Release], count: int) -> list[Release]:
    """One of each of so many parts of these steps, in ascending order of squared lengths.

    Of each part it is the one at three quarters of it, so that the last is among the longest.
    """

    def squares(release: Release) -> int:
        return sum(piece.tokens**2 for packed in release.micro_batches for piece in packed)

    ordered = sorted(releases, key=squares)
    return [ordered[(4 * part + 3) * len(ordered) // (4 * count)] for part in range(count)]


def _best_together(
    steps: Sequence[_SampledStep], proposed: Sequence[Schemes], limit: int
) -> list[Schemes]:
    """The choices that save most in these steps, each beside those before it."""

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
