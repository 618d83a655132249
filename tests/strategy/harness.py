"""Short real Trainer runs whose gradients and parameters can be compared across meshes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from tests.device import ON_CUDA

# Of tensors this small, two threads wait for each other longer than they work.
torch.set_num_threads(1)

WINDOW = 32
VOCABULARY = 64
# One token, shorter than 2·CP, odd, prime, as long as the window, and longer (split).
LENGTHS = (1, 2, 3, 7, 13, 31, 32, 70, 5, 17, 29, 11, 23, 6, 19, 32, 1, 37, 8, 14, 27, 4, 21, 9)


@dataclass(frozen=True)
class Case:
    """What varies besides the mesh."""

    packing: str = "wlb"
    sharding: str = "per_document_contiguous"
    tied: bool = False
    activation_checkpointing: str = "auto"
    masked: bool = False
    sliding_window: int | None = None
    layers: int = 4


CASES = (
    Case("wlb", "per_document_contiguous", tied=False, masked=True),
    Case("original", "per_sequence", tied=True),
    Case("wlb", "per_document", tied=True, activation_checkpointing="full", masked=True),
    # Shorter than a chunk of the longest pieces, longer than others.
    Case("original", "hybrid", activation_checkpointing="selective", sliding_window=9),
    Case("wlb", "adaptive"),
    Case("original", "ptrr", masked=True),
)
# For what is around a step: two stages have a layer each.
SMALL, SMALL_TIED = (replace(case, layers=2) for case in CASES[:2])


def documents(masked: bool) -> InMemoryDocuments:
    """The same random documents on every call."""
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, VOCABULARY, length) for length in LENGTHS]
    masks = None
    if masked:
        masks = [generator.random(length) < 0.6 for length in LENGTHS]
        # Whole documents without any target.
        masks[2][:], masks[6][:] = False, False
    return InMemoryDocuments(sequences, masks, vocab_size=VOCABULARY)


def on_mesh(case: Case, mesh: tuple[int, ...], schedule: str = "auto") -> Case:
    """Two layers, unless a pipeline is alone or has four stages: fewer messages of each kind."""
    alone = 1 < math.prod(mesh) == mesh[1]
    return case if alone or schedule == "interleaved" else replace(case, layers=2)


def config(tied: bool, sliding_window: int | None = None, layers: int = 4) -> TransformerConfig:
    """Small layers, four of them so that four stages have one each."""
    return TransformerConfig(
        dim=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        ffn_dim=48,
        vocab_size=VOCABULARY,
        tied_embeddings=tied,
        sliding_window=sliding_window,
    )


def module(case: Case, **options: Any) -> LanguageModule:
    """A fresh module; the same initial weights every time."""
    return LanguageModule(
        config(case.tied, case.sliding_window, case.layers),
        learning_rate=1e-2,
        activation_checkpointing=case.activation_checkpointing,  # type: ignore[arg-type]
        seed=7,
        **options,
    )


def data(case: Case, **options: Any) -> WLBDataModule:
    """Three micro-batches a step, so that two replicas have different numbers of them."""
    defaults: dict[str, Any] = {
        "documents": documents(case.masked),
        "context_window": WINDOW,
        "micro_batches": 3,
        "packing": case.packing,
        "sharding": case.sharding,
        "profile": "none",  # on GPUs the plans are those on CPUs
        # Tests' ranks are daemons, which may not start processes.
        "num_workers": 0,
    }
    return WLBDataModule(**(defaults | options))


class SharedGPUs(CUDAAccelerator):
    """As many devices as are asked for: those that there are, in turn."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", index % torch.cuda.device_count()) for index in devices]


def trainer(strategy: Any, devices: int, **options: Any) -> L.Trainer:
    """A quiet Trainer in float64."""
    defaults: dict[str, Any] = {
        "accelerator": SharedGPUs() if ON_CUDA else "cpu",
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "gradient_clip_val": 0.5,
        "max_steps": 3,
    }
    return L.Trainer(strategy=strategy, devices=devices, **(defaults | options))


class Recorder(L.Callback):
    """Keeps whole gradients, parameters and losses, whatever the mesh: collective."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, np.ndarray]] = []
        self.losses: list[float] = []
        self.plans: list[str] = []
        self.parameters: dict[str, np.ndarray] = {}
        self.micro_batches: list[int] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.gradients.append(
            {name: whole(p.grad) for name, p in pl_module.named_parameters() if p.grad is not None}
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))
        self.plans.append(batch.plan.to_json())
        self.micro_batches.append(len(batch.micro_batches))

    def on_train_end(self, trainer, pl_module) -> None:
        self.parameters = {name: whole(p) for name, p in pl_module.named_parameters()}

    def record(self) -> dict[str, Any]:
        names = ("gradients", "losses", "plans", "parameters", "micro_batches")
        return {name: getattr(self, name) for name in names}


def whole(tensor: Tensor) -> np.ndarray:
    """The full tensor of any sharding, as numpy."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().numpy().copy()


def reference(case: Case, **options: Any) -> dict[str, Any]:
    """The same run in one process, with ``strategy="auto"``."""
    recorder = Recorder()
    runner = trainer("auto", 1, callbacks=[recorder], **options)
    runner.fit(module(case), data(case))
    return recorder.record()


def relative_error(value: np.ndarray, expected: np.ndarray) -> float:
    """‖value − expected‖ / ‖expected‖; where the reference is zero, exactly zero is wanted."""
    norm = float(np.linalg.norm(expected))
    difference = float(np.linalg.norm(value - expected))
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm
