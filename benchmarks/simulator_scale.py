"""How long the simulator takes: one large pipeline, and a step of 1,024 pipeline ranks.

Everything that a prediction needs is timed: the programs, their graph, a duration, a transfer and
the bytes of every action, all times, and each rank's idle time and peak memory. "New" rows make
programs and graph anew in every run, "again" rows find them made by an earlier step of the same
shape. The limits hold for the process's own CPU time, which is the wall-clock time of a core that
nothing else uses; the wall-clock time of this run stands beside it.

Run ``python -m benchmarks.simulator_scale --help``. Prints a table and then, as its last line, one
JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from rich.console import Console

from benchmarks import report
from lightning_wlb.schedule.action_graph import graph_of
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.programs import make_programs
from lightning_wlb.schedule.simulator import simulate_replicas

# (name, schedule, replicas, ranks, micro-batches, stages per rank, limit in ms or None)
CASES = (
    ("one pipeline", "1f1b", 1, 16, 64, 1, 5.0),
    ("one pipeline", "interleaved", 1, 16, 64, 2, None),
    ("1,024 ranks", "1f1b", 64, 16, 16, 1, 100.0),
    ("1,024 ranks, counts differ", "1f1b", 64, 16, None, 1, None),
)


def milliseconds(
    run: Callable[[], Any], repeats: int, new: bool
) -> tuple[list[float], list[float]]:
    """Wall-clock and CPU time of each run but the first."""
    wall, own = [], []
    run()
    for _ in range(repeats):
        if new:
            graph_of.cache_clear()
            programs_of.cache_clear()
        begin = time.perf_counter(), time.process_time()
        run()
        wall.append(1e3 * (time.perf_counter() - begin[0]))
        own.append(1e3 * (time.process_time() - begin[1]))
    return wall, own


programs_of = lru_cache(make_programs)


def step(
    schedule: str, replicas: int, ranks: int, micro_batches: int | None, virtual_stages: int
) -> int:
    """Simulate one step of unequal micro-batches; None stands for 9 to 16 of them."""
    counts = [micro_batches or 9 + replica % 8 for replica in range(replicas)]
    sizes = [1_000_000 + 7_919 * index for index in range(max(counts))]

    def duration(replica: int, action: Action) -> int:
        return (sizes[action.micro_batch] + replica) * (1 if action.kind == "F" else 2)

    def transfer(replica: int, action: Action) -> int:
        return sizes[action.micro_batch] // 50

    def opened(replica: int, action: Action) -> int:
        return sizes[action.micro_batch] * 8

    found = simulate_replicas(
        [programs_of(schedule, ranks, count, virtual_stages) for count in counts],
        duration,
        transfer,
        opened_bytes=opened,
    )
    for each in found:
        assert min(each.idle_ns) >= 0
        assert min(each.peak_bytes) > 0
    return found[0].total_ns


def rows(repeats: int) -> list[dict[str, Any]]:
    table = []
    for name, schedule, replicas, ranks, micro_batches, virtual_stages, limit in CASES:
        shape = (schedule, replicas, ranks, micro_batches, virtual_stages)
        for new in (True, False):
            wall, own = milliseconds(partial(step, *shape), repeats, new)
            cpu = statistics.median(own)
            row = {
                "case": f"{name}, {'new' if new else 'again'}",
                "schedule": schedule,
                "replicas": replicas,
                "ranks": ranks,
                "micro_batches": micro_batches or "9-16",
                "virtual_stages": virtual_stages,
                "cpu_ms_median": round(cpu, 2),
                "cpu_ms_max": round(max(own), 2),
                "wall_ms_median": round(statistics.median(wall), 2),
                "limit_ms": limit,
                "passed": None if limit is None else cpu <= limit,
            }
            table.append(row)
    return table


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("simulator_scale", __doc__)
    parser.add_argument("--repeats", type=int, default=30, help="timed runs per case (default 30)")
    arguments = parser.parse_args(argv)
    table = rows(arguments.repeats)
    title = f"Simulator, one step, {arguments.repeats} repeats, one core"
    headings = [heading.replace("_", " ") for heading in table[0]]
    cells = [["" if value is None else str(value) for value in row.values()] for row in table]
    Console(width=150).print(report.table(title, headings, cells))
    report.finish(
        {
            "benchmark": "simulator_scale",
            "repeats": arguments.repeats,
            "python": sys.version.split()[0],
            "rows": table,
        }
    )


if __name__ == "__main__":
    main()
