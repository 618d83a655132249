"""How many rows the loss head should take at a time on a CPU; torch's own loss beside it.

    python -m benchmarks.loss_head

Forward and backward of one micro-batch's loss, by our function with several numbers of rows at a
time, by torch's with the same and with its own choice. Compared is processor time of one thread,
the median over rounds that run all in turn, as ratios to our function with the fewest rows. The
last line of the output is one JSON object; ``--output FOLDER`` also writes it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import report
from lightning_wlb.models import loss

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(rows: int) -> Loss:
    """Our function with so many rows at a time."""

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss.chunk_rows = lambda words, accelerator: rows
        return loss.token_loss(hidden, weight, labels)

    return run


def of_torch(rows: int | None) -> Loss:
    """Torch's function with so many rows at a time; None: its own choice."""
    own = {} if rows is None else {"batch_chunk_size": rows}

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions(**own)
        losses = F.linear_cross_entropy(hidden, weight, labels, reduction="none", options=options)
        return losses.sum()

    return run


def seconds(function: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    """Processor time of forward and backward."""
    begin = time.process_time()
    torch.autograd.grad(function(hidden, weight, labels), (hidden, weight))
    return time.process_time() - begin


def main() -> None:
    parser = report.parser("loss_head", __doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--words", type=int, default=16_384)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    hidden = torch.randn(arguments.rows, arguments.dim).to(dtype).requires_grad_()
    weight = (torch.randn(arguments.words, arguments.dim) / 50).to(dtype).requires_grad_()
    labels = torch.randint(0, arguments.words, (arguments.rows,))
    functions = {f"ours_{rows}": ours(rows) for rows in arguments.chunks}
    if hasattr(F, "linear_cross_entropy"):
        functions |= {f"torch_{rows}": of_torch(rows) for rows in arguments.chunks}
        functions["torch_own_choice"] = of_torch(None)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(arguments.rounds):
        for name in functions if number % 2 else reversed(functions):
            times[name].append(seconds(functions[name], hidden, weight, labels))
    first = times[f"ours_{arguments.chunks[0]}"]
    made = {
        "benchmark": "loss_head",
        "measured": True,
        "device": "CPU, one process of one thread, processor time",
        **{name: getattr(arguments, name) for name in ("rows", "dim", "words", "dtype", "rounds")},
        "microseconds_per_row": 1e6 * statistics.median(first) / arguments.rows,
        "ratio_median": {
            name: statistics.median(own / other for own, other in zip(each, first, strict=True))
            for name, each in times.items()
        },
    }
    report.finish(made, arguments.output and arguments.output / "loss_head")


if __name__ == "__main__":
    main()
