"""What ``compile=True`` saves on a CPU: forward and backward, compiled and not, in turn.

    python -m benchmarks.compiled

Two models of the same random weights run the same documents, of another length in every round, in
one process of one thread. Compared is processor time, the median over rounds that run both in turn,
so that other processes hardly count; the first round, in which everything is compiled, is shown by
itself. What is saved on a CPU says little about a GPU, where element-wise work is dearer beside
matrix products: there ``--device cuda --dtype bfloat16 --dim 2048 --words 128256 --tokens 16384``,
which nobody has run yet. The last line of the output is one JSON object; ``--output FOLDER`` also
writes it.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from torch._dynamo.utils import counters

import lightning_wlb as wlb
from benchmarks import report
from benchmarks.sliced_attention import VOCABULARY, batch_of
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.models.transformer import Transformer


def model_of(dim: int, layers: int, words: int) -> Transformer:
    """A model of random weights, always the same."""
    model = Transformer(
        wlb.TransformerConfig(
            dim=dim,
            layers=layers,
            heads=dim // 64,
            kv_heads=max(dim // 128, 1),
            ffn_dim=dim * 11 // 4,
            vocab_size=words,
        )
    )
    model.initialise(0)
    return model


def seconds(model: Transformer, batch: StepBatch) -> tuple[float, float]:
    """Time of forward and of backward."""
    (micro_batch,) = batch.micro_batches
    begin = now(micro_batch.positions.device)
    loss = model(micro_batch)
    between = now(micro_batch.positions.device)
    loss.backward()
    return between - begin, now(micro_batch.positions.device) - between


def now(device: torch.device) -> float:
    """Seconds of a clock: the processor's, or the wall's once a GPU has done its work."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = report.parser("compiled", __doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of the longest document")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--words", type=int, default=VOCABULARY, help="of the vocabulary")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=9, help="the first is not counted")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype, device = getattr(torch, arguments.dtype), arguments.device
    models = {
        name: model_of(arguments.dim, arguments.layers, arguments.words).to(device, dtype)
        for name in ("eager", "compiled")
    }
    models["compiled"].compile_blocks()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for number in range(arguments.rounds):
        batch = batch_of(1, arguments.tokens - 61 * (number % 5), 1).to(device)
        for name in models if number % 2 else reversed(models):
            times[name].append(seconds(models[name], batch))
    pairs = list(zip(times["compiled"][1:], times["eager"][1:], strict=True))
    ratios = [sum(own) / sum(other) for own, other in pairs]
    settings = ("tokens", "dim", "layers", "words", "dtype")
    made = {
        "benchmark": "compiled",
        "measured": True,
        "device": "CPU, one process of one thread, processor time"
        if device == "cpu"
        else torch.cuda.get_device_name(),
        **{name: getattr(arguments, name) for name in settings},
        "rounds": arguments.rounds - 1,
        "graphs_compiled": counters["stats"]["unique_graphs"],
        "first_round_seconds": sum(times["compiled"][0]),
        "ratio_median": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "forward_ratio_median": statistics.median(own[0] / other[0] for own, other in pairs),
        "backward_ratio_median": statistics.median(own[1] / other[1] for own, other in pairs),
    }
    report.finish(made, arguments.output and arguments.output / "compiled")


if __name__ == "__main__":
    main()
