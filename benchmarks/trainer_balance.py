"""transformers' Trainer on two ranks: TRL's packing, grouping by length, and balanced steps.

The same small Llama in float32 trains on the same documents through TRL's ``SFTTrainer``, or with
``--loop transformers`` through ``Trainer`` with TRL's collator, on two CPU ranks of one thread
each over gloo, in three ways:

* ``trl``: TRL's own packing (``bfd``) into rows of a window, one row for each micro-batch;
* ``grouped``: transformers' ``group_by_length``, padded, with torch's masked attention;
* ``balanced``: ``lightning_wlb.adapters.transformers_trainer``, without padding.

Documents have the lengths of the standard library's files, scaled and cut so that 65,536 bytes are
a window; their tokens are random. ``trl`` and ``balanced`` attend sequence by sequence
(``wlb_packed``): a dense mask over a row would hide what balance gains. Ways run in turn, some
steps each, of which the first does not count; each round takes other documents.

Two times are taken for each step. *Wall* is the clock. *Processor* is the processor time of the
busier rank, summed over steps: what steps take where each rank has a core of its own and waiting
costs nothing, and all that says something on a machine that others use. Both are divided by tokens,
and for work by FLOPs of the model, since the ways take other documents.

TRL packs the longest documents first, so a few of its steps have more attention for a token:
compare whole epochs where there is time for them.

``python -m benchmarks.trainer_balance`` takes minutes, needs ``trl``, and prints one JSON object
last. Losses are compared in ``tests/adapters/test_transformers_trainer.py``, to 1e-10 in float64.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.ranks import run_ranks
from benchmarks.workloads import stdlib_lengths

WAYS = ("trl", "grouped", "balanced")
RANKS, ACCUMULATED, EACH, VOCABULARY = 2, 2, 4, 1000


def documents(window: int, count: int, seed: int) -> list[dict[str, list[int]]]:
    """Rows of random tokens with the standard library's lengths."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(stdlib_lengths() * window // 65_536, 16, window)
    lengths = generator.permutation(lengths)[:count]
    return [{"input_ids": generator.integers(0, VOCABULARY, n).tolist()} for n in lengths]


def model_of(attention: str, width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            attn_implementation=attention,
            use_cache=False,
        )
    )


def flops_of(inputs: dict[str, Any], shape: Any) -> tuple[int, int]:
    """Tokens of a micro-batch, and the model's FLOPs on them."""
    from lightning_wlb.cost.flops import Work

    work = Work.of(shape).total
    if "attention_mask" in inputs:
        sizes = inputs["attention_mask"].sum(dim=1).tolist()
    else:
        positions = inputs["position_ids"][0]
        starts = torch.nonzero(positions == 0).flatten().tolist()
        sizes = np.diff([*starts, len(positions)]).tolist()
    return sum(sizes), sum(map(work, sizes))


