"""The tables that :class:`.ImbalanceMonitor` prints at the end of fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from lightning_wlb.mesh import AXES

_SHOWN = 16
"""Pipelines of a strategy that have a row each."""


def ranks_in_words(sizes: Mapping[str, int]) -> str:
    """``data 2 × context 4``: the axes that have more than one rank."""
    several = [f"{axis} {sizes[axis]}" for axis in AXES if sizes.get(axis, 1) > 1]
    return " × ".join(several) or "one device"


def strategies_table(strategies: Sequence[Mapping[str, Any]]) -> Table:
    """A run's :meth:`.ImbalanceMonitor.strategies` as a table: a row for each and each pipeline."""
    table = Table(
        title="Steps by strategy",
        caption=(
            "Time: of a strategy mean of its steps, of a pipeline what a rank computes in one;"
            " warm-up left out on each strategy. Predicted: by the profile."
        ),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for heading in ("steps", "time (s)", "predicted", "imbalance, data"):
        table.add_column(heading, justify="right")
    for each in strategies:
        table.add_section()
        name = f"strategy {each['strategy']}" if each["strategy"] else "mesh"
        times = each["seconds_per_step"], each["seconds_per_step_predicted"]
        balance = each["imbalance_data_aggregate"]
        table.add_row(name, str(each["steps"]), *map(_shown, (*times, balance)))
        pipelines = each["pipelines"]
        for own in pipelines[:_SHOWN]:
            first, last = own["ranks"]
            name = f"  ranks {first}-{last}: {ranks_in_words(own)}"
            times = own["compute_seconds"], own["compute_seconds_predicted"]
            table.add_row(name if last > first else f"  rank {first}", "", *map(_shown, times))
        if len(pipelines) > _SHOWN:
            table.add_row(f"  and {len(pipelines) - _SHOWN} more pipelines")
    return table


def summary_table(summary: dict[str, float], mesh: str) -> Table:
    """A run's :meth:`.ImbalanceMonitor.summary` as a table.

    Args:
        summary: of the run; figures that are not a number are left out or shown as a dash.
        mesh: what the title calls the mesh.
    """
    table = Table(
        title=f"Imbalance and throughput, {mesh}",
        caption=(
            f"{summary['steps']} steps, {summary['tokens']:,} tokens; measured over"
            f" {summary['timed_steps']} steps, warm-up left out."
            " Imbalance degree: 1 = balanced; aggregate: sums over all steps."
        ),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")
    for heading in ("mean", "p99", "aggregate"):
        table.add_column(heading, justify="right")
    for rows in (_imbalance(summary), _throughput(summary), _delay(summary)):
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def _imbalance(summary: dict[str, float]) -> Iterator[tuple[str, ...]]:
    for level in ("pipeline", "data", "context"):
        for suffix, name in (
            ("", f"imbalance, {level} level"),
            ("_planned", "  as planned (FLOPs)"),
            ("_predicted", "  as predicted (profile)"),
        ):
            figures = [
                summary.get(f"imbalance_{level}{suffix}_{how}", math.nan)
                for how in ("mean", "p99", "aggregate")
            ]
            # A plan has no context level, and without a profile nothing is predicted.
            if not suffix or not math.isnan(figures[0]):
                yield name, *map(_shown, figures)


def _throughput(summary: dict[str, float]) -> Iterator[tuple[str, ...]]:
    yield (
        "step time (s)",
        _shown(summary["seconds_per_step"]),
        _shown(summary["seconds_per_step_p99"]),
    )
    if not math.isnan(summary["seconds_per_step_predicted"]):
        yield "  as predicted (profile)", _shown(summary["seconds_per_step_predicted"])
    yield (
        "wait for the loader (s)",
        _shown(summary["loader_wait_seconds"]),
        _shown(summary["loader_wait_seconds_p99"]),
        f"{summary['loader_wait_share']:.1%}",
    )
    yield "time per million tokens (s)", "", "", _shown(summary["seconds_per_million_tokens"])
    yield "tokens per step", f"{summary['tokens_per_step']:,.0f}"
    yield "tokens/s per device", "", "", f"{summary['tokens_per_second_per_device']:,.0f}"
    yield "model TFLOP/s per device", "", "", f"{summary['tflops_per_device']:.3g}"
    if "mfu" in summary:
        yield "model FLOP utilisation", "", "", f"{summary['mfu']:.1%}"


def _delay(summary: dict[str, float]) -> Iterator[tuple[str, ...]]:
    yield "delay (steps)", _shown(summary["delay_mean"]), f"max {summary['delay_max']:.0f}"
    if summary["drain_steps"]:
        name = f"  in the {summary['drain_steps']} drain steps"
        yield name, _shown(summary["delay_mean_drain"])


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"
