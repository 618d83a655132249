"""The sizes of a decoder from which its FLOPs, time and memory are computed.

Eight numbers describe a plain decoder. In any other decoder (layers with different windows or
heads, mixtures of experts, latent attention) each layer states its heads and their widths, its
window, and the number of parameters that a token uses. The layers of a model are of a few *kinds*,
and costs are computed once for each kind.

Parameters that a token does not use (experts to which it is not sent) take memory but no FLOPs.
The modules that import this one compute costs from these sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import gcd, inf
from typing import Any

from lightning_wlb.argument_checks import whole


@dataclass(frozen=True)
class Recurrence:
    """The computation across rows of a layer without attention: linear attention, a convolution.

    Its cost for a token does not depend on the token's position. A layer that computes nothing
    across rows, such as a feed-forward network alone, has a recurrence whose sizes are all zero.

    Args:
        heads: heads, or channels of a convolution alone; ranks that share rows or parameters
            compute equal parts of them.
        flops: forward FLOPs of a token, without the layer's matrices.
        moved: elements of a token that go into a convolution or a recurrence, or come out of it.
        state: elements that a recurrence passes from one slice to the next, in at least float32.
        last_rows: elements of the rows that a convolution passes on, in the dtype of activations.

    Raises:
        ValueError: a size is not a whole number of at least 0.
    """

    heads: int = 0
    flops: int = 0
    moved: int = 0
    state: int = 0
    last_rows: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, whole(f"Recurrence: {name}", value, 0))


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one decoder layer that its FLOPs, time and memory depend on.

    Args:
        heads: query heads. In a layer without attention this and the next three are 1.
        kv_heads: key and value heads (fewer than ``heads`` in grouped-query attention).
        head_dim: width of one head's query and key.
        value_dim: width of a value of one head; ``head_dim`` in most models.
        attention_parameters: elements of the matrices before and after attention.
        feed_forward_parameters: elements of the matrices that a token uses in the feed-forward
            network: in a mixture of experts the router, shared experts and the token's routed ones.
        idle_parameters: elements of the experts' matrices that a token does not use.
        vector_parameters: elements of norms and biases.
        sliding_window: most keys that a query sees, its own included; None for no bound.
        recurrence: the layer's computation in place of attention; None if it attends.

    Raises:
        ValueError: a size is no whole number from 1 (parameters: 0) on, or heads % kv_heads != 0.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    attention_parameters: int
    feed_forward_parameters: int
    idle_parameters: int = 0
    vector_parameters: int = 0
    sliding_window: int | None = None
    recurrence: Recurrence | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, [field.name for field in fields(self) if "parameters" in field.name])

    @property
    def attends(self) -> bool:
        """Whether the layer has attention."""
        return self.recurrence is None

    @property
    def head_width(self) -> int:
        """Width of keys and values in the kernel and in messages; narrower ones are padded."""
        return max(self.head_dim, self.value_dim)

    def gated_width(self, dim: int) -> int:
        """Hidden width of a gated feed-forward network with as many parameters, rounded down."""
        return self.feed_forward_parameters // (3 * dim)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder on which its FLOPs depend.

    The first eight describe a plain decoder: equal layers with a gated feed-forward network.
    :meth:`of_layers` describes others by their layers: different windows, heads or parameters,
    mixtures of experts, values narrower than keys. The first eight are then the layers' largest.

    Args:
        dim: width of the residual stream.
        layers: number of decoder layers.
        heads: query heads.
        kv_heads: key and value heads (fewer than ``heads`` in grouped-query attention).
        head_dim: width of one head.
        ffn_dim: hidden width of the gated feed-forward network (three matrices); another network
            counts as a gated one with as many parameters, rounded down.
        vocab_size: rows of the output projection; 0 leaves the output projection out.
        sliding_window: most keys that a query sees, its own included; None for no bound.
        layer_shapes: the shape of each layer, if :meth:`of_layers` has set it.

    Raises:
        ValueError: a size is not a whole number of at least 1 (``vocab_size``: 0), ``heads`` is not
            a multiple of ``kv_heads``, or ``layer_shapes`` contradict the other fields.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    sliding_window: int | None = None
    layer_shapes: tuple[LayerShape, ...] | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, ["vocab_size"])
        if self.layer_shapes is None:
            return
        object.__setattr__(self, "layer_shapes", tuple(self.layer_shapes))
        for name, value in _summary(self.dim, self.each_layer).items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"ModelShape: {name}={getattr(self, name)}, but by layer_shapes it is {value}."
                    " Change the layers, and make the shape with ModelShape.of_layers."
                )

    @staticmethod
    def of_layers(dim: int, vocab_size: int, layer_shapes: Iterable[LayerShape]) -> ModelShape:
        """The shape of a decoder that is not a plain one.

        Raises:
            ValueError: no layer, or a size out of range.
        """
        layer_shapes = tuple(layer_shapes)
        if not layer_shapes:
            raise ValueError("ModelShape.of_layers: layer_shapes is empty; give one of each layer.")
        dim = whole("ModelShape: dim", dim, 1)
        sizes = _summary(dim, layer_shapes)
        return ModelShape(dim, vocab_size=vocab_size, layer_shapes=layer_shapes, **sizes)

    @cached_property
    def each_layer(self) -> tuple[LayerShape, ...]:
        """The shape of each layer."""
        if self.layer_shapes:
            return self.layer_shapes
        plain = LayerShape(
            self.heads,
            self.kv_heads,
            self.head_dim,
            value_dim=self.head_dim,
            attention_parameters=2 * self.dim * self.head_dim * (self.heads + self.kv_heads),
            feed_forward_parameters=3 * self.dim * self.ffn_dim,
            vector_parameters=2 * self.dim,
            sliding_window=self.sliding_window,
        )
        return (plain,) * self.layers

    @cached_property
    def kinds(self) -> dict[LayerShape, int]:
        """The different shapes of layers, by first use, and how many layers have each."""
        return dict(Counter(self.each_layer))

    @property
    def recurrent(self) -> bool:
        """Whether any layer carries a state from row to row."""
        return self.recurrent_heads > 0

    @property
    def recurrent_heads(self) -> int:
        """The number of ranks that share rows or parameters must divide this; 0: no recurrence."""
        return gcd(*(layer.recurrence.heads for layer in self.kinds if layer.recurrence))

    def check_tensor_parallel(self, size: int, context: int = 1) -> None:
        """Raise ValueError if so many tensor- and context-parallel ranks cannot split the model."""
        if (heads := self.recurrent_heads) % (size * context):
            sizes = ", ".join(str(each) for each in range(1, heads + 1) if heads % each == 0)
            raise ValueError(
                f"tensor_parallel_size={size} times context_parallel_size={context} does not divide"
                f" the {heads} heads of the model's recurrent layers, each of which one rank"
                f" computes on all rows. Choose sizes whose product is one of {sizes}."
            )
        heads_of = [("heads", layer.heads) for layer in self.kinds if layer.attends]
        # Layers given by `of_layers` may split their feed-forward network in other ways.
        plain = [("ffn_dim", self.ffn_dim)] if self.layer_shapes is None else []
        for name, value in [*heads_of, *plain, ("vocab_size", self.vocab_size)]:
            if value % size:
                remedy = (
                    f"Pad the vocabulary to vocab_size={-(-value // size) * size}; with pretrained"
                    " weights, which fix it, choose a tensor_parallel_size that divides it"
                    if name == "vocab_size"
                    else f"Choose a tensor_parallel_size that divides {value}"
                )
                raise ValueError(
                    f"tensor_parallel_size={size} does not divide {name}={value}. {remedy}."
                )
        for kv_heads in (layer.kv_heads for layer in self.kinds if layer.attends):
            if kv_heads % size and size % kv_heads:
                raise ValueError(
                    f"tensor_parallel_size={size} and the model's kv_heads={kv_heads} do not divide"
                    " each other, so key/value heads can be neither split nor shared evenly. Choose"
                    f" a tensor_parallel_size that divides {kv_heads} or is a multiple of it."
                )


def _check_sizes(shape: LayerShape | ModelShape, may_be_zero: Collection[str]) -> None:
    """Make sizes whole numbers, or raise ValueError."""
    kind = type(shape).__name__
    for field in fields(shape):
        value = getattr(shape, field.name)
        if field.name not in ("layer_shapes", "recurrence") and (
            field.name != "sliding_window" or value is not None
        ):
            least = 0 if field.name in may_be_zero else 1
            object.__setattr__(shape, field.name, whole(f"{kind}: {field.name}", value, least))
    if getattr(shape, "layer_shapes", None) is None and shape.heads % shape.kv_heads:
        raise ValueError(
            f"{kind}: heads={shape.heads} is not a multiple of kv_heads={shape.kv_heads};"
            " every key/value head serves the same number of query heads."
        )


def _summary(dim: int, layers: Sequence[LayerShape]) -> dict[str, Any]:
    """The fields of a ModelShape whose layers differ, from the layers with attention if any."""
    attending = [layer for layer in layers if layer.attends] or layers
    sizes = ("heads", "kv_heads", "head_dim")
    return {
        "layers": len(layers),
        **{name: max(getattr(layer, name) for layer in attending) for name in sizes},
        "ffn_dim": max(1, *(layer.gated_width(dim) for layer in layers)),
        "sliding_window": max((layer.sliding_window for layer in attending), key=window_width),
    }


def window_width(window: int | None) -> float:
    """A window as a number to compare: None, no bound, is the widest."""
    return inf if window is None else window
