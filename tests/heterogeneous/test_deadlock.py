"""A step on pipelines of its own, all that its ranks wait for: no order of it can deadlock."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_wlb.data.batch import make_step_batch
from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.heterogeneous.planning.sharded_layouts import Places, Weights
from lightning_wlb.heterogeneous.running_exchange import Forwarder
from lightning_wlb.heterogeneous.setup import weights_of
from lightning_wlb.heterogeneous.transfer import Pull
from lightning_wlb.plan import Scheme, Schemes, rank_in
from lightning_wlb.prediction.asymmetric_units import units
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.programs import make_programs, meetings_of, program_of
from tests.heterogeneous.deadlock_proof import Exchanged, threads_of_step
from tests.heterogeneous.random_runs import executor_of, random_run, reference
from tests.heterogeneous.test_parameters import PER_NODE, STEPS, run_of
from tests.ranks import run_ranks
from tests.schedule.rendezvous import Post, Thread, Wait, run_to_the_end
from tests.strategy.harness import relative_error, whole

LAYERS = 3
TWO_NODES = (Scheme(0, (1, 2)), Scheme(2, (3,), context=2))
"""Of two ranks each: neighbours in a pipeline share the first node."""


def counts_of(strategy: Sequence[Scheme]) -> list[int]:
    """Of each rank: its layers, and the ends."""
    ends = [(len(each.stages), *each.place(rank)) for each in strategy for rank in each.ranks]
    layers = [each.stages[each.place(r)[0]] for each in strategy for r in each.ranks]
    return [
        n + (stage == 0) + (stage == stages - 1)
        for n, (stages, stage, *_) in zip(layers, ends, strict=True)
    ]


def threads(
    strategy: Sequence[Scheme], micro_batches: Sequence[int], per_node: int, schedule="1f1b", *more
) -> list[Thread]:
    programs = [
        make_programs(schedule, len(scheme.stages), count)
        for scheme, count in zip(strategy, micro_batches, strict=True)
    ]
    return threads_of_step(strategy, programs, Exchanged(counts_of(strategy), per_node), *more)


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[Scheme, ...], list[int], int, str]:
    """A strategy, micro-batches of each of its pipelines, ranks of a node, a schedule."""
    per_node, nodes = draw(st.sampled_from(((1, 4), (8, 1), (2, 2), (2, 4), (4, 2), (3, 3))))
    ranks, first = per_node * nodes, 0
    strategy: list[Scheme] = []
    stages = st.sampled_from(((3,), (1, 2), (1, 1, 1)))
    sizes = st.tuples(stages, st.integers(1, 3), st.integers(1, 2))
    for shape in draw(st.lists(sizes, max_size=4)):
        scheme = Scheme(first, *shape)
        if scheme.ranks.stop <= ranks:
            strategy.append(scheme)
            first = scheme.ranks.stop
    strategy += [Scheme(rank, (LAYERS,)) for rank in range(first, ranks)]
    counts = [draw(st.integers(0, 4)) for _ in strategy]
    return tuple(strategy), counts, per_node, draw(st.sampled_from(("1f1b", "gpipe")))


@settings(max_examples=25, deadline=None)
@example((TWO_NODES, [3, 0], 2, "1f1b"))
@given(steps())
def test_no_step_can_deadlock(step) -> None:
    strategy, counts, per_node, schedule = step
    assert run_to_the_end(threads(strategy, counts, per_node, schedule)) == []


def test_nor_can_one_whose_pipelines_share_micro_batches() -> None:
    """The first of each; the last backward is of a shared one, and gradients are behind it."""
    strategy = (Scheme(0, (1, 2)), Scheme(2, (1, 2)), Scheme(4, (3,)), Scheme(5, (3,)))

    def shared(pipeline: int, action: Action):
        return ("both", action) if pipeline < 2 and action.micro_batch == 2 else None

    made = threads(strategy, [3, 3, 1, 0], 3, "1f1b", shared)
    assert run_to_the_end(made) == []
    posts = [step for step in made[0].steps if isinstance(step, Post)]
    assert [post.queue for post in posts[-4:]] == [*["node"] * 3, "loss"]
    assert [post.ranks for post in posts if post.queue == ("rows", False)] == [2] * 4


def in_one_thread(made: list[Thread]) -> list[Thread]:
    """The second hop of what is pulled is posted where a step's own thread waits for it."""
    changed = []
    for thread in made:
        if isinstance(thread.steps[0], Wait):  # a relay's: what it hands on, but for pulls
            pushes = [n for n, each in enumerate(thread.steps) if each.name[0] == "push"]
            changed.append(thread._replace(steps=thread.steps[pushes[0] :]))
            continue
        steps: list[Post | Wait] = []
        posted = set()
        for step in thread.steps:
            if isinstance(step, Wait) and step.name[0] == "pull" and step.name not in posted:
                posted.add(step.name)
                rail = next(e.name for e in thread.steps if e.name[:2] == step.name[:2])
                steps += [Wait(rail), Post("node", step.name, 2)]
            steps.append(step)
        changed.append(thread._replace(steps=steps))
    return changed


def test_neighbours_that_wait_for_each_others_activations_must_not_have_to_hand_on_parameters():
    made = threads(TWO_NODES, [2, 1], 2)
    assert run_to_the_end(made) == []
    stuck = {each.rank: each.waits.name for each in reversed(run_to_the_end(in_one_thread(made)))}
    assert stuck[0] == ("pull", 0, "node", 0), "rank 1 has not come to hand it out"
    assert stuck[1].action == Action(1, "F", 0)


def test_what_is_pushed_must_not_overtake_what_the_relay_still_has_to_post() -> None:
    """A rank uses fewer slots than there are, and has done so when the last of them travel."""
    hasty = [
        thread._replace(steps=[each for each in thread.steps if not getattr(each, "posted", False)])
        for thread in threads(TWO_NODES, [1, 1], 2)
    ]
    with pytest.raises(ValueError, match=r"two threads post to node, in either order: \('pu"):
        run_to_the_end(hasty)


FROZEN = ("layers.1.", "layers.2.attention.")
STRATEGY = STEPS[0][0]  # neighbours of a pipeline share a node; ranks use other numbers of buckets


def buckets_of(weights: Weights, schemes: Schemes) -> list[int]:
    """How many each rank uses."""
    turns = Places.of(schemes).turns([each.layers for each in weights.buckets])
    return (turns >= 0).sum(axis=1).tolist()


def recorded(rank: int) -> tuple[dict[bool, list], dict]:
    """What a rank posts in a step, in its own thread and (True) beside it; gradients."""
    run = run_of(0, frozen=FROZEN)
    (plan,), (runner, _) = run.plans, executor_of(run, rank, torch.float64)
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
    """Any pipelines, nodes, slices, asymmetric plans and shared micro-batches."""
    merged = 0
    for seed in range(4):
        run = random_run(seed, ranks)
        with torch.device("meta"):
            weights = weights_of(run.model(), (1, 2, 4))
        for plan in run.plans:
            strategy = plan.schemes or run.of_mesh
            executed = [
                units(replica, scheme.context, scheme.tensor)
                for replica, scheme in zip(plan.replicas, strategy, strict=True)
            ]
            programs = [
                [
                    program_of("1f1b", place, len(scheme.stages), 1, executed, number)
                    for place in range(len(scheme.stages))
                ]
                for number, scheme in enumerate(strategy)
            ]
            exchanged = Exchanged(buckets_of(weights, strategy), run.per_node)
            shared = meetings_of(executed)
            merged += shared is not None
            assert run_to_the_end(threads_of_step(strategy, programs, exchanged, shared)) == []
    assert merged
