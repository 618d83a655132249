"""Train a small decoder on Python's own standard library with three packings in turn, and compare.

    python examples/train_stdlib.py              # what `make train` runs, under four minutes
    python examples/train_stdlib.py --details    # with the long table
    python examples/train_stdlib.py --help

The packings are ``original`` (concatenate and cut at the context window, replicas take turns),
``best_fit`` (whole documents in as few windows as they fit, as axolotl and TRL pack) and ``auto``,
the package's default, which plans for equal work and shares a long document among replicas. Each
trains a model of its own, all of the same size and on the same documents (top-level functions and
classes as byte pairs) in the same order. They take turns of a few steps, A B C C B A in every
round, and go on from their checkpoints: a machine that slows down slows all of them. A ratio is
taken within a round; what is shown is the median over rounds, with the least and the most. Rounds
are run until the time is up.

One rank per core with one thread each: with more ranks than cores an idle rank's core does another
rank's work, and imbalance does not show in wall-clock time. Two cores run data parallel 2, four or
more pipeline 2 × data 2. Planning runs in loader workers on the same cores, so its cost is in the
times. The model is small and the window long, so that attention carries more than half of the
work, as it does in long-context training of large models.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table

import lightning_wlb as wlb

LEAST_ROUNDS = 3
MOST_CROWDED = 0.1
"""Share of time without a core above which the report says that the machine was busy."""

Step = Mapping[str, float]
"""What the monitor logs of a step, without ``wlb/``; and ``crowded_seconds``."""

Rounds = Sequence[Mapping[str, float]]
"""What :func:`measured` says of every round of a packing."""

KINDS = {"per_token": "microseconds_per_token", "per_flop": "seconds_per_tflop"}
"""What packings are compared by: how it is called, and which time it is."""

MEANS = (
    "imbalance_pipeline",
    "imbalance_data",
    "imbalance_data_planned",
    "step_seconds",
    "loader_wait_seconds",
    "delay_mean",
    "train_loss",
)


class TurnMonitor(wlb.ImbalanceMonitor):
    """Keeps what is logged of every step, and prints no table."""

    def __init__(self) -> None:
        super().__init__(heat_map=False, warm_up_steps=0)
        self.steps: list[Step] = []
        self.crowded_before = 0.0

    def on_train_batch_start(self, *arguments: Any) -> None:
        """Note where the step begins."""
        super().on_train_batch_start(*arguments)
        self.crowded_before = crowded_seconds()

    def on_train_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
        """Keep the step."""
        super().on_train_batch_end(trainer, *arguments)
        logged = trainer.callback_metrics
        step = {name.removeprefix("wlb/"): float(value) for name, value in logged.items()}
        step["crowded_seconds"] = crowded_seconds() - self.crowded_before
        self.steps.append(step)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing: the demo has a table of its own, over all rounds."""


