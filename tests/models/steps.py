"""Steps made by hand for the tests of the models."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Sequence
from itertools import cycle
from typing import Any

import lightning.pytorch as L
from torch.utils.data import DataLoader

from lightning_wlb.data.batch import StepBatch, make_step_batch
from lightning_wlb.data.store_checks import count_targets
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.mesh import Rank
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import MicroBatch, Piece, Recompute, ReplicaPlan, Slice, StepPlan
from lightning_wlb.sharding import layout

VOCABULARY = 24
LENGTHS = (1, 2, 13, 7, 40, 3, 22)
# Document 4 in two pieces; micro-batches of different length.
MICRO_BATCHES = (
    ((4, 0, 31), (0, 0, 1)),
    ((2, 0, 13), (4, 31, 40), (3, 0, 7), (1, 0, 2)),
    ((6, 0, 22),),
)
PIECES = tuple(piece for micro_batch in MICRO_BATCHES for piece in micro_batch)


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def loss_masks(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[bool]]:
    draw = random.Random(seed)
    return [[draw.random() < 0.6 for _ in range(length)] for length in lengths]


def config(**overrides: Any) -> TransformerConfig:
    sizes = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24}
    return TransformerConfig(**({"vocab_size": VOCABULARY, **sizes} | overrides))


def step_batch(
    texts: Sequence[Sequence[int]],
    micro_batches: Sequence[Sequence[tuple[int, int, int]]] = MICRO_BATCHES,
    masks: Sequence[Sequence[bool]] | None = None,
    rank: Rank | None = None,
    step: int = 0,
    recompute: Sequence[Recompute] = ("none",),
) -> StepBatch:
    """One replica's step: of each micro-batch its pieces (document, origin, stop).

    Micro-batches recompute what ``recompute`` says, from its begin again where it is shorter.
    """
    rank = rank or Rank()
    store = InMemoryDocuments(texts, masks, vocab_size=VOCABULARY)
    slices, forward = [], []
    for pieces, mode in zip(micro_batches, cycle(recompute), strict=False):
        rows = layout(
            "per_document_contiguous",
            [stop - origin for _, origin, stop in pieces],
            rank.mesh.context,
            rank.mesh.tensor,
        ).rows
        indices = tuple(range(len(slices), len(slices) + len(pieces)))
        slices += [Slice(document, origin, origin, stop) for document, origin, stop in pieces]
        forward.append(MicroBatch(indices, "per_document_contiguous", rows, (0,), mode))
    plan = StepPlan(
        step=step,
        epoch=0,
        replicas=(ReplicaPlan(tuple(slices), tuple(forward)),),
        pieces=tuple(Piece(part.document, part.origin, part.stop, step) for part in slices),
        target_tokens=sum(
            count_targets(store, part.document, part.start, part.stop) for part in slices
        ),
        cap=64,
        micro_batches=max(len(micro_batches), 1),
        nominal_tokens=200,
    ).validate()
    return make_step_batch(plan, store, rank, {}, 0, False)


def stage(
    model: Transformer, layers: Collection[int], embed: bool = False, head: bool = False
) -> Transformer:
    """A pipeline stage: the model, of which only some parts are left."""
    for number in set(map(int, model.layers)) - set(layers):
        del model.layers[str(number)]
    model.embed = model.embed if embed else None
    model.head = model.head if head else None
    return model


def spread(model: Transformer, seed: int = 7) -> Transformer:
    """The model with larger initial values than real ones: attention is far from uniform."""
    model.initial_deviation = lambda name: 0.3
    model.initialise(seed)
    return model


def loader(batches):
    """A loader that gives these batches as they are."""
    return DataLoader(batches, batch_size=None)


def trainer(path, **options):
    """A quiet Trainer of one process, without the package's strategy."""
    defaults = {
        "accelerator": "cpu",
        "strategy": "auto",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": path,
    }
    return L.Trainer(**(defaults | options))


def module(sliding_window=None, **options):
    """The small model of :func:`config` in float64, trained by itself."""
    sizes = dataclasses.replace(config(), sliding_window=sliding_window)
    built = LanguageModule(sizes, seed=3, **options).double()
    built.configure_model()
    return built.double()
