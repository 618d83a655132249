"""Tokens per second of processor time in one process of one thread, with nothing to balance.

The same small Llama from the same seed trains in float32 on the same documents (log-normal
lengths, mean 500 tokens, random tokens), with AdamW and clipping, four micro-batches of a window a
step, in five ways:

* ``transformers cut``: its ``Trainer`` on the concatenated documents, cut at the window (sdpa);
* ``transformers packed``: the same rows with positions that begin anew at each document, so that
  transformers masks documents from each other (sdpa);
* ``trl``: ``SFTTrainer`` with its packing (``bfd``) and sdpa; left out where TRL is missing;
* ``original`` and ``auto``: ``HuggingFaceModule`` under ``strategy="wlb"``, planning included.

Every way is a process of its own, measured from outside: the parent reads the processor time of all
threads of the process when it says that its first steps are done, and when it says that it is
done. Ways run in turn, some rounds of them; medians are compared within rounds, since a busy
machine lends its caches to others.

What the ways attend to differs: ``cut`` and TRL's rows see other documents of their row where a
mask does not hold them apart.

    python -m benchmarks.one_process --widths 64 --vocabularies 8000     # minutes
    python -m benchmarks.one_process --output benchmarks/results/one_process.json    # an hour

An output is gone on with where it stopped. Prints one JSON object as its last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import report

OURS = ("original", "auto")
WAYS = ("transformers cut", "transformers packed", "trl", *OURS)
REFERENCE = "transformers packed"
MICRO_BATCHES, WARM_UP = 4, 3
WINDOWS = {64: 512}  # of other widths 2,048
SIGMA, MEAN = 1.0, 500


def documents(window: int, vocabulary: int, tokens: int) -> list[list[int]]:
    """Documents of at least so many tokens together, none above the window."""
    draw = np.random.default_rng(0)
    made: list[list[int]] = []
    while (tokens := tokens - (len(made[-1]) if made else 0)) > 0:
        length = int(draw.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA))
        length = min(max(length, 2), window)
        made.append(draw.integers(0, vocabulary, length).tolist())
    return made


def config_of(width: int, vocabulary: int) -> Any:
    """A Llama of four layers."""
    from transformers import LlamaConfig

    heads = max(width // 64, 4)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        attn_implementation="sdpa",
        use_cache=False,
    )


def say(word: str) -> None:
    """Tell the parent, and wait until it has read the clock."""
    print(word, flush=True)
    sys.stdin.readline()


def run_ours(way: str, width: int, vocabulary: int, window: int, steps: int) -> None:
    """Lightning's Trainer with the plugin."""
    import lightning.pytorch as L

    from benchmarks.measured import quiet_trainer
    from lightning_wlb import HuggingFaceModule, WLBDataModule

    count = [0]

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, number: int):
            if number >= WARM_UP:
                count[0] += batch.plan.tokens
            if number == WARM_UP - 1:
                say("begin")
            if number == WARM_UP + steps - 1:
                say(f"end {count[0]}")

    trainer = quiet_trainer(
        devices=1,
        strategy="wlb",
        max_steps=WARM_UP + steps,
        gradient_clip_val=1.0,
        callbacks=[Watch()],
    )
    data = WLBDataModule(
        documents(window, vocabulary, (WARM_UP + steps + 2) * MICRO_BATCHES * window),
        context_window=window,
        micro_batches=MICRO_BATCHES,
        packing=way,
        num_workers=0,
    )
    trainer.fit(HuggingFaceModule(config_of(width, vocabulary)), data)


def run_theirs(way: str, width: int, vocabulary: int, window: int, steps: int) -> None:
    """The Trainer of transformers, or TRL's."""
    import torch
    from datasets import Dataset
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(width, vocabulary))
    corpus = documents(window, vocabulary, (WARM_UP + steps + 2) * MICRO_BATCHES * window)
    count = [0, 0]

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            count[0] += 1
            if count[0] == WARM_UP:
                count[1] = 0
                say("begin")
            if count[0] == WARM_UP + steps:
                say(f"end {count[1]}")

    options: dict[str, Any] = dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=WARM_UP + steps,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        max_grad_norm=1.0,
        dataloader_num_workers=0,
    )
    base: Any = Trainer
    if way == "trl":
        from trl import SFTConfig, SFTTrainer

        from tests.adapters.trainers import tokenizer

        base = SFTTrainer
        rows = Dataset.from_list([{"input_ids": each} for each in corpus])
        arguments: Any = SFTConfig(
            **options,
            max_length=window,
            packing=True,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": False},
        )
        more = {"processing_class": tokenizer()}
    else:
        tokens = np.concatenate(corpus)
        positions = np.concatenate([np.arange(len(each)) for each in corpus])
        made = [
            {"input_ids": tokens[begin : begin + window], "labels": tokens[begin : begin + window]}
            | (
                {"position_ids": positions[begin : begin + window]}
                if way == "transformers packed"
                else {}
            )
            for begin in range(0, len(tokens) - window + 1, window)
        ]
        rows = Dataset.from_list(made)
        arguments, more = TrainingArguments(**options), {}

    class Counted(base):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            count[1] += inputs["input_ids"].numel()
            return super().training_step(model, inputs, *rest, **named)

    Counted(model, arguments, train_dataset=rows, callbacks=[Watch()], **more).train()


