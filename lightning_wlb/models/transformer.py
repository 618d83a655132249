"""The reference decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; no biases.

It computes on packed rows, ``[rows, dim]``, as :class:`.Decoder` describes. Norm, rotation and
SwiGLU are functions of :mod:`.compiled_functions`; modules here hold parameters and exchange rows.

Under tensor parallelism the residual stream is split by rows: each rank holds rows/TP of them. All
rows are gathered before each half of a layer and reduce-scattered after it, and these messages
overlap products (:mod:`.tensor_parallel_overlap`). Under context parallelism the rows are this
rank's share of the micro-batch, and ``attend`` fetches the other ranks' keys and values.

In shapes P is a rank's rows, TP the tensor-parallel size; ``group`` is the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import AttentionOptions
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.attention.packed import Project, Queries, packed_attention
from lightning_wlb.data.batch import MicroBatchTensors
from lightning_wlb.distributed.process_groups import (
    NO_GROUPS,
    ProcessGroups,
    group_rank,
    group_size,
)
from lightning_wlb.models.compiled_functions import EAGER, BlockFunctions, rotary_frequencies
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.loss import token_loss
from lightning_wlb.models.tensor_parallel import embed_words, gather_rows, local
from lightning_wlb.models.tensor_parallel_overlap import GatheredRows, RowTravel, summed_products
from lightning_wlb.plan import Recompute

Attend = Callable[[Queries, Tensor, Tensor, Project], Tensor]
""":meth:`.Transformer.attend` for a given layer and given process groups."""


class Transformer(Decoder):
    """A decoder, or one pipeline stage of it, whose parameters :meth:`.Decoder.initialise` fills.

    Args:
        config: sizes of the whole model.
        attention_backend: see :class:`~lightning_wlb.attention.backends.VarlenAttention`.

    Attributes:
        attention_options: options of every layer's attention, such as its window.
        attend: the function that the layers call for attention. It may be replaced on an instance,
            for example by dense attention in a test.
    """

    embed: Embedding | None
    head: Head | None
    activation_checkpointing = "auto"
    overlaps = "all"

    attention_kernel: VarlenAttention

    def __init__(self, config: TransformerConfig, *, attention_backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.layers = nn.ModuleDict({str(number): Layer(config) for number in range(config.layers)})
        self.head = Head(config)
        if config.tied_embeddings:
            self.head.weight = self.embed.weight
        self.attention_kernel = VarlenAttention(attention_backend)
        self.attention_options = AttentionOptions(sliding_window=config.sliding_window)

    def forward(
        self,
        micro_batch: MicroBatchTensors,
        hidden: Tensor | None = None,
        layers: range | None = None,
        groups: ProcessGroups = NO_GROUPS,
    ) -> Tensor:
        """See :meth:`.Decoder.forward`."""
        if hidden is None:
            assert self.embed is not None
            assert micro_batch.tokens is not None
            hidden = self.embed(micro_batch.tokens, groups.tensor)
        freqs = rotary_frequencies(micro_batch.positions, self.config, hidden.dtype)
        recompute = micro_batch.recompute
        travel = RowTravel.of(groups, micro_batch.rows)
        for number in sorted(map(int, self.layers)) if layers is None else layers:
            metadata = micro_batch.attention.for_layer(number, recompute == "full")
            attend = partial(self.attend, metadata=metadata, groups=groups)
            hidden = self.layers[str(number)](hidden, freqs, attend, travel, recompute)
        if self.head is not None and (layers is None or layers.stop == self.config.layers):
            hidden = self.head(hidden, micro_batch.labels, groups.tensor)
        return hidden

    def attend(
        self,
        q: Queries,
        k: Tensor,
        v: Tensor,
        project: Project,
        metadata: AttentionMetadata,
        groups: ProcessGroups,
    ) -> Tensor:
        """Attention and its projection, with the arguments of :func:`.packed_attention`."""
        return packed_attention(
            q, k, v, project, metadata, self.attention_kernel, groups, self.attention_options
        )

    def compile_blocks(self) -> None:
        """Compile norms, rotations, feed-forward networks and the loss's softmax.

        A subclass's own modules are not compiled.
        """
        functions = BlockFunctions.compiled()
        for module in self.modules():
            if isinstance(module, Attention | FeedForward | RMSNorm | Head):
                module.functions = functions

    def tensor_parallel_plan(self, size: int) -> dict[str, Placement]:
        """Splits key and value matrices by heads if each rank gets a head, else replicates them."""
        key_value = Replicate() if size > self.config.kv_heads else Shard(0)
        return {
            "embed.weight": Shard(0),
            "head.weight": Shard(0),
            "layers.*.attention.wq": Shard(0),
            "layers.*.attention.wk": key_value,
            "layers.*.attention.wv": key_value,
            "layers.*.attention.wo": Shard(1),
            "layers.*.feed_forward.w1": Shard(0),
            "layers.*.feed_forward.w3": Shard(0),
            "layers.*.feed_forward.w2": Shard(1),
            "*norm.weight": Replicate(),
        }

    @property
    def tied(self) -> dict[str, str]:
        """The output matrix and the embedding, if they are tied."""
        return {"head.weight": "embed.weight"} if self.config.tied_embeddings else {}

    def initial_deviation(self, name: str) -> float:
        """0.02; less for matrices that write to the residual stream of many layers (GPT-2)."""
        residual = name.endswith((".wo", ".w2"))
        return 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02


class Layer(nn.Module):
    """One decoder layer: attention, then the feed-forward network, on the residual stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        hidden: Tensor,
        freqs: Tensor,
        attend: Attend,
        travel: RowTravel,
        recompute: Recompute = "none",
    ) -> Tensor:
        """[P/TP, dim] -> [P/TP, dim]."""

        def feed_forward(hidden: Tensor) -> Tensor:
            normal = self.feed_forward_norm(hidden)
            # A user's own module takes only the tensor-parallel group (examples/own_model.py).
            own = isinstance(self.feed_forward, FeedForward)
            how = (travel, recompute != "none") if own else (travel.group,)
            return hidden + self.feed_forward(normal, *how)

        def both(hidden: Tensor, freqs: Tensor) -> Tensor:
            normal = self.attention_norm(hidden)
            hidden = hidden + self.attention(normal, freqs, attend, travel, recompute == "full")
            if recompute == "selective":
                return _recomputed(feed_forward, hidden)
            return feed_forward(hidden)

        # Checkpointing is inside the layer, so that hooks around it run once.
        if recompute == "full":
            return _recomputed(both, hidden, freqs)
        return both(hidden, freqs)