def turn(
    way: str,
    loop: str,
    pair: float | None,
    folder: str,
    window: int,
    width: int,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    """Some steps of one way on this rank: seconds, tokens and FLOPs of each."""
    from datasets import Dataset, disable_progress_bars
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from trl import SFTConfig, SFTTrainer, pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from lightning_wlb.adapters.plan_step import shape_of
    from lightning_wlb.adapters.transformers_trainer import BalancedTraining
    from tests.adapters.trainers import tokenizer

    disable_progress_bars()
    model = model_of("sdpa" if way == "grouped" else "wlb_packed", width)
    shape = shape_of(model.config)
    rows = Dataset.from_list(documents(window, RANKS * ACCUMULATED * EACH * (steps + 1), seed))
    packed = way == "trl"
    if packed:
        rows = pack_dataset(rows, window, "bfd")
    seen: list[list[float]] = []

    base: Any = SFTTrainer if loop == "trl" else Trainer

    class Timed(base):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            tokens, flops = flops_of(inputs, shape)
            seen[-1][2] += tokens
            seen[-1][3] += flops
            seen[-1][4] = max(seen[-1][4], inputs["input_ids"].numel())
            return super().training_step(model, inputs, *rest, **named)

    class Balanced(BalancedTraining, Timed):
        work = None if pair is None else staticmethod(lambda tokens: tokens + pair * tokens**2)

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seen.append([-time.perf_counter(), -time.process_time(), 0, 0, 0])

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen[-1][0] += time.perf_counter()
            seen[-1][1] += time.process_time()

    own: dict[str, Any] = {"max_length": window if packed else None, "packing": packed}
    own |= {"padding_free": way != "grouped", "dataset_kwargs": {"skip_prepare_dataset": True}}
    own |= {"gradient_checkpointing": False}
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=way != "grouped")
    trainer = (Balanced if way == "balanced" else Timed)(
        model,
        (SFTConfig if loop == "trl" else TrainingArguments)(
            **(own if loop == "trl" else {}),
            output_dir=folder,
            per_device_train_batch_size=1 if packed else EACH,
            gradient_accumulation_steps=ACCUMULATED,
            max_steps=min(steps, len(rows) // (RANKS * ACCUMULATED)) if packed else steps,
            train_sampling_strategy="group_by_length" if way == "grouped" else "random",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            ddp_backend="gloo",
            bf16=False,
            disable_tqdm=True,
            seed=seed,
        ),
        train_dataset=rows,
        **({"processing_class": tokenizer()} if loop == "trl" else {"data_collator": collator}),
        callbacks=[Watch()],
    )
    trainer.train()
    return {"steps": seen[1:]}


def rank_of(
    rank: int,
    ways: list[str],
    loop: str,
    pair: float | None,
    rounds: int,
    window: int,
    width: int,
    steps: int,
) -> list[Any]:
    """All rounds on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            {way: turn(way, loop, pair, folder, window, width, steps, number) for way in ways}
            for number in range(rounds)
        ]


def of_way(turns: list[dict[str, Any]]) -> dict[str, float]:
    """One turn over both ranks: nanoseconds per token and imbalance."""
    steps = np.array([each["steps"] for each in turns])  # [rank, step, figure]
    tokens, flops = steps[:, :, 2].sum(), steps[:, :, 3]
    busier = steps[:, :, 1].max(axis=0).sum()
    return {
        "wall_ns_per_token": 1e9 * steps[:, :, 0].max(axis=0).sum() / tokens,
        "processor_ns_per_token": 1e9 * busier / tokens,
        "all_processors_ns_per_token": 1e9 * steps[:, :, 1].sum() / tokens,
        "processor_seconds_per_teraflop": 1e12 * busier / flops.sum(),
        "imbalance_of_processor": RANKS * busier / steps[:, :, 1].sum(),
        "imbalance_of_work": RANKS * flops.max(axis=0).sum() / flops.sum(),
        "tokens_per_step": tokens / steps.shape[1],
        "longest_row": steps[:, :, 4].max(),
    }


def main(argv: list[str] | None = None) -> None:
    """Run, print a table and one JSON object."""
    from rich.console import Console

    made = report.parser("trainer_balance", __doc__)
    made.add_argument("--loop", choices=("trl", "transformers"), default="trl")
    made.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="balanced last")
    made.add_argument(
        "--pair",
        type=float,
        help="work of a pair, over that of a token, which balanced goes by (default: FLOPs)",
    )
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--window", type=int, default=4096)
    made.add_argument("--width", type=int, default=64)
    made.add_argument("--output", type=Path)
    given = made.parse_args(argv)
    ways = given.ways
    sizes = (ways, given.loop, given.pair, given.rounds, given.window, given.width, given.steps)
    ranks = run_ranks(rank_of, RANKS, *sizes, process_group=False, timeout=3600)
    rounds = [
        {way: of_way([rank[number][way] for rank in ranks]) for way in ways}
        for number in range(given.rounds)
    ]
    figures = {
        way: {name: median(each[way][name] for each in rounds) for name in rounds[0][way]}
        for way in ways
    }
    ratios = {}
    for way in ways[:-1]:
        for name in list(figures[way])[:4]:
            found = sorted(each[way][name] / each["balanced"][name] for each in rounds)
            ratios[f"{way}, {name}"] = {
                "median": median(found), "least": found[0], "most": found[-1]
            }  # fmt: skip
    result = {
        "script": "trainer_balance",
        "loop": given.loop,
        "pair": given.pair,
        "rounds": given.rounds,
        "steps": given.steps - 1,
        "window": given.window,
        "width": given.width,
        "versions": report_versions(),
        "medians": figures,
        "of_balanced": ratios,
    }
    names = [*figures["balanced"]]
    report_table = [[way, *(f"{figures[way][name]:,.3f}" for name in names)] for way in ways]
    console = Console(width=200)
    for row in [["way", *names], *report_table]:
        console.print(" | ".join(row), highlight=False)
    for name, found in ratios.items():
        console.print(
            f"{name}: {found['median']:.3f} ({found['least']:.3f} to {found['most']:.3f})"
        )
    if given.output is not None:
        given.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def report_versions() -> dict[str, str]:
    """What was compared."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "trl", "accelerate")}


if __name__ == "__main__":
    main()
