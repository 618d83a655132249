"""How long work takes on a device: W_a and W_l of WLB-LLM §4.1 in nanoseconds, from a profile.

Every time is that of one rank, forward and backward apart:

* attention: FLOPs of each segment in whole tiles of the kernel, over the achieved FLOP/s that the
  profile has for (queries, keys, head size) (WLB-LLM §5.3), summed over segments; a call takes at
  least as long as its longest tile (:func:`.last_tiles_end`);
* matrix products: FLOPs over the achieved FLOP/s at so many rows, so that a short micro-batch is
  charged its low utilisation; element-wise work: bytes over the memory's bandwidth. For a given
  shape and mesh that is a·l² + b·l + c (Hydraulis App. B) with coefficients that follow l;
* communication of all axes (:mod:`~lightning_wlb.cost.communication`). If tensor-parallel messages
  overlap products, only the wait counts (:mod:`~lightning_wlb.cost.overlap`).

:mod:`lightning_wlb.prediction.micro_batch` adds them up, with recomputation.

If layers differ, each kind of layer has a latency model of its own (:attr:`LatencyModel.kinds`).
Besides matrix products and attention, decoders of other families are assumed to do as much work as
a plain decoder with feed-forward matrices of the same size. An expert's products are assumed to run
at the rate of all the micro-batch's rows, which is too fast for short micro-batches.

Results are whole nanoseconds, from IEEE arithmetic alone: the same on every rank and processor.
Each segment is rounded to picoseconds, so that a sum does not depend on its order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import get_args

import numpy as np

from lightning_wlb.cost.attention_tiles import last_tiles_end, padded_pairs
from lightning_wlb.cost.communication import Communication
from lightning_wlb.cost.flops import head_flops, layer_linear_flops
from lightning_wlb.cost.overlap import Exposed, Overlap, exposed_halves
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.rates import AttentionTable, Integers
from lightning_wlb.cost.shape import LayerShape, ModelShape
from lightning_wlb.mesh import ONE_DEVICE, Mesh
from lightning_wlb.plan import Recompute

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_PICOSECONDS = 1e12


@dataclass(frozen=True)
class LatencyModel:
    """Times of a model's parts on one device of a mesh.

    Raises:
        ValueError: a profile for a dtype that is not in ``DTYPE_BYTES``, a mesh that spans nodes
            with a profile without network, or a tensor-parallel size that cannot split the model.
    """

    profile: Profile
    shape: ModelShape  #: sizes of the whole model
    mesh: Mesh = ONE_DEVICE
    #: dtype of sums over tensor- and context-parallel ranks; at least the profile's
    reduce_dtype: str = "float32"
    #: whether the blocks are compiled: one kernel for each norm, rotation and SwiGLU
    compiled: bool = False
    overlap: Overlap = "off"  #: which messages overlap products
    #: results of :func:`.overlap.chunks_of`, by rows
    known_chunks: dict[int, int] = field(default_factory=dict, init=False, compare=False)
    _of_rows: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        if self.profile.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"The device profile {self.profile.name!r} is for dtype {self.profile.dtype!r};"
                f" known are {', '.join(DTYPE_BYTES)}."
            )
        self.shape.check_tensor_parallel(self.mesh.tensor, self.mesh.context)
        self.communication  # noqa: B018 (made here, so that a mesh without links is refused at once)

    @cached_property
    def communication(self) -> Communication:
        """Times of messages on the mesh."""
        return Communication(self.profile, self.mesh)

    @cached_property
    def kinds(self) -> tuple[LatencyModel, ...]:
        """A latency model for each kind of layer, in the order of ``shape.kinds``."""
        if len(self.shape.kinds) == 1:
            return (self,)
        ends = self.shape.dim, self.shape.vocab_size
        shapes = [ModelShape.of_layers(*ends, [layer]) for layer in self.shape.kinds]
        return tuple(replace(self, shape=shape) for shape in shapes)

    # Compute, one layer on one rank

    def attention_ns(self, queries: Integers, keys: Integers) -> tuple[int, int]:
        """Forward and backward time of a layer's attention kernel on one rank's heads.

        ``queries`` and ``keys`` are int64 [segments], keys at least as many as queries.
        """
        if len(queries) == 0:
            return 0, 0
        longest = np.array([[keys.max()], [queries.max()]])
        times = self.calls_ns(
            queries, keys, longest, lambda values: values.sum(axis=1, keepdims=True)
        )
        forward, backward = times[:, 0].tolist()
        return forward, backward

    def calls_ns(
        self,
        queries: Integers,
        keys: Integers,
        longest: Integers,
        totals: Callable[[Integers], Integers],
    ) -> Integers:
        """Forward and backward time of calls of the attention kernel, int64 [2, calls].

        Args:
            queries: queries of the segments of all calls, int64 [segments], as ``keys``.
            longest: most keys and most queries of a segment of each call, int64 [2, calls].
            totals: adds up values of segments, int64 [2, segments], for each call.
        """
        table = self._table
        if not self.layer.attends:
            return np.zeros_like(longest)
        if table.at_once == (1, 1):  # A call takes the sum of its segments' times.
            busy = totals(self.segments_ps(queries, keys))
        else:
            # After the segments come each call's query tile that sees the most keys, and its key
            # tile that the most queries see.
            last = np.maximum(longest, table.tile).ravel()
            every = self.segments_ps(
                np.append(queries, np.full_like(last, table.tile)), np.append(keys, last)
            )
            split = every[:, len(queries) :].reshape(2, 2, -1)
            heads = max(self.layer.heads // self.mesh.tensor, 1)
            once = np.array(table.at_once)[:, None]
            busy = last_tiles_end(
                totals(every[:, : len(queries)]),
                heads * totals(-(-np.array((queries, keys)) // table.tile)),
                split[(0, 1), (0, 1)] * once // heads,
                once,
            )
        return busy // 1000 + np.rint(table.call_ns).astype(np.int64)[:, None]

    def segments_ps(self, queries: Integers, keys: Integers) -> Integers:
        """Forward and backward time of each segment in picoseconds, int64 [2, segments].

        FLOPs count :func:`.padded_pairs`. Arguments are those of :meth:`attention_ns`.
        """
        table, layer = self._table, self.layer
        pairs, padded, seen = padded_pairs(queries, keys, table.tile, layer.sliding_window)
        # Two products of 2·head_dim FLOPs per pair and head; backward is 2.5 times that.
        width = layer.attends * layer.head_width * (layer.heads // self.mesh.tensor)
        flops = np.outer((4, 10), pairs) * width
        time = flops * (table.inverse_rates(padded, seen) / self.profile.sustained)
        return np.rint(time * _PICOSECONDS).astype(np.int64)

    def segment_cost(self, queries: Integers, keys: Integers) -> Integers:
        """Forward + backward time of each segment in ps, by which a sharding is chosen.

        It counts the kernel, and under context parallelism the copy of the keys that the segment
        reads: a sharding of many short segments copies a long document's keys many times. Times are
        for one layer; if layers differ, for the fewest layers with all kinds in the proportions of
        the model. Arguments are those of :meth:`attention_ns`; int64 [segments].
        """
        counts = self.shape.kinds.values()
        each = gcd(*counts)
        costs = (
            count // each * kind._segment_cost(queries, keys)
            for kind, count in zip(self.kinds, counts, strict=True)
        )
        return sum(costs, np.zeros_like(queries))

    def _segment_cost(self, queries: Integers, keys: Integers) -> Integers:
        result: Integers = self.segments_ps(queries, keys).sum(axis=0)
        # Backward copies the keys again.
        copies = 2 * self._copied_bytes(backward=False) + self._copied_bytes(backward=True)
        if self.mesh.context > 1:
            result += keys * round(copies * _PICOSECONDS / self.profile.element_bytes_per_second)
        return result

    def linear_ns(self, rows: int, *, backward: bool) -> int:
        """Time of one layer without the attention kernel, on one rank of ``rows`` rows."""
        traffic = self.layer_traffic(rows, backward=backward)
        return round(self.products_ns(rows, backward)) + self._blocks_ns(traffic)

    def products_ns(self, rows: int, backward: bool) -> float:
        """Time of the matrix products of one layer, on one rank of ``rows`` rows."""
        flops = (1 + backward) * (layer_linear_flops(self.layer, rows) // self.mesh.tensor)
        seconds = self.profile.layer.seconds(flops, rows, backward=backward)
        return seconds / self.profile.sustained * 1e9

    def again_ns(self, rows: int, recompute: Recompute) -> int:
        """Time that recomputation adds to one layer's backward, without attention and its keys.

        That is the matrix products of a forward with their communication: of the whole layer for
        ``"full"``, of its feed-forward half for ``"selective"``.
        """
        if recompute == "none":
            return 0
        forward = self.linear_ns(rows, backward=False)
        waits = self.waits_ns(rows)[recompute == "selective" :]
        # Recomputed rows are not gathered again.
        waited = round(sum(half.forward - half.again for half in waits))
        if recompute == "full":
            return forward + waited
        flops = 2 * self.layer.feed_forward_parameters  # per row
        share = 1000 * flops // layer_linear_flops(self.layer, 1)
        return forward * share // 1000 + waited

    def rows_ns(self, rows: int) -> tuple[int, ...]:
        """Times of a layer without its attention kernel and the exchange of keys.

        Forward, backward without recomputation, and the addition of each mode of ``Recompute``.
        They depend only on the rows and are remembered, as equal rows recur in every plan.
        """
        if rows not in self._of_rows:
            self._of_rows[rows] = (
                self.linear_ns(rows, backward=False) + self.tensor_parallel_ns(rows),
                self.linear_ns(rows, backward=True) + self.tensor_parallel_ns(rows, backward=True),
                *(self.again_ns(rows, mode) for mode in get_args(Recompute)),
            )
        return self._of_rows[rows]

    # Compute, the ends of the model

    def embedding_ns(self, rows: int, *, backward: bool) -> int:
        """Time of the look-up of ``rows`` tokens; backward adds to the whole table's gradient."""
        traffic = 2 * self._width * rows * self.shape.dim
        if backward and rows:
            traffic += 12 * self.shape.vocab_size // self.mesh.tensor * self.shape.dim
        return self._traffic_ns(traffic)

    def head_ns(self, rows: int, *, backward: bool) -> int:
        """Time of output projection and loss of ``rows`` rows; backward recomputes the logits."""
        flops = head_flops(self.shape, rows) // self.mesh.tensor
        seconds = self.profile.head.seconds((1 + 2 * backward) * flops, rows, backward=backward)
        products = round(seconds / self.profile.sustained * 1e9)
        return products + self._blocks_ns(self.head_traffic(rows, backward=backward))

    def action_ns(self, rows: int, parameters: int, *, backward: bool) -> int:
        """Overhead of a pass of ``rows`` rows through a stage of ``parameters`` on the rank."""
        overhead = self.profile.action
        sums = parameters * overhead.parameter_ns if backward else 0.0
        return round(overhead.ns[backward] + rows * overhead.row_ns[backward] + sums)

    # Communication

    def tensor_parallel_ns(self, rows: int, *, backward: bool = False) -> int:
        """Time that a layer's pass waits for all-gathers and reduce-scatters of [rows, dim]."""
        return round(sum(half[backward] for half in self.waits_ns(rows)))

    def waits_ns(self, rows: int) -> tuple[Exposed, Exposed]:
        """Time that the attention and the feed-forward half of a layer wait for these messages."""
        return exposed_halves(self, rows)

    def messages_ns(self, rows: int, chunks: int = 1) -> tuple[int, int]:
        """Time of an all-gather and of a reduce-scatter of a part of [rows, dim] over tensor."""
        elements, ranks = -(-rows // chunks) * self.shape.dim, self.mesh.tensor
        ns = self.communication.collective_ns
        gather = ns("tensor", ranks, elements * self._width)
        return gather, ns("tensor", ranks, elements * self._summed, summed=True)

    def exchange_keys_ns(
        self, received: int, keys: int, *, backward: bool, replicas: int = 1
    ) -> int:
        """Time to join keys and values of one layer on a rank; backward sums their gradients.

        Without context parallelism, keys are only copied in the order of the segments.

        Args:
            received: rows of other ranks' keys, as many as the busiest rank receives or sends.
            keys: rows that this rank's segments read, which are put in order after they arrive.
            backward: whether gradients are sent, in the dtype of reduction.
            replicas: number of replicas whose context-parallel groups act as one (DP-Merge).
        """
        axis = "context" if replicas == 1 else "data"
        size = received * self._key_elements * (self._summed if backward else self._width)
        ranks = self.mesh.context * replicas
        result = self.communication.exchange_ns(axis, ranks, size, summed=backward)
        return result + self._traffic_ns(keys * self._copied_bytes(backward=backward))

    def exchange_recurrence_ns(self, rows: int, *, replicas: int) -> int:
        """Time of the all-to-alls that distribute a recurrence's heads, and return the results."""
        assert self.layer.recurrence is not None
        axis, ranks = "context" if replicas == 1 else "data", self.mesh.context * replicas
        own = rows * self.layer.recurrence.moved // self.mesh.tensor * self._width
        return self.communication.exchange_ns(axis, ranks, own * (ranks - 1) // ranks)

    def pipeline_ns(self, rows: int, source: int) -> int:
        """Time of a micro-batch's message between stages ``source`` and ``source + 1``."""
        if self.mesh.pipeline == 1:
            return 0
        size = -(-rows // self.mesh.tensor) * self.shape.dim * self._width
        return self.communication.message_ns(source, size)

    def gather_ns(self, parameters: int) -> int:
        """Time of the all-gather of parameters, which are sharded over data × context."""
        ranks = self.mesh.data * self.mesh.context
        return self.communication.collective_ns("data", ranks, parameters * self._width)

    def reduce_ns(self, parameters: int) -> int:
        """Time of the reduce-scatter of parameters' gradients over data × context."""
        ranks = self.mesh.data * self.mesh.context
        return self.communication.collective_ns("data", ranks, parameters * self._wide, summed=True)

    def optimise_ns(self, parameters: int) -> int:
        """Time of the optimizer's update of a rank's shard of ``parameters`` parameters."""
        shard = -(-parameters // (self.mesh.data * self.mesh.context))
        # AdamW reads parameter, gradient and two moments and writes all but the gradient.
        return self._traffic_ns(28 * shard)

    @property
    def rank_kv_heads(self) -> int:
        """Key and value heads that one tensor-parallel rank computes."""
        return max(self.layer.kv_heads // self.mesh.tensor, 1)

    @cached_property
    def layer(self) -> LayerShape:
        """The shape of all layers, which must be alike."""
        (layer,) = self.shape.kinds
        return layer

    @cached_property
    def _key_elements(self) -> int:
        """Elements of a token's key and value in one layer on one rank."""
        return self.layer.attends * 2 * self.rank_kv_heads * self.layer.head_width

    @cached_property
    def _width(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.profile.dtype]

    @cached_property
    def _wide(self) -> int:
        """Bytes of an element of a sum, which is at least float32."""
        return max(self._width, 4)

    @cached_property
    def _summed(self) -> int:
        """Bytes of an element that tensor- and context-parallel ranks send for a sum."""
        return max(self._width, DTYPE_BYTES[self.reduce_dtype])

    @cached_property
    def _table(self) -> AttentionTable:
        return self.profile.attention_table(self.layer.head_width)

    def _copied_bytes(self, *, backward: bool) -> int:
        """Memory traffic of each key that is put in order, or of each gradient that is added."""
        return self._key_elements * (self._width + 2 * self._wide if backward else 2 * self._width)

    def layer_traffic(self, rows: int, *, backward: bool) -> int:
        """Bytes of memory traffic of a layer's element-wise work; backward counts twice.

        It counts two norms and two residual sums on this rank's rows, the rotary embedding in
        float32 on its heads or the reads and writes of a recurrence, and SwiGLU on its part of the
        feed-forward width. Compiled, rotation and SwiGLU read inputs and write results only once.
        """
        width, layer, size = self._width, self.layer, self.mesh.tensor
        residual = (2 * 2 + 2 * 3) * width * self.shape.dim // size
        rotary = (layer.heads // size + self.rank_kv_heads) * layer.head_dim
        rotary *= 2 * width + (0 if self.compiled else 4 * self._wide)
        if layer.recurrence:
            rotary = width * layer.recurrence.moved // size
        gate = (3 if self.compiled else 5) * width * layer.gated_width(self.shape.dim) // size
        return (2 if backward else 1) * rows * (residual + rotary + gate)

    def head_traffic(self, rows: int, *, backward: bool) -> int:
        """Bytes of memory traffic of the softmax over float32 logits, forward or backward."""
        return (28 if backward else 20) * rows * self.shape.vocab_size // self.mesh.tensor

    def _blocks_ns(self, size: int) -> int:
        """Time of a layer's or the head's element-wise work, which is slower uncompiled."""
        factor = 1.0 if self.compiled else self.profile.eager_factor
        return round(size * 1e9 * factor / self.profile.element_bytes_per_second)

    def _traffic_ns(self, size: int) -> int:
        return round(size * 1e9 / self.profile.element_bytes_per_second)
