"""Every adapter against the peer's own function on the same lengths: imbalance and simulated step.

The peer's function runs as it is installed (or, of what is only in a repository, from a clone:
``--clones FOLDER``); :mod:`benchmarks.peers` calls it. Both sides deal the same documents to as
many ranks under the same cap, and steps are compared by what a device (``--profile``) is predicted
to take for a 7B model on each rank, ranks waiting at the end of the step; *lockstep* is the
imbalance where they wait in every micro-batch. Everything is simulated; times are without
communication.

``python -m benchmarks.adapters`` prints a table, and one JSON object last; with ``--output`` the
JSON is kept and a page and a picture go beside it. Also measures :func:`.plan_step` itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import peers, report
from benchmarks.workloads import generator_a, stdlib_lengths
from lightning_wlb.adapters.megatron import PlannedContextParallel, PlannedPacking
from lightning_wlb.adapters.plan_step import plan_step
from lightning_wlb.adapters.torch_sampler import BalancedBatchSampler
from lightning_wlb.adapters.verl import get_seqlen_balanced_partitions, work_of_verl
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import Slice
from lightning_wlb.prediction.estimate import UnplacedMicroBatch, estimated_costs
from lightning_wlb.prediction.predictor import Predictor, mean_context_of, model_stages

RANKS, CAP, STEP, STEPS, ACCUMULATED = 8, 32_768, 128, 6, 4
SHAPE = TransformerConfig.preset("7b").shape
WORK = Work.of(SHAPE).total

Dealt = list[list[list[int]]]
Groups = list[list[list[int]]]


def workloads() -> dict[str, np.ndarray]:
    """Lengths by name, shuffled, at most a cap each."""
    generator = np.random.default_rng(0)
    count = STEP * STEPS
    return {
        "standard library / 4": generator.permutation(np.clip(stdlib_lengths() // 4, 16, CAP)),
        "generator A": generator_a(count, CAP, 0),
        "chats": np.clip(np.exp(generator.normal(6.5, 1.0, count)), 16, CAP).astype(np.int64),
    }


def milliseconds_of(step: Dealt, tokens: np.ndarray, profile: Profile) -> float:
    """Predicted compute of the slowest rank of a step, each rank one device of the profile."""
    latency = LatencyModel(profile, SHAPE)
    stages = model_stages(SHAPE, 1, mean_context_of(tokens, int(tokens.max())))
    predictor = Predictor(latency, tuple(stages))
    asked = [
        UnplacedMicroBatch(tuple(Slice(i, 0, 0, int(tokens[i])) for i in each), 1, 0)
        for rank in step
        for each in rank
        if each
    ]
    costs = iter(estimated_costs(latency, asked))
    times = [
        [sum(predictor.action_ns(0, next(costs))) if each else 0 for each in rank] for rank in step
    ]
    return max(map(sum, times)) / 1e6


def figures(steps: list[Dealt], lengths: list[np.ndarray], profile: Profile) -> dict[str, float]:
    """Imbalance and predicted time of some steps, each with its own lengths."""
    longest = lockstep = even = milliseconds = 0.0
    for step, tokens in zip(steps, lengths, strict=True):
        work = [[sum(WORK(int(tokens[i])) for i in each) for each in rank] for rank in step]
        longest += max(map(sum, work))
        rows = range(max(map(len, work)))
        lockstep += sum(max(rank[k] if k < len(rank) else 0 for rank in work) for k in rows)
        even += sum(map(sum, work)) / len(work)
        milliseconds += milliseconds_of(step, tokens, profile)
    most = max(
        sum(int(tokens[i]) for i in each)
        for step, tokens in zip(steps, lengths, strict=True)
        for rank in step
        for each in rank
    )
    return {
        "imbalance": longest / even,
        "lockstep": lockstep / even,
        "step_ms": milliseconds / len(steps),
        "most_tokens": most,
    }


def of_groups(groups: Groups, lengths: np.ndarray) -> dict[str, Any]:
    """The same of context groups, which wait for each other, by work alone."""
    waited, shared = 0.0, {}
    for group in groups:
        sizes = {i: sum(i in own for own in group) for own in group for i in own}
        shared |= sizes
        waited += max(sum(WORK(int(lengths[i])) / sizes[i] for i in own) for own in group)
    even = sum(WORK(int(each)) for each in lengths) / len(groups[0])
    by_length: dict[str, list[int]] = {}
    for i, count in sorted(shared.items()):
        start = 1 << (int(lengths[i]) - 1).bit_length() - 1
        by_length.setdefault(f"{start + 1} to {2 * start}", []).append(count)
    return {
        "imbalance": waited / even,
        "groups": len(groups),
        "ranks_by_length": {name: [min(each), max(each)] for name, each in by_length.items()},
    }


class Packing(PlannedPacking):
    """With the attributes that Megatron's base class sets."""

    model = SHAPE
    max_seqlen_per_dp_cp_rank, cp_size, dp_size = CAP, 1, RANKS
    microbatch_group_size_per_vp_stage = None


