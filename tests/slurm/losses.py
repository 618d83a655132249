"""What a run under Slurm leaves behind for the tests, written by the run itself."""

import atexit
import hashlib
import os
import time
from pathlib import Path

import lightning.pytorch as L
from torch.distributed.tensor import DTensor


class Losses(L.Callback):
    """Writes every step's loss exactly, and in the end a digest of each rank's parameters.

    Args:
        folder: gets ``losses``, a line for every step taken, and ``rank-N``.
        seconds: how much longer a step takes, so that a signal finds one.
        linger: how long the process stays after it has trained.
    """

    def __init__(self, folder: str, seconds: float = 0.0, linger: float = 0.0) -> None:
        self.folder, self.seconds, self.linger = Path(folder), seconds, linger

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.is_global_zero:
            with open(self.folder / "losses", "a") as file:
                start = os.environ.get("SLURM_RESTART_COUNT", "0")
                file.write(f"{start} {trainer.global_step} {float(outputs['loss']).hex()}\n")
        time.sleep(self.seconds)

    def on_train_end(self, trainer, pl_module) -> None:
        digest = hashlib.sha256()
        for name, parameter in pl_module.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            digest.update(name.encode() + local.detach().numpy().tobytes())
        (self.folder / f"rank-{trainer.global_rank}").write_text(digest.hexdigest())
        (self.folder / f"node-{trainer.global_rank}").write_text(
            os.environ.get("SLURMD_NODENAME", "")
        )
        atexit.register(time.sleep, self.linger)
