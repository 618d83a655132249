"""What a model must offer to be trained on packed documents and split over a mesh: one base class.

:class:`.Transformer` and the Hugging Face decoders are cases of :class:`Decoder`, and so is a model
of one's own. Nothing else of a model is asked for: :class:`.LanguageModule` calls its forward and
:meth:`~Decoder.initialise`, and :class:`.WLBStrategy` splits it by its three parts,
:attr:`~Decoder.tied` and :meth:`~Decoder.tensor_parallel_plan`.

Each parameter is drawn whole, in float32 on the CPU, by a generator seeded with a hash of the seed
and its name, and a rank keeps its shard. Cost: memory for the largest in float32.
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

    A subclass builds the whole model; the strategy then removes what other stages own. All of its
    parameters are in the three parts below, which its forward calls as modules: a module's call
    waits for its parameters. Rows have no batch dimension and lie in an order that the sharding
    chooses: where a row stands in its document is in ``micro_batch.positions``, and which rows see
    which is in ``micro_batch.attention``.

    Attributes:
        embed: the embedding; None on a stage that another one precedes.
        layers: the decoder layers that the stage holds, keyed by their global number as a string.
        head: the final norm and output projection; None on a stage that another one follows.
        attention_kernel: the kernel that the layers' attention calls; a strategy that measures
            attention sets its ``timer``. None in a model that attends by itself.
        activation_checkpointing: ``"auto"`` if the layers compute again in backward what
            ``micro_batch.recompute`` says; else the one mode that they always have.
        overlaps: which messages travel while layers compute, where ``groups.chunks`` is given
            (:mod:`.tensor_parallel_overlap`).
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
        """Run one stage on P rows, of which this rank's residual stream has P/TP.

        Attention is :func:`~lightning_wlb.attention.packed.packed_attention` with
        ``micro_batch.attention.for_layer(number)``.

        Args:
            micro_batch: its tokens are read by the embedding, its labels by the head. A label is
                -100 where a row has no target.
            hidden: [P/TP, dim], the output of the stage before; None in the first stage.
            layers: global numbers of the stage's layers; all that the module holds if None.
            groups: the process groups that share the rows and the parameters.

        Returns:
            Without a head: hidden states [P/TP, dim]. With a head and labels: the *sum* of token
            losses, 0-dim, float32 or wider, the same on every tensor-parallel rank. With a head
            and no labels: logits [P, vocabulary/TP] of this rank's share of the vocabulary.
        """
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def compile_blocks(self) -> None:
        """Compile what the layers compute between collectives and attention: ``compile=True``.

        It is called once, before the model is split. Gradients stay those of the model uncompiled,
        up to rounding.

        Raises:
            ValueError: the model has nothing that can be compiled.
        """
        raise ValueError(
            f"compile=True, but {type(self).__name__} does not compile anything: only the blocks of"
            " lightning_wlb.Transformer and its subclasses are. Set compile=False; or, in a model"
            " of your own, override compile_blocks, and compile pure functions of rows there, as"
            " Transformer does (lightning_wlb/models/compiled_functions.py)."
        )

    def tensor_parallel_plan(self, size: int) -> dict[str, Placement]:
        """Parameter-name pattern -> how parameters are split over ``size`` tensor-parallel ranks.

        A replicated parameter's gradient on a rank must be the part that flows through the rank's
        own rows, heads or words: the ranks' parts are added (:func:`.tensor_parallel.local`).

        Raises:
            ValueError: the model cannot be split.
        """
        raise ValueError(
            f"tensor_parallel_size={size}: {type(self).__name__} has no tensor_parallel_plan. Write"
            " one (docs/guide/own_model.md), or use tensor_parallel_size=1."
        )

    @property
    def tied(self) -> dict[str, str]:
        """Parameter name -> the name of the parameter that it equals, on any pipeline stage.

        On a stage with both the two are one ``Parameter``; else the strategy keeps them equal.
        """
        return {}

    def initialise(self, seed: int) -> None:
        """Fill the parameters that this rank holds, which may be DTensors.

        The values must be a function of the seed and of global parameter names only, so that they
        are the same on any mesh. Here vectors are zeros where their name ends in ``bias``, else
        ones (they are norm weights); everything else is normal with mean 0 and
        :meth:`initial_deviation`.

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
    """A seed of its own for each name, from the run's seed."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


NO_TABLES: ContextVar[bool] = ContextVar("NO_TABLES", default=False)
"""Whether modules that are made now shall have no values in their buffers either."""


class StoredWeights(NamedTuple):
    """What the checkpoint holds that a module is being loaded from."""

    values: int
    names: frozenset[str]


STORED: ContextVar[StoredWeights | None] = ContextVar("STORED", default=None)
_FEW_VALUES = 1 << 27


@contextmanager
def without_values() -> Iterator[None]:
    """A context in which models are made with names and shapes, and no values at all.

    Raises:
        ValueError: a size is below 0, or beyond what any machine can number.
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

    Those of its state dict and its tables must not be far more than the checkpoint's that is loaded
    (a module's hooks may rename or pad weights; torch compares them one by one later), and all of
    them must fit into ``machines`` such as this one, which share them evenly.
    """
    kept = {id(each) for each in (*model.state_dict(keep_vars=True).values(), *model.buffers())}
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    values = sum(each.numel() for key, each in tensors.items() if key in kept)
    need = sum(each.nbytes for each in tensors.values()) // machines
    stored, said = STORED.get(), ""
    if stored is not None and values > 2 * stored.values + _FEW_VALUES:
        held = f"{stored.values:,}"
        said = f"has {values:,} values by the checkpoint's hyperparameters, which holds {held}"
    elif hasattr(os, "sysconf") and need > machine_bytes():
        said = f"needs {need:,} bytes of memory, and this machine has {machine_bytes():,}"
    if said:
        name, largest = max(model.named_parameters(), key=lambda each: each[1].nbytes)
        raise ValueError(
            f"The {type(model).__name__} {said}. Its largest parameter is {name},"
            f" {tuple(largest.shape)}. Mend the config's sizes, or split it (WLBStrategy)."
        )


def check_decoder(model: Decoder, asked: ActivationCheckpointing) -> None:
    """Refuse a model that recomputes something else than the user ``asked`` for, or has dropout."""
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
