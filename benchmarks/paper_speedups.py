"""What WLB-LLM's Figures 12 to 14 become when this project predicts them.

Plain-4D (original packing, per-sequence sharding), Fixed-4D (fixed-length greedy within a global
batch, the better of per-sequence and per-document sharding) and WLB-LLM (Algorithm 1 with two
queues, the better of both shardings for each micro-batch) on all rows of the paper's Table 1, on
7B over context windows, and the breakdown of 7B-128K. Document lengths are those of Generator A,
since the paper's are not published; all methods pack the same pieces, those that ``original`` cuts.
Steps are simulated from a device profile, twice: with the communication that this project's
executor does (nothing overlaps, sums travel in float32), and without any, which is the other end
of what the paper's system may do. Speed-ups are of time per model FLOP over the same documents.

The shapes of 550M, 30B and 70B are not published. Ours are assumptions (:data:`SHAPES`).

Micro-batches are packed by predicted time, as in the paper (:func:`paper_work`).

Run ``python -m benchmarks.paper_speedups --help``. Prints tables, a sentence on every figure that
differs from the paper's by more than 15 %, and as its last line one JSON object; ``--output`` keeps
it, with the same as a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import report
from benchmarks.fixed_greedy import FixedGreedyPacker
from benchmarks.workloads import documents_for, generator_a, window_pieces
from lightning_wlb.cost.flops import PassWork, Work, causal_pairs
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import MicroBatch, ReplicaPlan, StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.packing.base import Packer
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.prediction.predictor import Predictor, model_stages
from lightning_wlb.prediction.step import StepPrediction
from lightning_wlb.sharding import ADAPTIVE

SHAPES: dict[str, ModelShape] = {
    "550M": TransformerConfig.preset("550m").shape,
    "7B": TransformerConfig.preset("7b").shape,
    # LLaMA's 33B has 52 heads, which 8 tensor-parallel ranks do not divide: 30.1 billion
    # parameters in the 7B's proportions.
    "30B": ModelShape(
        dim=7168, layers=48, heads=56, kv_heads=56, head_dim=128, ffn_dim=19_200, vocab_size=32_000
    ),
    "70B": TransformerConfig.preset("70b").shape,
}

K = 1024
TABLE_1 = [
    # model, window, (tensor, context, pipeline, data)
    ("550M", 64 * K, (2, 2, 4, 2)),
    ("550M", 128 * K, (2, 4, 4, 1)),
    ("7B", 64 * K, (4, 2, 4, 1)),
    ("7B", 128 * K, (8, 2, 4, 1)),
    ("30B", 64 * K, (8, 2, 4, 1)),
    ("30B", 128 * K, (8, 4, 4, 1)),
    ("70B", 64 * K, (16, 4, 4, 1)),
    ("70B", 128 * K, (16, 4, 4, 1)),
]
# The paper does not say on which mesh; that of 7B-128K here.
WINDOWS = [("7B", window * K, (8, 2, 4, 1)) for window in (32, 64, 96, 128, 160)]

PAPER_SHARDINGS = ("per_sequence", "per_document")
METHODS: dict[str, tuple[str | type[Packer], Sequence[str]]] = {
    # name: (packing, shardings of which the better one counts)
    "Plain-4D": ("original", ("per_sequence",)),
    "Fixed-4D": (FixedGreedyPacker, PAPER_SHARDINGS),
    "WLB-LLM": ("wlb", (ADAPTIVE,)),
}
BREAKDOWN: dict[str, tuple[str | type[Packer], Sequence[str]]] = {
    "CP per-document": ("original", ("per_document",)),
    "CP adaptive": ("original", (ADAPTIVE,)),
    "packing and delay": ("wlb", ("per_sequence",)),
    "all": ("wlb", (ADAPTIVE,)),
}

QUOTED: dict[str, float] = {
    # What the paper's text says; its figures have no numbers.
    "average of Fixed-4D over Plain-4D": 1.03,
    "average of WLB-LLM over Plain-4D": 1.23,
    "average of WLB-LLM over Fixed-4D": 1.19,
    "average of WLB-LLM, 64K": 1.15,
    "average of WLB-LLM, 128K": 1.30,
    "7B-128K, CP per-document": 1.02,
    "7B-128K, CP adaptive": 1.05,
    "7B-128K, packing and delay": 1.28,
    "7B-128K, all": 1.33,
    "7B-160K, WLB-LLM": 1.40,
}
NOTABLE = 0.15

COMMUNICATION = (
    "Here nothing overlaps, sums travel in float32 and keys and values cross nodes where the"
    " context group spans them; most of that time is proportional to tokens, whatever the packing,"
    " and dilutes the gain. What the paper's system overlaps is not published."
)


class Steps:
    """The predicted steps of a method.

    Attributes:
        steps: each of them.
        total_ns: the time of all.
        flops: their model FLOPs.
        context_imbalance: attention's time if all ranks took as long as the slowest, over its own.
    """

    def __init__(self, steps: Sequence[StepPrediction]) -> None:
        self.steps = steps
        self.total_ns = sum(step.total_ns for step in steps)
        self.flops = sum(step.flops for step in steps)
        peak, even = (
            sum(column) for column in zip(*(step.context_ns for step in steps), strict=True)
        )
        self.context_imbalance = peak / even


@dataclass(frozen=True)
class Case:
    """One model, window and mesh, with what is predicted for it."""

    model: str
    window: int
    mesh: Mesh
    profile: Profile

    @property
    def name(self) -> str:
        """As in the paper: 7B-128K."""
        return f"{self.model}-{self.window // K}K"

    def forecasts(
        self, methods: dict[str, tuple[str, Sequence[str]]], steps: int, seed: int
    ) -> dict[str, Steps]:
        """The predicted steps of each method."""
        shape = SHAPES[self.model]
        count = self.mesh.pipeline * self.mesh.data  # the paper's global batch
        documents = generator_a(documents_for(steps, count, self.window), self.window, seed)
        pieces = window_pieces(documents, self.window)
        context = int((pieces.astype(float) ** 2).sum() / pieces.sum() / 2)
        predictor = Predictor(
            LatencyModel(self.profile, shape, self.mesh),
            tuple(model_stages(shape, self.mesh.pipeline, context)),
        )
        work = paper_work(predictor.latency, self.window)
        result = {}
        for name, (packing, shardings) in methods.items():
            data = DataSettings(self.window, count, packing=packing, shuffle=False)
            planner = Planner(pieces, data, work, self.mesh, sharding="per_sequence")
            plans = plan_steps(planner, steps)
            tried = [
                Steps([predictor.predict(sharded(plan, predictor, sharding)) for plan in plans])
                for sharding in shardings
            ]
            result[name] = min(tried, key=lambda forecast: forecast.total_ns)
        return result


def paper_work(latency: LatencyModel, window: int) -> Work:
    """W_a + W_l of WLB-LLM Equation 2 as time, which the paper packs by.

    Of one layer, in 2^-24 ns. Of a window's attention a pair of a query and a key has its share, as
    if it were spread evenly over the context ranks; a token has its share of the rest of a
    micro-batch of a window, communication included.
    """
    ranks = latency.mesh.context
    rows = -(-window // ranks)
    length = np.array([window])

    def of_pass(*, backward: bool) -> PassWork:
        attention = latency.attention_ns(length, length)[backward] // ranks
        others = (
            latency.linear_ns(rows, backward=backward)
            + latency.tensor_parallel_ns(rows)
            + latency.exchange_keys_ns((ranks - 1) * rows, rows, backward=backward)
        )
        return PassWork((others << 24) // window, (attention << 24) // causal_pairs(window))

    return Work(of_pass(backward=False), of_pass(backward=True))


def sharded(plan: StepPlan, predictor: Predictor, sharding: str) -> StepPlan:
    """The plan under a sharding; adaptive takes the paper's two, by predicted attention time."""

    def name(replica: ReplicaPlan, group: MicroBatch) -> str:
        if sharding != ADAPTIVE:
            return sharding
        pieces = replica.slices_of(group)
        return min(
            PAPER_SHARDINGS,
            key=lambda each: sum(predictor.micro_batch(pieces, each).times.attention_ns),
        )

    def changed(replica: ReplicaPlan) -> ReplicaPlan:
        groups = tuple(replace(group, sharding=name(replica, group)) for group in replica.forward)
        return replace(replica, forward=groups)

    return replace(plan, replicas=tuple(map(changed, plan.replicas)))


