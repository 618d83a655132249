"""Whether `auto` is beaten by a way that it could have taken: random cases, every other packing.

A case is a kind of lengths (all equal to the window C; 90 % of 512 and 10 % of 65,536 tokens;
log-uniform from 32 to C; Generator A), a window, N, and a pipeline on several replicas. The
documents of one global batch are planned by ``auto`` and by the others: ``best_fit``, ``slim`` with
1 to 8 micro-batches to each of N, and whole documents of equal work in N to 6·N micro-batches,
which is ``wlb`` without delay (at a cap of C, and of 1.5·C in N). ``original`` trains other pieces,
since it cuts documents that fit a window, and shorter pieces are easier to even out: ``auto`` over
it is told apart. All are judged by the same scorer, as time per model FLOP of the step: without a
profile by exact work, with the overheads and the limit of ``auto``; with one on a 7B model under
the device's memory, at the least tensor parallelism under which windows fit with full
recomputation, each plan with the least recomputation that it needs. What exceeds the limit does not
count, unless nothing fits.

Run ``python -m benchmarks.auto_never_beaten --help``. The last line is one JSON object: the median
and the worst of ``auto`` over the best of the others, and the cases more than 0.5 % above 1, and
those in which it is more than 0.5 % behind ``original``.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.workloads import REFERENCE_WORK, SHAPES, generator_a
from lightning_wlb.cost.attention_tiles import reference_kernel_cost
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import ReplicaPlan, StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.plan_scoring import PlanScore, PlanScorer, ProfileScorer
from lightning_wlb.prediction.predictor import Predictor, mean_context_of, model_stages

K = 1024
KINDS = ("equal", "bimodal", "log_uniform", "generator_a")
ALLOWED = 1.005  # auto's time per FLOP to the best of the others
SHAPE = SHAPES["7B"]


@dataclass
class Counted:
    """A scorer that counts how often it is asked."""

    scorer: PlanScorer
    calls: int = 0

    @property
    def limit(self) -> int:
        """As the scorer's."""
        return self.scorer.limit

    @property
    def longest(self) -> Sequence[int]:
        """As the scorer's."""
        return self.scorer.longest

    def __call__(self, replicas: Sequence[ReplicaPlan]) -> PlanScore:
        """As the scorer."""
        self.calls += 1
        return self.scorer(replicas)

    def ends(self, replicas: Sequence[ReplicaPlan]) -> Sequence[int]:
        """As the scorer, counted as well."""
        self.calls += 1
        return self.scorer.ends(replicas)

    def settled(self, replicas: Sequence[ReplicaPlan]) -> list[ReplicaPlan]:
        """As the scorer."""
        return self.scorer.settled(replicas)


class Result(NamedTuple):
    """What a packing made of a case.

    Attributes:
        overflows: whether a rank holds more than the limit.
        time_per_work: of the step, in the scorer's unit over model FLOPs.
    """

    overflows: bool
    time_per_work: float

    def over(self, other: Result) -> float:
        """Time per work over that of another; infinite or 0 where only one of them fits."""
        if self.overflows != other.overflows:
            return float("inf") if self.overflows else 0.0
        return round(self.time_per_work / other.time_per_work, 4)


