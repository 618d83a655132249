"""The attention function that models call, however their packed rows lie on the ranks.

Keys and values are posted (:mod:`.key_exchange`), the queries are computed meanwhile, and attention
runs on the keys that have arrived, in one kernel call. The output is projected here too. If
backward must fetch the keys again (:func:`.attend_with_refetch`), it first posts them, and they are
sent while the projection's own backward runs. Nothing else overlaps (docs/design.md says why).

A slice leaves its keys and values in the step's :mod:`.kv_cache` for later slices of its piece.
Prefixes of a piece of n slices would add up to n/2 times the piece in every layer, and keys of a
context-parallel group to CP times a rank's own keys, so backward refetches both.

Padding rows, at the local end, are cut off before the kernel, and are exactly zero in the output
and in every gradient, whatever they hold. Values may be narrower than keys, as in DeepSeek's
multi-head latent attention. Keys and values are sent as one tensor, and kernels need them equally
wide, so zeros are appended to the values here and cut off the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions
from lightning_wlb.attention.key_exchange import KeyMessages, Pair, receive, send
from lightning_wlb.attention.kv_cache import attend_with_refetch
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.distributed.collectives import padded
from lightning_wlb.distributed.process_groups import ProcessGroups, group_size

Queries = Tensor | Callable[[], Tensor]
"""Queries, or a function that computes them and is called while keys and values are sent."""
Project = Callable[[Tensor], Tensor]
"""The output projection: from attention's output, [rows, heads, v_dim], to the layer's summand."""


def packed_attention(
    queries: Queries,
    k: Tensor,
    v: Tensor,
    project: Project | None,
    metadata: AttentionMetadata,
    attention: VarlenAttention,
    groups: ProcessGroups,
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Causal attention within each piece, over the ranks that share the rows.

    Args:
        queries: [rows, heads, head_dim], or a function that computes them, called once while keys
            and values are sent, which hides the exchange; its backward hides that of the gradients.
        k: [rows, kv_heads, head_dim], padding rows included.
        v: [rows, kv_heads, v_dim], v_dim at most head_dim.
        project: a function of attention's output, [rows, heads, v_dim] with zeros in padding rows.
            It is called once, and its result is returned; its backward hides the exchange of keys.
            None returns the output itself, and backward waits for that exchange.
        metadata: the micro-batch's for the layer (``metadata.for_layer``), on the same device.
        groups: has the group of the ranks that share the micro-batch's rows.
        options: the layer's, the same on every rank of the group.

    Returns:
        The result of ``project``, or [rows, heads, v_dim] with zeros in padding rows.

    Raises:
        ValueError: if values are wider than keys, rows, metadata and groups do not fit each other,
            the metadata of slices lacks the cache or the layer, or the kernel lacks an option.
    """
    width, value_width = k.shape[-1], v.shape[-1]
    if value_width > width:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}: values may be narrower than keys, not wider."
            " Put zeros behind queries and keys, and give the scale of their own width."
        )
    v = F.pad(v, (0, width - value_width)) if value_width < width else v
    group, slices = groups.of_rows(metadata.replicas), metadata.slices
    size = group_size(group)
    _check_rows(k, "k", metadata)
    if (metadata.key_index is None) != (size == 1):
        raise ValueError(
            f"the context-parallel group has {size} rank(s), but the metadata was made"
            f" {'without' if metadata.key_index is None else 'for'} context parallelism. Use one"
            " context_parallel_size for the strategy and the data."
        )
    own, messages = _own(k, v, metadata), KeyMessages(metadata, group)
    travel = size > 1 and metadata.rows > 0
    # A kernel that reads a single run saves only views of tensors that this rank holds anyway.
    copied = travel or (slices is not None and len(slices.runs) > 1)
    sent = send(k, v, own, messages) if travel or slices is not None else None
    q = queries() if callable(queries) else queries
    if sent is not None:
        keys, values = receive(sent, messages)
    else:
        keys, values = k[: metadata.queries], v[: metadata.queries]
    _check_rows(q, "q", metadata)

    def attend(keys: Tensor, values: Tensor) -> Tensor:
        return attention(q[: metadata.queries], keys, values, metadata, options)

    def projected(out: Tensor) -> Tensor:
        out = padded(out, metadata.rows)
        out = out[..., :value_width] if value_width < width else out
        return out if project is None else project(out)

    if not copied or metadata.recomputed or not torch.is_grad_enabled():
        return projected(attend(keys, values))
    again = KeyMessages(metadata, group)

    def fetch() -> Pair:
        again.send(*own)
        return again.receive()

    result = projected(attend_with_refetch(attend, keys, values, fetch))
    if result.requires_grad:
        result.register_hook(lambda gradient: again.send(*own))
    return result


def _own(k: Tensor, v: Tensor, metadata: AttentionMetadata) -> Pair:
    """The rank's keys and values, detached; also put into the cache if later slices read them."""
    slices = metadata.slices
    if slices is None:
        return k.detach(), v.detach()
    cache, layer = slices.cache_and_layer
    # Contiguous, so that the cache keeps no view of a larger tensor.
    own = k.detach().contiguous(), v.detach().contiguous()
    if slices.keeps:
        cache.put(layer, slices.micro_batch, *own)
    return own


def _check_rows(x: Tensor, name: str, metadata: AttentionMetadata) -> None:
    if len(x) != metadata.rows:
        raise ValueError(
            f"{name} has {len(x)} rows, the metadata {metadata.rows}, padding included."
        )
