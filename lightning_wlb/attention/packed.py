"""The one attention function that a model calls, however its packed rows lie on the ranks.

It passes on to :mod:`.sliced` if the micro-batch's metadata has slices, to :mod:`.ulysses` if ranks
share the heads, and else to :mod:`.context_parallel`.

Values may be narrower than keys, as in DeepSeek's multi-head latent attention. Keys and values are
sent as one tensor, and kernels want them equally wide, so that zeros are put behind the values here
and cut off the result. So narrow values are sent, kept for backward and multiplied as wide as keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.context_parallel import context_parallel_attention
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.attention.sliced import sliced_attention
from lightning_wlb.attention.ulysses import head_parallel_attention
from lightning_wlb.distributed.process_groups import ProcessGroups

Queries = Tensor | Callable[[], Tensor]
"""Queries, or a function that computes them and is called while keys and values are sent."""
Project = Callable[[Tensor], Tensor]
"""The output projection: from attention's output, [rows, heads, v_dim], to what a layer adds."""


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
        queries: [rows, heads, head_dim], or a function that computes them; it is called once, while
            keys and values are sent, and so hides the exchange.
        k: [rows, kv_heads, head_dim], padding rows included.
        v: [rows, kv_heads, v_dim], v_dim at most head_dim.
        project: a function of attention's output, [rows, heads, v_dim] with zeros in padding rows,
            which is called once and whose result is returned; its backward hides the exchange of
            keys. None returns the output itself: backward then waits for that exchange.
        metadata: of the micro-batch, for the layer (``metadata.for_layer``).
        groups: has the group of the ranks that share the micro-batch's rows or heads.

    Returns:
        What ``project`` returns, or [rows, heads, v_dim], zero in padding rows.

    Raises:
        ValueError: if values are wider than keys, rows, metadata and groups do not fit each other,
            or the kernel lacks an option.
    """
    width, value_width = k.shape[-1], v.shape[-1]
    if value_width > width:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}: values may be narrower than keys, not wider."
            " Put zeros behind queries and keys, and give the scale of their own width."
        )
    v = F.pad(v, (0, width - value_width)) if value_width < width else v

    def projected(out: Tensor) -> Tensor:
        out = out[..., :value_width] if value_width < width else out
        return out if project is None else project(out)

    group = groups.of_rows(metadata.replicas)
    if metadata.slices is None and not metadata.head_rows:
        computed = queries if callable(queries) else lambda: queries
        return context_parallel_attention(
            computed, k, v, projected, metadata, attention, group, options
        )
    q = queries() if callable(queries) else queries
    if metadata.slices is not None:
        return projected(sliced_attention(q, k, v, metadata, attention, group, options))
    assert group is not None
    return projected(head_parallel_attention(q, k, v, metadata, attention, group, options))
