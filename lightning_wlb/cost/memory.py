"""What a rank holds in memory: parameters and their state, and activations between F and B.

State under FSDP2 as the strategy uses it (within a step ZeRO-1): a rank holds its stage's
tensor-parallel share of the parameters whole in the compute dtype and their gradients whole in at
least float32, and its data × context shard of the parameters at rest, of AdamW's two moments and,
at the step's end, of the gradients.

Activations are the tensors that autograd saves of the reference decoder, tensor by tensor, under
each activation checkpointing; they live from a micro-batch's forward on a stage to its backward.
Context parallelism saves the gathered keys and values instead of a rank's own. What lives only
inside one pass (the gradients of one layer, its recomputation, the logits of one chunk) is counted
once, at the largest.

tests/cost/test_memory.py holds the activations to what autograd saves, byte for byte.

Cost: O(1) per micro-batch. The caching allocator's fragmentation, the CUDA context and
communication buffers are not in it: plan with :data:`USABLE_PERCENT` of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from lightning_wlb.cost.communication import ONE_DEVICE, Mesh
from lightning_wlb.cost.flops import ModelShape
from lightning_wlb.cost.latency import DTYPE_BYTES, Checkpointing

Key = TypeVar("Key")

USABLE_PERCENT = 92
"""Percent of a device's memory that a plan may fill."""

_CHUNK_LOGITS_BYTES = 3 * 4 * 2**22
"""Logits of one chunk of rows, their exponentials and gradient, in float32 (models/loss.py)."""


@dataclass(frozen=True)
class StageParts:
    """What of the model a rank owns: layers (over all its stages) and the ends."""

    layers: int
    embedding: bool = False
    head: bool = False


