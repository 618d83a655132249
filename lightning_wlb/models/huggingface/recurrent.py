"""Recurrent layers of transformers' modules on packed rows: every document by itself.

Linear attention (gated delta rule, Kimi's delta attention), Mamba 2 and short convolutions carry
something from row to row, and on packed rows would carry it from document to document, without a
word. Families compute all of them by a few functions of their files. :func:`by_segments` replaces
these: while a decoder of this package runs, those of :data:`FUNCTIONS` call transformers' own once
for each piece, with the state that an earlier slice has left
(:mod:`lightning_wlb.attention.recurrence`); outside of one they are what they were. Where ranks
share rows, each computes its heads of all rows; tensor-parallel ranks compute theirs, of
projections and convolutions that each of them has whole.

Cost: a call of the recurrence for each piece of a micro-batch. With flash-linear-attention on CUDA
one call would do (``cu_seqlens``); it is not used yet. Kernels' fused paths (convolution and
recurrence in one call) are not taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_wlb.attention.recurrence import (
    RecurrentRows,
    State,
    by_segment,
    to_all_rows,
    to_own_rows,
)
from lightning_wlb.distributed.process_groups import group_size
from lightning_wlb.models.huggingface.attention import current_run, running
from lightning_wlb.models.tensor_parallel import gather_rows

_CONVOLUTION = "causal_conv1d_fn"
_DELTA = frozenset({_CONVOLUTION, "torch_chunk_gated_delta_rule"})
_KIMI = frozenset({_CONVOLUTION, "chunk_kimi_delta_attention"})
_DELTA_RULES = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"}
_MAMBA2 = frozenset({_CONVOLUTION, "mamba2_chunk_scan"})
FAMILIES: Mapping[str, frozenset[str]] = {
    "bamba": _MAMBA2,
    "granitemoehybrid": _MAMBA2,
    "kimi_linear": _KIMI,
    "lfm2": frozenset({_CONVOLUTION}),
    "lfm2_moe": frozenset({_CONVOLUTION}),
    "lfm3": frozenset({_CONVOLUTION}),
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
        return theirs(*args, **kwargs)

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


def _rows(name: str) -> tuple[RecurrentRows, Any]:
    """Where the running micro-batch's pieces lie, and the group of the ranks that share them."""
    run = current_run()
    rows = run.micro_batch.recurrence
    if rows is None:
        raise ValueError(
            f"{name}: the batch does not say where its documents begin. Make it with"
            " make_step_batch(..., recurrent=True), as WLBDataModule does for such a model."
        )
    return rows, run.groups.of_rows(rows.replicas)


def _check_heads(heads: int, kind: str, *groups: Any) -> None:
    ranks = prod(map(group_size, groups))
    if heads % ranks:
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ValueError(
            f"{ranks} ranks share a recurrent layer's {heads} {kind} (context_parallel_size, times"
            " the replicas that share a micro-batch, times tensor_parallel_size for heads), which"
            f" cannot be spread evenly. Numbers of ranks that go: {sizes}."
        )


def _own(x: Tensor, group: Any, dim: int = 0) -> Tensor:
    """The part of values by head or channel that this rank computes with."""
    return x if group_size(group) == 1 else x.chunk(group_size(group), dim)[dist.get_rank(group)]


