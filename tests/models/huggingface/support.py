"""Short Trainer runs of Hugging Face models, and transformers' own model document by document.

transformers computes rotary tables, norms and routers in float32 whatever the model's dtype, which
hides errors below 1e-6; :class:`KeepDouble` leaves float64 alone.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.attention.recurrence import RecurrentRows, Segment
from lightning_wlb.data.batch import IGNORE, MicroBatchTensors, StepBatch
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.tensor_parallel import assign
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.models.huggingface.configs import tiny
from tests.strategy.changed_plans import changed_data
from tests.strategy.harness import Case, Recorder, data, documents, relative_error, trainer


class KeepDouble(ExitStack):
    """Within it, asking for float32 of a float64 tensor gives float64.

    Functions are patched: a torch mode would be off where backward recomputes.
    """

    def __enter__(self) -> KeepDouble:
        owners = [(torch.Tensor, name) for name in ("float", "to", "type", "softmax", "sum")]
        owners += [(torch, "softmax"), (F, "softmax"), (F, "log_softmax")]
        for owner, name in owners:
            self.enter_context(patch.object(owner, name, _wide(getattr(owner, name), name)))
        return self


def _wide(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
            if name == "float":
                return x
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(x, *args, **kwargs)

    return call


def value(name: str, shape: Iterable[int]) -> Tensor:
    """Values of a parameter by its family's name; wide, so that nothing is zero or one."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    wide = torch.empty(tuple(shape), dtype=torch.float64, device="cpu")
    wide.normal_(0, 0.15, generator=generator)
    return wide + (1 if "norm" in name and name.endswith("weight") else 0)


def packed_rows(lengths: Sequence[int]) -> tuple[list[Tensor], MicroBatchTensors]:
    """Random documents of these lengths, and the micro-batch that holds them one after another."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, 64, (length,), generator=generator) for length in lengths]
    rows = sum(lengths)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    metadata = AttentionMetadata(rows, rows, ends, ends, max(lengths), max(lengths), None)
    labels = [torch.cat([each[1:], torch.tensor([IGNORE])]) for each in documents]
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = tuple(Segment((n, 0), 0, length, False) for n, length in enumerate(lengths))
    return documents, MicroBatchTensors(
        torch.cat(documents),
        torch.cat(labels),
        positions,
        metadata,
        rows,
        recurrence=RecurrentRows(segments, (rows,)),
    )


class Valued(HuggingFaceModule):
    """The module under test, with :func:`value` for its parameters."""

    def configure_model(self) -> None:
        LanguageModule.configure_model(self)  # adapters belong to weights, which are in no folder

    def init_weights(self) -> None:
        decoder = self.model
        for name, parameter in decoder.named_parameters():
            source = decoder.tied.get(name, name)
            whole = value(decoder.family_name(source), decoder.family_shape(source))
            assign(parameter, whole.view(parameter.shape))


class Packed(Valued):
    """The same in float64."""

    def build_model(self) -> nn.Module:
        # The strategy leaves buffers as they are, and Lightning's own float64 run widens them; some
        # families make parameters in float32, which would round these values.
        return super().build_model().double()


class ByDocument(Packed):
    """transformers' own model with its eager attention, one document at a time."""

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.config)
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        return AutoModelForCausalLM.from_config(config, **eager, dtype=torch.float64).double()

    def init_weights(self) -> None:
        for name, parameter in self.model.named_parameters():
            with torch.no_grad():
                parameter.copy_(value(name, parameter.shape))

    def step(self, batch: StepBatch) -> Tensor:
        store = documents(True)
        total = torch.zeros((), dtype=torch.float64)
        for piece in batch.plan.pieces:
            length = int(store.lengths[piece.document])
            tokens = torch.as_tensor(store.read(piece.document, 0, length).copy())
            allowed = torch.as_tensor(store.mask(piece.document, 0, length).copy())
            labels = torch.full((length,), -100)
            labels[:-1] = torch.where(allowed[1:], tokens[1:], -100)
            part = slice(piece.origin, piece.stop)
            logits = self.model(tokens[None, part], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits, labels[part], reduction="sum")
        return total / self.loss_denominator(batch.plan)


