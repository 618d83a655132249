"""Recurrent layers of transformers' modules on packed rows, without mixing documents.

Linear attention (gated delta rule, Kimi's delta attention), Mamba 2 and short convolutions carry a
state from row to row, and on packed rows would silently carry it from document to document. A
family computes all of them by a few functions of its file. :func:`by_segments` replaces these
functions: while a decoder of this package runs, :mod:`.recurrent_functions` calls the family's own
function for each piece separately; elsewhere they are unchanged. A module that does not call each
of its family's functions raises ValueError, since it would mix documents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import signature
from math import gcd
from operator import add
from typing import Any

from torch import Tensor, nn

from lightning_wlb.cost.shape import Recurrence
from lightning_wlb.models.huggingface.attention import RUNNING
from lightning_wlb.models.huggingface.recurrent_functions import CONVOLUTION, FUNCTIONS

_DELTA = frozenset({CONVOLUTION, "torch_chunk_gated_delta_rule"})
_KIMI = frozenset({CONVOLUTION, "chunk_kimi_delta_attention"})
_MAMBA2 = frozenset({CONVOLUTION, "mamba2_chunk_scan"})
FAMILIES: Mapping[str, frozenset[str]] = {
    "bamba": _MAMBA2,
    "granitemoehybrid": _MAMBA2,
    "kimi_linear": _KIMI,
    "lfm2": frozenset({CONVOLUTION}),
    "lfm2_moe": frozenset({CONVOLUTION}),
    "lfm3": frozenset({CONVOLUTION}),
    "nemotron_h": _MAMBA2,
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
}
"""The functions by which a family's recurrent layers compute across rows; each layer calls all."""


@dataclass
class _Layer:
    """The recurrent layer that is running, by its global number."""

    number: int
    sizes: Recurrence | None  # None if a decoder of this package runs the layer
    called: set[str] = field(default_factory=set)


_LAYER: ContextVar[_Layer | None] = ContextVar("layer", default=None)


def recurrent_modules(layers: Iterable[nn.Module]) -> Iterator[Any]:
    """The modules that carry a state from row to row: all modules that have a convolution."""
    for layer in layers:
        for module in layer.modules():
            if any(isinstance(child, nn.Conv1d) for child in module.children()):
                yield module


def by_segments(
    layers: Iterable[nn.Module], family: str, sizes: dict[nn.Module, Recurrence] | None = None
) -> None:
    """Let the recurrent modules of a family's layers run piece by piece in this package's decoders.

    Other models of the family, and these layers outside a decoder, run unchanged. With ``sizes``
    the layers run unchanged too, and note there the sizes of their computation across rows.
    """
    for module in recurrent_modules(layers):
        source = sys.modules[type(module).__module__]
        for name, ours in FUNCTIONS.items():
            theirs = getattr(source, name, None)
            if theirs is not None and not hasattr(theirs, "by_segments"):
                setattr(source, name, _replaced(name, theirs, ours))
        module.forward = _watched(module, module.forward, FAMILIES[family], sizes)


def _replaced(
    name: str, theirs: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    """A call of ``ours`` in a module that :func:`by_segments` has changed, else of ``theirs``."""

    @wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        layer = _LAYER.get()
        if layer is None:
            return theirs(*args, **kwargs)
        layer.called.add(name)
        if layer.sizes is None:
            return ours(theirs, layer.number, *args, **kwargs)
        # The family's own code, without its wrapper that looks for a kernel and warns.
        out = getattr(theirs, "__wrapped__", theirs)(*args, **kwargs)
        given = signature(theirs).bind(*args, **kwargs)
        given.apply_defaults()
        layer.sizes = _joined(layer.sizes, _sizes(name, given.arguments))
        return out

    call.by_segments = True  # type: ignore[attr-defined]
    return call


def _sizes(name: str, given: Mapping[str, Any]) -> Recurrence:
    """Sizes of a convolution or a recurrence by the arguments of its function.

    FLOPs of a token and head in chunks of c tokens, with a state of k x v numbers: delta rules have
    5ck + 3cv + 6kv, Mamba 2 has 2c(k + v) + 4kv.
    """
    if name == CONVOLUTION:
        channels, kernel = given["weight"].shape
        flops, last_rows = 2 * kernel * channels, (kernel - 1) * channels
        return Recurrence(channels, flops, 2 * channels, last_rows=last_rows)
    if name == "mamba2_split_conv1d_scan_combined":
        return Recurrence()
    chunk = given["chunk_size"]
    if name == "mamba2_chunk_scan":
        rows = [given[each] for each in ("hidden_states", "dt", "B", "C")]
        (_, tokens, heads, v), k = rows[0].shape, rows[2].shape[-1]
        flops = 2 * chunk * (k + v) + 4 * k * v
    else:
        rows = [given[each] for each in ("query", "key", "value", "g", "beta")]
        (_, tokens, heads, v), k = rows[2].shape, rows[1].shape[-1]
        flops = 5 * chunk * k + 3 * chunk * v + 6 * k * v
    moved = sum(each.numel() for each in rows) // tokens + heads * v
    return Recurrence(heads, heads * flops, moved, heads * k * v)


def _joined(one: Recurrence, other: Recurrence) -> Recurrence:
    """The sum of two recurrences of one layer, with the gcd of their numbers of heads."""
    sums = map(add, vars(one).values(), vars(other).values())
    return replace(Recurrence(*sums), heads=gcd(one.heads, other.heads))


def _watched(
    module: Any,
    forward: Callable[..., Tensor],
    wanted: frozenset[str],
    sizes: dict[nn.Module, Recurrence] | None,
) -> Callable[..., Tensor]:
    """The forward of a recurrent module; raises unless it calls all ``wanted`` functions."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        run = RUNNING.get(None)
        if run is None and sizes is None:
            return forward(*args, **kwargs)
        layer = _Layer(module.layer_idx, None if sizes is None else Recurrence())
        token = _LAYER.set(layer)
        try:
            out = forward(*args, **kwargs)
        finally:
            _LAYER.reset(token)
        if missing := sorted(wanted - layer.called):
            raise ValueError(
                f"{type(module).__name__} did not call {', '.join(missing)}: this version of"
                " transformers computes it in another way, which would mix packed documents. Use"
                " a version that docs/families.md names."
            )
        if sizes is not None and layer.sizes is not None:
            sizes[module] = layer.sizes
        if run is not None:
            run.attended.add(module.layer_idx)
        return out

    return call
