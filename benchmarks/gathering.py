"""What parameters that travel behind compute save: all at once at a step's ends, and unit by unit.

Two ranks of this machine (data 2) train a model of random weights, in steps that take turns: in one
all parameters are waited for before the first action and no gradient travels before the last one,
in the other gathers and reductions run behind the actions, as they do in training. Of each step
it is measured how long it takes, and how long the rank waits for parameters and is busy behind its
last action: what is *exposed*. *Hidden* is the share of it that is exposed no more. Medians over
pairs of neighbouring steps. Where other processes use the machine, the ratio of processor times
says whether travelling behind compute costs something by itself.

Once over the loopback as it is, where there is little to hide, and once over a slow link: the ranks
run in a network namespace of their own, whose loopback ``tc`` lets through so many Gbit/s (Linux,
with ``unshare`` and ``tc``).

Run ``python -m benchmarks.gathering --help``. Prints a table and then, as its last line, one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import torch
from rich.console import Console

from benchmarks import report
from benchmarks.ranks import run_ranks
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.schedule.actions import Action
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.training import gather_and_reduce as gathering
from lightning_wlb.training.gather_and_reduce import ParameterBuckets

all_gather = gathering.all_gather_into

RANKS = 2
WARM_UP = 2
"""Steps that are not counted, of each kind."""


class AtOnce(ParameterBuckets):
    """Leaves nothing to hide where it is told so."""

    at_once = False
    holds_back = False
    exposed = 0.0
    """Seconds in which the rank has waited for parameters, and from its last action on."""

    @contextmanager
    def step(self, program: Sequence[Action], shared: Collection[int] = ()) -> Iterator[None]:
        """A step, before which everything is waited for if it is to be."""
        self.exposed = 0.0
        with super().step(program, shared):
            if self.at_once:
                for each in self._in_step:
                    each.wait()
            self.holds_back = self.at_once
            yield
            self.holds_back = False
            self.ended = time.perf_counter()

    def advance(self) -> None:
        """Post no reduction until the step's end, if it is to be so."""
        if not self.holds_back:
            super().advance()

    def finish(self) -> None:
        """The end of the step's traffic."""
        super().finish()
        self.exposed += time.perf_counter() - self.ended

    def gathers(self, *arguments: Any, **options: Any) -> Any:
        """Post a gather whose wait is timed."""
        work = all_gather(*arguments, **options)
        return SimpleNamespace(wait=lambda: self.timed(work.wait))

    def timed(self, wait: Callable[[], Any]) -> None:
        """Wait, and note how long."""
        begin = time.perf_counter()
        wait()
        self.exposed += time.perf_counter() - begin


class Turns(L.Callback):
    """Lets steps take turns, and measures them."""

    def __init__(self) -> None:
        self.steps: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.gathering = trainer.strategy.executor.parameters
        self.gathering.__class__ = AtOnce
        gathering.all_gather_into = self.gathering.gathers

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.gathering.at_once = trainer.global_step % 2 == 0
        trainer.strategy.barrier()
        self.began, self.worked = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy.barrier()
        seconds, worked = time.perf_counter() - self.began, time.process_time() - self.worked
        self.steps[self.gathering.at_once].append((seconds, self.gathering.exposed, worked))


def on_rank(rank: int, arguments: dict[str, Any]) -> dict[bool, list[tuple[float, float, float]]]:
    torch.set_num_threads(1)
    width, window = arguments["width"], arguments["tokens"]
    config = TransformerConfig(
        dim=width,
        layers=arguments["layers"],
        heads=8,
        kv_heads=8,
        ffn_dim=3 * width,
        vocab_size=4096,
    )
    documents = InMemoryDocuments([[number % 4096 for number in range(window)]] * 64)
    turns = Turns()
    L.Trainer(
        strategy=WLBStrategy(RANKS),
        devices=RANKS,
        accelerator="cpu",
        max_steps=2 * (arguments["pairs"] + WARM_UP),
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns],
    ).fit(
        LanguageModule(config),
        WLBDataModule(
            documents,
            context_window=window,
            micro_batches=RANKS * arguments["micro_batches"],
            packing="original",
            num_workers=0,
        ),
    )
    return turns.steps


def summary(ranks: list[dict[bool, list[tuple[float, float, float]]]]) -> dict[str, Any]:
    """Medians over steps, each as its slower rank had it."""
    old, new = (
        [max(each) for each in zip(*(rank[kind][WARM_UP:] for rank in ranks), strict=True)]
        for kind in (True, False)
    )
    saved = [before[0] - after[0] for before, after in zip(old, new, strict=True)]
    return {
        "step_at_once_s": round(median(each[0] for each in old), 4),
        "step_behind_s": round(median(each[0] for each in new), 4),
        "exposed_at_once_s": round(median(each[1] for each in old), 4),
        "exposed_behind_s": round(median(each[1] for each in new), 4),
        "saved_s": round(median(saved), 4),
        "hidden": round(
            median(1 - after[1] / before[1] for before, after in zip(old, new, strict=True)), 3
        ),
        "step_ratio": round(
            median(after[0] / before[0] for before, after in zip(old, new, strict=True)), 4
        ),
        "processor_ratio": round(
            median(after[2] / before[2] for before, after in zip(old, new, strict=True)), 4
        ),
    }


def slow_loopback(gbit: float) -> None:
    """Let this namespace's loopback carry so many Gbit/s."""
    for command in (
        "ip link set lo up",
        f"tc qdisc add dev lo root tbf rate {round(gbit * 1000)}mbit burst 256kb latency 400ms",
    ):
        subprocess.run(command.split(), check=True)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = report.parser("gathering", __doc__)
    parser.add_argument("--gbit", type=float, default=1.0, help="slow link; 0: none (default 1)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch (default 1024)")
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="of each rank in a step (default 1)"
    )
    parser.add_argument("--pairs", type=int, default=20, help="of steps (default 20)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON file to write as well")
    arguments = vars(parser.parse_args(argv))
    output, inside = arguments.pop("output"), arguments.pop("inside")
    if inside:
        slow_loopback(arguments["gbit"])
    ranks = run_ranks(on_rank, RANKS, arguments, process_group=False, timeout=3600)
    rows = [{"gbit": arguments["gbit"] if inside else None, **summary(ranks)}]
    if inside:
        print(json.dumps(rows[0]))
        return
    if arguments["gbit"]:
        again = [sys.executable, "-m", "benchmarks.gathering", *argv, "--inside"]
        command = ["unshare", "--map-root-user", "--net", *again]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(lines.splitlines()[-1]))
    headings = [heading.replace("_", " ") for heading in rows[0]]
    cells = [[str(value) for value in row.values()] for row in rows]
    Console(width=120).print(report.table("ParameterBuckets, two ranks", headings, cells))
    report.finish({"benchmark": "gathering", **arguments, "rows": rows}, output)


if __name__ == "__main__":
    main()
