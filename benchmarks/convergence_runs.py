"""The training runs of ``benchmarks.convergence``: settings, one run, and its curves.

One run trains in one process from one seed, which sets the initial weights and the order of the
documents, and evaluates on documents that no run trains on. About 40 seconds on one core with the
default settings. Not a comparison by itself: differences between packings are smaller than those
between seeds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import torch

import lightning_wlb as wlb
from benchmarks.fixed_greedy import METHODS
from benchmarks.measured import quiet_trainer
from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.loader import StepDataset
from lightning_wlb.data.stores.document_store import DocumentStore, DocumentSubset
from lightning_wlb.planning import DataSettings

PACKINGS = ("original", "fixed_greedy", "auto", "wlb")
NORMALISATIONS = ("step", "nominal")
HELD_OUT = 64  # documents
LAST = 5  # the final training loss is that of the last 1/5 of the tokens


@dataclass(frozen=True)
class Settings:
    """What every run of a comparison shares.

    Args:
        tokens: length of a run.
        context_window: C.
        micro_batches: N; a global batch is N·C tokens.
        packing_window: global batches that ``fixed_greedy`` packs together.
        dim, layers: of the model.
        vocabulary: byte pairs.
        learning_rate: peak, after a warm-up over 5 % of the tokens; a cosine ends at a tenth.
        points: of the curves of the training loss; the held-out loss has half as many.

    Raises:
        ValueError: a run so short that a step could pass over a point.
    """

    tokens: int = 524_288
    context_window: int = 1024
    micro_batches: int = 4
    packing_window: int = 8
    dim: int = 64
    layers: int = 2
    vocabulary: int = 1024
    learning_rate: float = 3e-3
    points: int = 16

    def __post_init__(self) -> None:
        least = 2 * self.points * self.micro_batches * self.context_window
        if self.tokens < least:
            raise ValueError(
                f"tokens={self.tokens}, but {self.points} points of a curve need {least} at"
                f" {self.micro_batches} x {self.context_window} tokens per step. Train longer, or"
                " choose a smaller context window."
            )


class Run(NamedTuple):
    """One training run."""

    packing: str
    normalisation: str
    seed: int

    @property
    def name(self) -> str:
        """Key in the results."""
        return f"{self.packing}/{self.normalisation}/{self.seed}"


class Curves(L.Callback):
    """Losses and delay of a run by tokens seen.

    Args:
        settings: of the run.
        held_out: batches to evaluate on.
    """

    def __init__(self, settings: Settings, held_out: list[StepBatch]) -> None:
        self.settings = settings
        self.held_out = held_out
        self.steps: list[tuple[int, int, float, float, int]] = []
        self.seen = 0
        self.evaluated: list[tuple[int, float]] = []

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert isinstance(pl_module, wlb.LanguageModule)
        plan = batch.plan
        loss = float(outputs["loss"]) * pl_module.loss_denominator(plan)
        self.steps.append((plan.tokens, plan.target_tokens, loss, plan.delay, plan.max_delay))
        stretch = 2 * self.settings.tokens // self.settings.points
        before, self.seen = self.seen, self.seen + plan.tokens
        if before // stretch < self.seen // stretch:
            self.evaluated.append((self.seen, evaluate(pl_module, self.held_out)))

    def result(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        tokens, targets, losses, delays, oldest = map(
            np.array, zip(*self.steps, strict=True)
        )  # one row per step
        seen = tokens.cumsum()
        edges = np.linspace(0, seen[-1], self.settings.points + 1)[1:]
        point = np.searchsorted(edges, seen - tokens / 2)
        last = seen > seen[-1] * (LAST - 1) / LAST
        return {
            "steps": len(self.steps),
            "tokens": int(seen[-1]),
            "tokens_variation": float(tokens.std() / tokens.mean()),
            "delay_mean": float((delays * tokens).sum() / seen[-1]),
            "delay_max": int(oldest.max()),
            "training": {
                "tokens": [round(float(edge)) for edge in edges],
                "loss": (
                    np.bincount(point, losses, len(edges))
                    / np.maximum(np.bincount(point, targets, len(edges)), 1)
                ).tolist(),
            },
            "held_out": {
                "tokens": [count for count, _ in self.evaluated],
                "loss": [loss for _, loss in self.evaluated],
            },
            "final_training": float(losses[last].sum() / targets[last].sum()),
            "final_held_out": self.evaluated[-1][1],
        }


def evaluate(module: wlb.LanguageModule, batches: Sequence[StepBatch]) -> float:
    """Mean loss over the targets of the batches."""
    assert module.model is not None
    with torch.no_grad():
        losses = [
            float(module.model(micro_batch))
            for batch in batches
            for micro_batch in batch.micro_batches
        ]
    return sum(losses) / sum(batch.target_tokens for batch in batches)


def train(settings: Settings, run: Run) -> dict[str, Any]:
    """The curves of one run. In a process of its own: it seeds everything."""
    torch.set_num_threads(1)
    store = stdlib_documents(settings)
    # The same documents in every run, whatever its seed.
    chosen = set(random.Random(0).sample(range(len(store)), HELD_OUT))
    kept = [number for number in range(len(store)) if number not in chosen]
    L.seed_everything(run.seed, verbose=False)
    module = wlb.LanguageModule(
        wlb.TransformerConfig(
            dim=settings.dim,
            layers=settings.layers,
            heads=2,
            kv_heads=2,
            ffn_dim=11 * settings.dim // 4,
            vocab_size=settings.vocabulary,
        ),
        learning_rate=settings.learning_rate,
        warmup_tokens=settings.tokens // 20,
        decay_tokens=settings.tokens,
        loss_normalisation=run.normalisation,  # type: ignore[arg-type]
    )
    packing: dict[str, Any] = {"method": METHODS.get(run.packing, run.packing)}
    if run.packing == "fixed_greedy":
        packing["packing_window"] = settings.packing_window
    data = wlb.WLBDataModule(
        DocumentSubset(store, kept),
        context_window=settings.context_window,
        micro_batches=settings.micro_batches,
        packing=packing,
        long_documents="truncate",
        max_tokens=settings.tokens,
        seed=run.seed,
    )
    curves = Curves(settings, _batches(DocumentSubset(store, sorted(chosen)), settings))
    trainer = quiet_trainer(
        devices=1,
        max_epochs=-1,  # max_tokens ends the run
        gradient_clip_val=1.0,
        callbacks=[curves],
    )
    trainer.fit(module, data)
    return curves.result()


def stdlib_documents(settings: Settings) -> wlb.StdlibDocuments:
    """What every run trains on; tokenised on the first call on a machine, then read."""
    return wlb.StdlibDocuments(tokenizer="bpe", vocab_size=settings.vocabulary)


def _batches(store: DocumentStore, settings: Settings) -> list[StepBatch]:
    """Documents up to a window, which no packing cuts any further."""
    data = DataSettings(
        context_window=settings.context_window,
        micro_batches=settings.micro_batches,
        packing="best_fit",
        long_documents="truncate",
        shuffle=False,
    )
    return list(StepDataset(store, data, Work(PassWork(1, 0), PassWork(2, 0))))
