"""FLOPs against hand counts, brute force and the reference constants of LLaMA2-7B."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.flops import (
    PassWork,
    Work,
    attention_flops,
    causal_pairs,
    head_flops,
    layer_linear_flops,
    linear_flops,
)
from lightning_wlb.cost.shape import ModelShape, Recurrence

LLAMA2_7B = ModelShape(
    dim=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn_dim=11008, vocab_size=32000
)
SMALL = ModelShape(dim=6, layers=3, heads=4, kv_heads=2, head_dim=5, ffn_dim=7, vocab_size=11)
LAYER = SMALL.each_layer[0]


def with_windows(windows: list[int | None]) -> ModelShape:
    """SMALL with a layer of each window."""
    layers = [replace(LAYER, sliding_window=window) for window in windows]
    return ModelShape.of_layers(SMALL.dim, SMALL.vocab_size, layers)


def test_linear_flops_are_two_per_parameter_and_token() -> None:
    query, key, value, output = 6 * 20, 6 * 10, 6 * 10, 20 * 6
    feed_forward = 3 * 6 * 7
    assert layer_linear_flops(LAYER, 9) == 2 * 9 * (query + key + value + output + feed_forward)
    assert head_flops(SMALL, 9) == 2 * 9 * 6 * 11
    assert linear_flops(SMALL, 9) == 3 * layer_linear_flops(LAYER, 9) + head_flops(SMALL, 9)


@given(
    tokens=st.integers(0, 40),
    context=st.integers(0, 40),
    sliding_window=st.none() | st.integers(1, 90),
)
def test_causal_pairs_count_the_mask(tokens: int, context: int, sliding_window: int | None) -> None:
    mask = [
        (query, key)
        for query in range(context, context + tokens)
        for key in range(context + tokens)
        if key <= query and (sliding_window is None or query - key < sliding_window)
    ]
    assert causal_pairs(tokens, context, sliding_window) == len(mask)
    # Two products of head_dim multiply-adds for every pair, head and layer.
    shape = replace(SMALL, sliding_window=sliding_window)
    assert attention_flops(shape, tokens, context) == len(mask) * 2 * 2 * 5 * 4 * 3


@given(
    cuts=st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    windows=st.lists(st.none() | st.integers(1, 3000), min_size=1, max_size=4),
)
def test_slices_of_a_piece_cost_what_the_piece_costs(
    cuts: list[int], windows: list[int | None]
) -> None:
    work = Work.of(with_windows(windows))
    context, forward, backward = 0, 0, 0
    for tokens in cuts:
        forward += work.forward(tokens, context)
        backward += work.backward(tokens, context)
        context += tokens
    assert forward == work.forward(context)
    assert backward == work.backward(context)
    assert work.total(context) == forward + backward


def test_reference_constants_of_llama2_7b() -> None:
    """LLaMA2-7B: d²/49,408 token-equivalents forward, d²/42,350 with the backward."""
    linear = layer_linear_flops(LLAMA2_7B.each_layer[0], 1)
    for tokens in (1, 4096, 49_408, 131_072):
        attention = attention_flops(LLAMA2_7B, tokens) // LLAMA2_7B.layers
        # Exactly d·(d + 1)/49,408: the diagonal is the difference to d².
        assert attention * 49_408 == linear * tokens * (tokens + 1)
    # With linear ×3 and attention ×3.5: 49,408·3/3.5 = 42,349.7.
    one_layer = Work.of(
        ModelShape(
            dim=4096, layers=1, heads=32, kv_heads=32, head_dim=128, ffn_dim=11008, vocab_size=0
        )
    )
    tokens = 131_072
    equivalents = one_layer.total(tokens) / one_layer.total(1) * (1 + 1 / 42_350)
    assert equivalents == pytest.approx(tokens + tokens * tokens / 42_350, rel=2e-5)


@given(
    linear=st.integers(1, 10**9),
    windows=st.dictionaries(
        st.none() | st.integers(1, 3000), st.integers(0, 10**9), min_size=1, max_size=4
    ),
    tokens=st.integers(0, 10**4),
)
def test_tokens_within_is_the_inverse_of_work_where_windows_differ(linear, windows, tokens) -> None:
    work = PassWork.of_windows(linear, windows)
    assert work.windows == windows
    assert work(tokens) == linear * tokens + sum(
        per_pair * causal_pairs(tokens, 0, window) for window, per_pair in windows.items()
    )
    assert work.tokens_within(work(tokens)) == tokens
    assert work.tokens_within(work(tokens + 1) - 1) == tokens


@given(
    windows=st.lists(st.none() | st.integers(1, 90), min_size=1, max_size=5),
    tokens=st.integers(0, 100),
    context=st.integers(0, 100),
)
def test_work_of_layers_with_different_windows_is_the_sum_over_layers(
    windows, tokens, context
) -> None:
    work = Work.of(with_windows(windows))
    linear = linear_flops(with_windows(windows), tokens)
    assert linear == len(windows) * layer_linear_flops(LAYER, tokens) + head_flops(SMALL, tokens)
    pairs = sum(causal_pairs(tokens, context, window) for window in windows)
    assert work.forward(tokens, context) == linear + 4 * 4 * 5 * pairs
    assert work.backward(tokens, context) == 2 * linear + 10 * 4 * 5 * pairs
    assert work.total.window == (None if None in windows else max(windows))


def test_work_of_recurrent_layers_is_linear_in_tokens() -> None:
    near = replace(LAYER, sliding_window=4)
    recurrent = replace(LAYER, recurrence=Recurrence(heads=12, flops=1000, moved=1))
    work, attends = (
        Work.of(ModelShape.of_layers(6, 0, [near, each])) for each in (recurrent, near)
    )
    assert work.forward.per_token == attends.forward.per_token + 1000
    assert work.backward.per_token == attends.backward.per_token + 2000
    assert 2 * work.total.per_pair == attends.total.per_pair
    assert work.total.windows.keys() == {4}
    assert (work.recurrent_heads, attends.recurrent_heads) == (12, 0)
    alone = Work.of(ModelShape.of_layers(6, 0, [recurrent]))
    assert alone.total(10) == 10 * alone.total(1)
    assert alone.total.tokens_within(alone.total(10)) == 10


def test_narrower_values_count_once_in_forward_and_twice_in_backward() -> None:
    layer = replace(LAYER, value_dim=3)
    work = Work.of(ModelShape.of_layers(6, 0, [layer]))
    assert work.forward.per_pair == 2 * 4 * (5 + 3)
    # Scores again, and gradients of queries and keys; of probabilities, and of values.
    assert work.backward.per_pair == 2 * 4 * (3 * 5 + 2 * 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim=0, but it must be at least 1"),
        ({"layers": -1}, "layers=-1"),
        ({"vocab_size": -1}, "vocab_size=-1, but it must be at least 0"),
        ({"kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, int], message: str) -> None:
    fields = {
        "dim": 6, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 5, "ffn_dim": 7,
        "vocab_size": 11,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        ModelShape(**{**fields, **changes})
