"""Steps on pipelines that differ: every piece once, where it fits, in the least simulated time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece, Scheme, StepPlan
from lightning_wlb.planning import DataSettings, unequal
from lightning_wlb.planning.unequal import Arranged, Receiver, arrange
from lightning_wlb.prediction.predictor import Predictor

SHAPE = ModelShape(dim=2048, layers=4, heads=16, kv_heads=16, head_dim=128, ffn_dim=5504,
                   vocab_size=32000)  # fmt: skip
WINDOW = 32768
DATA = DataSettings(WINDOW, 4, packing={"method": "slim", "micro_packs": 4})
RULES = DATA.rules(None, Work.of(SHAPE))
DEEP, FLAT = Scheme(0, (2, 2), context=2), Scheme(4, (4,))


@cache
def receiver(scheme: Scheme, gigabytes: int = 80) -> Receiver:
    mesh = Mesh(max(8 // scheme.size, 1), len(scheme.stages), scheme.context, scheme.tensor)
    profile = replace(Profile.load("h100"), memory_bytes=gigabytes << 30)
    return Receiver(scheme, Predictor(LatencyModel(profile, SHAPE, mesh), scheme.layers))


def arranged(own: list[Piece], *receivers: Receiver) -> Arranged:
    """On the ranks of the receivers' schemes."""
    kinds = {each.scheme.shape: each for each in receivers}
    return arrange(own, [each.scheme for each in receivers], kinds, RULES, DATA.packer)


def pieces(*lengths: int) -> list[Piece]:
    return [Piece(number, 0, length, 0) for number, length in enumerate(lengths)]


def test_a_plan_on_unequal_pipelines_is_valid_and_deals_by_what_they_can_do() -> None:
    """Pipelines get work by their ranks, and a long piece goes where it fits."""
    receivers = [receiver(DEEP, 5), receiver(FLAT, 5), receiver(replace(FLAT, first=5), 5)]
    assert receivers[1].longest < 20000 <= receivers[0].longest
    assert receivers[1].costs([20000, 500])[0] is None
    own = pieces(20000, *[3000] * 5, *[900] * 8, *[200] * 10)
    made = arranged(own, *receivers)
    assert made.excess == 0
    plan = StepPlan(
        0, 0, made.replicas, tuple(own), 0, WINDOW, 4, 4 * WINDOW,
        strategy=tuple(each.scheme for each in receivers),
    ).validate()  # fmt: skip
    assert StepPlan.from_json(plan.to_json()) == plan
    assert {part.document for part in made.replicas[0].slices} >= {0}
    times = [
        each.judge([made_for]).time for each, made_for in zip(receivers, made.replicas, strict=True)
    ]
    assert made.time_ns == max(times) < 1.25 * min(times)


def test_dealing_is_near_the_best_of_all_by_simulation() -> None:
    receivers = [receiver(DEEP), receiver(FLAT)]
    own = pieces(9000, 7000, 4000, 1500)
    packers = [DATA.packer(replace(RULES, micro_batches=each)) for each in (3, 1)]
    best = min(
        max(
            each.judge([each.plan(mine, packer)]).time
            for at, (each, packer) in enumerate(zip(receivers, packers, strict=True))
            if (mine := [piece for piece, home in zip(own, homes, strict=True) if home == at])
        )
        for homes in product(range(2), repeat=len(own))
    )
    assert best <= arranged(own, *receivers).time_ns <= 1.05 * best


def test_simulated_times_correct_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With costs that are wrong for one pipeline, dealing again makes the step shorter."""
    receivers = [receiver(DEEP), receiver(FLAT)]
    true = Receiver.costs

    def wrong(self: Receiver, tokens):
        return [cost and cost // (3 if self is receivers[1] else 1) for cost in true(self, tokens)]

    own = pieces(*[3000] * 6, *[1000] * 8)
    monkeypatch.setattr(Receiver, "costs", wrong)
    corrected = arranged(own, *receivers).time_ns
    monkeypatch.setattr(unequal, "DEALT_AGAIN", 0)
    assert arranged(own, *receivers).time_ns > 1.1 * corrected


def test_a_pipeline_without_pieces_does_nothing() -> None:
    made = arranged(pieces(500), receiver(DEEP), receiver(FLAT))
    assert sorted(len(each.forward) for each in made.replicas) == [0, 1]


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stages of \[4\] layers, not of the pipeline on ranks"):
        Receiver(DEEP, receiver(FLAT).predictor)
    with pytest.raises(ValueError, match="piece 0 can run on none of 1 pipelines"):
        arranged(pieces(20000), receiver(FLAT, 5))