class Contestant:
    """The model that one packing trains, a few steps at a time."""

    def __init__(self, packing: str, options: argparse.Namespace) -> None:
        L.seed_everything(options.seed, verbose=False)
        self.packing, self.devices = packing, options.devices
        self.sizes = mesh(options.devices)
        self.model = wlb.LanguageModule(
            wlb.TransformerConfig.preset("tiny", layers=2, heads=1, kv_heads=1, vocab_size=1024),
            learning_rate=3e-3,
            warmup_tokens=20 * options.context_window,
        )
        self.data = wlb.WLBDataModule(
            wlb.StdlibDocuments(tokenizer="bpe", vocab_size=1024),
            context_window=options.context_window,
            micro_batches=options.devices,
            packing=packing,
            # It balances by micro-batches above a window: short documents fill up beside long ones.
            cap=2 * options.context_window if packing == "wlb" else None,
            seed=options.seed,
            profile=options.profile,
        )
        self.checkpoint = Path(options.output) / f"{packing}.ckpt"
        self.trained = 0
        self.trainer: Any = None

    def train(self, steps: int) -> list[Step]:
        """So many optimizer steps more; what was measured of each."""
        monitor = TurnMonitor()
        self.trainer = L.Trainer(
            strategy=wlb.WLBStrategy(*self.sizes),
            accelerator="cpu",
            devices=self.devices,
            max_steps=self.trained + steps,
            gradient_clip_val=1.0,
            callbacks=[monitor],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        # The checkpoint has the optimizer's state and the place in the documents too.
        self.trainer.fit(self.model, self.data, ckpt_path=self.checkpoint if self.trained else None)
        self.trained += steps
        self.trainer.save_checkpoint(self.checkpoint)
        return monitor.steps


def crowded_seconds() -> float:
    """How long this process has been ready to run and had no core; 0 where no Linux says so."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def mesh(devices: int) -> tuple[int, int]:
    """(data, pipeline) parallel sizes: the same for all packings."""
    return (devices // 2, 2) if devices >= 4 and devices % 2 == 0 else (devices, 1)


def compete(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Train all packings in turns until the time is up or the rounds are done.

    Returns:
        Of each packing, what :func:`measured` says of every round.
    """
    begin = time.monotonic()
    say("Reading Python's standard library (the first time, it is cut into tokens)\n")
    contestants = [Contestant(packing, options) for packing in options.packing]
    say(f"Training in turns, on {options.devices} processes: {', '.join(options.packing)}\n")
    say("warm-up  ")
    for contestant in contestants:
        contestant.train(options.steps)
        say(".")
    rounds: dict[str, list[dict[str, float]]] = {packing: [] for packing in options.packing}
    done, longest, finished = 0, 0.0, False
    while not finished:
        start = time.monotonic()
        say(f"\nround {done + 1:2} ")
        steps: dict[str, list[Step]] = {packing: [] for packing in options.packing}
        for contestant in (*contestants, *reversed(contestants)):
            steps[contestant.packing] += contestant.train(options.steps)
            say(".")
        for packing in options.packing:
            rounds[packing].append(measured(steps[packing]))
            say(f"  {packing} {rounds[packing][-1]['microseconds_per_token']:.1f}")
        done += 1
        now = time.monotonic()
        longest = max(longest, now - start)
        say(f"  µs per token  ({now - begin:.0f} s)")
        late = now - begin + longest > options.seconds
        finished = done == options.rounds if options.rounds else done >= LEAST_ROUNDS and late
        # The ranks' clocks differ: rank 0 decides.
        finished = contestants[0].trainer.strategy.broadcast(finished)
    say("\n")
    return rounds


@rank_zero_only
def say(text: str) -> None:
    """Print a part of a line on rank 0, at once."""
    print(text, end="", flush=True)


def measured(steps: Sequence[Step]) -> dict[str, float]:
    """One packing's round as plain numbers.

    Returns:
        ``tokens``; ``microseconds_per_token``; ``seconds_per_tflop``, of a rank and in model FLOPs;
        ``waiting``, the share of its time in which a replica waits for the busiest one, on average
        over replicas (waits between the stages of a pipeline are not in it); ``crowded``, the share
        of its time in which this process was ready to run and had no core; and means over steps of
        what else is logged.
    """
    seconds = sum(step["step_seconds"] for step in steps)
    tokens = sum(step["tokens"] for step in steps)
    tflops = sum(step["tflops_per_device"] * step["step_seconds"] for step in steps)
    waited = sum((1 - 1 / step["imbalance_data"]) * step["step_seconds"] for step in steps)
    return {
        **{name: sum(step[name] for step in steps) / len(steps) for name in MEANS},
        "tokens": tokens,
        "microseconds_per_token": 1e6 * seconds / tokens,
        "seconds_per_tflop": seconds / tflops,
        "waiting": waited / seconds,
        "crowded": sum(step["crowded_seconds"] for step in steps) / seconds,
    }


class Ratio(NamedTuple):
    """How many times as long a packing takes as another, and in how many rounds it takes longer."""

    median: float
    least: float
    most: float
    longer: int


def ratio(times: Sequence[float], last: Sequence[float]) -> Ratio:
    """Times of a packing over those of the last one, round by round."""
    each = [own / other for own, other in zip(times, last, strict=True)]
    return Ratio(median(each), min(each), max(each), sum(value > 1 for value in each))


def compared(rounds: Mapping[str, Rounds]) -> dict[str, dict[str, Ratio]]:
    """Of each packing but the last, its times over the last one's by the names of ``KINDS``."""
    *others, last = rounds
    return {
        packing: {
            kind: ratio([own[key] for own in rounds[packing]], [own[key] for own in rounds[last]])
            for kind, key in KINDS.items()
        }
        for packing in others
    }


def middle(rounds: Rounds, key: str) -> float:
    """The median over rounds."""
    return median(each[key] for each in rounds)


def short_table(rounds: Mapping[str, Rounds]) -> Table:
    """What a person who has never heard of imbalance wants to know."""
    last, ratios = list(rounds)[-1], compared(rounds)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("packing")
    table.add_column("time per\ntoken", justify="right")
    table.add_column("time spent\nwaiting", justify="right")
    table.add_column(f"times as long as {last}\nper token")
    table.add_column("\nfor equal work")
    for packing, measured_of in rounds.items():
        shown = ["1", "1"]
        if packing != last:
            shown = [
                f"{each.median:.2f} ({each.least:.2f} to {each.most:.2f})"
                for each in ratios[packing].values()
            ]
        table.add_row(
            packing,
            f"{middle(measured_of, 'microseconds_per_token'):.1f} µs",
            f"{middle(measured_of, 'waiting'):.0%}",
            *shown,
        )
    return table


def sentences(rounds: Mapping[str, Rounds]) -> list[str]:
    """What the run has shown, in words."""
    last = list(rounds)[-1]
    count, result = len(rounds[last]), []
    for packing, ratios in compared(rounds).items():
        token, flop = (f"{each.median:.2f}" for each in ratios.values())
        order = float(token) - 1
        result.append(
            f"{packing} took {token} times as long per token as {last}"
            + (f" and {flop} times for equal work" if flop != token else "")
            + f": {last} was {'faster' if order > 0 else 'slower' if order < 0 else 'as fast'} per"
            f" token, and ahead in {ratios['per_token'].longer} of {count} rounds."
        )
    waits = [f"{middle(rounds[packing], 'waiting'):.0%} with {packing}" for packing in rounds]
    result.append(
        f"Waiting for the busiest process took {', '.join(waits[:-1])} and {waits[-1]} of the time."
    )
    crowded = median(middle(each, "crowded") for each in rounds.values())
    if crowded > MOST_CROWDED:
        result.append(
            f"Other programs were using these cores: a process was without one for {crowded:.0%} of"
            " its time. On an idle machine the times may compare differently."
        )
    return result


def long_table(rounds: Mapping[str, Rounds]) -> Table:
    """The medians over rounds of what the short table leaves out."""
    table = Table(title="\nMedians over rounds", title_justify="left")
    table.add_column("")
    for packing in rounds:
        table.add_column(packing, justify="right")
    # What is shown, its key, what it is multiplied by, with how many digits.
    rows = [
        ("s per model TFLOP of a rank", "seconds_per_tflop", 1, 2),
        ("s per step", "step_seconds", 1, 3),
        ("ms wait for the loader, per step", "loader_wait_seconds", 1e3, 1),
        ("tokens per round", "tokens", 1, 0),
        ("% of time without a core", "crowded", 100, 1),
        ("imbalance, micro-batches", "imbalance_pipeline", 1, 3),
        ("imbalance, replicas", "imbalance_data", 1, 3),
        ("  as planned (FLOPs)", "imbalance_data_planned", 1, 3),
        ("delay (steps)", "delay_mean", 1, 2),
        ("loss", "train_loss", 1, 3),
    ]
    for label, key, factor, digits in rows:
        values = (factor * middle(measured_of, key) for measured_of in rounds.values())
        table.add_row(label, *(f"{value:,.{digits}f}" for value in values))
    return table


@rank_zero_only
def report(rounds: Mapping[str, Rounds], options: argparse.Namespace) -> None:
    """The tables, the sentences and the file of figures, on rank 0."""
    console = Console(highlight=False)
    if options.details:
        console.print(long_table(rounds))
    count = len(rounds[options.packing[-1]])
    console.print(f"\nMedians of {count} rounds; in brackets, the least and the most of them:\n")
    console.print(short_table(rounds))
    console.print(
        "\nWaiting: for the process that has more to do in a step. Equal work: per FLOP of the"
        " model; a packing that cuts documents, as original does, gives their tokens less to"
        " attend to.\n"
    )
    for sentence in sentences(rounds):
        console.print(sentence)
    figures = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "devices": options.devices,
        "context_window": options.context_window,
        "steps_per_round": 2 * options.steps,
        "seed": options.seed,
        "ratios": {
            packing: {kind: each._asdict() for kind, each in ratios.items()}
            for packing, ratios in compared(rounds).items()
        },
        "rounds": rounds,
    }
    path = Path(options.output) / "figures.json"
    path.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(f"\nAll figures: {path}", soft_wrap=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add = parser.add_argument
    add("--seconds", type=float, default=210.0,
        help=f"begin no round that would end later, but run {LEAST_ROUNDS} at least")  # fmt: skip
    add("--rounds", type=int, help="so many rounds, however long they take")
    add("--steps", type=int, default=2, help="of a turn; each packing has two turns a round")
    add("--details", action="store_true", help="print the long table too")
    add("--devices", type=int, default=max(1, min(cores or 1, 4) // 2 * 2), help="ranks")
    add("--context-window", type=int, default=12_288, help="longest piece, in tokens")
    add("--packing", nargs="+", default=["original", "best_fit", "auto"],
        help="two methods or more to compare; the others are divided by the last")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--profile", help="of the device (default: auto chooses by exact work)")
    add("--output", default="runs", help="folder for checkpoints and figures.json")
    options = parser.parse_args()
    if len(options.packing) < 2 or len(set(options.packing)) < len(options.packing):
        parser.error(f"--packing takes two or more different methods, got {options.packing}")
    if options.steps < 1 or (options.rounds is not None and options.rounds < 1):
        parser.error("--steps and --rounds are at least 1")
    return options


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # Lightning's own, under torch 2.13
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    chosen = parse()
    report(compete(chosen), chosen)