class Attention(nn.Module):
    """Grouped-query attention; the projections see all P rows, the residual stream P/TP."""

    functions = EAGER

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.head_dim = config.head_dim
        self.kv_heads = config.kv_heads
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.wq = nn.Parameter(torch.empty(queries, config.dim))
        self.wk = nn.Parameter(torch.empty(keys, config.dim))
        self.wv = nn.Parameter(torch.empty(keys, config.dim))
        self.wo = nn.Parameter(torch.empty(config.dim, queries))

    def forward(
        self, hidden: Tensor, freqs: Tensor, attend: Attend, travel: RowTravel, kept: bool
    ) -> Tensor:
        """[P/TP, dim] -> [P/TP, dim]; the heads in between are this rank's own.

        ``kept`` says that backward recomputes this call, see :class:`.GatheredRows`.
        """
        table = torch.view_as_real(freqs)
        keys, values = (self._of_own_heads(each, travel.group) for each in (self.wk, self.wv))
        rows = GatheredRows(hidden, (local(self.wq), keys, values), travel, kept)
        # Keys first if they are sent on; else all three products overlap the arriving rows.
        first = (1, 2) if travel.keys_travel else (1, 2, 0)
        k, v, *q = map(self._heads, rows.times(*first))

        def queries() -> Tensor:
            return self.functions.rotate(*(q or map(self._heads, rows.times(0))), table)

        def project(out: Tensor) -> Tensor:
            return summed_products(out.flatten(-2), local(self.wo), travel)

        return attend(queries, self.functions.rotate(k, table), v, project)

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.head_dim))

    def _of_own_heads(self, weight: nn.Parameter, group: ProcessGroup | None) -> Tensor:
        """The rows of a key or value matrix for the heads that this rank's query heads read."""
        size = group_size(group)
        if size <= self.kv_heads:
            return local(weight)
        first = group_rank(group) * self.kv_heads // size * self.head_dim
        return local(weight)[first : first + self.head_dim]


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    functions = EAGER

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.ffn_dim, config.dim))
        self.w3 = nn.Parameter(torch.empty(config.ffn_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.dim, config.ffn_dim))

    def forward(self, hidden: Tensor, travel: RowTravel, kept: bool) -> Tensor:
        """[P/TP, dim] -> [P/TP, dim]; ``kept`` as for :class:`Attention`."""
        rows = GatheredRows(hidden, (local(self.w1), local(self.w3)), travel, kept)
        return summed_products(self.functions.swiglu(*rows.times(0, 1)), local(self.w2), travel)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, along the last dimension."""

    functions = EAGER

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.dim))
        self.eps = config.norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        return self.functions.rms_norm(hidden, local(self.weight), self.eps)


class Embedding(nn.Module):
    """The embedding table; under tensor parallelism each rank holds some words' rows."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))

    def forward(self, tokens: Tensor, group: ProcessGroup | None) -> Tensor:
        """Tokens int64 [P] -> hidden states [P/TP, dim]."""
        table = local(self.weight)
        return embed_words(partial(F.embedding, weight=table), tokens, table.shape[0], group)


class Head(nn.Module):
    """Final norm and output projection; under tensor parallelism each rank holds some words."""

    functions = EAGER

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))

    def forward(self, hidden: Tensor, labels: Tensor | None, group: ProcessGroup | None) -> Tensor:
        """[P/TP, dim] -> the sum of token losses; logits [P, vocabulary/TP] without labels."""
        hidden = gather_rows(self.norm(hidden), group)
        if labels is None:
            return F.linear(hidden, local(self.weight))
        return token_loss(hidden, local(self.weight), labels, group, self.functions.softmax)


def _recomputed(function: Callable[..., Tensor], *kept: Tensor) -> Tensor:
    """``function(*kept)`` under activation checkpointing: only ``kept`` is held for backward."""
    # It keeps the random state: a user's own modules need the same numbers in backward.
    return checkpoint(function, *kept, use_reentrant=False)
