"""Ten million documents: when a planner and a first batch are there, and in how much memory.

Stores of flat arrays and of an Arrow file are made in a temporary folder, of 1 to 39 tokens a
document as 16-bit numbers, and removed at the end. Each case runs in a process of its own, and does
what a rank does: store, planner, mean context, first batch, state after some steps, and the first
batch of a loader's worker with all that it needs. Memory is what the process has resident above
what it had when the store was open: at its most until the first batch is read, and then without the
pages of the mapped tokens, which all processes share and the system takes back when it needs them.

Run ``python -m benchmarks.scale --help``. Prints a table and then, as its last line, one JSON
object. Needs Linux, and a gigabyte of disk for ten million documents.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

import lightning_wlb as wlb
from benchmarks import report
from lightning_wlb.data.batch import make_step_batch
from lightning_wlb.data.open_documents import hold_out
from lightning_wlb.data.stores.document_store import Array, CheckedDocuments
from lightning_wlb.prediction.predictor import mean_context_of

CASES = (("flat", "auto", 0), ("flat", "wlb", 0), ("flat", "auto", 10_000), ("arrow", "auto", 0))
"""Kind of store, packing, and how many documents are held out for validation."""
LIMITS = {"ready_seconds": 5.0, "memory_mb": 200.0, "batch_seconds": 1.0}
SETTINGS = {"context_window": 4096, "micro_batches": 8}
MOST_TOKENS = 39
STEPS = 20
VOCABULARY = 32_000
ROWS = 1000
"""Rows of a record batch of the Arrow file: as many as the datasets library writes."""


class FlatDocuments(CheckedDocuments):
    """A store of one's own: one array of tokens, and where each document begins in it."""

    def __init__(self, folder: Path) -> None:
        self._array = np.asarray(np.load(folder / "tokens.npy", mmap_mode="r"))
        self._offsets = np.asarray(np.load(folder / "offsets.npy", mmap_mode="r"))
        super().__init__("FlatDocuments", np.diff(self._offsets), VOCABULARY)

    def _tokens(self, row: int, start: int, stop: int) -> Array:
        begin = int(self._offsets[row])
        return self._array[begin + start : begin + stop]


def make_stores(folder: Path, documents: int) -> dict[str, Any]:
    """Stores of the same random documents; what :func:`opened` opens each by."""
    rng = np.random.default_rng(0)
    offsets = np.zeros(documents + 1, np.int64)
    np.cumsum(rng.integers(1, MOST_TOKENS + 1, documents), out=offsets[1:])
    tokens = rng.integers(0, VOCABULARY, int(offsets[-1]), np.uint16)
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "tokens.npy", tokens)
    arrow = str(folder / "documents.arrow")
    schema = pa.schema([("input_ids", pa.list_(pa.uint16()))])
    with pa.ipc.new_stream(arrow, schema) as writer:
        for first in range(0, documents, ROWS):
            own = offsets[first : first + ROWS + 1]
            lists = pa.ListArray.from_arrays(
                (own - own[0]).astype(np.int32), tokens[own[0] : own[-1]]
            )
            writer.write_batch(pa.record_batch([lists], schema=schema))
    return {"flat": folder, "arrow": arrow}


def opened(kind: str, source: Any) -> wlb.DocumentStore:
    """The store of a case."""
    if kind == "flat":
        return FlatDocuments(source)
    return wlb.documents(source, vocab_size=VOCABULARY)


def megabytes(field: str) -> float:
    """A field of this process's memory as Linux counts it, such as ``VmRSS``, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"/proc/self/status has no {field}. This benchmark needs Linux.")


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that it took, and its result."""
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def case(kind: str, source: Any, packing: str, held_out: int) -> dict[str, Any]:
    """Everything that is measured of one case, in a process that has opened nothing yet."""
    opening, store = timed(lambda: opened(kind, source))
    # The most that was resident, counted anew from here on.
    Path("/proc/self/clear_refs").write_text("5")
    begin, own = megabytes("VmRSS"), megabytes("RssAnon")
    shape = wlb.TransformerConfig.preset("tiny", vocab_size=VOCABULARY).shape
    data = wlb.DataSettings(packing=packing, **SETTINGS)

    def ready() -> tuple[wlb.StepDataset, Any]:
        kept = hold_out(store, held_out, 0, "held_out")[0] if held_out else store
        dataset = wlb.StepDataset.for_model(kept, data, shape)
        return dataset, dataset.planner()

    planner_seconds, (dataset, planner) = timed(ready)
    lengths = np.asarray(dataset.store.lengths)
    mean_context, _ = timed(lambda: mean_context_of(lengths, data.context_window))

    def first_batch() -> Any:
        # As StepDataset does, which plans one step ahead.
        plan, state = planner.next_step(), planner.state_dict()
        following = planner.next_step()
        return make_step_batch(
            plan, dataset.store, dataset.rank, state, following.digest, False, None, VOCABULARY
        )

    most = megabytes("VmHWM") - begin
    batch_seconds, _ = timed(first_batch)
    memory = max(most, megabytes("RssAnon") - own)
    for _ in range(STEPS):
        planner.next_step()
    state = planner.state_dict()
    # The worker makes a planner of its own, from the beginning.
    loader = wlb.StepLoader(dataset, num_workers=1)
    worker_seconds, _ = timed(lambda: next(iter(loader)))
    row: dict[str, Any] = {
        "store": kind,
        "packing": packing,
        "held_out": held_out,
        "opening_seconds": opening,
        "planner_seconds": planner_seconds,
        "ready_seconds": opening + planner_seconds,
        "mean_context_seconds": mean_context,
        "batch_seconds": batch_seconds,
        "first_batch_of_a_worker_seconds": worker_seconds,
        "memory_mb": memory,
        "process_mb": begin,
        "state_bytes": len(json.dumps(state)),
    }
    return {
        name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("scale", __doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--output", type=Path, help="also write the result to this .json")
    arguments = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sources = make_stores(Path(folder), arguments.documents)
        for kind, packing, held_out in CASES:
            # Spawned: a fork would begin with this process's memory.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                rows.append(process.submit(case, kind, sources[kind], packing, held_out).result())
    passed = all(row[name] <= limit for row in rows for name, limit in LIMITS.items())
    headings = [name.replace("_", " ") for name in rows[0]]
    cells = [[str(value) for value in row.values()] for row in rows]
    title = f"{arguments.documents:,} documents"
    Console(width=200).print(report.table(title, headings, cells))
    report.finish(
        {
            "benchmark": "scale",
            "documents": arguments.documents,
            "python": sys.version.split()[0],
            "limits": LIMITS,
            "passed": passed,
            "rows": rows,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
