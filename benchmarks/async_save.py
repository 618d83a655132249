"""How long training waits for a checkpoint: written at once, and in the background.

Two ranks of this machine train a model of random weights and save it every few steps, in turns with
and without ``WLBStrategy(async_save=True)``. Of each save it is measured how long
``trainer.save_checkpoint`` takes (the *stall*), and after how long the checkpoint has its name; of
each step how long it takes, apart where a save is being written meanwhile. Medians; the disk and
its ``fsync`` are this machine's. Steps between saves must suffice for writing one.

Run ``python -m benchmarks.async_save --help``. Prints a table and then, as its last line, one JSON
object.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as L
from rich.console import Console

from benchmarks import report
from benchmarks.ranks import run_ranks
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy.wlb import WLBStrategy

RANKS = 2
MB = 1e6


class Saves(L.Callback):
    """Saves every few steps, under names of their own, and measures."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.stalls: list[float] = []
        self.written: list[float] = []
        self.steps: dict[bool, list[float]] = {False: [], True: []}
        self.began: float | None = None

    def on_train_batch_start(self, trainer, *_: Any) -> None:
        self.step_began, self.busy = time.perf_counter(), self.began is not None

    def on_train_batch_end(self, trainer, *_: Any) -> None:
        now = time.perf_counter()
        path = self.folder / f"{len(self.stalls) - 1}.ckpt"
        if self.began is not None and path.exists():
            self.written.append(path.stat().st_ctime - self.began)
            self.began = None
        # A step in which a save ended counts to neither.
        if self.busy == (self.began is not None):
            self.steps[self.busy].append(now - self.step_began)
        if trainer.global_step % self.every == 0:
            begin, self.began = time.perf_counter(), time.time()
            trainer.save_checkpoint(self.folder / f"{len(self.stalls)}.ckpt")
            self.stalls.append(time.perf_counter() - begin)


def on_rank(rank: int, folder: str, arguments: dict[str, int]) -> list[dict[str, Any]]:
    config = TransformerConfig(
        dim=arguments["width"],
        layers=arguments["layers"],
        heads=8,
        kv_heads=8,
        ffn_dim=3 * arguments["width"],
        vocab_size=4096,
    )
    documents = InMemoryDocuments([list(range(1, 500))] * 64, vocab_size=4096)
    rows = []
    for repeat in range(arguments["repeats"]):
        for background in (False, True):
            saves = Saves(Path(folder) / f"{background}-{repeat}", arguments["every"])
            module = LanguageModule(config)
            L.Trainer(
                strategy=WLBStrategy(RANKS, async_save=background),
                devices=RANKS,
                accelerator="cpu",
                max_steps=arguments["steps"],
                max_epochs=-1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[saves],
            ).fit(
                module,
                WLBDataModule(
                    documents, context_window=512, micro_batches=2, profile="none", num_workers=0
                ),
            )
            size = sum(each.stat().st_size for each in (saves.folder / "0.ckpt").iterdir())
            rows.append(
                {
                    "background": background,
                    "checkpoint_mb": size / MB,
                    # The first save allocates memory for the copy, and optimizer state is new.
                    "stalls": saves.stalls[1:],
                    "written": saves.written[1:],
                    "steps": saves.steps,
                }
            )
    return rows


def summary(rows: list[dict[str, Any]], background: bool) -> dict[str, Any]:
    mine = [row for row in rows if row["background"] == background]

    def middle(values: list[list[float]]) -> float | None:
        every = [each for some in values for each in some]
        return round(median(every), 4) if every else None

    return {
        "async_save": background,
        "saves": sum(len(row["stalls"]) for row in mine),
        "checkpoint_mb": round(mine[0]["checkpoint_mb"], 1),
        "stall_s": middle([row["stalls"] for row in mine]),
        "written_after_s": middle([row["written"] for row in mine]),
        "step_s": middle([row["steps"][False] for row in mine]),
        "step_while_saving_s": middle([row["steps"][True] for row in mine]),
    }


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("async_save", __doc__)
    parser.add_argument("--width", type=int, default=512, help="of the model (default 512)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--steps", type=int, default=24, help="of a run (default 24)")
    parser.add_argument("--every", type=int, default=6, help="steps between saves (default 6)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind (default 2)")
    parser.add_argument("--output", type=Path, help="JSON file to write as well")
    arguments = vars(parser.parse_args(argv))
    output = arguments.pop("output")
    with tempfile.TemporaryDirectory() as folder:
        rows = run_ranks(on_rank, RANKS, folder, arguments, process_group=False, timeout=600)[0]
    table = [summary(rows, background) for background in (False, True)]
    headings = [heading.replace("_", " ") for heading in table[0]]
    cells = [[str(value) for value in row.values()] for row in table]
    Console(width=120).print(report.table("Saving a checkpoint, two ranks", headings, cells))
    report.finish({"benchmark": "async_save", **arguments, "rows": table}, output)


if __name__ == "__main__":
    main()
