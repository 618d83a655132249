"""The memory of a rank: parameters and their state, and activations.

*State*, as with ZeRO-1 (:mod:`~lightning_wlb.training.gather_and_reduce`): during a step a rank
holds its stage's tensor-parallel share of the parameters in the compute dtype and of their
gradients in at least float32. It also holds its data × context shard of the parameters, of AdamW's
two moments and, at the step's end, of the gradients. If parameters are not sharded, a rank has one
copy of the gradients, and of the parameters too if they are kept in the compute dtype.

*Activations* are the tensors that autograd saves in the reference decoder, tensor by tensor, from a
micro-batch's forward on a stage to its backward, given what the micro-batch recomputes. Keys and
values of other ranks or of earlier slices do not count, because backward refetches them. For other
families the bytes are an estimate: layers count as those of a plain decoder with as many heads and
feed-forward parameters, recurrent layers as kernels that keep their inputs and results. The states
that slices leave for later slices are counted exactly.

*Transient* bytes exist only inside one pass: one layer's gradients and recomputation, fetched keys,
the loss head's logits of one chunk and its matrix's gradient, and the kernel's sums of gradients.
Only the largest are counted, once. Kernels under ``torch.use_deterministic_algorithms`` take more.

The caching allocator's fragmentation, the CUDA context and communication buffers are not counted:
plan with :func:`usable_bytes` of a device. Every call is O(1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from lightning_wlb.cost.communication import COMMUNICATOR_BYTES, communicators
from lightning_wlb.cost.latency import DTYPE_BYTES
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.rates import Integers
from lightning_wlb.cost.shape import LayerShape, ModelShape
from lightning_wlb.mesh import ONE_DEVICE, Mesh
from lightning_wlb.plan import Recompute

_Sizes = TypeVar("_Sizes", int, Integers)  # of one micro-batch, or of many

USABLE_PERCENT = 92
"""Percent of a device's memory that a plan may fill at most. Chosen, not measured."""

_SPARE_PERCENT = 3
"""Least percent of a GPU left for CUDA's context and for fragmentation. Chosen, not measured."""

_TILE = 128
"""Most rows of a kernel's accumulator for each segment besides the segment's rows."""

CPU_LOGITS = 2**22
"""Logits of a chunk on a CPU (16 MiB in float32), unless ``LEAST_ROWS`` rows have more."""

ACCELERATOR_LOGITS = 2**29
"""Most logits of a chunk on an accelerator (2 GiB in float32): 4,096 rows of 128K words."""

ACCELERATOR_ROWS = 4096
"""Rows of a chunk on an accelerator, unless they have more logits than ``ACCELERATOR_LOGITS``."""

LEAST_ROWS = 256
"""Least rows of a chunk: with fewer, the matrix product runs at low utilisation."""


