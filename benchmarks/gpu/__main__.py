"""An hour on one GPU: is it right, how fast, and as predicted; in parts of under ten minutes.

1. *right*: the tests marked ``gpu``, and gradients against one process, on this device.
2. *profile*: device profiles of the layers of 7b and llama3-8b, and their error on what was held
   out; the files serve ``lightning-wlb plan --profile`` and the parts below.
3. *train*: a decoder of a billion parameters at 128K on Generator A, ``original`` and ``auto`` in
   turn: step time, tokens per second, MFU and memory, beside their prediction.
4. *papers*: WLB-LLM's Figures 10 and 15, and our call over the bare kernel.
5. *trace*: one profiled step, and where its time goes.

``--part`` takes a number or a name. Results are in ``gpu_<name>.json`` under ``--output``, and as
tables beside it, written after each row: a row that fails with its error, and the names of rows for
which no time was left. The last line is one JSON object. The exit status is 1 where a row failed or
was left out.

``--device cpu --small`` runs every line that needs no CUDA device, in tiny sizes, for tests. This
project has not run it on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import report
from benchmarks.gpu import papers, profile, right, trace, train
from benchmarks.gpu.recording import Run, record

PARTS: dict[str, ModuleType] = {
    "right": right,
    "profile": profile,
    "train": train,
    "papers": papers,
    "trace": trace,
}
"""In order of their numbers, from 1; each has ``rows(run)`` and ``summary(done)``."""


def part(text: str) -> str:
    """The name of a part from its number or name."""
    names = list(PARTS)
    if text.isdigit() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    if text in names:
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is none of 1 to {len(names)}, {', '.join(names)}")


def main(argv: list[str] | None = None) -> int:
    """Run one part; the exit status."""
    parser = report.parser("gpu", __doc__)
    parser.epilog = (__doc__ or "").partition("\n\n")[2]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--part", type=part, required=True, help="1 to 5, or its name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the program")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds (default 540)")
    parser.add_argument(
        "--output", type=Path, help="folder for results (default, but for --small: results)"
    )
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu --small tries the program without.")
    if arguments.limit <= 0:
        parser.error(f"--limit {arguments.limit:g}: give seconds above 0.")
    if arguments.device == "cpu" and not arguments.small:
        parser.error("--device cpu: real sizes take days on it. Add --small.")
    if arguments.small and arguments.output is None:
        parser.error("--small: give --output, or its figures would replace real ones.")
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    output = arguments.output or Path(__file__).parents[1] / "results"
    output.mkdir(parents=True, exist_ok=True)
    run = Run(device, arguments.small, output, arguments.limit)
    chosen = PARTS[arguments.part]
    result = record(
        arguments.part,
        chosen.rows(run),
        run,
        chosen.summary,
        lambda line: print(line, flush=True),
    )
    if arguments.part == "papers":
        done = {name: row for name, row in result["rows"].items() if "error" not in row}
        papers.draw(done, result["device"], output / "gpu_papers.png")
    print(json.dumps(result), flush=True)
    failed = any("error" in row for row in result["rows"].values())
    return int(failed or bool(result["left_out"]))


if __name__ == "__main__":
    raise SystemExit(main())
