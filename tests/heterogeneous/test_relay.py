"""Two hops beside a step: what was posted in which order is what the proof is about; a failure."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_wlb.data.batch import make_step_batch
from lightning_wlb.heterogeneous import transfer as travel
from lightning_wlb.heterogeneous.planning.exchanges import Link
from lightning_wlb.heterogeneous.planning.sharded_layouts import slots
from lightning_wlb.heterogeneous.transfer import Groups, Pull, Relay, weights_of
from lightning_wlb.heterogeneous.transfer import Post as Exchanged
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import rank_in
from lightning_wlb.prediction.asymmetric_units import units
from lightning_wlb.schedule.programs import meetings_of, program_of
from lightning_wlb.supervision.progress import PROGRESS
from tests.heterogeneous.proof import Travel, threads_elsewhere
from tests.heterogeneous.random_strategies import random_run
from tests.heterogeneous.test_runtime import (
    OF_MESH,
    PER_NODE,
    STRATEGIES,
    config,
    documents,
    executor,
    plan_of,
    reference,
)
from tests.ranks import run_ranks
from tests.schedule.rendezvous import Post, Wait, run_to_the_end
from tests.strategy.harness import relative_error, whole

FROZEN = ("layers.1.", "layers.2.attention.")
STRATEGY, OWN = STRATEGIES[0]  # neighbours of a pipeline share a node; ranks use other numbers


def test_calls_are_made_in_order_in_a_thread_that_ends_with_the_relay() -> None:
    relay, made, may = Relay(None), [], threading.Event()
    before = threading.active_count()

    def call(number: int) -> int:
        may.wait(10)
        assert not torch.is_grad_enabled()
        made.append(number)
        return number

    results = [relay.submit(lambda n=n: call(n)) for n in range(3)]
    assert made == [], "nobody waits for them"
    may.set()
    relay.settle()
    assert made == [each.result() for each in results] == [0, 1, 2]
    del relay
    for _ in range(100):
        if threading.active_count() < before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before - 1


def test_where_a_device_waits_calls_are_made_at_once_on_a_stream_of_its_own(monkeypatch) -> None:
    """As under NCCL, where a wait holds up no thread."""
    streams, now = [], []

    @contextmanager
    def on(stream):
        now.append(stream)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or device)
    monkeypatch.setattr(torch.cuda, "stream", on)
    before, device = threading.active_count(), torch.device("cuda", 1)
    relay = Relay(device)
    made = relay.submit(lambda: (list(now), torch.is_grad_enabled()))
    assert made.done()
    assert made.result() == ([device], False)
    assert (streams, now, threading.active_count()) == ([device], [], before)
    with pytest.raises(ZeroDivisionError):
        relay.submit(lambda: 1 // 0)
    relay.settle()


def test_no_call_is_made_after_one_that_failed() -> None:
    relay, made = Relay(None), []
    results = [relay.submit(lambda: 1 // 0), relay.submit(lambda: made.append(1))]
    for each in results:
        with pytest.raises(ZeroDivisionError):
            each.result()
    with pytest.raises(ZeroDivisionError):
        relay.settle()
    assert made == []
    assert PROGRESS.failed == "ZeroDivisionError: integer division or modulo by zero"
    PROGRESS.begin()
    assert PROGRESS.failed == ""


def recorded(rank: int) -> tuple[dict[bool, list], dict]:
    """What a rank posts in a step, in its own thread and (True) beside it; gradients."""
    runner, _ = executor(rank, FROZEN)
    plan = plan_of(0, STRATEGY, OWN, store := documents())
    batch = make_step_batch(plan, store, rank_in(STRATEGY, rank), {}, 0, False)
    channels = runner.heterogeneous(plan).pipeline.groups.items()
    kinds = {id(group): channel.kind for channel, group in channels}
    posts: dict[bool, list] = {False: [], True: []}
    asked = threading.local()
    exchange, all_to_all, send, receive, settle = (
        Link.exchange, dist.all_to_all_single, dist.isend, dist.irecv, Relay.settle
    )  # fmt: skip

    def exchanging(self, slot, hop, *, push=False):
        asked.last = "push" if push else "pull", hop, slot
        return exchange(self, slot, hop, push=push)

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
        patch.setattr(Relay, "settle", settling)
        patch.setattr(Link, "exchange", exchanging)
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
    here, at_rest = runner.heterogeneous, dict(runner.model.named_parameters())
    link, kind = here._links.to(STRATEGY), (torch.float64, torch.device("cpu"))
    tied = runner.model.tied
    shards = {tied.get(name, name): each.to_local().detach() for name, each in at_rest.items()}
    if rank == 3:
        dist.barrier()
    pull = Pull(link, here._groups, shards, *kind)
    if rank != 3:
        dist.barrier()
    for slot in range(len(link.units)):
        pull.arrive(slot)
    pull.finish()


def test_a_step_posts_what_the_proof_is_about_and_waits_for_no_rail_at_first() -> None:
    plan = plan_of(0, STRATEGY, OWN, documents())
    with torch.device("meta"):
        weights = weights_of(Transformer(config()), (1, 2, 4))
    units = [len(Link(weights, OF_MESH, STRATEGY, rank, PER_NODE).units) for rank in range(4)]
    assert len(set(units)) > 1
    programs = [
        [
            program_of("1f1b", place, len(scheme.stages), 1, plan.replicas, number)
            for place in range(len(scheme.stages))
        ]
        for number, scheme in enumerate(STRATEGY)
    ]
    threads = threads_elsewhere(STRATEGY, programs, Travel(units, PER_NODE))
    assert run_to_the_end(threads) == []
    stages = {rank: len(scheme.stages) for scheme in STRATEGY for rank in scheme.ranks}

    def said(post: Post | Wait, rank: int) -> tuple | str:
        if isinstance(post, Wait):
            return "settled"  # of the relay, before this thread posts to the groups of nodes
        if post.queue in ("rail", "node"):
            what, slot, *_ = post.name
            return what, int(post.queue == "node"), slot
        action = post.name.action
        return action.kind, action.micro_batch * stages[rank] + action.stage

    found, right = run_ranks(recorded, 4, timeout=120), reference()["gradients"][0]
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
            travels = Travel((slots(weights, strategy) >= 0).sum(axis=1).tolist(), run.per_node)
            shared = meetings_of(executed)
            merged += shared is not None
            assert run_to_the_end(threads_elsewhere(strategy, programs, travels, shared)) == []
    assert merged


def test_what_fails_beside_a_step_fails_where_it_is_waited_for(monkeypatch) -> None:
    model = Transformer(config()).double()
    link = Link(weights_of(model, (1, 2, 4)), OF_MESH, STRATEGY, 1, PER_NODE)
    shards = {
        link.weights.units[unit].names[number]: torch.zeros(sizes(box, link, unit, number))
        for unit in range(len(link.weights.units))
        for number, box in link.boxes(unit, rest=True).items()
    }
    posted = []

    class Failing(Exchanged):
        def __init__(self, exchange, *rest):
            posted.append(exchange.ranks)
            if len(posted) == link.slots + 2:
                raise MemoryError("no room for the second slot")
            super().__init__(exchange, *rest)

    monkeypatch.setattr(travel, "Post", Failing)
    ended = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: ended)
    groups = Groups(dict.fromkeys([range(1, 4, 2), range(2)]), Relay(None))
    pull = Pull(link, groups, shards, torch.float64, torch.device("cpu"))
    pull.arrive(0)
    for slot in (1, 2):
        with pytest.raises(MemoryError, match="second slot"):
            pull.arrive(slot)
    assert posted == [range(1, 4, 2)] * link.slots + [range(2)] * 2, "and nothing is posted later"
    with pytest.raises(MemoryError):
        groups.settle()
    assert PROGRESS.failed == "MemoryError: no room for the second slot"
    PROGRESS.begin()


def sizes(box, link: Link, unit: int, number: int) -> list[int]:
    dims = len(link.weights.shapes[link.weights.units[unit].names[number]])
    return (box[:dims, 1] - box[:dims, 0]).tolist()
