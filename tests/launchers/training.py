"""A user's script: trains four steps on two ranks from the newest checkpoint, if there is one.

::

    python tests/launchers/training.py FOLDER          # Lightning starts the second rank
    torchrun --nproc-per-node 2 tests/launchers/training.py FOLDER --dies-after 3
"""

import argparse
import os
import signal
from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_wlb.strategy.wlb import WLBStrategy
from tests.strategy.harness import SMALL, data, module, trainer


class Writes(L.Callback):
    """Appends each step's loss to a file, exactly; once, rank 1 dies after a step."""

    def __init__(self, folder: Path, dies_after: int) -> None:
        self.folder, self.dies_after = folder, dies_after

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.is_global_zero:
            with open(self.folder / "losses", "a") as file:
                file.write(f"{trainer.global_step} {float(outputs['loss']).hex()}\n")
        died, here = self.folder / "died", (trainer.global_rank, trainer.global_step)
        if here == (1, self.dies_after) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, dies_after: int = 0) -> None:
    """Train in the folder."""
    runner = trainer(
        WLBStrategy(pipeline_parallel_size=2),
        2,
        max_steps=4,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=[
            # The checkpoint of a step is there before its rank may die.
            Writes(folder, dies_after),
            ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1),
        ],
        default_root_dir=folder,
    )
    runner.fit(module(SMALL), data(SMALL, num_workers=1), ckpt_path="last")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dies-after", type=int, default=0)
    given = parser.parse_args()
    train(given.folder, given.dies_after)
