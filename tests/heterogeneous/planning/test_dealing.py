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
from lightning_wlb.heterogeneous.planning.dealing import (
    UTILISED,
    PipelineKind,
    arrange,
    document_ns,
)
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece, ReplicaPlan, Scheme, StepPlan, alike
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.dealing import longest_first
from lightning_wlb.planning.plan_scoring import ProfileScorer
from lightning_wlb.planning.step_chooser import PlannedStep
from lightning_wlb.prediction.predictor import Predictor
from tests.prediction.test_predictor import plan_of, predictor

SHAPE = ModelShape(dim=2048, layers=4, heads=16, kv_heads=16, head_dim=128, ffn_dim=5504,
                   vocab_size=32000)  # fmt: skip
WINDOW = 32768
DATA = DataSettings(WINDOW, 4, packing={"method": "slim", "micro_packs": 4})
RULES = DATA.rules(None, Work.of(SHAPE))
AUTO = replace(DATA, packing="auto")
DEEP, FLAT = Scheme(0, (2, 2), context=2), Scheme(4, (4,))


@cache
def receiver(scheme: Scheme, gigabytes: int = 80, count: int = 1) -> PipelineKind:
    mesh = Mesh(max(8 // scheme.size, 1), len(scheme.stages), scheme.context, scheme.tensor)
    profile = replace(Profile.load("h100"), memory_bytes=gigabytes << 30)
    predictor = Predictor(LatencyModel(profile, SHAPE, mesh), scheme.layers)
    return PipelineKind(scheme, ProfileScorer(predictor), count=count)


def arranged(
    own: list[Piece], *strategy: Scheme, gigabytes: int = 80, data: DataSettings = DATA
) -> PlannedStep:
    """The valid plan of a step on pipelines with so much memory."""
    kinds = {
        shape: receiver(strategy[numbers[0]], gigabytes, len(numbers))
        for shape, numbers in alike(strategy).items()
    }
    made = arrange(own, strategy, kinds, data.packer(data.rules(None, Work.of(SHAPE))))
    plan = StepPlan(
        0, 0, made.replicas, tuple(own), 0, made.cap, 4, 4 * WINDOW, schemes=strategy
    ).validate()
    assert StepPlan.from_json(plan.to_json()) == plan
    predicted = Pool({strategy: kinds}).predict(plan, kinds[strategy[0].shape].scorer.predictor)
    assert (predicted.total_ns, predicted.peak_bytes > 0) == (made.time_ns, True)
    return made


def sharers(made: PlannedStep) -> set[tuple[int, ...]]:
    return {each.replicas for replica in made.replicas for each in replica.forward}


def replace_numbers(plan: ReplicaPlan) -> ReplicaPlan:
    """The plan as that of replica 0."""
    return plan.changed(lambda each: replace(each, replicas=(0,)))


def pieces(*lengths: int) -> list[Piece]:
    return [Piece(number, 0, length, 0) for number, length in enumerate(lengths)]


def test_a_plan_on_unequal_pipelines_is_valid_and_deals_by_what_they_can_do() -> None:
    """Pipelines get work by their ranks, and a long piece goes where it fits."""
    deep, flat = receiver(DEEP, 6), receiver(FLAT, 6)
    assert flat.longest < 20000 <= deep.longest
    own = pieces(20000, *[3000] * 5, *[900] * 8, *[200] * 10)
    made = arranged(own, DEEP, FLAT, replace(FLAT, first=5), gigabytes=6)
    assert made.excess == 0
    assert {part.document for part in made.replicas[0].slices} >= {0}
    assert sharers(made) == {(0,), (1,), (2,)}
    times = [
        each.scorer([replace_numbers(plan)]).time
        for each, plan in zip((deep, flat, flat), made.replicas, strict=True)
    ]
    assert made.time_ns == max(times) < 1.5 * min(times)  # the deep one also fills and drains


def test_dealing_is_near_the_best_of_all_by_simulation() -> None:
    receivers = [receiver(DEEP), receiver(FLAT)]
    own = pieces(9000, 7000, 4000, 1500)
    packers = [DATA.packer(replace(RULES, micro_batches=each)) for each in (3, 1)]
    best = min(
        max(
            each.scorer(each.plan(mine, packer)).time
            for at, (each, packer) in enumerate(zip(receivers, packers, strict=True))
            if (mine := [piece for piece, home in zip(own, homes, strict=True) if home == at])
        )
        for homes in product(range(2), repeat=len(own))
    )
    assert best <= arranged(own, DEEP, FLAT).time_ns <= 1.15 * best  # of four pieces


def test_a_pipeline_without_pieces_does_nothing() -> None:
    made = arranged(pieces(500), DEEP, FLAT)
    assert sorted(len(each.forward) for each in made.replicas) == [0, 1]


def test_pipelines_that_are_all_alike_are_arranged_as_a_mesh_of_them() -> None:
    own = pieces(12000, 7000, *[2000] * 9)
    made = arranged(own, *(replace(FLAT, first=first) for first in range(4)), data=AUTO)
    kind = receiver(replace(FLAT, first=0), count=4)
    packer = AUTO.packer(AUTO.rules(None, Work.of(SHAPE)))
    assert list(made.replicas) == kind.plan(longest_first(own), packer)
    # The longest piece has more work than a pipeline's share.
    assert (0, 1) in sharers(made)
    assert made.time_ns < receiver(FLAT).scorer(receiver(FLAT).plan(own[:1], packer)).time


def test_a_piece_of_more_work_than_any_pipelines_share_goes_where_most_share_it() -> None:
    strategy = Scheme(0, (2, 2)), *(Scheme(2 + place, (4,)) for place in range(4))
    own = pieces(24000, *[2000] * 10)
    made = arranged(own, *strategy, data=AUTO)
    assert (1, 2, 3, 4) in sharers(made)


def test_what_no_pipeline_holds_is_shared_by_some_that_are_alike() -> None:
    """They need not be neighbours; the numbers are the strategy's."""
    strategy = Scheme(0, (4,)), Scheme(1, (2, 2)), Scheme(3, (4,)), Scheme(4, (4,))
    longest = receiver(strategy[1], 5).longest
    assert receiver(strategy[0], 5).longest < longest
    own = pieces(longest + 500, *[900] * 8)
    made = arranged(own, *strategy, gigabytes=5, data=AUTO)
    assert made.excess == 0
    assert (0, 2) in sharers(made)
    assert max(map(len, sharers(made))) == 2
    assert made.replicas[1].forward
    with pytest.raises(
        ValueError, match=f"piece of {longest + 500} tokens, .* hold {longest}: ranks"
    ):
        arranged(own, *strategy, gigabytes=5)  # this packing knows no memory


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="document 0 has a piece of 20000 tokens"):
        arranged(pieces(20000), replace(FLAT, first=0), gigabytes=5)


def test_a_long_document_takes_what_its_step_keeps_the_busiest_rank_busy() -> None:
    model = predictor(Mesh(pipeline=2))
    (simulation,) = model.predict(plan_of([[[2 * UTILISED]]])).simulations
    assert document_ns(model, 2 * UTILISED, "none") == max(simulation.busy_ns)


def test_short_documents_divide_the_time_of_as_many_as_fill_a_micro_batch() -> None:
    model = predictor(Mesh(pipeline=2))
    (simulation,) = model.predict(plan_of([[[UTILISED // 4] * 4]])).simulations
    assert document_ns(model, UTILISED // 4, "none") == max(simulation.busy_ns) / 4
