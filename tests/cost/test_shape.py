"""Shapes: what a plain decoder's layer is, and layers that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_wlb.cost.shape import LayerShape, ModelShape

PLAIN = ModelShape(dim=6, layers=3, heads=4, kv_heads=2, head_dim=5, ffn_dim=7, vocab_size=11)
LAYER = LayerShape(
    heads=4, kv_heads=2, head_dim=5, value_dim=5, attention_parameters=2 * 6 * 5 * (4 + 2),
    feed_forward_parameters=3 * 6 * 7, vector_parameters=2 * 6,
)  # fmt: skip
NARROW = replace(LAYER, sliding_window=9, heads=2)


def test_the_layers_of_a_plain_decoder_are_alike() -> None:
    assert PLAIN.each_layer == (LAYER,) * 3
    assert PLAIN.kinds == {LAYER: 3}
    assert LAYER.gated_width(6) == 7
    assert LAYER.head_width == 5


def test_layers_that_differ_are_summed_up_by_the_most() -> None:
    shape = ModelShape.of_layers(6, 11, [NARROW, LAYER, NARROW, replace(LAYER, value_dim=8)])
    assert shape.each_layer == shape.layer_shapes
    assert list(shape.kinds.values()) == [2, 1, 1]
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (4, 4, 2, 5)
    assert (shape.ffn_dim, shape.sliding_window) == (7, None)
    assert ModelShape.of_layers(6, 11, [NARROW]).sliding_window == 9
    assert [layer.head_width for layer in shape.each_layer] == [5, 5, 5, 8]


def test_tensor_parallel_ranks_split_what_every_layer_has() -> None:
    mixed = ModelShape.of_layers(6, 11, [NARROW, LAYER])
    for shape, size, first in (
        (PLAIN, 3, "heads=4"),
        (PLAIN, 2, "ffn_dim=7"),
        (replace(PLAIN, ffn_dim=8), 2, "vocab_size=11"),
        (mixed, 4, "heads=2"),
        (mixed, 2, "vocab_size=11"),
        (replace(mixed, vocab_size=12), 8, "heads=2"),
    ):
        with pytest.raises(ValueError, match=f"={size} does not divide {first}"):
            shape.check_tensor_parallel(size)
    replace(mixed, vocab_size=12).check_tensor_parallel(2)


def test_a_shape_that_contradicts_its_layers_is_refused() -> None:
    shape = ModelShape.of_layers(6, 11, [NARROW, LAYER])
    assert replace(shape, vocab_size=12).vocab_size == 12
    for name, value in {"layers": 3, "heads": 8, "ffn_dim": 8, "sliding_window": 9}.items():
        with pytest.raises(ValueError, match=f"{name}={value}, but by layer_shapes it is"):
            replace(shape, **{name: value})
    with pytest.raises(ValueError, match="layer_shapes is empty"):
        ModelShape.of_layers(6, 11, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads=3 is not a multiple of kv_heads=2"),
        ({"value_dim": 0}, "LayerShape: value_dim=0, but it must be at least 1"),
        ({"idle_parameters": -1}, "idle_parameters=-1, but it must be at least 0"),
        ({"sliding_window": 0}, "sliding_window=0, but it must be at least 1"),
    ],
)
def test_an_impossible_layer_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAYER, **changes)