def _heads_of(
    tensors: Sequence[Tensor], heads: int, rows: Any, tensor: Any
) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """What this tensor-parallel rank computes of [1, rows, heads, ...], and what joins the results.

    Tensors with fewer heads (a group of ``heads`` shares one) have them repeated where ranks could
    not be given whole groups.
    """
    _check_heads(heads, "heads", rows, tensor)
    ranks = group_size(rows) * group_size(tensor)
    even = [
        x.repeat_interleave(heads // x.shape[2], dim=2) if x.shape[2] % ranks else x
        for x in tensors
    ]

    def join(out: Tensor) -> Tensor:
        if group_size(tensor) == 1:
            return out
        return gather_rows(out.movedim(2, 0).contiguous(), tensor).movedim(0, 2)

    return [_own(x, tensor, 2) for x in even], join


def _convolution(
    theirs: Callable[..., Tensor],
    layer: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """A depthwise causal convolution, [1, channels, rows], weight [channels, kernel]."""
    rows, group = _rows(_CONVOLUTION)
    _check_heads(hidden_states.shape[1], "channels", group)
    (whole,) = to_all_rows([hidden_states[0].t()[..., None]], rows, group)
    before = weight.shape[-1] - 1
    mine, mine_bias = _own(weight, group), None if bias is None else _own(bias, group)

    def compute(parts: list[Tensor], state: State | None, _: bool) -> tuple[Tensor, State]:
        (x,) = parts
        front = x.new_zeros(before, x.shape[1]) if state is None else state[0]
        joined = torch.cat([front, x])
        out = theirs(joined.t()[None], mine, mine_bias, activation=activation)
        return out[0, :, before:].t(), (joined[len(joined) - before :].clone(),)

    if not rows.tokens:
        return hidden_states * 0
    out = by_segment(rows, (layer, _CONVOLUTION), [whole[..., 0]], compute)
    return to_own_rows(out[..., None], hidden_states.shape[2], rows, group)[..., 0].t()[None]


def _delta_rule(
    theirs: Callable[..., Any],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """A gated delta rule: [1, rows, heads, width], with decays ``g`` by head or by channel."""
    rows, group = _rows("the gated delta rule")
    if not rows.tokens:
        return value * 0, None
    every = (query, key, value, g, beta)
    mine, join = _heads_of(every, value.shape[2], group, current_run().groups.tensor)
    inputs = to_all_rows([x[0] for x in mine], rows, group)

    def compute(
        parts: list[Tensor], state: State | None, goes_on: bool
    ) -> tuple[Tensor, State | None]:
        q, k, v, decay, rate = (x[None] for x in parts)
        out, after = theirs(
            q,
            k,
            v,
            g=decay,
            beta=rate,
            initial_state=None if state is None else state[0],
            output_final_state=goes_on,
            **options,
        )
        return out[0], (after,) if goes_on else None

    out = by_segment(rows, (layer, "delta"), inputs, compute)
    return join(to_own_rows(out, value.shape[1], rows, group)[None]), None


def _scan(
    theirs: Callable[..., Any],
    layer: int,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Tensor:
    """Mamba 2: hidden [1, rows, heads, width], dt [1, rows, heads], B, C [1, rows, groups, n]."""
    rows, group = _rows("a Mamba 2 scan")
    if not rows.tokens:
        return hidden_states * 0
    tensor = current_run().groups.tensor
    mine, join = _heads_of((hidden_states, dt, B, C), hidden_states.shape[2], group, tensor)
    inputs = to_all_rows([x[0] for x in mine], rows, group)
    by_head = {
        name: None if each is None else _own(_own(each, tensor), group)
        for name, each in {"A": A, "D": D, "dt_bias": dt_bias}.items()
    }

    def compute(
        parts: list[Tensor], state: State | None, goes_on: bool
    ) -> tuple[Tensor, State | None]:
        x, step, b, c = (each[None] for each in parts)
        out = theirs(
            x,
            step,
            B=b,
            C=c,
            chunk_size=chunk_size,
            initial_states=None if state is None else state[0],
            return_final_states=goes_on,
            **by_head,
            **options,
        )
        return (out[0][0], (out[1],)) if goes_on else (out[0], None)

    out = by_segment(rows, (layer, "scan"), inputs, compute)
    return join(to_own_rows(out, hidden_states.shape[1], rows, group)[None])


def _not_fused(*_: Any, **__: Any) -> None:
    """Nothing: the family then computes the convolution and the scan by themselves."""


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    _CONVOLUTION: _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}
"""What takes the place of transformers' functions of these names."""
