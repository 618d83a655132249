"""What is waited for of messages behind products: against sums by hand, and never more than all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.overlap import (
    MOST_CHUNKS,
    Exposed,
    chunks_of,
    default_chunks,
    exposed_halves,
    exposed_keys,
    halves,
    waited_ns,
)
from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.cost.rates import LinearTable
from lightning_wlb.cost.shape import LayerShape, ModelShape
from lightning_wlb.mesh import Mesh

# A gated layer of dim 100, whose products take 12 ns for each row on one of two ranks, forward:
# queries, keys and values 3.6, attention's output 1.2, gate and up 4.8, down 2.4.
DIM = 100
SHAPE = ModelShape(DIM, 2, 4, 4, 25, 200, 1000)
FLOPS = 2 * (4 * DIM**2 + 3 * DIM * 200) // 2


def model(per_second: float, slowed: float = 1.0, launch_ns: float = 0.0) -> LatencyModel:
    rate = FLOPS / 12e-9
    profile = replace(
        Profile.load("cpu"),
        layer=LinearTable((1,), (rate,), (rate,)),
        links={"node": Link(0.0, per_second, launch_ns)},
        dtype="float32",
        sustained=1.0,
        slowed_beside=slowed,
        devices_per_node=4,
    )
    return LatencyModel(profile, SHAPE, Mesh(tensor=2), overlap="all")


def test_shares_of_products_are_those_of_the_matrices() -> None:
    attention, feed_forward = halves(DIM, SHAPE.each_layer[0])
    assert attention == pytest.approx((0.3, 0.1))
    assert feed_forward == pytest.approx((0.4, 0.2))
    odd = LayerShape(8, 8, 64, 64, 1000, 0)  # fewer parameters than a plain output projection
    assert halves(DIM, odd) == ((0.0, 1.0), (0.0, 0.0))


def test_in_parts_the_first_message_is_waited_for() -> None:
    """Messages of 1 ns a row, 1,000 rows: behind products of 3.6, 1.2, 4.8 and 2.4 ns."""
    latency = model(DIM * 4 / 2 * 1e9)
    assert latency.messages_ns(1000) == (1000, 1000)
    assert exposed_halves(latency, 1000, 1) == (Exposed(2000, 1000, 0),) * 2
    assert exposed_halves(latency, 1000, 4) == (Exposed(500, 250, 0),) * 2
    assert chunks_of(latency, 1000) == 4
    assert latency.tensor_parallel_ns(1000) == 1000
    assert latency.tensor_parallel_ns(1000, backward=True) == 500
    assert waited_ns(latency, [1000, 1000]) == (2 * 2 * 1500, 2 * 2 * 8000)


def test_a_message_longer_than_its_product_is_waited_for_by_the_rest() -> None:
    """Messages of 4 ns a row: 0.4 behind products of 3.6, 2.8 behind one of 1.2."""
    latency = model(DIM * 4 / 2 * 1e9 / 4)
    attention, feed_forward = exposed_halves(latency, 1000, 4)
    assert attention.forward == pytest.approx(2 * 1000 + 3 * 100 + 3 * 700)
    assert attention.again == pytest.approx(400)
    assert attention.backward == pytest.approx(1000 + 3 * 700 + 2 * 400)
    assert feed_forward.forward == pytest.approx(2 * 1000 + 0 + 3 * 400)


def test_products_are_slower_beside_messages() -> None:
    """At half speed: 1 ns of product runs beside 2 ns of message, so that a half is waited for."""
    attention, _ = exposed_halves(model(DIM * 4 / 2 * 1e9, slowed=2.0), 1000, 1)
    assert attention.again == pytest.approx(500)
    assert attention.backward == pytest.approx(1000 + 2 * 500)


def test_late_gradients_of_weights_hide_the_last_message_of_each_half() -> None:
    """Messages of 8 ns a row; gradients of weights take 4.8 in attention, 7.2 behind it."""
    late = replace(model(DIM * 4 / 2 * 1e9 / 8), overlap="late")
    attention, feed_forward = exposed_halves(late, 1000)
    assert attention == pytest.approx((16_000, 8000 + 3200, 0))
    assert feed_forward == pytest.approx((16_000, 8000 + 800, 0))
    assert exposed_keys(replace(late, mesh=Mesh(context=2)), 1000, 3000, 6000) == (3000, 6000, 3000)


def test_keys_travel_beside_queries_and_outputs() -> None:
    """Of 24 ns a row, forward, queries and outputs take 2.4 each; backward takes twice that."""
    latency = replace(model(DIM * 4 / 2 * 1e9), mesh=Mesh(context=2))
    assert exposed_keys(latency, 1000, 3000, 6000) == (600, 1200, 0)
    slow = replace(model(DIM * 4 / 2 * 1e9, slowed=2.0), mesh=Mesh(context=2))
    assert exposed_keys(slow, 1000, 3000, 6000) == (1500, 3000, 1500)
    # Half of that on each of two tensor ranks: a fourth of the queries, gradients by rows alone.
    both = replace(latency, mesh=Mesh(context=2, tensor=2))
    assert chunks_of(both, 1000) == 4
    assert exposed_keys(both, 1000, 3000, 6000) == (2700, 4800, 600)
    for alone in (replace(both, overlap="off"), replace(latency, mesh=Mesh(data=2))):
        assert exposed_keys(alone, 1000, 3000, 6000) == (3000, 6000, 3000)


def test_few_rows_travel_in_one_part() -> None:
    latency = model(DIM * 4 / 2 * 1e9, launch_ns=5000.0)
    assert chunks_of(latency, 100) == 1
    assert chunks_of(latency, 1_000_000) == MOST_CHUNKS


def test_what_is_recomputed_is_not_gathered_again() -> None:
    latency = model(DIM * 4 / 2 * 1e9 / 8)
    off = replace(latency, overlap="off")
    attention, feed_forward = exposed_halves(latency, 1000)
    forward = latency.linear_ns(1000, backward=False)
    waited = [half.forward - half.again for half in (attention, feed_forward)]
    assert latency.again_ns(1000, "full") == round(forward + sum(waited))
    share = latency.again_ns(1000, "selective") - round(waited[1])
    assert share == off.again_ns(1000, "selective") - sum(off.messages_ns(1000))


@given(
    st.floats(1e6, 1e13), st.floats(0, 1e6), st.floats(1, 3), st.integers(0, 20_000), st.booleans()
)
def test_no_pass_waits_for_more_than_its_messages(
    rate: float, launch_ns: float, slowed: float, rows: int, tensor: bool
) -> None:
    latency = model(rate, slowed=slowed, launch_ns=launch_ns)
    if not tensor:
        latency = replace(latency, mesh=Mesh())
    gather, scatter = latency.messages_ns(rows)
    for half in exposed_halves(latency, rows):
        assert 0 <= half.forward <= (gather + scatter) * (1 + 1e-9)
        # Backward gathers once more.
        assert 0 <= half.backward <= (2 * gather + scatter) * (1 + 1e-9)
    off = replace(latency, overlap="off")
    assert exposed_halves(off, rows) == (Exposed(gather + scatter, gather + scatter, 0),) * 2


def test_parts_without_a_profile() -> None:
    assert [default_chunks(rows, 2) for rows in (0, 1023, 2048, 3000, 10**6)] == [1, 1, 2, 2, 4]