class Case(NamedTuple):
    """One workload on one mesh."""

    kind: str
    window: int
    micro_batches: int
    data: int
    pipeline: int
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.kind} C={self.window // K}K N={self.micro_batches} DP={self.data}"
            f" PP={self.pipeline} seed={self.seed}"
        )

    def lengths(self) -> np.ndarray:
        """The documents of one global batch, tokens."""
        rng = np.random.default_rng(self.seed)
        tokens = self.micro_batches * self.window
        count = tokens // 1000
        if self.kind == "equal":
            drawn = np.full(self.micro_batches, self.window)
        elif self.kind == "bimodal":
            drawn = np.where(rng.random(count) < 0.9, 512, 65_536)
        elif self.kind == "log_uniform":
            drawn = np.exp(rng.uniform(np.log(32), np.log(self.window), count)).astype(np.int64)
        else:
            drawn = generator_a(count, self.window, self.seed)
        # At most N·C tokens, so that all packings have the same documents in their first step.
        return drawn[: int(np.searchsorted(np.cumsum(drawn), tokens, side="right"))]

    def scorer(self, lengths: np.ndarray, profile: Profile | None) -> tuple[Work, Mesh, PlanScorer]:
        """What the plans of the case are made for, and judged by."""
        if profile is None:
            mesh = Mesh(self.data, self.pipeline)
            rules = DataSettings(self.window, self.micro_batches).rules(lengths, REFERENCE_WORK)
            return REFERENCE_WORK, mesh, rules.work_scorer(mesh)
        mean_context = mean_context_of(lengths, self.window)
        stages = tuple(model_stages(SHAPE, self.pipeline, mean_context))
        for tensor in (1, 2, 4, 8):
            mesh = Mesh(self.data, self.pipeline, tensor=tensor)
            predictor = Predictor(LatencyModel(profile, SHAPE, mesh), stages)
            longest, ranks = predictor.memory.model.longest_micro_batch, self.pipeline
            opened = (min(ranks - rank, self.micro_batches) for rank in range(ranks))
            given = predictor.usable_bytes, self.micro_batches, "full"
            each = zip(predictor.memory.rank_parts, opened, strict=True)
            if min(longest(*one, *given) for one in each) >= self.window:
                break
        return Work.of(SHAPE), mesh, ProfileScorer(predictor)

    def run(self, profile: Profile | None) -> dict[str, Any]:
        """All packings of the case: ``auto`` over the best of the others, who that is, calls."""
        lengths = self.lengths()
        work, mesh, scorer = self.scorer(lengths, profile)

        cost = reference_kernel_cost
        if isinstance(scorer, ProfileScorer):
            cost = scorer.predictor.latency.segment_cost  # as a run has it

        def planned(settings: DataSettings, scorer: Any) -> Result:
            given = lengths, settings, work, mesh
            plan = Planner(*given, scorer=scorer, kernel_cost=cost).next_step()
            assert isinstance(plan, StepPlan)
            verdict = scorer(plan.replicas)
            done = sum(work.total(piece.tokens) for piece in plan.pieces)
            return Result(verdict.peak > scorer.limit, verdict.time / done)

        counted = Counted(scorer)
        before = time.process_time()
        auto = planned(DataSettings(self.window, self.micro_batches, shuffle=False), counted)
        seconds = time.process_time() - before
        others = {name: planned(settings, scorer) for name, settings in self.others()}
        cut = planned(
            DataSettings(self.window, self.micro_batches, packing="original", shuffle=False), scorer
        )
        name = min(others, key=lambda name: others[name])
        return {
            "case": str(self),
            "ratio": auto.over(others[name]),
            "best": name,
            "over_original": auto.over(cut),
            "time_per_work": auto.time_per_work,
            "fits": not auto.overflows,
            "judged": counted.calls - 1,
            "seconds": round(seconds, 3),
        }

    def others(self) -> Iterator[tuple[str, DataSettings]]:
        """The ways that ``auto`` is compared with, by name."""
        window, count = self.window, self.micro_batches
        yield "best_fit", DataSettings(window, count, packing="best_fit", shuffle=False)
        for packs in (1, 2, 4, 8):
            packing: dict[str, Any] = {"method": "slim", "micro_packs": packs}
            yield f"slim {packs}", DataSettings(window, count, packing=packing, shuffle=False)
        packing = {"method": "wlb", "queues": 0}
        yield "wlb", DataSettings(window, count, packing=packing, shuffle=False)
        for halves in (2, 3, 4, 6, 8, 12):
            yield (
                f"whole {halves / 2:g}",
                DataSettings(window, -(-count * halves // 2), packing, cap=window, shuffle=False),
            )


def cases(count: int, seed: int) -> Iterator[Case]:
    """So many cases, of each kind in turn."""
    draw = random.Random(seed)
    for number in range(count):
        yield Case(
            KINDS[number % len(KINDS)],
            draw.choice((64, 128, 256)) * K,
            draw.randint(4, 24),
            draw.randint(1, 8),
            draw.randint(1, 8),
            draw.randrange(10**6),
        )


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("auto_never_beaten", __doc__)
    parser.add_argument("--cases", type=int, default=300, help="default 300")
    parser.add_argument("--seed", type=int, default=1, help="of the cases (default 1)")
    parser.add_argument("--profile", help="device profile, such as h100 (default: exact work)")
    parser.add_argument("--all", action="store_true", help="every case in the JSON object")
    parser.add_argument("--save", type=Path, help="also write PATH.json")
    arguments = parser.parse_args(argv)
    profile = Profile.load(arguments.profile) if arguments.profile else None
    rows = []
    for case in cases(arguments.cases, arguments.seed):
        rows.append(row := case.run(profile))
        print(
            f"{row['ratio']:.4f}  {row['case']}: {row['best']}, {row['judged']} judged,"
            f" {row['seconds']:.2f} s{'' if row['fits'] else ', does not fit'}",
            flush=True,
        )
    ratios = [row["ratio"] for row in rows]
    result: dict[str, Any] = {
        "benchmark": "auto_never_beaten",
        **{name: value for name, value in vars(arguments).items() if name != "save"},
        "median": statistics.median(ratios),
        "worst": max(ratios),
        "judged_median": statistics.median(row["judged"] for row in rows),
        "judged_most": max(row["judged"] for row in rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "total": sum(row["time_per_work"] for row in rows),
        "beaten": [row for row in rows if row["ratio"] > ALLOWED],
        "behind_original": [row for row in rows if row["over_original"] > ALLOWED],
    }
    if arguments.all:
        result["rows"] = rows
    report.finish(result, arguments.save)


if __name__ == "__main__":
    main()