def speedup(forecasts: dict[str, Steps], method: str, baseline: str = "Plain-4D") -> float:
    """Time per model FLOP of the baseline over that of the method."""
    slow, fast = forecasts[baseline], forecasts[method]
    return (slow.total_ns / slow.flops) / (fast.total_ns / fast.flops)


def without_communication(profile: Profile) -> Profile:
    """The same device with links that take no time."""
    free = Link(0.0, 1e30)
    return replace(profile, links={"node": free, "network": free})


def figures(profile: Profile, steps: int, seed: int) -> dict[str, Any]:
    """Everything for one profile: speed-ups by configuration, window and part."""
    table = {}
    for model, window, sizes in TABLE_1:
        case = Case(model, window, mesh_of(sizes), profile)
        methods = METHODS | (BREAKDOWN if case.name == "7B-128K" else {})
        made = case.forecasts(methods, steps, seed)
        table[case.name] = {name: speedup(made, name) for name in made}
        if case.name == "7B-128K":
            imbalance = {name: forecast.context_imbalance for name, forecast in made.items()}
    windows = {}
    for model, window, sizes in WINDOWS:
        case = Case(model, window, mesh_of(sizes), profile)
        made = case.forecasts(METHODS, steps, seed)
        windows[case.name] = {name: speedup(made, name) for name in made}
    return {
        "table_1": table,
        "windows": windows,
        "quoted": quoted(table, windows),
        "context_imbalance": imbalance,
    }


