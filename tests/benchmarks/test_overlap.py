"""The benchmark of messages behind products computes what it says."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import overlap, overlap_measured
from lightning_wlb.cost.profile import Link

RESULTS = Path(overlap.__file__).with_name("results")


def test_products_sleep_for_their_time_and_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    x, weight, total = torch.ones(4, 3), torch.ones(5, 3), torch.ones(4, 3)
    out = torch.ones(2, 4, 5)
    with overlap_measured.Sleeping():
        assert torch.equal(F.linear(x, weight), torch.zeros(4, 5))
        assert torch.bmm(x.expand(2, 4, 3), weight.t().expand(2, 3, 5), out=out) is out
        assert total.addmm_(torch.ones(4, 5), weight) is total
        assert torch.equal(x + 1, torch.full((4, 3), 2.0)), "what is no product is computed"
    assert slept == [pytest.approx(each / overlap_measured.FLOPS) for each in (120, 240, 120)]
    assert torch.equal(out, torch.ones(2, 4, 5))


def test_what_arrives_at_once_has_the_shapes_of_messages() -> None:
    x, gathered, own = torch.arange(6.0).view(2, 3), torch.empty(4, 3), torch.empty(1, 3)
    with overlap_measured.nothing_sent():
        overlap_measured.tensor_parallel_overlap.all_gather_into(
            gathered, x, group=None, async_op=True
        ).wait()
        overlap_measured.tensor_parallel_overlap.reduce_scatter_into(
            own, x, group=None, async_op=True
        ).wait()
    assert torch.equal(gathered, torch.cat([x, x]))
    assert torch.equal(own, x[:1])


def test_a_message_as_long_as_the_shortest_product_is_hidden_but_for_a_part() -> None:
    rows = 256
    shortest = rows * overlap_measured.CONFIG.dim**2 / overlap_measured.FLOPS
    link = Link(0.0, rows // 2 * overlap_measured.CONFIG.dim * 4 / shortest)
    # Of four parts one is waited for; of three messages in each half's backward one, a quarter.
    shares = overlap_measured.predicted_shares(overlap_measured.latency_of(rows, link), rows)
    assert shares == {"forward": pytest.approx(0.75), "backward": pytest.approx(0.875)}


def test_keys_have_a_product_of_their_length_beside_them_and_in_backward_two() -> None:
    rows, config = 256, overlap_measured.CONFIG
    product = 2 * rows * config.dim**2 / overlap_measured.FLOPS
    for slower, forward, backward in ((1, 1.0, 1.0), (4, 0.25, 0.5)):
        link = Link(0.0, rows * 2 * config.dim * 4 / product / slower)
        latency = overlap_measured.latency_of(rows, link)
        shares = overlap_measured.predicted_shares_of_keys(latency, rows)
        assert shares == {"forward": pytest.approx(forward), "backward": pytest.approx(backward)}


def test_published_steps_are_nearer_with_messages_behind_products() -> None:
    rows = overlap.published()
    assert len(rows) == 3
    for row in rows:
        off, auto = row["off_over_published"], row["auto_over_published"]
        assert row["no_messages_over_published"] < auto < off
        assert row["auto_over_off"] == pytest.approx(auto / off)


def test_kept_figures_agree() -> None:
    result = json.loads((RESULTS / "overlap.json").read_text())
    for axis, each in product(overlap_measured.AXES, ("forward", "backward")):
        figures = result["measured"]["axes"][axis]["slow"][each]
        off, auto, computed = (figures[f"{way}_ms"] for way in overlap_measured.WAYS)
        assert figures["hidden"] == pytest.approx((off - auto) / (off - computed))
    for name, row in result["slimpack"].items():
        assert row["time"] <= 1.0, name
        assert row["communication_auto"] < row["communication_off"], name
        assert row["time"] < row["time_hugging_face"] < 1.0, name
    for name, row in result["removed"]["rows"].items():
        assert row["no messages"] < row["and own keys"] <= row["everywhere"], name
        assert row["everywhere"] < row["whole pieces"] < 1.0, name
