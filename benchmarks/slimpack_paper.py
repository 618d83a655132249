"""SlimPack's settings predicted: best-fit sample packing against slices, 1F1B and interleaved.

The paper (§6) trains LLaMA-like models of 7B to 150B at windows of 64K to 256K tokens on Common
Crawl, GitHub and Wikipedia, on 128 and 256 GPUs, with Megatron-LM and best-fit packing as the
baseline, and reports up to 2.8 times its throughput. Neither its lengths nor its meshes are
published. :data:`benchmarks.workloads.CORPORA` and :data:`MESHES` are ours, written down before the
first run.

Both methods get the same documents in the same steps, adaptive sharding, and the least activation
checkpointing with which the baseline fits. Slices are planned by ``auto`` with the same profile.
Steps are simulated from the profile, once with its links and once with links that take no time.
Their rank time is decomposed into work, the warm-up of equal micro-batches as many as the step has,
imbalance (the rest without communication), and communication.

Run ``python -m benchmarks.slimpack_paper --help``. Prints tables and, last, one JSON object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks import report
from benchmarks.paper_speedups import without_communication
from benchmarks.workloads import CORPORA, SHAPES, Corpus, K
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.memory_model import USABLE_PERCENT
from lightning_wlb.cost.overlap import Overlap
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Recompute, StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.planner import plan_steps
from lightning_wlb.prediction.predictor import Predictor, mean_context_of, model_stages

PAPER = 2.8  # its largest gain
INTERLEAVED = "13B"  # the model that is also run with two stages a rank

MESHES = {  # 128 GPUs for the smaller two, 256 for the others, as in the paper's Figure 13
    "7B": Mesh(data=4, pipeline=4, context=2, tensor=4),
    "13B": Mesh(data=4, pipeline=4, context=2, tensor=4),
    "70B": Mesh(data=2, pipeline=8, context=2, tensor=8),
    "150B": Mesh(data=2, pipeline=8, context=2, tensor=8),
}


@dataclass(frozen=True)
class Case:
    """One model, window and corpus.

    Args:
        samples: documents of a global batch, on average.
        overlap: which messages are behind products.
    """

    model: str
    window: int
    corpus: Corpus
    profile: Profile
    samples: int = 1024
    overlap: Overlap = "off"

    def run(self, steps: int, seed: int, per_rank: int) -> dict[str, Any]:
        """Both methods' predictions with so many stages per pipeline rank."""
        mesh = replace(MESHES[self.model], virtual_stages=per_rank)
        shape = SHAPES[self.model]
        mean = float(self.corpus.lengths(100_000, self.window, 0).mean())
        count = max(round(self.samples * mean / self.window), 1)
        lengths = self.corpus.lengths(
            int(1.5 * (steps + 1) * count * self.window / mean), self.window, seed
        )
        stages = tuple(model_stages(shape, mesh.stages, mean_context_of(lengths, self.window)))
        schedule = "1f1b" if per_rank == 1 else "interleaved"

        def predictor(profile: Profile) -> Predictor:
            return Predictor(
                LatencyModel(profile, shape, mesh, overlap=self.overlap), stages, schedule
            )

        model = predictor(self.profile)
        modes: Sequence[Recompute] = get_args(Recompute)
        usable = self.profile.memory_bytes * USABLE_PERCENT // 100
        for mode in modes:
            plain = self._plans("best_fit", count, lengths, steps, model, mode)
            made = [model.predict(plan) for plan in plain]
            if max(each.peak_bytes for each in made) <= usable:
                break
        plans = self._plans("auto", count, lengths, steps, model, mode)
        unlinked = predictor(without_communication(self.profile))
        result: dict[str, Any] = {
            "N": count,
            "activation_checkpointing": mode,
            "fits": max(each.peak_bytes for each in made) <= usable,
        }
        for name, of_method in (("best_fit", plain), ("auto", plans)):
            result[name] = summary(of_method, model, unlinked)
        result["gain"] = result["best_fit"]["ns_per_token"] / result["auto"]["ns_per_token"]
        return result

    def _plans(
        self,
        packing: str,
        count: int,
        lengths: np.ndarray,
        steps: int,
        model: Predictor,
        mode: Recompute,
    ) -> list[StepPlan]:
        planner = Planner(
            lengths,
            DataSettings(self.window, count, packing=packing, cap=self.window, shuffle=False),
            Work.of(SHAPES[self.model]),
            model.latency.mesh,
            kernel_cost=model.latency.segment_cost,  # as in a run that has the profile
            scorer=ProfileScorer(model, mode) if packing == "auto" else None,
            activation_checkpointing=mode,
        )
        return plan_steps(planner, steps)