@dataclass(frozen=True)
class MemoryModel:
    """Bytes on one rank.

    Args:
        shape: of the whole model.
        mesh: ranks along each axis.
        activation_checkpointing: ``"none"``, ``"selective"`` or ``"full"``.
        dtype: what the model computes in.
        rest_dtype: of parameters and optimizer state at rest; float32 for ``bf16-mixed``.
        fused_norm: whether RMSNorm is one kernel, which saves its input and one number per row;
            on a CPU it also saves the normalised rows.
    """

    shape: ModelShape
    mesh: Mesh = ONE_DEVICE
    activation_checkpointing: Checkpointing = "none"
    dtype: str = "bfloat16"
    rest_dtype: str = "float32"
    fused_norm: bool = True

    def parameters(self, parts: StageParts) -> int:
        """Parameters of a rank before sharding over data × context: its tensor share."""
        count = parts.layers * self._layer_parameters
        ends = self.shape.vocab_size // self.mesh.tensor * self.shape.dim
        if parts.embedding:
            count += ends
        if parts.head:
            count += ends + self.shape.dim
        return count

    def state_bytes(self, parts: StageParts) -> int:
        """Parameters, gradients and optimizer state during a step, activations left out."""
        count = self.parameters(parts)
        width, rest = DTYPE_BYTES[self.dtype], DTYPE_BYTES[self.rest_dtype]
        shard = -(-count // (self.mesh.data * self.mesh.context))
        return count * (width + max(width, 4)) + shard * (3 * rest + max(width, 4))

    def layer_bytes(self, rows: int, keys: int) -> int:
        """Saved by one layer of one micro-batch.

        Args:
            rows: of the rank, padding included.
            keys: that its segments read (its rows without context parallelism).
        """
        width, size = DTYPE_BYTES[self.dtype], self.mesh.tensor
        residual = rows // size * self.shape.dim * width
        if self.activation_checkpointing == "full":
            return residual
        if self.activation_checkpointing == "selective":
            return self._attention_half(rows, keys) + residual
        return self._attention_half(rows, keys) + self._feed_forward_half(rows)

    def micro_batch_bytes(self, parts: StageParts, rows: int, keys: int) -> int:
        """Saved by one micro-batch on one stage, from its forward to its backward.

        Args:
            parts: the *stage's* layers and ends.
            rows: of the rank, padding included.
            keys: that its segments read (its rows without context parallelism).
        """
        if rows == 0:
            return 0
        width, size = DTYPE_BYTES[self.dtype], self.mesh.tensor
        residual = rows // size * self.shape.dim * width
        # The turns of the rotary embedding, tokens, labels and positions, the index of the keys.
        result = rows * (4 * self.shape.head_dim + 3 * 8) + parts.layers * self.layer_bytes(
            rows, keys
        )
        if self.mesh.context > 1:
            result += 8 * keys
        if parts.head:
            result += self._norm(rows) + rows * (self.shape.dim * width + 4)
        else:
            result += residual  # what was sent on, held until its gradient comes
        return result

    def kept_keys_bytes(self, parts: StageParts, rows: int) -> int:
        """Beyond :meth:`micro_batch_bytes`, of a micro-batch whose keys later slices read.

        Their gradients, in at least float32, from the last slice's backward to its own; and where
        everything else is computed again, the keys and values themselves.
        """
        width = DTYPE_BYTES[self.dtype]
        each = max(width, 4) + (width if self.activation_checkpointing == "full" else 0)
        return parts.layers * 2 * rows * self._kv_heads * self.shape.head_dim * each

    def transient_bytes(self, parts: StageParts, rows: int, keys: int) -> int:
        """Most that lives only inside one pass of such a micro-batch."""
        width, size, shape = DTYPE_BYTES[self.dtype], self.mesh.tensor, self.shape
        again = {
            "none": 0,
            "selective": self._feed_forward_half(rows),
            "full": self._attention_half(rows, keys) + self._feed_forward_half(rows),
        }[self.activation_checkpointing]
        feed_forward = 3 * rows * shape.ffn_dim // size * width
        heads = 2 * (shape.heads // size) * rows + 2 * self._kv_heads * keys
        attention = heads * shape.head_dim * width
        if self.mesh.context > 1:
            attention += (
                2 * self.mesh.context * rows * self._kv_heads * shape.head_dim * max(width, 4)
            )
        layer = again + max(feed_forward, attention) + 2 * rows * shape.dim * width
        return max(layer, _CHUNK_LOGITS_BYTES if parts.head else 0)

    def _attention_half(self, rows: int, keys: int) -> int:
        width, size, shape = DTYPE_BYTES[self.dtype], self.mesh.tensor, self.shape
        heads = shape.heads // size
        queries = rows * heads * shape.head_dim * width
        # Gathered keys hold what the segments read; a rank's own hold its rows.
        keys = keys if self.mesh.context > 1 else rows
        key_values = 2 * keys * self._kv_heads * shape.head_dim * width
        padded = queries if self.mesh.context > 1 else 0  # the padded copy that wo reads
        return (
            self._norm(rows)
            + rows * shape.dim * width  # normalised rows of all tensor ranks, read by wq, wk, wv
            + 2 * queries
            + padded
            + key_values
            + rows * heads * 4  # log-sum-exp
        )

    def _feed_forward_half(self, rows: int) -> int:
        width, shape = DTYPE_BYTES[self.dtype], self.shape
        gate = 4 * rows * shape.ffn_dim // self.mesh.tensor * width
        return self._norm(rows) + rows * shape.dim * width + gate

    def _norm(self, rows: int) -> int:
        """An RMSNorm's input, and one number per row."""
        width, own = DTYPE_BYTES[self.dtype], rows // self.mesh.tensor
        copies = 1 if self.fused_norm else 2
        return own * (copies * self.shape.dim * width + 4)

    @property
    def _kv_heads(self) -> int:
        return max(self.shape.kv_heads // self.mesh.tensor, 1)

    @property
    def _layer_parameters(self) -> int:
        shape, size = self.shape, self.mesh.tensor
        queries = 2 * shape.dim * shape.heads * shape.head_dim // size
        # Replicated where there are fewer heads than ranks.
        kv_heads = shape.kv_heads // size if size <= shape.kv_heads else shape.kv_heads
        keys = 2 * shape.dim * kv_heads * shape.head_dim
        return queries + keys + 3 * shape.dim * shape.ffn_dim // size + 2 * shape.dim

    def longest_micro_batch(
        self, parts: StageParts, open_micro_batches: int, memory_bytes: int
    ) -> int:
        """L_max: tokens of the longest micro-batch, over its context-parallel group, that fits.

        The open micro-batches of a stage are all taken to be as long (WLB-LLM §4, Hydraulis
        App. B.1 MaxLen).

        Args:
            parts: of the rank, all its stages together.
            open_micro_batches: stage passes whose activations the schedule holds at once, at most.
            memory_bytes: of the device, of which :data:`USABLE_PERCENT` are filled.

        Returns:
            0 where not even the state fits.
        """
        free = memory_bytes * USABLE_PERCENT // 100 - self.state_bytes(parts)
        size = self.mesh.tensor

        def needed(rows: int) -> int:
            keys = self.most_keys(rows)
            return open_micro_batches * self.micro_batch_bytes(
                parts, rows, keys
            ) + self.transient_bytes(parts, rows, keys)

        if needed(size) > free:
            return 0
        low, high = 1, 2  # in units of `size` rows; `low` fits
        while needed(high * size) <= free:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if needed(middle * size) <= free else (low, middle)
        return low * size * self.mesh.context

    def most_keys(self, rows: int) -> int:
        """Keys that a rank's segments read of a micro-batch that is one document of equal shares.

        T·(1 + 1/(2·CP)) of T tokens (docs/design.md §5); its rows without context parallelism.
        """
        ranks = self.mesh.context
        return rows if ranks == 1 else rows * ranks + rows // 2


def peak_bytes(passes: Iterable[tuple[bool, Key]], sizes: Mapping[Key, tuple[int, int]]) -> int:
    """Most bytes of activations that a sequence of passes holds at once.

    Args:
        passes: (whether it is a backward, key of the stage and micro-batch) in program order.
        sizes: for each key the bytes saved from forward to backward, and those inside a pass.
    """
    held = peak = 0
    for backward, key in passes:
        saved, transient = sizes[key]
        if not backward:
            held += saved
        peak = max(peak, held + (transient if backward else 0))
        if backward:
            held -= saved
    return peak
