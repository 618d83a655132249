"""What every kernel of variable-length attention is: one call with one signature.

:mod:`.varlen` chooses a kernel, checks its arguments and calls it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lightning_wlb.attention.metadata import AttentionMetadata


class Kernel(Protocol):
    """Causal attention of packed queries over packed keys and values; differentiable in all three.

    A segment has n queries and m ≥ n keys and is causal, aligned at the bottom right: its last
    query sees every key, the one before it all keys but the last. Segments never see each other.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        scale: float | None,
        sliding_window: int | None,
    ) -> Tensor:
        """Attend.

        Args:
            q: [queries, heads, head_dim], at least one query, without padding rows.
            k: [keys, kv_heads, head_dim], heads a multiple of kv_heads; in the order of
                ``metadata.cu_seqlens_k``.
            v: [keys, kv_heads, head_dim].
            metadata: the segments, on the same device: ``cu_seqlens_q``, ``cu_seqlens_k`` and the
                two maxima. ``key_index`` has been applied already.
            scale: factor of the scores; 1 / sqrt(head_dim) if None.
            sliding_window: most keys that a query sees, its own included; all if None.

        Returns:
            [queries, heads, head_dim] in the dtype of q.
        """
