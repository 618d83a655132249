"""What each sharding is worth as a candidate of ``adaptive``: attention latency without it.

Micro-batches of plans of Generator A and of the standard library (128K windows, N = 4, pipeline of
four) are laid out on CP 2 to 16 by the choice among all candidates, and among all but one. The
latency is that of the slowest rank by the reference kernel cost: modelled, not measured.

Run ``python -m benchmarks.candidate_shardings --output FILE.json``;
about four minutes on one core. The last line is one JSON object: by corpus, packing and CP, by how
many percent attention takes longer without each candidate, over all micro-batches and over those
with slices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.sharding_latency import predicted_latency
from benchmarks.workloads import REFERENCE_WORK, documents_for, generator_a, stdlib_lengths
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Slice
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.sharding import choose
from lightning_wlb.sharding.adaptive import CANDIDATES

WINDOW = 131_072
SIZES = (2, 4, 8, 16)


def micro_batches(corpus: str, packing: str, steps: int) -> list[tuple[Slice, ...]]:
    """The micro-batches of the first steps of a corpus under a packing."""
    lengths = (
        stdlib_lengths()
        if corpus == "stdlib"
        else generator_a(documents_for(steps, 4, WINDOW), WINDOW, seed=0)
    )
    data = DataSettings(WINDOW, 4, packing=packing)
    planner = Planner(lengths, data, REFERENCE_WORK, Mesh(pipeline=4), sharding="per_sequence")
    return [
        plan.replicas[0].slices_of(micro_batch)
        for plan in plan_steps(planner, steps)
        for micro_batch in plan.replicas[0].forward
    ]


def worth(packs: list[tuple[Slice, ...]], context: int) -> dict[str, Any]:
    """Percent that attention takes longer without each candidate on ``context`` ranks."""
    latencies: dict[str, list[int]] = {}
    for left_out in ("", *CANDIDATES):
        candidates = [name for name in CANDIDATES if name != left_out]
        latencies[left_out] = []
        for slices in packs:
            contexts = [part.context for part in slices]
            lengths = [part.tokens for part in slices]
            _, made = choose(lengths, context, 1, candidates=candidates, contexts=contexts)
            latencies[left_out].append(predicted_latency(made, contexts=contexts))
    sliced = [any(part.context for part in slices) for slices in packs]

    def percent(name: str, which: list[bool]) -> float | None:
        best = sum(x for x, asked in zip(latencies[""], which, strict=True) if asked)
        without = sum(x for x, asked in zip(latencies[name], which, strict=True) if asked)
        return round(100 * (without / best - 1), 2) if best else None

    return {
        name: {"all": percent(name, [True] * len(packs)), "sliced": percent(name, sliced)}
        for name in CANDIDATES
    }


def main() -> None:
    parser = report.parser("candidate_shardings", __doc__)
    parser.add_argument("--steps", type=int, default=20, help="of each corpus and packing")
    parser.add_argument("--output", type=Path, help="JSON file to write the result to")
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    for corpus in ("generator_a", "stdlib"):
        for packing in ("slim", "auto", "wlb"):
            packs = micro_batches(corpus, packing, arguments.steps)
            for context in SIZES:
                row = worth(packs, context)
                print(corpus, packing, f"CP {context}", row, flush=True)
                rows[f"{corpus}/{packing}/{context}"] = row
    result = {"benchmark": "candidate_shardings", "steps": arguments.steps, "rows": rows}
    report.finish(result, arguments.output)


if __name__ == "__main__":
    main()
