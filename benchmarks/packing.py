"""How well packing methods balance Generator A: imbalance degree, tokens per step, delay, time.

All methods pack the same pieces, those that ``original`` cuts from the stream; the cost is one
layer of LLaMA2-7B (benchmarks/workloads.py). The steps measured end before the epoch does, so no
drain step is among them, and the pieces that then still wait are not in the delay.

Run ``python -m benchmarks.packing --help``. Prints a table and then, as its last line, one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import (
    CALIBRATION_DOCUMENTS,
    REFERENCE_WORK,
    documents_for,
    generator_a,
    window_pieces,
)
from lightning_wlb.plan import StepPlan
from lightning_wlb.planning import DataSettings, Planner

CALIBRATION_SEED = 0
CALIBRATION_TARGET = 1.434
CALIBRATION_TOLERANCE = 0.02


def micro_batch_work(plan: StepPlan, forward_only: bool) -> list[int]:
    """FLOPs of the plan's micro-batches; empty ones, which a plan leaves out, are not listed."""
    work = REFERENCE_WORK.forward if forward_only else REFERENCE_WORK.total
    return [
        sum(work(piece.tokens, piece.context) for piece in replica.slices_of(group))
        for replica in plan.replicas
        for group in replica.forward
    ]


def measure(pieces: np.ndarray, data: DataSettings, steps: int) -> dict[str, Any]:
    """Plan ``steps`` steps over pieces that arrive in the given order.

    Returns:
        Imbalance degrees max·N/Σ over steps (mean, 99th percentile, and the aggregate
        N·Σmax/ΣW) of forward and backward, the mean of forward alone; tokens per step over N·C;
        delay in steps, mean over tokens and maximum; milliseconds per plan.
    """
    planner = Planner(pieces, data, REFERENCE_WORK.total)
    plans: list[StepPlan] = []
    begin = time.perf_counter()
    for _ in range(steps):
        plan = planner.next_step()
        if plan is None or plan.drain:
            break
        plans.append(plan)
    seconds = time.perf_counter() - begin
    count = data.micro_batches
    total, forward = (
        np.array([[max(loads), sum(loads)] for loads in (micro_batch_work(p, only) for p in plans)])
        for only in (False, True)
    )
    degrees = total[:, 0] * count / total[:, 1]
    tokens = np.array([plan.tokens for plan in plans])
    delays = np.array([plan.delay for plan in plans])
    return {
        "steps": len(plans),
        "imbalance_mean": float(degrees.mean()),
        "imbalance_p99": float(np.percentile(degrees, 99)),
        "imbalance_aggregate": float(total[:, 0].sum() * count / total[:, 1].sum()),
        "imbalance_forward_mean": float((forward[:, 0] * count / forward[:, 1]).mean()),
        "tokens_per_step": float(tokens.mean() / data.nominal_tokens),
        "delay_mean": float((delays * tokens).sum() / tokens.sum()),
        "delay_max": max(plan.max_delay for plan in plans),
        "ms_per_plan": 1e3 * seconds / len(plans),
    }


def calibration(window: int = 131_072, micro_batches: int = 4) -> dict[str, Any]:
    """The forward imbalance of ``original`` on Generator A, which must be 1.434 ± 0.02."""
    lengths = generator_a(CALIBRATION_DOCUMENTS, window, CALIBRATION_SEED)
    data = DataSettings(window, micro_batches, packing="original", shuffle=False)
    planner = Planner(lengths, data, REFERENCE_WORK.total)
    degrees = []
    for _ in range(int(lengths.sum()) // data.nominal_tokens):
        plan = planner.next_step()
        assert plan is not None
        loads = micro_batch_work(plan, forward_only=True)
        degrees.append(max(loads) * micro_batches / sum(loads))
    value = float(np.mean(degrees))
    return {
        "documents": CALIBRATION_DOCUMENTS,
        "seed": CALIBRATION_SEED,
        "imbalance_forward_mean": value,
        "passed": abs(value - CALIBRATION_TARGET) <= CALIBRATION_TOLERANCE,
    }


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per method, queues and cap: means over seeds (maxima for the greatest delay)."""
    window, count = arguments.window, arguments.micro_batches
    documents = documents_for(arguments.steps, count, window)
    streams = [
        window_pieces(generator_a(documents, window, seed), window) for seed in arguments.seeds
    ]
    settings = [DataSettings(window, count, packing="original", shuffle=False)]
    settings += [
        DataSettings(
            window, count, packing="wlb", cap=int(cap * window), queues=queues, shuffle=False
        )
        for cap in arguments.caps
        for queues in arguments.queues
    ]
    table = []
    for data in settings:
        runs = [measure(pieces, data, arguments.steps) for pieces in streams]
        row: dict[str, Any] = {
            "packing": data.packing,
            "queues": data.queues if data.packing == "wlb" else 0,
            "cap": data.token_cap / window,
            "documents": documents,
        }
        for name in runs[0]:
            values = [run[name] for run in runs]
            row[name] = max(values) if name == "delay_max" else round(float(np.mean(values)), 4)
        table.append(row)
    return table


def show(table: list[dict[str, Any]], gate: dict[str, Any], console: Console) -> None:
    """Print the rows, and the calibration gate as the caption."""
    shown = Table(
        title="Packing on Generator A",
        caption=(
            f"calibration gate, original, forward alone: {gate['imbalance_forward_mean']:.3f}"
            f" ({'passed' if gate['passed'] else 'FAILED'},"
            f" {CALIBRATION_TARGET} ± {CALIBRATION_TOLERANCE})"
        ),
    )
    columns = {
        "packing": "packing",
        "queues": "queues",
        "cap": "cap (C)",
        "imbalance_mean": "imbalance mean",
        "imbalance_p99": "p99",
        "imbalance_aggregate": "aggregate",
        "imbalance_forward_mean": "forward mean",
        "tokens_per_step": "tokens/step (N·C)",
        "delay_mean": "delay mean (steps)",
        "delay_max": "max",
        "ms_per_plan": "ms/plan",
    }
    for title in columns.values():
        shown.add_column(title, justify="left" if title == "packing" else "right")
    for row in table:
        shown.add_row(
            *(
                f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name])
                for name in columns
            )
        )
    console.print(shown)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packing", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=300, help="steps per seed (default 300)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument("--window", type=int, default=131_072, help="C in tokens (default 131072)")
    parser.add_argument("--micro-batches", type=int, default=4, help="N of a step (default 4)")
    parser.add_argument(
        "--queues", type=int, nargs="+", default=[1, 2, 3], help="outlier queues (default 1 2 3)"
    )
    parser.add_argument(
        "--caps",
        type=float,
        nargs="+",
        default=[1.25, 1.5, 2.0],
        help="caps in windows (default 1.25 1.5 2)",
    )
    arguments = parser.parse_args(argv)
    gate = calibration()
    table = rows(arguments)
    show(table, gate, Console(width=150))
    print(json.dumps({"benchmark": "packing", **vars(arguments), "gate": gate, "rows": table}))


if __name__ == "__main__":
    main()