def pairs(
    lengths: np.ndarray, clones: Path | None, profile: Profile
) -> Iterator[tuple[str, Callable[[], tuple[Any, Any]]]]:
    """Name of the peer's function, and what makes its figures and ours."""
    parts = [lengths[at : at + STEP] for at in range(0, STEP * STEPS, STEP)]
    mesh = Mesh(data=RANKS)

    def each(peer: Callable[[list[int]], Dealt], own: Callable[[np.ndarray], Dealt]) -> Any:
        return (
            figures([peer(part.tolist()) for part in parts], parts, profile),
            figures([own(part) for part in parts], parts, profile),
        )

    def planned(part: np.ndarray) -> Dealt:
        return plan_step(part, ranks=RANKS, max_tokens=CAP, model=SHAPE).micro_batches

    def by_verl(part: np.ndarray) -> Dealt:
        step = plan_step(part, ranks=RANKS, max_tokens=CAP, work=work_of_verl)
        return step.micro_batches

    def partitions(function: Any) -> Callable[[Any], Dealt]:
        return lambda part: [
            [own] for own in function([work_of_verl(int(n)) for n in part], RANKS, True)
        ]

    def theirs(part: list[int]) -> Dealt:
        module = peers.module_of("verl", "verl.utils.seqlen_balancing")
        return partitions(module.get_seqlen_balanced_partitions)(part)

    def packed(part: np.ndarray) -> Dealt:
        groups = Packing().get_groups_and_subsamples(list(enumerate(part.tolist())))
        return [[group[rank] for group in groups] for rank in range(RANKS)]

    def sampled(by_length: bool) -> Any:
        if by_length:
            each_batch = STEP // RANKS // ACCUMULATED
            steps = peers.transformers_grouped(
                lengths.tolist()[: STEP * STEPS], each_batch, RANKS, ACCUMULATED, 0
            )
        else:
            steps = peers.transformers_rebalance(
                lengths.tolist()[: STEP * STEPS], STEP, RANKS, ACCUMULATED, 0
            )
        own = BalancedBatchSampler(
            lengths[: STEP * STEPS],
            sequences=STEP,
            ranks=RANKS,
            micro_batches=ACCUMULATED,
            model=SHAPE,
        )
        return (
            figures(steps, [lengths] * len(steps), profile),
            figures(list(own.steps()), [lengths] * STEPS, profile),
        )

    def rows(part: list[int]) -> Dealt:
        found = peers.trl_rows(tuple(part), CAP, "bfd")
        micro_batches = [[document for document, _ in row] for row in found]
        return [micro_batches[rank::RANKS] for rank in range(RANKS)]

    def contexts() -> Any:
        short = CAP // 4
        found = peers.megatron_hybrid(parts[0].tolist(), RANKS, short, clones)
        own = PlannedContextParallel(short, SimpleNamespace(size=lambda: RANKS), model=SHAPE)
        groups = own.get_groups_and_subsamples(list(enumerate(parts[0].tolist())))[1]
        return of_groups(found, parts[0]), of_groups(groups, parts[0])

    def dp_balanced(part: list[int]) -> Dealt:
        if clones is None:
            raise peers.Missing("Megatron-LM")
        return peers.megatron_dp_balanced(part, mesh, CAP, clones)

    yield (
        "verl get_seqlen_balanced_partitions (equal_size)",
        lambda: each(theirs, partitions(get_seqlen_balanced_partitions)),
    )
    yield (
        "verl _balance_batch + rearrange_micro_batches",
        lambda: each(lambda part: peers.verl(part, mesh, CAP), by_verl),
    )
    yield "Megatron Core DpBalancedScheduler", lambda: each(dp_balanced, packed)
    yield "Megatron Core BalancedCPScheduler", contexts
    yield "TRL pack_dataset (bfd), rows in turn", lambda: each(rows, planned)
    yield "transformers group_by_length", lambda: sampled(True)
    yield "transformers BatchRebalanceSampler", lambda: sampled(False)