def processor_seconds(process: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tokens_per_second(way: str, *sizes: int) -> float:
    """One turn of a way, in a process of its own.

    Raises:
        RuntimeError: the process has failed, with what it wrote.
    """
    one = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-m", "benchmarks.one_process", "--turn", way, *map(str, sizes)]
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env={**os.environ, **one}
        )
        assert process.stdin is not None
        assert process.stdout is not None
        begin = 0.0
        for line in process.stdout:
            word, _, tokens = line.strip().partition(" ")
            if word not in ("begin", "end"):
                continue
            now = processor_seconds(process.pid)
            if word == "end":
                process.kill()
                process.wait()
                return int(tokens) / (now - begin)
            begin = now
            process.stdin.write("\n")
            process.stdin.flush()
        process.wait()
        errors.seek(0)
        raise RuntimeError(f"{way} has failed: {errors.read()[-2000:]}")


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table and one JSON object."""
    made = report.parser("one_process", __doc__)
    made.add_argument("--widths", type=int, nargs="+", default=[64, 256, 1024])
    made.add_argument("--vocabularies", type=int, nargs="+", default=[8000, 128000])
    made.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--steps", type=int, help="steps of a turn (width 64: 40, 256: 6, 1,024: 2)")
    made.add_argument("--output", type=Path, help="a .json; a .md is written beside it")
    made.add_argument("--turn", nargs="+", help="internal: way, width, vocabulary, window, steps")
    given = made.parse_args(argv)
    if given.turn:
        way, *sizes = given.turn
        import torch

        torch.set_num_threads(1)
        (run_ours if way in OURS else run_theirs)(way, *map(int, sizes))
        return
    ways = [way for way in given.ways if way != "trl" or find_spec("trl")]
    kept = given.output is not None and given.output.exists()
    turns: dict[str, list[dict[str, float]]] = (
        json.loads(given.output.read_text())["turns"] if kept else {}
    )
    sizes = [(width, words) for width in given.widths for words in given.vocabularies]
    for number in range(given.rounds):
        for width, vocabulary in sizes:
            rounds = turns.setdefault(f"{width},{vocabulary}", [])
            if len(rounds) > number:
                continue
            window = WINDOWS.get(width, 2048)
            steps = given.steps or {64: 40, 256: 6}.get(width, 2)
            rounds.append(
                {way: tokens_per_second(way, width, vocabulary, window, steps) for way in ways}
            )
            result = {"script": "one_process", "turns": turns}
            if given.output is not None:
                given.output.write_text(json.dumps(result, indent=1) + "\n")
                given.output.with_suffix(".md").write_text(page(turns))
    print(*lines_of(turns), sep="\n")
    print(json.dumps({"script": "one_process", "turns": turns}))


def lines_of(turns: dict[str, list[dict[str, float]]]) -> list[str]:
    """A table: median tokens per second of processor time, and ratios to the reference."""
    ways = [way for way in WAYS if any(way in each for each in chain(*turns.values()))]
    lines = [
        f"| width | vocabulary | rounds | {' | '.join(ways)} |",
        "|---:|---:|---:|" + "---:|" * len(ways),
    ]
    for sizes, rounds in turns.items():
        cells = []
        for way in ways:
            found = [each for each in rounds if way in each]
            speed = f"{median(each[way] for each in found):,.0f}" if found else ""
            ratios = sorted(each[way] / each[REFERENCE] for each in found if REFERENCE in each)
            if ratios and way != REFERENCE:
                speed += f" ({median(ratios):.2f}: {ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells.append(speed)
        width, words = map(int, sizes.split(","))
        lines.append(f"| {width:,} | {words:,} | {len(rounds)} | {' | '.join(cells)} |")
    return lines


def page(turns: dict[str, list[dict[str, float]]]) -> str:
    """The page of results."""
    head = (
        "# One process, nothing to balance\n\nMade by `python -m benchmarks.one_process`; do not"
        " edit. Tokens per second of processor time, one thread, a Llama of four layers in"
        " float32, documents of log-normal lengths (mean 500), four micro-batches of a window (512"
        " at width 64, else 2,048) a step: medians of rounds, in brackets the ratio to"
        f" `{REFERENCE}` (median: least to most). Measured on a machine that others used"
        " too.\n\n"
    )
    return head + "\n".join(lines_of(turns)) + "\n"


if __name__ == "__main__":
    main()
