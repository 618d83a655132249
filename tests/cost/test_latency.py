"""The latency model: exact values from simple profiles, and what must hold of any."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.cost.flops import attention_flops, layer_linear_flops
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import ActionOverhead, Link, Profile
from lightning_wlb.cost.rates import AttentionTable, LinearTable
from lightning_wlb.cost.shape import ModelShape, Recurrence
from lightning_wlb.mesh import Mesh

SHAPE = ModelShape(
    dim=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn_dim=11008, vocab_size=32000
)
H100 = Profile.load("h100")
RATE = 1e14
FLAT = replace(
    H100,
    attention=(AttentionTable(128, 128, (128,), (1.0,), ((RATE,),), ((RATE / 2,),)),),
    layer=LinearTable((1,), (RATE,), (RATE / 2,)),
    head=LinearTable((1,), (RATE,), (RATE,)),
    action=ActionOverhead((100.0, 200.0), (1.0, 2.0), 2.5e-3),
    element_bytes_per_second=1e30,
    sustained=1.0,
    links={"node": Link(0.0, 1e9), "network": Link(0.0, 1e8)},
)


def arrays(*segments: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(segments, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def test_attention_is_flops_over_the_rate() -> None:
    model = LatencyModel(FLAT, SHAPE)
    flops = attention_flops(SHAPE, 4096) // SHAPE.layers
    assert model.attention_ns(*arrays((4096, 4096)))[False] == int(flops / RATE * 1e9)
    assert model.attention_ns(*arrays((4096, 4096)))[True] == int(2.5 * flops / (RATE / 2) * 1e9)


@pytest.mark.parametrize(("queries", "keys"), [(4096, 4096), (1024, 9000), (128, 200)])
def test_a_sliding_window_leaves_out_the_pairs_beyond_it(queries: int, keys: int) -> None:
    shape = replace(SHAPE, sliding_window=700)
    model = LatencyModel(FLAT, shape)
    flops = attention_flops(shape, queries, keys - queries) // SHAPE.layers
    assert model.attention_ns(*arrays((queries, keys)))[False] == int(flops / RATE * 1e9)


def test_queries_are_padded_to_the_tile() -> None:
    model = LatencyModel(FLAT, SHAPE)
    # The rows of padding see no keys behind the last query's.
    one = model.attention_ns(*arrays((1, 1000)))[False]
    assert one == model.attention_ns(*arrays((128, 1000)))[False]
    # A tile that ends at the 1,127th key and one that ends at the 1,128th: 64 keys less each than
    # two whole tiles behind 1,000 - 1 keys, rounded down to whole keys.
    two = model.attention_ns(*arrays((129, 1128)))[False]
    assert two == model.attention_ns(*arrays((256, 1128 + 127 - 127 // 2)))[False]
    # A segment shorter than a tile, keys included, is a tile.
    assert model.segments_ps(*arrays((30, 70))).tolist() == (
        model.segments_ps(*arrays((128, 128))).tolist()
    )


def test_a_call_waits_for_its_longest_tile() -> None:
    (table,) = FLAT.attention
    model = LatencyModel(replace(FLAT, attention=(replace(table, at_once=(50, 20)),)), SHAPE)

    def ns(*segments: tuple[int, int], ranks: int = 1) -> tuple[int, int]:
        return replace(model, mesh=Mesh(tensor=ranks)).attention_ns(*arrays(*segments))

    # A tile of 128 queries and its 1,024 keys on one of 50 processors, 4 · 128 FLOPs per pair; the
    # backward's longest tile has 128 keys and 256 queries, on one of 20, 10 · 128 FLOPs.
    forward = (128 * 896 + 128 * 129 // 2) * 4 * 128 / (RATE / 50) * 1e9
    backward = (128 * 128 + 128 * 129 // 2) * 10 * 128 / (RATE / 2 / 20) * 1e9
    # Two tiles of each of 16 heads fit in at once: the rest of the call ends earlier.
    assert ns((256, 1024), ranks=2)[0] == int(forward)
    # Eight tiles of keys of one head.
    assert ns((256, 1024), ranks=32)[1] == int(backward)
    # Many calls' worth: what the processors wait for at the end is half of what the longest tile,
    # of 4,096 keys, takes more than the mean one.
    flops = attention_flops(SHAPE, 4096) // SHAPE.layers * 20
    longest = (128 * 3968 + 128 * 129 // 2) * 4 * 128 / (RATE / 50)
    mean = flops / RATE * 50 / (20 * 32 * 32)
    seconds = flops / RATE + (longest - mean) / 2
    assert ns(*[(4096, 4096)] * 20)[0] == pytest.approx(seconds * 1e9, rel=1e-9, abs=1)


def test_tensor_parallelism_divides_the_heads() -> None:
    whole, part = (LatencyModel(FLAT, SHAPE, Mesh(tensor=size)) for size in (1, 8))
    segments = arrays((4096, 8192), (512, 512))
    assert part.attention_ns(*segments)[False] == pytest.approx(
        whole.attention_ns(*segments)[False] / 8, abs=1
    )
    assert part.linear_ns(1000, backward=False) == pytest.approx(
        whole.linear_ns(1000, backward=False) / 8, abs=1
    )


def test_linear_work_is_flops_over_the_rate() -> None:
    model = LatencyModel(FLAT, SHAPE)
    flops = layer_linear_flops(SHAPE.each_layer[0], 1000)
    assert model.linear_ns(1000, backward=False) == round(flops / RATE * 1e9)
    assert model.linear_ns(1000, backward=True) == round(2 * flops / (RATE / 2) * 1e9)


def test_the_ends_and_the_overhead() -> None:
    model = LatencyModel(FLAT, SHAPE)
    flops = 2 * 1000 * 4096 * 32000
    assert model.head_ns(1000, backward=False) == round(flops / RATE * 1e9)
    assert model.head_ns(1000, backward=True) == round(3 * flops / RATE * 1e9)
    assert model.action_ns(50, 10**6, backward=False) == 150
    assert model.action_ns(50, 10**6, backward=True) == 300 + 2_500


def test_a_step_reaches_a_share_of_the_rates_of_kernels_alone() -> None:
    alone = LatencyModel(FLAT, SHAPE)
    step = replace(alone, profile=replace(FLAT, sustained=0.8))
    segments = arrays((4096, 8192))
    for backward in (False, True):
        kernel = alone.attention_ns(*segments)[backward]
        assert step.attention_ns(*segments)[backward] == pytest.approx(kernel / 0.8, abs=1)
        layer = alone.linear_ns(1000, backward=backward)
        assert step.linear_ns(1000, backward=backward) == pytest.approx(layer / 0.8, abs=1)
        head = alone.head_ns(1000, backward=backward)
        assert step.head_ns(1000, backward=backward) == pytest.approx(head / 0.8, abs=1)


def test_short_micro_batches_pay_for_low_utilisation() -> None:
    ramp = LinearTable((100, 200, 400), (1e13, 2e13, 3e13), (1e13, 2e13, 3e13))
    model = LatencyModel(replace(FLAT, layer=ramp), SHAPE)
    flops = layer_linear_flops(SHAPE.each_layer[0], 1)
    # Linear in rows between the table's points, constant below, at the last rate beyond.
    at = {rows: model.linear_ns(rows, backward=False) for rows in (1, 100, 200, 300, 400, 800)}
    assert at[100] == round(100 * flops / 1e13 * 1e9)
    assert at[1] == at[100]
    assert at[300] == pytest.approx((at[200] + at[400]) / 2, abs=2)
    assert at[800] == round(800 * flops / 3e13 * 1e9)


def test_the_rate_is_exact_for_times_affine_in_queries_times_keys() -> None:
    # seconds = 1e-6 + flops·1e-12 for one head: inverse rate 1e-12 + 1e-6/flops is linear
    # in 1/keys at given queries.
    def rate(queries: int, ratio: float) -> float:
        return 1 / (1e-12 + 1e-6 / (queries * queries * ratio))

    ratios = (1.0, 2.0, 8.0)
    table = AttentionTable(
        128, 1, (16, 64), ratios, *(tuple(tuple(rate(q, r) for r in ratios) for q in (16, 64)),) * 2
    )
    for keys in (16, 20, 50, 128):
        found, _ = table.inverse_rates(np.array([16]), np.array([keys]))
        assert found[0] == pytest.approx(1 / rate(16, keys / 16), rel=1e-12)
    # Beyond the table nothing is extrapolated.
    far, _ = table.inverse_rates(np.array([6400]), np.array([6400 * 100]))
    assert far[0] == pytest.approx(1 / rate(64, 8.0), rel=1e-12)


@settings(max_examples=100)
@given(st.integers(1, 100_000), st.integers(0, 100_000), st.booleans())
def test_more_keys_never_take_less_time(queries: int, before: int, backward: bool) -> None:
    model = LatencyModel(H100, SHAPE)
    less = model.attention_ns(*arrays((queries, queries + before)))[backward]
    more = model.attention_ns(*arrays((queries, queries + before + 128)))[backward]
    assert more >= less


def test_the_cost_of_segments_is_what_the_kernel_takes() -> None:
    model = LatencyModel(FLAT, SHAPE)
    queries, keys = arrays((4096, 8192), (1, 1000), (300, 300))
    both = sum(model.attention_ns(queries, keys)[backward] for backward in (False, True))
    costs = model.segment_cost(queries, keys)
    assert costs.shape == (3,)
    assert int(costs.sum()) // 1000 == pytest.approx(both, abs=1)
    # Under context parallelism a segment's keys are copied: 2·32·128 elements, 2 + 2 bytes
    # forward and again in backward, and 2 + 4 + 4 for their gradients, at 1 TB/s.
    slow = replace(FLAT, element_bytes_per_second=1e12)
    copying = LatencyModel(slow, SHAPE, Mesh(context=2))
    assert (copying.segment_cost(queries, keys) - costs == keys * 2 * 32 * 128 * 18).all()


def test_recomputation_is_a_forward_or_its_feed_forward_half() -> None:
    model = LatencyModel(FLAT, SHAPE, Mesh(tensor=2))
    share = 6 * 4096 * 11008 / layer_linear_flops(SHAPE.each_layer[0], 1)
    forward, parallel = model.linear_ns(1000, backward=False), model.tensor_parallel_ns(1000)
    assert model.again_ns(1000, "none") == 0
    half = model.again_ns(1000, "selective") - parallel // 2
    assert half == pytest.approx(share * forward, rel=2e-3)
    assert model.again_ns(1000, "full") == forward + parallel


def test_communication_in_bytes_over_bandwidth() -> None:
    model = LatencyModel(FLAT, SHAPE, Mesh(data=2, pipeline=2, context=2, tensor=4))
    # Three quarters of [1000, 4096], two gathers of 2 bytes and two sums of 4, at 1 GB/s.
    assert model.tensor_parallel_ns(1000) == 2 * 3 * 1000 * 1024 * (2 + 4)
    # 2·8 heads of 128 for 1000 rows; the sum of gradients is 4 bytes wide.
    assert model.exchange_keys_ns(1000, 0, backward=False) == 1000 * 16 * 128 * 2
    assert model.exchange_keys_ns(1000, 0, backward=True) == 1000 * 16 * 128 * 4
    # Stages lie on different nodes here: 0.1 GB/s.
    assert model.pipeline_ns(1000, 0) == 250 * 4096 * 2 * 10
    # A ring over data × context, two ranks in each node.
    assert model.gather_ns(4_000_000) == 3 * 1_000_000 * 2 * 5
    assert model.reduce_ns(4_000_000) == 3 * 1_000_000 * 4 * 5


def test_one_rank_sends_nothing() -> None:
    model = LatencyModel(FLAT, SHAPE)
    assert model.tensor_parallel_ns(1000) == 0
    assert model.exchange_keys_ns(1000, 0, backward=True) == 0
    assert model.pipeline_ns(1000, 0) == 0
    assert model.gather_ns(1000) == model.reduce_ns(1000) == 0


def test_an_unknown_dtype_and_an_indivisible_model_are_refused() -> None:
    with pytest.raises(ValueError, match="is for dtype 'int8'; known are"):
        LatencyModel(replace(H100, dtype="int8"), SHAPE)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=5 does not divide heads=32"):
        LatencyModel(H100, SHAPE, Mesh(tensor=5))


def test_layers_that_differ_have_a_model_each() -> None:
    layer = SHAPE.each_layer[0]
    near = replace(layer, sliding_window=1024, feed_forward_parameters=3 * 4096 * 4096)
    mixed = LatencyModel(FLAT, ModelShape.of_layers(4096, 32_000, [near, layer, near, near]))
    alike = LatencyModel(FLAT, replace(SHAPE, ffn_dim=4096, sliding_window=1024))
    whole = LatencyModel(FLAT, SHAPE)
    assert alike.kinds == (alike,)
    segments = arrays((4096, 8192), (300, 300))
    for kind, same in zip(mixed.kinds, (alike, whole), strict=True):
        for backward in (False, True):
            attention = same.attention_ns(*segments)[backward]
            assert kind.attention_ns(*segments)[backward] == attention
            assert kind.linear_ns(900, backward=backward) == same.linear_ns(900, backward=backward)
    # A sharding is chosen by what all layers take.
    costs = 3 * alike.segment_cost(*segments) + whole.segment_cost(*segments)
    assert (mixed.segment_cost(*segments) == costs).all()


def test_a_recurrent_layer_takes_its_flops_its_traffic_and_its_all_to_alls() -> None:
    layer = SHAPE.each_layer[0]
    across = Recurrence(heads=8, flops=10**6, moved=1000, state=7, last_rows=5)
    recurrent = replace(layer, heads=1, kv_heads=1, head_dim=1, value_dim=1, recurrence=across)
    profile, mesh = replace(FLAT, element_bytes_per_second=1e12), Mesh(data=2, context=4)
    shape = ModelShape.of_layers(4096, 32_000, [recurrent, layer, recurrent])
    model = LatencyModel(profile, shape, mesh)
    linear, attention = model.kinds
    segments = arrays((4096, 8192), (300, 300))
    assert linear.attention_ns(*segments) == (0, 0)
    for backward in (False, True):
        assert linear.exchange_keys_ns(0, 10**6, backward=backward) == 0
        rate = RATE / 2 if backward else RATE
        products = (1 + backward) * 900 * (10**6 + layer_linear_flops(layer, 1)) / rate * 1e9
        moved = 900 * 2 * (10 * 4096 + 1000 + 5 * layer.gated_width(4096))
        assert linear.linear_ns(900, backward=backward) == pytest.approx(
            products + (1 + backward) * moved * profile.eager_factor / 1e3, abs=2
        )
    # Three quarters of a rank's elements go to three others, a nanosecond a byte.
    assert linear.exchange_recurrence_ns(900, replicas=1) == 900 * 1000 * 2 * 3 // 4
    assert linear.exchange_recurrence_ns(900, replicas=2) == 900 * 1000 * 2 * 7 // 8
    # Only layers that attend choose a sharding.
    assert (model.segment_cost(*segments) == attention.segment_cost(*segments)).all()


def test_narrower_values_are_padded_to_the_keys() -> None:
    layer = replace(SHAPE.each_layer[0], head_dim=192, value_dim=128)
    latent = LatencyModel(FLAT, ModelShape.of_layers(4096, 32_000, [layer]), Mesh(context=2))
    wide = LatencyModel(FLAT, replace(SHAPE, head_dim=192), Mesh(context=2))
    segments = arrays((4096, 8192))
    for backward in (False, True):
        assert latent.attention_ns(*segments)[backward] == wide.attention_ns(*segments)[backward]
        assert latent.exchange_keys_ns(10, 20, backward=backward) == wide.exchange_keys_ns(
            10, 20, backward=backward
        )


def test_sums_that_travel_narrower_take_half_of_the_bytes() -> None:
    wide = LatencyModel(FLAT, SHAPE, Mesh(context=2, tensor=2))
    narrow = replace(wide, reduce_dtype="bfloat16")
    # One gigabyte a second: a nanosecond a byte. Gathers are of bfloat16 either way.
    gathered = 2 * 1000 * SHAPE.dim * 2 // 2
    assert wide.tensor_parallel_ns(1000) == 3 * gathered
    assert narrow.tensor_parallel_ns(1000) == 2 * gathered
    fetched = narrow.exchange_keys_ns(1000, 0, backward=False)
    assert fetched == wide.exchange_keys_ns(1000, 0, backward=False)
    assert fetched == narrow.exchange_keys_ns(1000, 0, backward=True)
    assert 2 * fetched == wide.exchange_keys_ns(1000, 0, backward=True)
    # Gradients of parameters stay as they are.
    assert narrow.reduce_ns(1000) == wide.reduce_ns(1000)
    exact = replace(narrow, profile=replace(FLAT, dtype="float64"))
    assert exact.tensor_parallel_ns(1000) == 8 * gathered


def test_compiled_blocks_move_fewer_bytes_and_faster() -> None:
    slow = replace(FLAT, element_bytes_per_second=1e12, eager_factor=1.5)
    eager = LatencyModel(slow, SHAPE)
    compiled = replace(eager, compiled=True)
    products = LatencyModel(FLAT, SHAPE).linear_ns(1000, backward=False)
    # Per row two norms and two sums of 4,096 elements, 64 heads of 128 turned, SwiGLU of 11,008:
    # rotations through three float32 results, SwiGLU through one of two bytes.
    residual, heads, hidden = 4096 * 10 * 2, 64 * 128, 11008 * 2
    assert eager.linear_ns(1000, backward=False) == pytest.approx(
        products + 1.5 * (residual + heads * (4 + 16) + 5 * hidden), abs=1
    )
    assert compiled.linear_ns(1000, backward=False) == pytest.approx(
        products + residual + heads * 4 + 3 * hidden, abs=1
    )
    softmax = 1000 * 20 * 32000 / 1e3
    head = LatencyModel(FLAT, SHAPE).head_ns(1000, backward=False)
    assert eager.head_ns(1000, backward=False) == pytest.approx(head + 1.5 * softmax, abs=1)
    assert compiled.head_ns(1000, backward=False) == pytest.approx(head + softmax, abs=1)
