"""What a rank holds in memory: parameters and their state, and activations between F and B.

State under FSDP2 as the strategy uses it (within a step ZeRO-1): a rank holds its stage's
tensor-parallel share of the parameters whole in the compute dtype and their gradients whole in at
least float32, and its data × context shard of the parameters at rest, of AdamW's two moments and,
at the step's end, of the gradients.

Activations are the tensors that autograd saves of the reference decoder, tensor by tensor, under
each activation checkpointing; they live from a micro-batch's forward on a stage to its backward.
Keys and values of other ranks or of earlier slices are fetched again in backward. What lives only
inside one pass (the gradients of one layer, its recomputation, keys that were fetched, the logits
of one chunk) is counted once, at the largest.

tests/cost/test_memory.py holds the activations to what autograd saves, byte for byte, and
tests/strategy/test_measure.py whole steps to what the executor counts.

Cost: O(1) per micro-batch. The caching allocator's fragmentation, the CUDA context and
communication buffers are not in it: plan with :data:`USABLE_PERCENT` of a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_wlb.cost.flops import ModelShape
from lightning_wlb.cost.latency import DTYPE_BYTES, Checkpointing
from lightning_wlb.mesh import ONE_DEVICE, Mesh

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

    def layer_bytes(self, rows: int) -> int:
        """Saved by one layer of one micro-batch; ``rows`` of the rank, padding included.

        Keys of other ranks and of earlier slices are not saved: backward fetches them again.
        """
        residual = self.boundary_bytes(rows)
        if self.activation_checkpointing == "full":
            return residual
        if self.activation_checkpointing == "selective":
            return self._attention_half(rows) + residual
        return self._attention_half(rows) + self._feed_forward_half(rows)

    def micro_batch_bytes(self, parts: StageParts, rows: int) -> int:
        """What one micro-batch holds on one stage, from its forward to its backward.

        Args:
            parts: the *stage's* layers and ends.
            rows: of the rank, padding included.
        """
        if rows == 0:
            return 0
        # The turns of the rotary embedding.
        result = rows * 4 * self.shape.head_dim + parts.layers * self.layer_bytes(rows)
        if parts.head:
            result += self._norm(rows) + rows * (self.shape.dim * DTYPE_BYTES[self.dtype] + 4)
        else:
            result += self.boundary_bytes(rows)  # sent on, held until its gradient comes
        return result

    def input_bytes(self, parts: StageParts, rows: int, index: int) -> int:
        """Positions, tokens, labels and the index of keys: there for the whole step.

        Args:
            parts: of the rank.
            rows: of the rank, padding included.
            index: keys that are put in order, 0 where a rank's rows are its keys.
        """
        return 8 * (rows * (1 + parts.embedding + parts.head) + index)

    def boundary_bytes(self, rows: int) -> int:
        """What a micro-batch of ``rows`` rows of a rank sends to a neighbouring stage."""
        return rows // self.mesh.tensor * self.shape.dim * DTYPE_BYTES[self.dtype]

    def kept_keys_bytes(self, parts: StageParts, rows: int) -> int:
        """Beyond :meth:`micro_batch_bytes`, keys and values that later slices read.

        None where autograd keeps them anyway, that is unless everything is computed again.
        """
        return self._keys(parts, rows, DTYPE_BYTES[self.dtype]) * (
            self.activation_checkpointing == "full"
        )

    def key_gradient_bytes(self, parts: StageParts, rows: int) -> int:
        """Gradients of the keys and values that later slices read, in at least float32.

        Held from the first of these slices' backwards to their own.
        """
        return self._keys(parts, rows, max(DTYPE_BYTES[self.dtype], 4))

    def _keys(self, parts: StageParts, rows: int, width: int) -> int:
        return parts.layers * 2 * rows * self._kv_heads * self.shape.head_dim * width

    def transient_bytes(self, parts: StageParts, rows: int, keys: int) -> int:
        """Most that lives only inside one pass of such a micro-batch."""
        width, size, shape = DTYPE_BYTES[self.dtype], self.mesh.tensor, self.shape
        again = {
            "none": 0,
            "selective": self._feed_forward_half(rows),
            "full": self._attention_half(rows) + self._feed_forward_half(rows),
        }[self.activation_checkpointing]
        feed_forward = 3 * rows * shape.ffn_dim // size * width
        fetched = keys if self.mesh.context > 1 or keys > rows else 0
        heads = 2 * (shape.heads // size) * rows + 2 * self._kv_heads * (keys + fetched)
        attention = heads * shape.head_dim * width
        if self.mesh.context > 1:
            attention += (
                2 * self.mesh.context * rows * self._kv_heads * shape.head_dim * max(width, 4)
            )
        layer = again + max(feed_forward, attention) + 2 * rows * shape.dim * width
        return max(layer, _CHUNK_LOGITS_BYTES if parts.head else 0)

    def _attention_half(self, rows: int) -> int:
        width, size, shape = DTYPE_BYTES[self.dtype], self.mesh.tensor, self.shape
        heads = shape.heads // size
        queries = rows * heads * shape.head_dim * width
        key_values = 2 * rows * self._kv_heads * shape.head_dim * width
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
        self,
        parts: StageParts,
        open_micro_batches: int,
        memory_bytes: int,
        micro_batches: int,
    ) -> int:
        """L_max: tokens of the longest micro-batch, over its context-parallel group, that fits.

        The open micro-batches of a stage are all taken to be as long (WLB-LLM §4, Hydraulis
        App. B.1 MaxLen).

        Args:
            parts: of the rank, all its stages together.
            open_micro_batches: stage passes whose activations the schedule holds at once, at most.
            memory_bytes: of the device, of which :data:`USABLE_PERCENT` are filled.
            micro_batches: of the step, whose inputs are all there.

        Returns:
            0 where not even the state fits.
        """
        free = memory_bytes * USABLE_PERCENT // 100 - self.state_bytes(parts)
        size = self.mesh.tensor

        def needed(rows: int) -> int:
            keys = self.most_keys(rows)
            index = keys if self.mesh.context > 1 else 0
            # Beyond the first stage, two gradients on their way to the stage before.
            sent = 0 if parts.embedding else 2 * self.boundary_bytes(rows)
            return (
                open_micro_batches * self.micro_batch_bytes(parts, rows)
                + micro_batches * self.input_bytes(parts, rows, index)
                + self.transient_bytes(parts, rows, keys)
                + sent
            )

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

        T·(1 + 1/(2·CP)) of T tokens; its rows without context parallelism.
        """
        ranks = self.mesh.context
        return rows if ranks == 1 else rows * ranks + rows // 2
