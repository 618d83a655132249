"""What slicing pieces costs besides balance: one step whole and in slices, in one process.

    python -m benchmarks.sliced_attention

The same documents run in micro-batches of a whole document each, and cut into slices that read
each other's keys and values. The step is that of the executor on one rank without a pipeline, so
what differs is attention over slices: calls, copies of keys, gradients on their way to their
owners, and smaller matrix products. Compared is processor time of one thread, the median over
rounds that run both in turn, so that other processes hardly count. The last line of the output is
one JSON object; ``--output FOLDER`` also writes it.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

import lightning_wlb as wlb
from benchmarks import report
from lightning_wlb.data.batch import StepBatch, make_step_batch
from lightning_wlb.distributed.process_groups import NO_GROUPS
from lightning_wlb.mesh import Rank
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import MicroBatch, Piece, ReplicaPlan, Slice, StepPlan, symmetric_backward
from lightning_wlb.schedule.programs import program_of
from lightning_wlb.sharding import layout
from lightning_wlb.training.executor import Step
from lightning_wlb.training.pipeline_messages import Messages, PipelineRank

VOCABULARY = 256


def batch_of(documents: int, tokens: int, slices: int) -> StepBatch:
    """Documents of ``tokens`` tokens, each in so many slices, each slice a micro-batch."""
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, VOCABULARY, tokens) for _ in range(documents)]
    cuts = [tokens * number // slices for number in range(slices + 1)]
    parts = [
        Slice(document, 0, start, stop)
        for document in range(documents)
        for start, stop in pairwise(cuts)
    ]
    forward = tuple(
        MicroBatch((number,), "hybrid", layout("hybrid", [part.tokens], 1, 1).rows, (0,))
        for number, part in enumerate(parts)
    )
    replica = ReplicaPlan(tuple(parts), forward, symmetric_backward(parts, forward))
    plan = StepPlan(
        step=0,
        epoch=0,
        replicas=(replica,),
        pieces=tuple(Piece(number, 0, tokens, 0) for number in range(documents)),
        target_tokens=documents * (tokens - 1),
        cap=tokens,
        micro_batches=len(forward),
        nominal_tokens=documents * tokens,
    ).validate()
    store = wlb.InMemoryDocuments(texts, vocab_size=VOCABULARY)
    return make_step_batch(plan, store, Rank(), {}, 0, False)


def seconds(model: Transformer, batch: StepBatch) -> float:
    """Processor time of one step."""
    pipeline = PipelineRank(
        rank=Rank(),
        stages=(range(len(model.layers)),),
        schedule="1f1b",
        groups={},
        hidden_size=model.config.dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    begin = time.process_time()
    messages = Messages(pipeline, {})
    step = Step(model, pipeline, NO_GROUPS, batch, messages, batch.target_tokens)
    for action in program_of(pipeline.schedule, 0, 1, 1, batch.plan.replicas, 0):
        step.run(action)
    return time.process_time() - begin


def main() -> None:
    parser = report.parser("sliced_attention", __doc__)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=6_800, help="of each document")
    parser.add_argument("--slices", type=int, default=4, help="of each document")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="the first is not counted")
    parser.add_argument("--output", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = Transformer(
        wlb.TransformerConfig(
            dim=arguments.dim,
            layers=arguments.layers,
            heads=arguments.heads,
            kv_heads=arguments.heads,
            ffn_dim=4 * arguments.dim,
            vocab_size=VOCABULARY,
        )
    )
    model.initialise(0)
    batches = {
        name: batch_of(arguments.documents, arguments.tokens, slices)
        for name, slices in (("whole", 1), ("sliced", arguments.slices))
    }
    times: dict[str, list[float]] = {name: [] for name in batches}
    for number in range(arguments.rounds):
        for name in batches if number % 2 else reversed(batches):
            times[name].append(seconds(model, batches[name]))
    whole, sliced = times["whole"][1:], times["sliced"][1:]
    ratios = [own / other for own, other in zip(sliced, whole, strict=True)]
    count = arguments.documents * arguments.tokens
    settings = ("documents", "tokens", "slices", "dim", "heads", "layers")
    made = {
        "benchmark": "sliced_attention",
        "measured": True,
        "device": "CPU, one process of one thread, processor time",
        **{name: getattr(arguments, name) for name in settings},
        "rounds": arguments.rounds - 1,
        "whole_microseconds_per_token": 1e6 * statistics.median(whole) / count,
        "sliced_microseconds_per_token": 1e6 * statistics.median(sliced) / count,
        "ratio_median": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
    }
    report.finish(made, arguments.output and arguments.output / "sliced_attention")


if __name__ == "__main__":
    main()
