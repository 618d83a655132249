"""What it costs to compare a checkpoint with its manifest while it is read.

One process reads a checkpoint of random weights and their AdamW state, in turns with and without
``WLBStrategy(verify_checkpoints=True)``, once from memory (*warm*) and once after the system was
asked to forget the files (*cold*). Medians of the seconds on the clock, and the fewest seconds of
the processor. The comparison is a thread's: where no processor is free its seconds add up.

Run ``python -m benchmarks.verify_checkpoint --help``. Prints a table and then, as its last line,
one JSON object.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks import report
from lightning_wlb.checkpoints import sharded, writing

WIDTH = 1024
LAYER_BYTES = WIDTH * WIDTH * 4 * 3  # a weight and its two moments


def forget(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, layers: int, repeats: int) -> list[dict[str, Any]]:
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = folder / "run.ckpt"
    writing.write(path, sharded.collect(model, [optimizer], {}, {}))
    rows = []
    for cold in (False, True):
        clock: dict[bool, list[float]] = {False: [], True: []}
        processor: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(repeats):
            for verify in (False, True):
                if cold:
                    forget(path)
                began, spent = time.perf_counter(), time.process_time()
                sharded.load(path, model, [optimizer], {}, None, verify=verify)
                clock[verify].append(time.perf_counter() - began)
                processor[verify].append(time.process_time() - spent)
        rows += [
            {
                "files": "cold" if cold else "warm",
                "verified": verify,
                "seconds": round(median(clock[verify]), 3),
                "processor_seconds": round(min(processor[verify]), 3),
            }
            for verify in (False, True)
        ]
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("verify_checkpoint", __doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="to read (default 1000)")
    parser.add_argument("--repeats", type=int, default=7, help="of each kind (default 7)")
    parser.add_argument("--output", type=Path, help="JSON file to write as well")
    arguments = vars(parser.parse_args(argv))
    output = arguments.pop("output")
    layers = max(arguments["megabytes"] * 10**6 // LAYER_BYTES, 1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), layers, arguments["repeats"])
    headings = [heading.replace("_", " ") for heading in rows[0]]
    cells = [[str(value) for value in row.values()] for row in rows]
    Console(width=120).print(report.table("Reading a checkpoint", headings, cells))
    report.finish({"benchmark": "verify_checkpoint", **arguments, "rows": rows}, output)


if __name__ == "__main__":
    main()
