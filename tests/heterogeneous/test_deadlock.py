"""A step on pipelines of its own, all that its ranks wait for: no order of it can deadlock."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_wlb.data.batch import make_step_batch
from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.heterogeneous.planning.sharded_layouts import Places, Weights
from lightning_wlb.heterogeneous.setup import weights_of
from lightning_wlb.plan import Schemes, rank_in
from lightning_wlb.schedule.programs import program_of
from tests.heterogeneous.deadlock_proof import threads_of_step
from tests.heterogeneous.random_runs import executor_of, random_run, reference
from tests.heterogeneous.test_parameters import STEPS, run_of
from tests.ranks import run_ranks
from tests.schedule.rendezvous import Post, run_to_the_end
from tests.schedule.support import meetings_of, sharers_of
from tests.strategy.harness import relative_error, whole

FROZEN = ("layers.1.", "layers.2.attention.")
STRATEGY = STEPS[0][0]  # ranks use other numbers of buckets


def buckets_of(weights: Weights, schemes: Schemes) -> list[list[bool]]:
    """Those of each rank by turn: whether a part of each is frozen."""
    of_ranks = Places.of(schemes).turns([each.layers for each in weights.buckets])
    frozen = [not weights.frozen.isdisjoint(each.names) for each in weights.buckets]
    return [
        [frozen[number] for _, number in sorted(zip(turns, range(len(turns)), strict=True))][
            (turns < 0).sum() :
        ]
        for turns in of_ranks
    ]


def recorded(rank: int) -> tuple[list, dict]:
    """What a rank posts in a step; gradients."""
    run = run_of(0, frozen=FROZEN)
    (plan,), runner = run.plans, executor_of(run, rank, torch.float64)
    batch = make_step_batch(plan, run.store, rank_in(STRATEGY, rank), {}, 0, False)
    channels = runner.heterogeneous(plan).pipeline.groups.items()
    kinds = {id(group): channel.kind for channel, group in channels}
    posts: list[tuple] = []
    exchange, send, receive = Redistribution.exchange, dist.isend, dist.irecv

    def exchanging(self, turn, *, push=False):
        posts.append(("push" if push else "pull", turn))
        return exchange(self, turn, push=push)

    def noting(original):
        def message(tensor, peer, group, tag):
            posts.append((kinds[id(group)], tag))
            return original(tensor, peer, group, tag=tag)

        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Redistribution, "exchange", exchanging)
        patch.setattr(dist, "isend", noting(send))
        patch.setattr(dist, "irecv", noting(receive))
        runner.run(batch, plan.target_tokens)
        runner.finish()
    parameters = dict(runner.model.named_parameters())
    gradients = {n: whole(p.grad) for n, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    with pytest.raises(ValueError, match="frozen or unfrozen since the run began: layers"):
        runner.run(batch, plan.target_tokens)
    return posts, gradients


def test_a_step_posts_what_the_proof_is_about() -> None:
    run = run_of(0, frozen=FROZEN)
    (plan,) = run.plans
    with torch.device("meta"):
        weights = weights_of(run.model(), (1, 2, 4))
    buckets = buckets_of(weights, STRATEGY)
    assert len(set(map(len, buckets))) > 1
    programs = [
        [
            program_of("1f1b", place, len(scheme.stages), 1, plan.replicas, number)
            for place in range(len(scheme.stages))
        ]
        for number, scheme in enumerate(STRATEGY)
    ]
    threads = threads_of_step(STRATEGY, programs, buckets)
    assert run_to_the_end(threads) == []
    stages = {rank: len(scheme.stages) for scheme in STRATEGY for rank in scheme.ranks}

    def said(post: Post, rank: int) -> tuple:
        if post.queue == "all":
            return post.name
        action = post.name.action
        return action.kind, action.micro_batch * stages[rank] + action.stage

    found, right = run_ranks(recorded, 4, timeout=120), reference(run)["gradients"][0]
    for thread in threads:
        posts, gradients = found[thread.rank]
        own = [each for each in thread.steps if isinstance(each, Post)]
        own = [said(each, thread.rank) for each in own if each.queue not in ("tensor", "loss")]
        assert posts == own
        assert not any(name.startswith(FROZEN) for name in gradients)
        for name, value in gradients.items():
            tied = "embed.weight" if name == "head.weight" else name
            assert relative_error(value, right[tied]) <= 1e-10, name
    trained = {name for name in right if not name.startswith(FROZEN)}
    assert {name for _, own in found for name in own} == {*trained, "head.weight"}


@pytest.mark.parametrize("ranks", [4, 8])
def test_no_step_of_random_runs_can_deadlock(ranks: int) -> None:
    """Any pipelines, slices and shared micro-batches."""
    merged = 0
    for seed in range(8):
        run = random_run(seed, ranks)
        with torch.device("meta"):
            weights = weights_of(run.model(), (1, 2, 4))
        for plan in run.plans:
            strategy = plan.schemes or run.of_mesh
            programs = [
                [
                    program_of("1f1b", place, len(scheme.stages), 1, plan.replicas, number)
                    for place in range(len(scheme.stages))
                ]
                for number, scheme in enumerate(strategy)
            ]
            buckets = buckets_of(weights, strategy)
            sharers = sharers_of(plan.replicas)
            merged += any(len(each) > 1 for own in sharers for each in own)
            shared = meetings_of(sharers)
            assert run_to_the_end(threads_of_step(strategy, programs, buckets, shared)) == []
    assert merged
