"""Real training steps, recorded: plans, times of every action, activations held.

What the benchmarks that measure have in common. On a CPU a rank has one thread; its times are its
own CPU time, so ranks may share a core, except for wall clocks. On CUDA they are events, and a step
lasts until the device has done it.
"""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import torch

from benchmarks.activation_count import count_activations
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.heterogeneous.planning.dealing import renumbered
from lightning_wlb.heterogeneous.setup import Dynamic
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import ActivationCheckpointing, ReplicaPlan, StepPlan, alike
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.programs import program_of
from lightning_wlb.schedule.simulator import Simulation, simulate_replicas
from lightning_wlb.strategy.wlb import WLBStrategy


@dataclass
class RankStep:
    """One step as one rank saw it.

    Args:
        plan: JSON of the step's plan.
        begin: wall clock of this machine when the step began, in seconds.
        wall: seconds that it took.
        compute: (action, CPU seconds) in the order in which they ran; empty unless timed.
        held: bytes of activations after each action; empty unless counted.
        stages: first and last layer + 1 of every stage.
        cpu: processor seconds of the process, all its threads together.
        peak_bytes: most bytes of the GPU that the step had allocated; 0 on a CPU.
    """

    plan: str
    begin: float
    wall: float
    compute: list[tuple[str, float]]
    held: list[int]
    stages: list[tuple[int, int]]
    cpu: float = 0.0
    peak_bytes: int = 0


class Recorder(L.Callback):
    """Keeps what every step of this rank did.

    Args:
        counted: count activations instead of timing actions, which counting would disturb.
    """

    def __init__(self, counted: bool = False) -> None:
        self.counted = counted
        self.steps: list[RankStep] = []
        self.begin = self.cpu = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Time or count every action from here on."""
        executor = trainer.strategy.executor
        if self.counted:
            self.count = count_activations(executor)
        else:
            executor.measure()

    def on_train_batch_start(self, trainer: L.Trainer, *arguments: Any) -> None:
        """Start the step's clocks."""
        _await_device(trainer.strategy.root_device)
        self.begin, self.cpu = time.monotonic(), time.process_time()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, _: int
    ) -> None:
        """Keep the step."""
        peak_bytes = _await_device(trainer.strategy.root_device)
        executor = trainer.strategy.executor
        self.steps.append(
            RankStep(
                plan=batch.plan.to_json(),
                begin=self.begin,
                wall=time.monotonic() - self.begin,
                compute=[(str(each.action), each.compute) for each in executor.timings()],
                held=self.count.held_bytes if self.counted else [],
                stages=[(part.start, part.stop) for part in executor.pipeline.stages],
                cpu=time.process_time() - self.cpu,
                peak_bytes=peak_bytes,
            )
        )


def _await_device(device: torch.device) -> int:
    """Wait until a GPU has done what it was asked; the most bytes allocated since the last call."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return most


def quiet_trainer(accelerator: str = "cpu", **options: Any) -> L.Trainer:
    """A Trainer that prints and writes nothing but what goes wrong."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return L.Trainer(
        accelerator=accelerator,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def train(
    config: TransformerConfig,
    mesh: Mesh,
    data: WLBDataModule,
    *,
    counted: bool = False,
    schedule: str = "1f1b",
    activation_checkpointing: ActivationCheckpointing = "auto",
    callbacks: Sequence[L.Callback] = (),
    dynamic: Dynamic = "off",
    **options: Any,
) -> list[RankStep]:
    """Train a fresh module as one of the mesh's ranks; what its steps did.

    Args:
        config: of the model.
        mesh: over all ranks of the process group.
        data: without loader workers, which the ranks cannot have.
        counted: see :class:`Recorder`.
        schedule: of the pipeline.
        activation_checkpointing: of the module.
        callbacks: beside the recorder, and after it.
        dynamic: strategies that steps may take in place of the mesh's pipelines.
        options: of :func:`quiet_trainer`.
    """
    recorder = Recorder(counted)
    trainer = quiet_trainer(
        strategy=WLBStrategy(*mesh.shape, schedule=schedule, dynamic=dynamic),
        devices=mesh.devices,
        callbacks=[recorder, *callbacks],
        **options,
    )
    # The Trainer shares the machine's cores out; profiles and clocks are of one thread.
    torch.set_num_threads(1)
    module = LanguageModule(config, activation_checkpointing=activation_checkpointing)
    trainer.fit(module, data)
    return recorder.steps


def replayed(
    mesh: Mesh,
    plan: StepPlan,
    timings: Sequence[Sequence[tuple[str, float]]],
    schedule: str = "1f1b",
) -> list[Simulation]:
    """The step's schedule with each action's own time, the slowest rank's of a context and tensor
    group; no communication.

    Args:
        mesh: that the step ran on.
        plan: of the step.
        timings: of each rank, (action, seconds).
        schedule: of the pipeline.
    """
    if not plan.schemes:
        return _replayed(mesh, plan.replicas, timings, schedule)
    found: dict[int, Simulation] = {}
    for numbers in alike(plan.schemes).values():
        scheme = plan.schemes[numbers[0]]
        like = scheme.mesh(len(numbers))
        ranks = [rank for number in numbers for rank in plan.schemes[number].ranks]
        replicas = [renumbered(plan.replicas[number], numbers.index) for number in numbers]
        made = _replayed(like, replicas, [timings[rank] for rank in ranks], schedule)
        found |= zip(numbers, made, strict=True)
    return [found[number] for number in sorted(found)]


def _replayed(
    mesh: Mesh,
    replicas: Sequence[ReplicaPlan],
    timings: Sequence[Sequence[tuple[str, float]]],
    schedule: str,
) -> list[Simulation]:
    """On a mesh whose replicas these are."""
    measured: dict[tuple[int, Action], int] = {}
    for rank, of_rank in enumerate(timings):
        replica = mesh.coordinate(rank).data
        for text, seconds in of_rank:
            stage, kind, micro_batch = re.split("([FB])", text)
            key = replica, Action(int(stage), kind, int(micro_batch))  # type: ignore[arg-type]
            measured[key] = max(measured.get(key, 0), round(seconds * 1e9))
    programs = [
        [
            program_of(schedule, rank, mesh.pipeline, mesh.virtual_stages, replicas, number)
            for rank in range(mesh.pipeline)
        ]
        for number in range(len(replicas))
    ]
    return simulate_replicas(
        programs,
        lambda replica, action: measured[replica, action],
        sharers=[replica.sharers for replica in replicas],
    )
