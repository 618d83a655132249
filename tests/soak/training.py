"""The script that the soak starts, breaks and resumes: a tiny decoder, some seconds of training.

::

    python -m tests.soak.training '{"folder": "/tmp/run", "mesh": [2, 2, 1, 1]}'

Rank 0 appends the loss of every step to ``losses``. Every rank writes its output to ``rank-N.log``,
after every step its pages of memory, open descriptors, seconds of CPU time and seconds of wall time
to ``usage-N``, and where training ends a digest of its parameters and optimizer state to
``state-N``.
"""

import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor

from lightning_wlb.strategy.wlb import WLBStrategy
from tests.soak.faults import PLANTED
from tests.soak.plants import Plant, PlantedData, planted
from tests.strategy import harness


@dataclass(frozen=True)
class Run:
    """What varies between runs; every field goes through JSON.

    Attributes:
        folder: holds logs and marks; ``checkpoints`` in it the checkpoints.
        mesh: data, pipeline, context and tensor parallel sizes.
        fault: its name in :data:`.faults.PLANTED`; empty for none.
        name: what checkpoints are called; without ``{step}`` each replaces the one before.
        repeats: how often the documents, four steps, are in an epoch.
        timeout: seconds that the strategy's collectives wait; None: its default.
        resume: whether to go on from the last checkpoint.
        strategy: further arguments of the strategy.
        nodes: how many nodes the ranks are on.
    """

    folder: str
    mesh: tuple[int, int, int, int]
    steps: int = 7
    fault: str = ""
    save_on_exception: bool = False
    save_every: int = 3
    name: str = "last-{step}"
    timeout: float | None = None
    resume: bool = False
    validate_every: int = 2
    repeats: int = 1
    strategy: dict[str, Any] | None = None
    nodes: int = 1


class Records(L.Callback):
    """Writes down losses, what each step takes, and the final state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            (self.folder / "began").write_text(str(trainer.global_step))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.is_global_zero:
            with (self.folder / "losses").open("a") as file:
                file.write(f"{trainer.global_step} {float(outputs['loss']).hex()}\n")

        with (self.folder / f"usage-{trainer.global_rank}").open("a") as file:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            descriptors = len(os.listdir("/proc/self/fd"))
            now = f"{time.process_time():.4f} {time.monotonic():.4f}"
            file.write(f"{trainer.global_step} {pages} {descriptors} {now}\n")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        digest = hashlib.sha256()
        for name, parameter in sorted(pl_module.named_parameters()):
            state = trainer.optimizers[0].state[parameter]
            for value in (parameter, *(state[key] for key in sorted(state))):
                local = value.to_local() if isinstance(value, DTensor) else value
                digest.update(name.encode() + local.detach().contiguous().numpy().tobytes())
        (self.folder / f"state-{trainer.global_rank}").write_text(digest.hexdigest())


def main() -> None:
    options = Run(**json.loads(sys.argv[1]))
    folder = Path(options.folder)
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    with planted(PLANTED.get(options.fault), rank, folder) as plant:
        fit(options, folder, plant)


def fit(options: Run, folder: Path, plant: Plant) -> None:
    plant.at("script")
    keeper = ModelCheckpoint(
        folder / "checkpoints",
        filename=options.name,
        save_top_k=-1 if "{step}" in options.name else 1,
        every_n_train_steps=options.save_every,
        save_on_exception=options.save_on_exception,
    )
    named = {} if options.timeout is None else {"timeout": timedelta(seconds=options.timeout)}
    strategy = WLBStrategy(*options.mesh, **named, **(options.strategy or {}))
    plant.wrap(strategy)
    trainer = harness.trainer(
        strategy,
        prod(options.mesh) // options.nodes,
        num_nodes=options.nodes,
        max_steps=options.steps,
        max_epochs=-1,
        val_check_interval=options.validate_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[Records(folder), plant.callback, keeper],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    trainer.fit(
        harness.module(harness.SMALL),
        PlantedData(plant, options.repeats),
        ckpt_path="last" if options.resume else None,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
