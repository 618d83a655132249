"""A small run for the tests, as a job of Slurm and without it, and what it leaves behind."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.slurm.cluster import Cluster, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples/train.sbatch")
STEPS = 12
NODES, TASKS = 2, 2
RANKS = NODES * TASKS
# What differs from the script's own lines: two small nodes without a GPU.
OPTIONS = (
    f"--nodes={NODES}",
    f"--ntasks-per-node={TASKS}",
    "--gpus-per-node=0",
    "--cpus-per-task=1",
)


CONFIG = f"""
trainer:
  strategy: wlb
  accelerator: cpu
  precision: 32-true
  max_steps: {STEPS}
  gradient_clip_val: 1.0
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
wlb: {{pipeline_parallel_size: 2, context_parallel_size: 1, tensor_parallel_size: 1}}
model:
  class_path: lightning_wlb.LanguageModule
  init_args:
    config: {{dim: 32, layers: 2, heads: 2, kv_heads: 1, ffn_dim: 48, vocab_size: 256}}
    learning_rate: 0.01
data: {{documents: stdlib, context_window: 256, micro_batches: 4}}
"""


class Run:
    """One run and its folder.

    Args:
        folder: gets the configuration, the log, the checkpoints, and what ``Losses`` writes.
        seconds: how much longer a step takes, so that a signal finds one.
        linger: how long its processes stay after they have trained.
        keep: options of a ModelCheckpoint, which saves in ``folder/kept``; none if empty.
    """

    def __init__(
        self, folder: Path, *, seconds: float = 0.0, linger: float = 0.0, **keep: Any
    ) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.config = folder / "run.yaml"
        own = {
            "class_path": "tests.slurm.losses.Losses",
            "init_args": {"folder": str(folder), "seconds": seconds, "linger": linger},
        }
        keeper = {
            "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
            "init_args": {"dirpath": str(folder / "kept"), **keep},
        }
        config = yaml.safe_load(CONFIG)
        config["trainer"] |= {
            "enable_checkpointing": bool(keep),
            "default_root_dir": str(folder),
            "callbacks": [keeper, own] if keep else [own],
        }
        self.config.write_text(yaml.safe_dump(config))
        self.environment = {
            "CONFIG": str(self.config),
            "VENV": sys.prefix,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def submit(self, cluster: Cluster, *options: str, training: tuple[str, ...] = ()) -> str:
        """The number of a job that runs the project's own batch script."""
        return cluster.submit(
            *OPTIONS,
            f"--output={self.log}",
            *options,
            SCRIPT,
            *training,
            cwd=ROOT,
            **self.environment,
        )

    def without_slurm(self, environment: Mapping[str, str]) -> None:
        """Run it with as many ranks that the Trainer starts by itself."""
        command = [sys.executable, "-m", "lightning_wlb.cli.main", "fit"]
        command += [f"--config={self.config}", f"--trainer.devices={RANKS}"]
        with open(self.log, "w") as log:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env={**environment, **self.environment},
                stdout=log,
                stderr=log,
                timeout=240,
            )
        assert done.returncode == 0, self.log.read_text()

    def taken(self) -> list[tuple[int, int, str]]:
        """Restarts before it, number and exact loss of every step that was taken, in order."""
        path = self.folder / "losses"
        lines = path.read_text().splitlines() if path.exists() else []
        words = [line.split() for line in lines]
        return [(int(start), int(step), loss) for start, step, loss in words]

    def steps(self) -> list[tuple[int, str]]:
        """Number and exact loss of every step that was taken, in order."""
        return [(step, loss) for _, step, loss in self.taken()]

    def parameters(self) -> list[str]:
        """Each rank's digest of its parameters at the end."""
        return [(self.folder / f"rank-{rank}").read_text() for rank in range(RANKS)]

    def checkpoints(self) -> list[str]:
        """The checkpoints in its folder."""
        found = self.folder.glob("**/*.ckpt")
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def wait_for_steps(self, count: int, seconds: float = 180) -> None:
        """Wait until so many steps were taken, those of all restarts together."""
        wait_until(
            lambda: len(self.steps()) >= count,
            seconds,
            f"only {len(self.steps())} steps: {self.log}",
        )

    def said(self) -> str:
        """The log, for messages of assertions."""
        return self.log.read_text() if self.log.exists() else "(no log)"
