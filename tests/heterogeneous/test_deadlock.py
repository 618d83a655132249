"""A step on pipelines of its own, all that its ranks wait for: no order of it can deadlock."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from lightning_wlb.data.batch import make_step_batch
from lightning_wlb.heterogeneous.parameter_transfer import Pull
from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.heterogeneous.planning.sharded_layouts import Places, Weights
from lightning_wlb.heterogeneous.running_exchange import Forwarder
from lightning_wlb.heterogeneous.setup import weights_of
from lightning_wlb.plan import Schemes, rank_in
from lightning_wlb.schedule.programs import program_of
from tests.heterogeneous.deadlock_proof import Exchanged, threads_of_step
from tests.heterogeneous.random_runs import executor_of, random_run, reference
from tests.heterogeneous.test_parameters import PER_NODE, STEPS, run_of
from tests.ranks import run_ranks
from tests.schedule.rendezvous import Post, Wait, run_to_the_end
from tests.schedule.support import meetings_of, sharers_of
from tests.strategy.harness import relative_error, whole

FROZEN = ("layers.1.", "layers.2.attention.")
STRATEGY = STEPS[0][0]  # neighbours of a pipeline share a node; ranks use other numbers of buckets


def buckets_of(weights: Weights, schemes: Schemes) -> list[int]:
    """How many each rank uses."""
    turns = Places.of(schemes).turns([each.layers for each in weights.buckets])
    return (turns >= 0).sum(axis=1).tolist()


def recorded(rank: int) -> tuple[dict[bool, list], dict]:
    """What a rank posts in a step, in its own thread and (True) beside it; gradients."""
    run = run_of(0, frozen=FROZEN)
    (plan,), runner = run.plans, executor_of(run, rank, torch.float64)
    batch = make_step_batch(plan, run.store, rank_in(STRATEGY, rank), {}, 0, False)
    channels = runner.heterogeneous(plan).pipeline.groups.items()
    kinds = {id(group): channel.kind for channel, group in channels}
    posts: dict[bool, list] = {False: [], True: []}
    asked = threading.local()
    exchange, all_to_all, send, receive, settle = (
        Redistribution.exchange, dist.all_to_all_single, dist.isend, dist.irecv, Forwarder.settle
    )  # fmt: skip

    def exchanging(self, turn, hop, *, push=False):
        asked.last = "push" if push else "pull", hop, turn
        return exchange(self, turn, hop, push=push)

    def posting(*args, **options):
        posts[threading.current_thread() is not threading.main_thread()].append(asked.last)
        return all_to_all(*args, **options)

    def noting(original):
        def message(tensor, peer, group, tag):
            posts[False].append((kinds[id(group)], tag))
            return original(tensor, peer, group, tag=tag)

        return message

    def settling(self):
        settle(self)
        posts[False].append("settled")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forwarder, "settle", settling)
        patch.setattr(Redistribution, "exchange", exchanging)
        patch.setattr(dist, "all_to_all_single", posting)
        patch.setattr(dist, "isend", noting(send))
        patch.setattr(dist, "irecv", noting(receive))
        runner.run(batch, plan.target_tokens)
        runner.finish()
    parameters = dict(runner.model.named_parameters())
    gradients = {n: whole(p.grad) for n, p in parameters.items() if p.grad is not None}
    check_late(rank, runner)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    with pytest.raises(ValueError, match="frozen or unfrozen since the run began: layers"):
        runner.run(batch, plan.target_tokens)
    return posts, gradients


def check_late(rank: int, runner) -> None:
    """The last rank begins when the others have posted what they pull, or none ever would."""
    here, sharded = runner.heterogeneous, dict(runner.model.named_parameters())
    own, kind = here._redistribute(STRATEGY), (torch.float64, torch.device("cpu"))
    tied = runner.model.tied
    shards = {tied.get(name, name): each.to_local().detach() for name, each in sharded.items()}
    if rank == 3:
        dist.barrier()
    pull = Pull(own, here._groups, shards, *kind)
    if rank != 3:
        dist.barrier()
    for turn in range(len(own.buckets)):
        pull.arrive(turn)
    pull.finish()


def test_a_step_posts_what_the_proof_is_about_and_waits_for_no_rail_at_first() -> None:
    run = run_of(0, frozen=FROZEN)
    (plan,) = run.plans
    with torch.device("meta"):
        weights = weights_of(run.model(), (1, 2, 4))
    counts = buckets_of(weights, STRATEGY)
    assert len(set(counts)) > 1
    programs = [
        [
            program_of("1f1b", place, len(scheme.stages), 1, plan.replicas, number)
            for place in range(len(scheme.stages))
        ]
        for number, scheme in enumerate(STRATEGY)
    ]
    threads = threads_of_step(STRATEGY, programs, Exchanged(counts, PER_NODE))
    assert run_to_the_end(threads) == []
    stages = {rank: len(scheme.stages) for scheme in STRATEGY for rank in scheme.ranks}

    def said(post: Post | Wait, rank: int) -> tuple | str:
        if isinstance(post, Wait):
            return "settled"  # of the relay, before this thread posts to the groups of nodes
        if post.queue in ("rail", "node"):
            what, turn, *_ = post.name
            return what, int(post.queue == "node"), turn
        action = post.name.action
        return action.kind, action.micro_batch * stages[rank] + action.stage

    found, right = run_ranks(recorded, 4, timeout=120), reference(run)["gradients"][0]
    for thread in threads:
        recorded_posts, gradients = found[thread.rank]
        own = [
            each
            for each in thread.steps
            if (each.posted if isinstance(each, Wait) else each.queue not in ("tensor", "loss"))
        ]
        beside = not isinstance(thread.steps[0], Post)
        before = [] if beside else ["settled"]
        assert recorded_posts[beside] == before + [said(each, thread.rank) for each in own]
        assert recorded_posts[True]
        assert not any(name.startswith(FROZEN) for name in gradients)
        for name, value in gradients.items():
            tied = "embed.weight" if name == "head.weight" else name
            assert relative_error(value, right[tied]) <= 1e-10, name
    trained = {name for name in right if not name.startswith(FROZEN)}
    assert {name for _, own in found for name in own} == {*trained, "head.weight"}


@pytest.mark.parametrize("ranks", [4, 8])
def test_no_step_of_random_runs_can_deadlock(ranks: int) -> None:
    """Any pipelines, nodes, slices and shared micro-batches."""
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
            exchanged = Exchanged(buckets_of(weights, strategy), run.per_node)
            sharers = sharers_of(plan.replicas)
            merged += any(len(each) > 1 for own in sharers for each in own)
            shared = meetings_of(sharers)
            assert run_to_the_end(threads_of_step(strategy, programs, exchanged, shared)) == []
    assert merged