def quoted(
    table: dict[str, dict[str, float]], windows: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Ours for each figure that the paper's text quotes."""

    def mean(method: str, ending: str = "", over: str = "Plain-4D") -> float:
        rows = [row for name, row in table.items() if name.endswith(ending)]
        return float(np.mean([row[method] / row[over] for row in rows]))

    ours = {
        "average of Fixed-4D over Plain-4D": mean("Fixed-4D"),
        "average of WLB-LLM over Plain-4D": mean("WLB-LLM"),
        "average of WLB-LLM over Fixed-4D": mean("WLB-LLM", over="Fixed-4D"),
        "average of WLB-LLM, 64K": mean("WLB-LLM", "-64K"),
        "average of WLB-LLM, 128K": mean("WLB-LLM", "-128K"),
        "7B-160K, WLB-LLM": windows["7B-160K"]["WLB-LLM"],
        **{f"7B-128K, {part}": table["7B-128K"][part] for part in BREAKDOWN},
    }
    return {name: ours[name] for name in QUOTED}


def mesh_of(sizes: tuple[int, int, int, int]) -> Mesh:
    """From the paper's order: tensor, context, pipeline, data."""
    tensor, context, pipeline, data = sizes
    return Mesh(data, pipeline, context, tensor)


def sentences(with_links: dict[str, Any], without: dict[str, Any]) -> list[str]:
    """One for every quoted figure from which a prediction differs by more than 15 %."""
    found = []
    for name, paper in QUOTED.items():
        ours, free = with_links["quoted"][name], without["quoted"][name]
        off, off_free = abs(ours / paper - 1), abs(free / paper - 1)
        if min(off, off_free) > NOTABLE:
            why = ""
            text = (
                f"the paper says {paper:.2f}, we predict {ours:.2f} with communication and"
                f" {free:.2f} without, {off:.0%} and {off_free:.0%} off."
            )
        elif off > NOTABLE:
            why = COMMUNICATION
            text = (
                f"the paper's {paper:.2f} is met without communication ({free:.2f}), and"
                f" {ours:.2f} predicted with it."
            )
        elif off_free > NOTABLE:
            why = ""
            text = (
                f"the paper's {paper:.2f} is met with communication ({ours:.2f}), and {free:.2f}"
                " predicted without it."
            )
        else:
            continue
        found.append(f"{name}: {text} {why}".rstrip())
    return found


def tables(
    with_links: dict[str, Any], without: dict[str, Any]
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, headings and rows of each table."""
    names = list(METHODS)[1:]
    headings = ["", *(heading for name in names for heading in (name, "no communication"))]
    for key, title in (("table_1", "Figure 12: speed-up over Plain-4D"), ("windows", "Figure 14")):
        yield (
            title,
            headings,
            [
                [case, *(f"{r[name]:.3f}" for name in names for r in (row, without[key][case]))]
                for case, row in with_links[key].items()
            ],
        )
    headings = ["", "paper", "ours", "no communication", "differ by"]
    rows = []
    for name, paper in QUOTED.items():
        found = [each["quoted"][name] for each in (with_links, without)]
        off = [f"{each / paper - 1:+.0%}" for each in found]
        rows.append([name, f"{paper:.2f}", *(f"{each:.3f}" for each in found), ", ".join(off)])
    yield "What the paper's text quotes, Figure 13 among it", headings, rows


def page(result: dict[str, Any]) -> str:
    """The tables and the sentences."""
    lines = [
        "# WLB-LLM's Figures 12 to 14, simulated beside the paper",
        "",
        "Made by `python -m benchmarks.paper_speedups --output"
        " benchmarks/results/paper_speedups.json`; do not edit. *Simulated*:"
        f" {result['provenance']}; {result['steps']} steps of each configuration on Generator A,"
        " since the paper's lengths are not published. The paper measured on H100s. *No"
        " communication* is the same with links that take no time.",
    ]
    both = result["with_communication"], result["without_communication"]
    for title, headings, rows in tables(*both):
        lines += ["", f"## {title}", "", *report.markdown_table(headings, rows)]
    lines += ["", "## Where it differs by more than 15 %", ""]
    lines += [f"* {sentence}" for sentence in result["differing"]]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("paper_speedups", __doc__)
    parser.add_argument("--profile", default="h100-fa2", help="name or file (default h100-fa2)")
    parser.add_argument("--steps", type=int, default=100, help="per configuration (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the lengths (default 1)")
    parser.add_argument("--output", type=Path, help="a .json to keep; a page is written beside it")
    arguments = parser.parse_args(argv)
    profile = Profile.load(arguments.profile)
    both = [
        figures(each, arguments.steps, arguments.seed)
        for each in (profile, without_communication(profile))
    ]
    console = Console(width=150)
    for title, headings, rows in tables(*both):
        console.print(report.table(title, headings, rows, f"Simulated. {profile.provenance}."))
    differing = sentences(*both)
    for sentence in differing:
        console.print(sentence, soft_wrap=True, highlight=False)
    result = {
        "benchmark": "paper_speedups",
        "simulated": True,
        "provenance": profile.provenance,
        "steps": arguments.steps,
        "seed": arguments.seed,
        "paper": QUOTED,
        "with_communication": both[0],
        "without_communication": both[1],
        "differing": differing,
    }
    report.finish(result, arguments.output, page)


if __name__ == "__main__":
    main()
