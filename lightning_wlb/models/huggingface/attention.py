"""Attention of transformers' modules by this package's kernels.

transformers looks up an attention function by the name in a model's config. :func:`attention` is
registered under ``NAME``; transformers makes no mask for a name without a mask function. The
micro-batch's metadata says which rows see which, but no module of transformers passes it on (some
drop unknown keywords). So a context variable holds the running forward (:class:`Running`) while it
runs, and again while backward recomputes a part of it, which autograd may do on another thread.

Options of a module that the kernels do not support are refused: a mask, dropout, attention that is
not causal, and every keyword that is not known to leave the result unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import AttentionOptions
from lightning_wlb.attention.packed import packed_attention
from lightning_wlb.data.batch import MicroBatchTensors
from lightning_wlb.distributed.process_groups import ProcessGroups
from lightning_wlb.plan import Recompute

NAME = "lightning_wlb"

# Further keywords that modules pass on, which do not change the result of `attention`.
_HARMLESS = {
    "cache_position",
    "is_causal",  # True; False is refused
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",  # applied to queries and keys already
    "return_dict",
    "use_cache",
}


@dataclass
class Running:
    """The forward of one stage on one micro-batch."""

    micro_batch: MicroBatchTensors
    groups: ProcessGroups  #: the process groups that share the rows and the parameters
    kernel: VarlenAttention
    received: Tensor | None = None  #: [1, rows, dim], the hidden state that the stage received
    #: [1, rows, dim] after the stage's last layer, if other stages follow
    left: Tensor | None = None
    #: numbers of the layers that have called attention
    attended: set[int] = field(default_factory=set)


RUNNING: ContextVar[Running] = ContextVar("running")
"""The forward that is running; it has no value outside a forward."""


@contextmanager
def during(run: Running) -> Iterator[None]:
    """Make ``run`` the forward that is running."""
    token = RUNNING.set(run)
    try:
        yield
    finally:
        RUNNING.reset(token)


def recomputed(function: Callable[..., Any], mode: Recompute | None = None) -> Callable[..., Any]:
    """``function`` under activation checkpointing: backward runs it again from its inputs.

    With a ``mode``, only micro-batches whose ``recompute`` is that mode are recomputed, else all.
    Calls must be within a stage's forward, which :data:`RUNNING` holds in backward too. The random
    state is not kept, since there is no dropout.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        run = RUNNING.get()
        if mode not in (None, run.micro_batch.recompute):
            return function(*args, **kwargs)

        def within(*args: Any, **kwargs: Any) -> Any:
            with during(run):
                return function(*args, **kwargs)

        return checkpoint(within, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention modules call.

    Queries are [1, heads, rows, head_dim], keys [1, kv_heads, rows, head_dim] and values [1,
    kv_heads, rows, value_dim], not wider than keys; ``s_aux`` are sinks, [heads]. Scaling, cap and
    window are as in :class:`.AttentionOptions`.

    Returns:
        [1, rows, heads, value_dim], and None in place of attention weights.

    Raises:
        ValueError: the kernels lack an option of the module, or no decoder of this package runs it.
    """
    run = RUNNING.get(None)
    if run is None:
        raise ValueError(
            f"{type(module).__name__} was called outside of a decoder of lightning_wlb, whose"
            f" attention implementation {NAME!r} reads the micro-batch. Load the model by"
            " from_pretrained(...) to use it by itself."
        )
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(
            f"{type(module).__name__} attends without causality, to later tokens too; decoders"
            " only. Where the config has use_bidirectional_attention, set it to False."
        )
    unknown = sorted(
        name for name, given in others.items() if given is not None and name not in _HARMLESS
    )
    asked = [
        *(["a mask of its own"] if attention_mask is not None else []),
        *([f"attention dropout {dropout:g}"] if dropout else []),
        *unknown,
    ]
    if asked:
        raise ValueError(
            f"{type(module).__name__} asks attention for {', '.join(asked)}, which the"
            " variable-length kernels do not compute, so its documents would be trained wrongly."
            " Set dropout to 0 in its config; or choose another family (docs/families.md)."
        )
    number: int = module.layer_idx  # type: ignore[assignment]
    if sliding_window is None and _has_window(module, number):
        raise ValueError(
            f"{type(module).__name__} gives attention no window, though its config has one for"
            f" layer {number}: the family has it in its masks alone, which are not made here, so"
            " the layer would see too much. Set use_sliding_window=False or sliding_window=None in"
            " the config, or choose another family (docs/families.md)."
        )
    run.attended.add(number)
    if torch.is_autocast_enabled(value.device.type):  # the rotary embedding gives float32
        query, key = query.to(value.dtype), key.to(value.dtype)
    out = packed_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        None,
        run.micro_batch.attention.for_layer(number, run.micro_batch.recompute == "full"),
        run.kernel,
        run.groups,
        AttentionOptions(
            scale=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux
        ),
    )
    return out[None], None


def _has_window(module: nn.Module, number: int) -> bool:
    """Whether a layer has a sliding window by its module's config."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return bool(kinds[number] == "sliding_attention")
    return bool(getattr(config, "sliding_window", None))


AttentionInterface.register(NAME, attention)