@dataclass(frozen=True)
class Run:
    """A run of AdamW steps of a family's tiny model; ``change``: how its plans are rewritten."""

    family: str
    mesh: tuple[int, int, int, int] = (1, 1, 1, 1)
    packing: str = "wlb"
    sharding: str = "per_document_contiguous"
    schedule: str = "1f1b"
    virtual: int = 1
    checkpointing: str = "none"
    change: str | None = field(default=None, compare=False)
    steps: int = 2
    learning_rate: float = 1e-2
    fields: tuple[tuple[str, Any], ...] = ()
    lora: dict[str, Any] | None = field(default=None, compare=False)

    @property
    def config(self) -> Any:
        return tiny(self.family, **dict(self.fields))

    @property
    def case(self) -> Case:
        return Case(self.packing, self.sharding, masked=True)


OPTIONS: dict[str, Any] = {"learning_rate": 1e-2}


def by_document(run: Run) -> dict[str, Any]:
    """The run in one process by transformers alone; names are the family's."""
    recorder = Recorder()
    with KeepDouble():
        module = ByDocument(run.config, learning_rate=run.learning_rate)
        trainer("auto", 1, max_steps=run.steps, callbacks=[recorder]).fit(module, data(run.case))
    return recorder.record()


def on_ranks(rank: int, runs: tuple[Run, ...]) -> list[dict[str, Any]]:
    """The runs on this rank of a mesh, one after another; names are the family's."""
    results = []
    for run in runs:
        recorder = Recorder()
        with KeepDouble():
            # With adapters the values of `Packed` take the place of weights.
            weights = {} if run.lora is None else {"pretrained": "none", "lora": run.lora}
            given = {"activation_checkpointing": run.checkpointing, **weights}
            module = Packed(run.config, learning_rate=run.learning_rate, **given)
            strategy = WLBStrategy(
                *run.mesh, schedule=run.schedule, virtual_pipeline_size=run.virtual
            )
            ranks = int(np.prod(run.mesh))
            runner = trainer(strategy, ranks, max_steps=run.steps, callbacks=[recorder])
            made = changed_data(run.case, run.change) if run.change else data(run.case)
            runner.fit(module, made)
        results.append(named_by_family(recorder.record(), module.model))
    return results


def named_by_family(record: dict[str, Any], decoder: HuggingFaceDecoder) -> dict[str, Any]:
    """A record whose parameters and gradients go by the family's names."""
    names = {
        f"model.{name}": decoder.family_name(decoder.tied.get(name, name))
        for name, _ in decoder.named_parameters()
    }
    steps = (record["parameters"], *record["gradients"])
    parameters, *gradients = ({names[n]: each for n, each in step.items()} for step in steps)
    return record | {"parameters": parameters, "gradients": gradients}


def worst_error(records: list[dict[str, Any]], wanted: dict[str, Any]) -> float:
    """Largest relative error over losses, gradients and final parameters of all ranks.

    Every parameter of the reference must be on some rank.
    """
    worst = 0.0
    for record in records:
        for got, want in zip(record["losses"], wanted["losses"], strict=True):
            worst = max(worst, abs(got - want) / abs(want))
        pairs = [
            *zip(record["gradients"], wanted["gradients"], strict=True),
            (record["parameters"], wanted["parameters"]),
        ]
        for got, want in pairs:
            for name, tensor in got.items():
                # A parameter that no document reached has no gradient in one process.
                other = want.get(f"model.{name}", np.zeros(tensor.size))
                worst = max(worst, relative_error(tensor.reshape(-1), other.reshape(-1)))
    held = {f"model.{name}" for record in records for name in record["parameters"]}
    assert held == set(wanted["parameters"])
    return worst