def chunk_rows(words: int, accelerator: bool) -> int:
    """Rows of a chunk of the loss head, whose logits exist together; ``words`` are the rank's.

    Each chunk reads and writes the sum of the output matrix' gradient once: 8 bytes per element in
    float32, for 8 FLOPs per element and row. So on an accelerator of 600 TFLOP/s and 3.3 TB/s
    chunks of 4,096 rows spend 4 % of their time on that, and chunks of 256 rows more than 40 %
    (computed, not measured). On a CPU products take so much longer that both chunk sizes are
    equally fast within the noise (``benchmarks/loss_head.py``).
    """
    if accelerator:
        return max(min(ACCELERATOR_LOGITS // max(words, 1), ACCELERATOR_ROWS), LEAST_ROWS)
    return max(CPU_LOGITS // max(words, 1), LEAST_ROWS)


def usable_bytes(profile: Profile, mesh: Mesh, groups: int | None = None) -> int:
    """Bytes of a device that a plan may fill on a mesh.

    That is :data:`USABLE_PERCENT`, or less if that leaves no room on a small GPU for the process
    groups of a rank: ``groups`` many, or those of the mesh.
    """
    memory = profile.memory_bytes
    groups = communicators(mesh) if groups is None else groups
    taken = groups * COMMUNICATOR_BYTES if profile.device_type == "cuda" else 0
    room = memory * (100 - _SPARE_PERCENT) // 100 - taken
    return max(min(memory * USABLE_PERCENT // 100, room), 0)


@dataclass(frozen=True)
class StageParts:
    """The part of the model that a rank owns: layers of all its stages, embedding and head."""

    layers: tuple[int, ...]  #: how many of each kind of layer, in the order of ``ModelShape.kinds``
    embedding: bool = False  #: whether it has the embedding
    head: bool = False  #: whether it has the final norm and the output projection


@dataclass(frozen=True)
class MemoryModel:
    """Bytes on one rank. ``rows`` are the rows of a micro-batch on the rank, padding included.

    Args:
        shape: sizes of the whole model.
        dtype: dtype in which the model computes.
        rest_dtype: dtype of sharded parameters and optimizer state; float32 for ``bf16-mixed``.
        accelerator: whether the device is no CPU. A CPU's RMSNorm is not one kernel, and also
            saves the normalised rows; its loss head takes fewer rows at a time.
        reduce_dtype: dtype in which tensor- and context-parallel ranks send summands.
        overlap: whether layers keep only own rows for backward, and gather the others again.
        kernel: named as in :class:`.cost.profile.Profile`; unknown names count as FlashAttention-2.
    """

    shape: ModelShape
    mesh: Mesh = ONE_DEVICE
    dtype: str = "bfloat16"
    rest_dtype: str = "float32"
    accelerator: bool = True
    reduce_dtype: str = "float32"
    kernel: str = "flash_attn 2"
    overlap: bool = False

    def parameters(self, parts: StageParts) -> int:
        """Parameters of a rank's tensor-parallel share, before sharding over data × context."""
        shape, size = self.shape, self.mesh.tensor
        table = shape.vocab_size // size * shape.dim
        head = parts.head * (table + shape.dim)
        return self._of_layers(parts, self._layer_parameters) + parts.embedding * table + head

    def _layer_parameters(self, layer: LayerShape) -> int:
        size = self.mesh.tensor
        matrices = layer.attention_parameters + layer.feed_forward_parameters
        matrices += layer.idle_parameters
        # With fewer key/value heads than ranks, their parameters are replicated.
        heads = layer.kv_heads if size > layer.kv_heads and layer.attends else 0
        replicated = self.shape.dim * heads * (layer.head_dim + layer.value_dim)
        return (matrices - replicated) // size + replicated + layer.vector_parameters

    def _of_layers(self, parts: StageParts, each: Callable[[LayerShape], int]) -> int:
        kinds = zip(self.shape.kinds, parts.layers, strict=True)
        return sum(count * each(layer) for layer, count in kinds if count)

    def state_bytes(self, parts: StageParts) -> int:
        """Parameters, gradients and optimizer state during a step, activations left out."""
        count = self.parameters(parts)
        ranks, rest = self.mesh.data * self.mesh.context, DTYPE_BYTES[self.rest_dtype]
        if ranks == 1:
            # Nothing is reduced, and parameters in the compute dtype are not copied.
            copied = 0 if self.dtype == self.rest_dtype else self._width
            return count * (copied + self._wide + 3 * rest)
        return count * (self._width + self._wide) + -(-count // ranks) * (3 * rest + self._wide)

    def layer_bytes(self, layer: LayerShape, rows: int, recompute: Recompute = "none") -> int:
        """Bytes that one layer saves for the backward of a micro-batch."""
        residual = self.boundary_bytes(rows)
        if recompute == "full":
            return residual
        if recompute == "selective":
            return self._attention_half(layer, rows) + residual
        return self._attention_half(layer, rows) + self._feed_forward_half(layer, rows)

    def micro_batch_bytes(self, parts: StageParts, rows: int, recompute: Recompute = "none") -> int:
        """Bytes that a micro-batch holds on one of a rank's stages from forward to backward."""
        # The first term is the rotary embedding's frequencies.
        result = rows * 4 * self.shape.head_dim
        result += self._of_layers(parts, lambda layer: self.layer_bytes(layer, rows, recompute))
        if parts.head:
            result += self._norm(rows) + rows * (self.shape.dim * self._width + 4)
        else:
            result += self.boundary_bytes(rows)  # the output, held until its gradient arrives
        return result

    def input_bytes(self, parts: StageParts, rows: int, index: int) -> int:
        """Positions, tokens, labels and the index of keys, which a rank holds for the whole step.

        ``index`` is the number of keys that an index puts in order, 0 if keys are the local rows.
        """
        return 8 * (rows * (1 + parts.embedding + parts.head) + index)

    def boundary_bytes(self, rows: int) -> int:
        """Bytes that a micro-batch sends to a neighbouring stage."""
        return rows // self.mesh.tensor * self.shape.dim * self._width

    def kept_keys_bytes(self, parts: StageParts, rows: int, recompute: Recompute) -> int:
        """Keys and values that later slices read, unless :meth:`micro_batch_bytes` counts them.

        It leaves them out only if whole layers are recomputed; otherwise autograd saves them.
        """
        if recompute != "full":
            return 0
        return self._of_layers(parts, lambda layer: self._key_bytes(layer, rows, self._width))

    def key_gradient_bytes(self, parts: StageParts, rows: int) -> int:
        """Gradients of the keys and values that later slices read, in at least float32.

        They are held from the first backward of these slices to the backward of ``rows``.
        """
        return self._of_layers(parts, lambda layer: self._key_bytes(layer, rows, self._wide))

    def transient_bytes(
        self, parts: StageParts, rows: int, keys: int, recompute: Recompute = "none"
    ) -> int:
        """Most transient bytes of a pass of a micro-batch of one segment on a stage.

        ``keys`` are the keys that the rank's attention reads.
        """
        kinds = zip(self.shape.kinds, parts.layers, strict=True)
        layers = [layer for layer, count in kinds if count]
        inside = (self.layer_transient_bytes(each, rows, keys, recompute, 1) for each in layers)
        return int(max(parts.head * self.head_transient_bytes(rows), *inside, 0))

    def head_transient_bytes(self, rows: _Sizes) -> _Sizes:
        """A chunk's logits, their gradient for half types, and the gradient of the matrix."""
        words = self.shape.vocab_size // self.mesh.tensor
        logits: _Sizes = np.minimum(rows, chunk_rows(words, self.accelerator)) * words
        narrow = self._width if self._width < self._wide else 0
        return (self._wide + narrow) * (logits + words * self.shape.dim)

    def layer_transient_bytes(
        self,
        layer: LayerShape,
        rows: _Sizes,
        keys: _Sizes,
        recompute: Recompute,
        segments: _Sizes | int,
    ) -> _Sizes:
        """Most transient bytes of a pass of a layer.

        ``rows``, ``keys`` read, ``segments`` and the result: numbers or int64 [micro-batches].
        """
        width, size = self._width, self.mesh.tensor
        result = (recompute != "none") * self._feed_forward_half(layer, rows, kept=True)
        result += (recompute == "full") * self._attention_half(layer, rows, kept=True)
        if self.overlap and self.mesh.tensor > 1 and recompute != "full":
            result += self._read_rows(rows, kept=True)  # gathered again
        feed_forward = 3 * rows * layer.gated_width(self.shape.dim) // size * width
        fetched = keys if self.mesh.context > 1 else keys * (keys > rows)
        queries = 2 * (layer.heads // size) * rows * layer.head_width * width
        attention = queries + self._key_bytes(layer, keys + fetched, width)
        attention += self._kernel_bytes(layer, rows, keys, segments)
        if layer.recurrence:
            attention = rows * layer.recurrence.moved // size * width
        if self.mesh.context > 1:
            # Sums of gradients of keys and values, and a copy if they are sent in a narrower dtype.
            reduced = max(width, DTYPE_BYTES[self.reduce_dtype])
            widths = self._wide + (reduced if reduced < self._wide else 0)
            attention += self._key_bytes(layer, self.mesh.context * rows, widths)
        most: _Sizes = np.maximum(feed_forward, attention)
        return result + most + 2 * rows * self.shape.dim * width

    def _kernel_bytes(
        self, layer: LayerShape, rows: _Sizes, keys: _Sizes, segments: _Sizes | int
    ) -> _Sizes:
        """The buffers in which the kernel's backward adds up gradients.

        Every FlashAttention has a float32 gradient of the queries, with one more tile of rows for
        each segment. If query heads share key heads, 2.x and torch make the gradients of keys and
        values for each query head; 3.x and 4.x add them up in float32. Head widths are padded.
        """
        if self.kernel in ("cpu", "exact"):
            return 0 * rows
        size, wide = self.mesh.tensor, layer.head_width
        heads, kv_heads = layer.heads // size, max(layer.kv_heads // size, 1)
        step = 32 if wide <= 128 else 64
        padded = -(-wide // step) * step
        beyond = _TILE * segments
        result = 4 * heads * padded * (rows + beyond)
        if heads == kv_heads:
            return result
        if self.kernel in ("flash_attn 3", "flash_attn 4"):
            return result + 2 * 4 * kv_heads * padded * (keys + beyond)
        return result + 2 * self._width * heads * wide * keys

    def _attention_half(self, layer: LayerShape, rows: _Sizes, kept: bool = False) -> _Sizes:
        if layer.recurrence:
            moved = rows * layer.recurrence.moved // self.mesh.tensor * self._width
            return (self._norm(rows) + self._read_rows(rows, kept) + moved) * (moved > 0)
        heads = layer.heads // self.mesh.tensor
        queries = rows * heads * layer.head_width * self._width
        padded = queries if self.mesh.context > 1 else 0  # the padded copy that wo reads
        return (
            self._norm(rows)
            + self._read_rows(rows, kept)  # normalised, read by wq, wk, wv
            + 2 * queries
            + padded
            + self._key_bytes(layer, rows, self._width)
            + rows * heads * 4  # log-sum-exp
        )

    def _feed_forward_half(self, layer: LayerShape, rows: _Sizes, kept: bool = False) -> _Sizes:
        gate = 4 * rows * layer.gated_width(self.shape.dim) // self.mesh.tensor * self._width
        return self._norm(rows) + self._read_rows(rows, kept) + gate

    def _read_rows(self, rows: _Sizes, kept: bool) -> _Sizes:
        """Bytes of the rows that products read: with overlap only own rows, unless ``kept``."""
        ranks = 1 if kept or not self.overlap else self.mesh.tensor
        return rows // ranks * self.shape.dim * self._width

    def _key_bytes(self, layer: LayerShape, rows: _Sizes, width: int) -> _Sizes:
        """Keys and values of one layer, ``width`` bytes per element."""
        kv_heads = max(layer.kv_heads // self.mesh.tensor, 1) * layer.attends
        return 2 * rows * kv_heads * layer.head_width * width

    def _norm(self, rows: _Sizes) -> _Sizes:
        """An RMSNorm's input, and one number per row."""
        copies = 1 if self.accelerator else 2
        return rows // self.mesh.tensor * (copies * self.shape.dim * self._width + 4)

    @cached_property
    def _width(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def _wide(self) -> int:
        """Bytes of an element of a gradient, at least float32."""
        return max(self._width, 4)

    def rank_bytes(
        self,
        parts: StageParts,
        open_micro_batches: int,
        rows: int,
        micro_batches: int,
        recompute: Recompute = "none",
    ) -> int:
        """Bytes that a rank holds if all micro-batches of a step are equally long.

        Each micro-batch counts as one document in equal shares: of T tokens a rank then reads
        T·(1 + 1/(2·CP)) keys, without context parallelism T.

        Args:
            parts: the parts of all stages of the rank.
            open_micro_batches: most stage passes whose activations the schedule holds at once.
            rows: rows of each micro-batch.
            micro_batches: micro-batches of the step, whose inputs are all in memory.
            recompute: the mode of each micro-batch.
        """
        ranks = self.mesh.context
        keys = rows if ranks == 1 else rows * ranks + rows // 2
        index = keys if ranks > 1 else 0
        # Stages after the first also hold two gradients that are being sent to the stage before.
        sent = 0 if parts.embedding else 2 * self.boundary_bytes(rows)
        return (
            self.state_bytes(parts)
            + open_micro_batches * self.micro_batch_bytes(parts, rows, recompute)
            + micro_batches * self.input_bytes(parts, rows, index)
            + self.transient_bytes(parts, rows, keys, recompute)
            + sent
        )

    def longest_micro_batch(
        self,
        parts: StageParts,
        open_micro_batches: int,
        usable: int,
        micro_batches: int,
        recompute: Recompute = "none",
    ) -> int:
        """L_max: tokens of the longest micro-batch, over its context-parallel group, that fits.

        All micro-batches are assumed to be equally long (WLB-LLM §4, Hydraulis App. B.1 MaxLen).
        The arguments are those of :meth:`rank_bytes`, and ``usable``, the bytes that may be filled.
        The result is 0 if not even the state fits.
        """
        size = self.mesh.tensor
        # A row takes more than one byte, so at most so many units of `size` rows fit.
        units = bisect_right(
            range(1, max(usable - self.state_bytes(parts), 0) + 1),
            usable,
            key=lambda units: self.rank_bytes(
                parts, open_micro_batches, units * size, micro_batches, recompute
            ),
        )
        return units * size * self.mesh.context
