"""The base class of models that are trained on packed documents and split over a mesh.

:class:`.Transformer`, the Hugging Face decoders and a user's own models are subclasses of
:class:`Decoder`. A model needs nothing else: :class:`.LanguageModule` calls its forward and
:meth:`~Decoder.initialise`, and :class:`.WLBStrategy` splits it by its three parts,
:attr:`~Decoder.tied` and :meth:`~Decoder.tensor_parallel_plan`.

Each parameter is drawn whole, in float32 on the CPU, by a generator seeded with a hash of the seed
and the parameter's name, and a rank keeps its shard. Cost: memory for the largest parameter.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.dropout import _DropoutNd

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.cost.overlap import Overlap
from lightning_wlb.data.batch import MicroBatchTensors
from lightning_wlb.distributed.process_groups import NO_GROUPS, ProcessGroups
from lightning_wlb.models.tensor_parallel import assign
from lightning_wlb.plan import ActivationCheckpointing


class Decoder(nn.Module):
    """A decoder on packed rows, or one pipeline stage of it.

    A subclass builds the whole model; the strategy then removes the parts of other stages. All
    parameters are in the three parts below, which the forward calls as modules, because a module's
    call waits for its parameters. Rows have no batch dimension, and the sharding chooses their
    order: ``micro_batch.positions`` has each row's position in its document, and
    ``micro_batch.attention`` says which rows see which.

    Attributes:
        embed: the embedding; None on all stages but the first.
        layers: the decoder layers that the stage holds, keyed by their global number as a string.
        head: the final norm and output projection; None on all stages but the last.
        attention_kernel: the kernel that the layers' attention calls; a strategy that measures
            attention sets its ``timer``. None in a model with attention of its own.
        activation_checkpointing: ``"auto"`` if the layers recompute in backward what
            ``micro_batch.recompute`` says; else the mode that they always have.
        overlaps: which messages overlap products, if ``groups.chunks`` is given.
    """

    embed: nn.Module | None
    layers: nn.ModuleDict
    head: nn.Module | None
    attention_kernel: VarlenAttention | None = None
    activation_checkpointing: ActivationCheckpointing = "none"
    overlaps: Overlap = "off"

    def forward(
        self,
        micro_batch: MicroBatchTensors,
        hidden: Tensor | None = None,
        layers: range | None = None,
        groups: ProcessGroups = NO_GROUPS,
    ) -> Tensor:
        """Run one stage on P rows; this rank's residual stream has P/TP of them.

        Attention is :func:`~lightning_wlb.attention.packed.packed_attention` with
        ``micro_batch.attention.for_layer(number)``.

        Args:
            micro_batch: the embedding reads its tokens, the head its labels (-100: no target).
            hidden: [P/TP, dim], the output of the stage before; None in the first stage.
            layers: global numbers of the stage's layers; all layers of the module if None.
            groups: the process groups that share the rows and the parameters.

        Returns:
            Without a head: hidden states [P/TP, dim]. With a head and labels: the *sum* of token
            losses, 0-dim, float32 or wider, the same on every tensor-parallel rank. With a head
            and no labels: logits [P, vocabulary/TP] of this rank's share of the vocabulary.
        """
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def compile_blocks(self) -> None:
        """For ``compile=True``: compile the layers' work between collectives and attention.

        It is called once, before the model is split. It may change gradients only by rounding.

        Raises:
            ValueError: the model has nothing to compile.
        """
        raise ValueError(
            f"compile=True, but {type(self).__name__} does not compile anything: only the blocks of"
            " lightning_wlb.Transformer and its subclasses are. Set compile=False; or, in a model"
            " of your own, override compile_blocks, and compile pure functions of rows there, as"
            " Transformer does (lightning_wlb/models/compiled_functions.py)."
        )

    def tensor_parallel_plan(self, size: int) -> dict[str, Placement]:
        """Name pattern of parameters -> how they are split over ``size`` tensor-parallel ranks.

        A replicated parameter's gradient on a rank must be the part that flows through the rank's
        own rows, heads or words: the ranks' parts are summed (:func:`.tensor_parallel.local`).

        Raises:
            ValueError: the model cannot be split.
        """
        raise ValueError(
            f"tensor_parallel_size={size}: {type(self).__name__} has no tensor_parallel_plan. Write"
            " one (docs/guide/own_model.md), or use tensor_parallel_size=1."
        )

    @property
    def tied(self) -> dict[str, str]:
        """Parameter name -> name of the parameter to which it is tied, on any pipeline stage.

        A stage with both has a single ``Parameter``; else the strategy keeps both equal.
        """
        return {}

    def initialise(self, seed: int) -> None:
        """Fill the parameters that this rank holds, which may be DTensors.

        Values must depend only on the seed and global parameter names, so that every mesh has the
        same. By default vectors named ``...bias`` are zeros, others ones (norm weights). All other
        values are normal with mean 0 and the standard deviation :meth:`initial_deviation`.

        Raises:
            ValueError: a parameter on the meta device, which has no memory to fill.
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                raise ValueError(
                    f"initialise: parameter {name} is on the meta device. Give the model memory"
                    " first, by model.to_empty(device=...)."
                )
            source = self.tied.get(name, name)
            deviation = self.initial_deviation(source)
            assign(parameter, initial_value(source, parameter.shape, seed, deviation))

    def initial_deviation(self, name: str) -> float:
        """Standard deviation of a parameter's initial values, by its name."""
        return 0.02