def planning_ms(repeats: int = 7) -> dict[str, float]:
    """Processor time of a plan of 10,000 sequences on 512 ranks."""
    generator = np.random.default_rng(0)
    lengths = np.clip(np.exp(generator.normal(6.8, 1.2, 10_000)), 32, 16_384).astype(np.int64)
    found: dict[str, list[float]] = {"wall": [], "processor": []}
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        plan_step(lengths, ranks=512, max_tokens=32_768, model=SHAPE)
        found["wall"].append(1e3 * (time.perf_counter() - wall))
        found["processor"].append(1e3 * (time.process_time() - processor))
    return {name: median(each) for name, each in found.items()}


def picture(path: Path, lengths: np.ndarray) -> None:
    """Work of each rank of one step, dealt in turn and planned, by micro-batch."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    part = lengths[:STEP]
    step = plan_step(part, ranks=RANKS, max_tokens=CAP, model=SHAPE)
    count = len(step.micro_batches[0])
    turns = [list(range(rank, STEP, RANKS)) for rank in range(RANKS)]
    before = [[own[k::count] for k in range(count)] for own in turns]
    even = sum(WORK(int(n)) for n in part) / RANKS
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharex=True, layout="constrained")
    colours = ("#08306b", "#4292c6", "#9ecae1", "#c6dbef")
    for axis, dealt, title in zip(
        axes, (before, step.micro_batches), ("dealt in turn", "plan_step"), strict=True
    ):
        longest = 0.0
        for rank, own in enumerate(dealt):
            start = 0.0
            for k, each in enumerate(own):
                width = sum(WORK(int(part[i])) for i in each) / even
                axis.barh(rank, width, left=start, color=colours[k % 4], edgecolor="white")
                start += width
            longest = max(longest, start)
        axis.axvline(longest, color="#e69f00", linewidth=2)
        axis.set(title=f"{title}: {longest:.2f} times the mean", yticks=range(RANKS))
        axis.set_yticklabels([f"rank {rank}" for rank in range(RANKS)])
        axis.invert_yaxis()
        axis.set_xlabel("work over the mean rank's; one colour a micro-batch")
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Compare, print a table and one JSON object."""
    made = report.parser("adapters", __doc__)
    made.add_argument("--clones", type=Path)
    made.add_argument("--profile", default="h100")
    made.add_argument("--output", type=Path)
    made.add_argument("--picture", type=Path)
    given = made.parse_args(argv)
    profile, console = Profile.load(given.profile), Console(width=180)
    table: list[dict[str, Any]] = []
    for workload, lengths in workloads().items():
        for name, run in pairs(lengths, given.clones, profile):
            try:
                peer, own = run()
            except peers.Missing as missing:
                console.print(f"{name}: {missing} is missing")
                continue
            table.append({"lengths": workload, "peer": name, "theirs": peer, "ours": own})
    plan = planning_ms()
    lines = [
        "| lengths | peer's function | imbalance | lockstep | step (ms) | most tokens |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in table:
        cells = []
        for name, form in (
            ("imbalance", "{:.3f}"), ("lockstep", "{:.3f}"), ("step_ms", "{:,.0f}"),
            ("most_tokens", "{:,.0f}"),
        ):  # fmt: skip
            sides = [
                form.format(row[s][name]) if name in row[s] else "" for s in ("theirs", "ours")
            ]
            cells.append(" → ".join(sides) if any(sides) else "")
        lines.append(f"| {row['lengths']} | {row['peer']} | {' | '.join(cells)} |")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"plan_step, 10,000 sequences on 512 ranks: {plan}")
    result = {"script": "adapters", "simulated": True, "profile": profile.name, "rows": table}
    result |= {"ranks": RANKS, "cap": CAP, "documents_per_step": STEP, "plan_step_ms": plan}
    if given.picture is not None:
        picture(given.picture, workloads()["standard library / 4"])
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
        page = [
            "# Adapters against their peers",
            "",
            f"Simulated by `python -m benchmarks.adapters`, profile {profile.name}, a 7B model on"
            f" {RANKS} ranks, {STEP} documents a step, cap {CAP:,} tokens: theirs → ours. Of"
            " `BalancedCPScheduler` only work is compared, with a quarter of the cap on a rank.",
            "",
            *lines,
            "",
            f"`plan_step` of 10,000 sequences on 512 ranks: {plan['processor']:.0f} ms of processor"
            f" time, {plan['wall']:.0f} ms on the clock (a busy machine of two cores).",
        ]
        given.output.with_suffix(".md").write_text("\n".join(page) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
