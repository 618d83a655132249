"""Recurrent layers of transformers' modules on packed rows: every document by itself.

Linear attention (gated delta rule, Kimi's delta attention), Mamba 2 and short convolutions carry
something from row to row, and on packed rows would carry it from document to document, without a
word. Families compute all of them by a few functions of their files. :func:`by_segments` replaces
these: while a decoder of this package runs, those of :mod:`.recurrent_functions` run transformers'
own for each piece by itself; outside of one they are what they were. A module that did not call
each function of its family's is refused, since it would have mixed documents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_wlb.models.huggingface.attention import running
from lightning_wlb.models.huggingface.recurrent_functions import CONVOLUTION, FUNCTIONS

_DELTA = frozenset({CONVOLUTION, "torch_chunk_gated_delta_rule"})
_KIMI = frozenset({CONVOLUTION, "chunk_kimi_delta_attention"})
_DELTA_RULES = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"}
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
"""The functions by which a family's recurrent layers compute across rows; each calls them all."""


class RecurrentSizes(NamedTuple):
    """The sizes of a recurrence, and of how many keys attention of these sizes takes its FLOPs.

    A convolution alone is next to nothing: the least that tensor-parallel ranks can share.
    """

    heads: int = 64
    kv_heads: int = 64
    head_dim: int = 1
    value_dim: int = 1
    keys: int = 1


@dataclass
class _Layer:
    """The recurrent layer that is running.

    Args:
        number: its global number.
        called: the functions that it has called.
        sizes: what they were given; None where a decoder of this package runs the layer.
    """

    number: int
    called: set[str] = field(default_factory=set)
    sizes: RecurrentSizes | None = None


_LAYER: ContextVar[_Layer | None] = ContextVar("layer", default=None)


def recurrent_modules(layers: Iterable[nn.Module]) -> Iterator[Any]:
    """The modules that carry something from row to row: those that have a convolution."""
    for layer in layers:
        for module in layer.modules():
            if any(isinstance(child, nn.Conv1d) for child in module.children()):
                yield module


def by_segments(layers: Iterable[nn.Module], family: str) -> None:
    """Let the recurrent modules of a family's layers run piece by piece in this package's decoders.

    Other models of the family, and these outside of a decoder, run as they did.
    """
    for module in recurrent_modules(layers):
        _replace_functions(module)
        module.forward = _piece_by_piece(module, module.forward, FAMILIES[family])


def note_sizes(layers: Iterable[nn.Module], sizes: dict[nn.Module, RecurrentSizes]) -> None:
    """Let recurrent modules of known families note the sizes of their recurrences when they run."""
    for module in recurrent_modules(layers):
        _replace_functions(module)
        module.forward = _noting(module, module.forward, sizes)


def _replace_functions(module: nn.Module) -> None:
    source = sys.modules[type(module).__module__]
    for name, ours in FUNCTIONS.items():
        theirs = getattr(source, name, None)
        if theirs is not None and not hasattr(theirs, "by_segments"):
            setattr(source, name, _replaced(name, theirs, ours))


def _replaced(
    name: str, theirs: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    """``theirs`` outside of a module that :func:`by_segments` has changed, ``ours`` inside."""

    @wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        layer = _LAYER.get()
        if layer is None:
            return theirs(*args, **kwargs)
        layer.called.add(name)
        if layer.sizes is None:
            return ours(theirs, layer.number, *args, **kwargs)
        layer.sizes = _sizes(name, args, kwargs) or layer.sizes
        # The family's own code, without what looks for a kernel and says that there is none.
        return getattr(theirs, "__wrapped__", theirs)(*args, **kwargs)

    call.by_segments = True  # type: ignore[attr-defined]
    return call


def _sizes(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> RecurrentSizes | None:
    """Sizes of a recurrence by the arguments of its function; None for a convolution.

    FLOPs of a token in chunks of c tokens, a state of k x v numbers a head: of the delta rules
    4ck + c(k + v) + 2cv + 6kv, of Mamba 2 2c(k + v) + 4kv. A key takes attention 2(k + v).
    """
    if name in _DELTA_RULES:
        _, key, value = args[:3]
        (*_, kv_heads, k), (*_, heads, v) = key.shape, value.shape
        c = options.get("chunk_size", 64)
        flops = 4 * c * k + c * (k + v) + 2 * c * v + 6 * k * v
    elif name == "mamba2_chunk_scan":
        hidden, _, _, b = args[:4]
        (*_, kv_heads, k), (*_, heads, v) = b.shape, hidden.shape
        flops = 2 * options["chunk_size"] * (k + v) + 4 * k * v
    else:
        return None
    return RecurrentSizes(heads, kv_heads, k, v, max(flops // (2 * (k + v)), 1))


def _piece_by_piece(
    module: Any, forward: Callable[..., Tensor], wanted: frozenset[str]
) -> Callable[..., Tensor]:
    """A recurrent module's forward, which must compute across rows by the ``wanted`` functions."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        run = running()
        if run is None:
            return forward(*args, **kwargs)
        layer = _Layer(module.layer_idx)
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
        run.attended.add(module.layer_idx)
        return out

    return call


def _noting(
    module: Any, forward: Callable[..., Tensor], sizes: dict[nn.Module, RecurrentSizes]
) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        layer = _Layer(module.layer_idx, sizes=RecurrentSizes())
        token = _LAYER.set(layer)
        try:
            out = forward(*args, **kwargs)
        finally:
            _LAYER.reset(token)
        assert layer.sizes is not None
        sizes[module] = layer.sizes
        return out

    return call