def summary(plans: Sequence[StepPlan], model: Predictor, unlinked: Predictor) -> dict[str, Any]:
    """Time per token, and the shares of a rank's time; memory, micro-batches and cuts."""
    total = tokens = work = warm_up = imbalance = communication = peak = 0.0
    micro_batches = cuts = merged = 0
    ranks, per_rank = model.latency.mesh.pipeline, model.latency.mesh.virtual_stages
    for plan in plans:
        step, bare = model.predict(plan), unlinked.predict(plan)
        replicas = len(plan.replicas)
        busy = sum(sum(each.busy_ns) for each in bare.simulations) / (replicas * ranks)
        each_has = sum(len(replica.forward) for replica in plan.replicas) / replicas
        filling = busy * (ranks - 1) / (each_has * per_rank)
        compute = bare.simulations[0].compute_ns
        total += step.total_ns
        work += busy
        warm_up += filling
        imbalance += compute - busy - filling
        communication += step.total_ns - compute
        tokens += plan.tokens
        peak = max(peak, step.peak_bytes)
        micro_batches += round(each_has)
        cuts += sum(part.context > 0 for replica in plan.replicas for part in replica.slices)
        merged += sum(
            len(group.replicas) > 1 for replica in plan.replicas for group in replica.forward
        )
    return {
        "ns_per_token": total / tokens,
        "work": work / total,
        "warm_up": warm_up / total,
        "imbalance": imbalance / total,
        "communication": communication / total,
        "peak_gigabytes": peak / 1e9,
        "micro_batches_per_replica": micro_batches / len(plans),
        "cuts_per_step": cuts / len(plans),
        "merged_per_step": merged / len(plans),
    }


SHARES = ("work", "warm_up", "imbalance", "communication")
HEADINGS = ("case", "N", "gain", "M", "cuts", "GB", "recomputed", *SHARES)


def cells(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A line for each case: the shares, and best-fit → slices where there are two figures."""
    made = []
    for name, row in rows.items():
        old, new = row["best_fit"], row["auto"]

        def pair(key: str, form: str, old: dict[str, Any] = old, new: dict[str, Any] = new) -> str:
            return f"{old[key]:{form}} → {new[key]:{form}}"

        made.append([
            name, str(row["N"]), f"{row['gain']:.2f}", pair("micro_batches_per_replica", ".1f"),
            f"{new['cuts_per_step']:.0f}",
            pair("peak_gigabytes", ".0f") + ("" if row["fits"] else ", does not fit"),
            row["activation_checkpointing"], *(pair(share, ".0%") for share in SHARES),
        ])  # fmt: skip
    return made


def gains(rows: dict[str, dict[str, Any]]) -> str:
    """Least and most, of the cases that the baseline can run at all."""
    values = [row["gain"] for row in rows.values() if row["fits"]]
    return f"{min(values):.2f} to {max(values):.2f}" if values else "unknown"


def markdown(result: dict[str, Any]) -> str:
    """The table as a page."""
    rows = result["rows"]
    lines = [
        "# Slices over best-fit packing in SlimPack's settings, simulated",
        "",
        f"Profile: {result['provenance']}. {result['steps']} steps per case, seed {result['seed']}."
        " See `benchmarks/slimpack_paper.py`.",
        "",
        f"Gain {gains(rows)}; the paper reports up to {PAPER}, measured. Shares are of a rank's"
        " time, best-fit → slices. The baseline does not fit where it says so, and the range leaves"
        " these cases out.",
        "",
        "Gains above the paper's are at 256K, where best-fit has two to six micro-batches on a"
        " replica and one long document keeps all ranks waiting. The paper's lengths are not"
        " published: the last four rows say how far such a case depends on the tail and on the"
        " documents of a step.",
        "",
        *report.markdown_table(HEADINGS, cells(rows)),
    ]
    return "\n".join(lines) + "\n"


def cases(
    models: Sequence[str], windows: Sequence[int], profile: Profile
) -> dict[str, tuple[Case, int]]:
    """Name -> case and stages per rank; last the sensitivity to what the paper leaves open."""
    made = {
        f"{model} {window}K {name} {schedule}": (Case(model, window * K, corpus, profile), per_rank)
        for schedule, per_rank in (("1F1B", 1), ("interleaved", 2))
        for model in models
        if per_rank == 1 or model == INTERLEAVED
        for window in windows
        for name, corpus in CORPORA.items()
    }
    base = Case("13B", 256 * K, CORPORA["common_crawl"], profile)
    tail = base.corpus.tail
    for label, case in {
        "512 samples": replace(base, samples=512),
        "2048 samples": replace(base, samples=2048),
        "half the tail": replace(base, corpus=replace(base.corpus, tail=tail / 2)),
        "twice the tail": replace(base, corpus=replace(base.corpus, tail=2 * tail)),
    }.items():
        made[f"13B 256K common_crawl 1F1B, {label}"] = case, 1
    return made


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("slimpack_paper", __doc__)
    parser.add_argument("--steps", type=int, default=2, help="steps per case (default 2)")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--profile", default="h100-fa2", help="device profile (h100-fa2)")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), help="default: all")
    parser.add_argument("--windows", type=int, nargs="+", default=[64, 128, 256], help="in K")
    parser.add_argument("--save", type=Path, help="also write PATH.json and PATH.md")
    arguments = parser.parse_args(argv)
    profile = Profile.load(arguments.profile)
    rows = {
        name: case.run(arguments.steps, arguments.seed, per_rank)
        for name, (case, per_rank) in track(
            cases(arguments.models, arguments.windows, profile).items(),
            "Simulating",
            console=Console(stderr=True),
        )
    }
    console = Console(width=200)
    caption = f"{profile.provenance}. The paper reports up to {PAPER}."
    title = "Slices over best-fit (best-fit → slices), simulated"
    console.print(report.table(title, HEADINGS, cells(rows), caption))
    console.print(f"gain {gains(rows)}; the paper: up to {PAPER}")
    result = {
        "benchmark": "slimpack_paper",
        **{name: value for name, value in vars(arguments).items() if name != "save"},
        "measured": profile.measured,
        "provenance": profile.provenance,
        "rows": rows,
    }
    report.finish(result, arguments.save, markdown)


if __name__ == "__main__":
    main()