def initial_value(name: str, shape: torch.Size, seed: int, deviation: float) -> Tensor:
    """The whole initial value of one parameter, float32 on the CPU."""
    if len(shape) <= 1:
        return (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    return values.normal_(0.0, deviation, generator=generator)


def seed_of(seed: int, name: str) -> int:
    """A separate seed for each name, from the run's seed."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


NO_TABLES: ContextVar[bool] = ContextVar("NO_TABLES", default=False)
"""Whether modules made now get no values in their buffers either."""


class StoredWeights(NamedTuple):
    """The contents of the checkpoint from which a module is being loaded."""

    values: int
    names: frozenset[str]


STORED: ContextVar[StoredWeights | None] = ContextVar("STORED", default=None)
_FEW_VALUES = 1 << 27


@contextmanager
def without_values() -> Iterator[None]:
    """A context in which models are made with names and shapes, but without any values.

    Raises:
        ValueError: a size is below 0, or too large for any machine.
    """
    token = NO_TABLES.set(True)
    try:
        with torch.device("meta"):
            yield
    except (RuntimeError, TypeError) as error:
        if not re.search("overflow|negative dimension", str(error).lower()):
            raise
        said = str(error).partition("\n")[0]
        raise ValueError(f"The config has sizes that no memory can hold: {said}") from error
    finally:
        NO_TABLES.reset(token)


def machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_size(model: nn.Module, machines: int = 1) -> None:
    """Refuse a model, built without values, whose values would fill the memory.

    The model's state dict and tables must not have far more values than the state dict, or the
    checkpoint that is loaded (a module's hooks may rename or pad weights; torch compares them one
    by one later): a small config may ask for tables of any size. All values must fit into
    ``machines`` machines like this one, which share them evenly.
    """
    weights = {id(each): each for each in model.state_dict(keep_vars=True).values()}
    kept = {*weights, *map(id, model.buffers())}
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    values = sum(each.numel() for key, each in tensors.items() if key in kept)
    need = sum(each.nbytes for each in tensors.values()) // machines
    stored, said = STORED.get(), ""
    held = stored.values if stored else sum(each.numel() for each in weights.values())
    if values > 2 * held + _FEW_VALUES:
        said = f"has {values:,} values by its hyperparameters, but its weights hold {held:,}"
    elif hasattr(os, "sysconf") and need > machine_bytes():
        said = f"needs {need:,} bytes of memory, and this machine has {machine_bytes():,}"
    if said:
        named = (*model.named_parameters(), *model.named_buffers())
        name, largest = max(named, key=lambda each: each[1].nbytes)
        raise ValueError(
            f"The {type(model).__name__} {said}. Its largest tensor is {name},"
            f" {tuple(largest.shape)}. Mend the config's sizes, or split it (WLBStrategy)."
        )


def check_decoder(model: Decoder, asked: ActivationCheckpointing) -> None:
    """Refuse a model with dropout, or that recomputes other parts than the user ``asked`` for."""
    name, own = type(model).__name__, model.activation_checkpointing
    if "auto" not in (asked, own) and asked != own:
        raise ValueError(
            f"activation_checkpointing={asked!r}, but the {name} that build_model returned always"
            f" has {own!r}. Give {own!r} or 'auto'; or let its layers recompute what"
            " micro_batch.recompute says, and say so by its attribute"
            " activation_checkpointing='auto' (docs/guide/own_model.md)."
        )
    for place, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise ValueError(
                f"{name}: {place} is a {type(module).__name__} of p={module.p:g}. Its random"
                " numbers would be others on every mesh and after a resume, so a run could not be"
                " repeated or resumed exactly. Set p=0."
            )
