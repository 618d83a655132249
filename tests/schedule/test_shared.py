"""Micro-batches that replicas share: no deadlock between replicas, and the simulated wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice
from lightning_wlb.schedule.packflow import backward_order, backward_orders
from lightning_wlb.schedule.simulator import simulate_replicas
from tests.schedule.proof import check_replicas
from tests.schedule.support import meetings_of, parse_program, programs_of, sharers_of


def one_rank(*programs):
    return [[parse_program(program)] for program in programs]


def test_shared_actions_begin_together():
    """Replica 1 comes to the shared micro-batch late, and both leave it together."""
    first, second = simulate_replicas(
        one_rank("0F0 0B0 0F1 0B1", "0F1 0F0 0B0 0B1"),
        lambda replica, action: 10 if replica == 0 else 25,
        sharers=[[(0, 1), (0,)], [(0, 1), (1,)]],
    )
    assert [(span.begin_ns, str(span.action)) for span in first.spans[0]] == [
        (25, "0F0"), (50, "0B0"), (60, "0F1"), (70, "0B1"),
    ]  # fmt: skip
    assert [span.begin_ns for span in second.spans[0]] == [0, 25, 50, 75]


def test_replicas_in_different_orders_deadlock():
    programs = one_rank("0F0 0F1 0B0 0B1", "0F1 0F0 0B1 0B0")
    sharers = [[(0, 1)] * 2] * 2
    with pytest.raises(ValueError, match="rank 0 waits for the other replicas that run 0F0"):
        check_replicas(programs, [2, 2], shared=meetings_of(sharers))
    with pytest.raises(ValueError, match="0F0, rank 0 of replica 1 stands still at 0F1"):
        simulate_replicas(programs, lambda replica, action: 1, sharers=sharers)


def plan_of(quads, pairs, own):
    """Four replicas: chains that all share, micro-batches that pairs share, chains of their own."""
    replicas = []
    for replica in range(4):
        slices, forward = [], []
        everyone, pair = (0, 1, 2, 3), (0, 1) if replica < 2 else (2, 3)
        chains = [(f"1{at}", length, everyone) for at, length in enumerate(quads)]
        chains += [(f"2{replica // 2}{at}", 1, pair) for at in range(pairs)]
        chains += [
            (f"3{replica}{at}", length, (replica,)) for at, length in enumerate(own[replica])
        ]
        for document, length, members in chains:
            for part in range(length):
                forward.append(MicroBatch((len(slices),), "per_document", 1, members))
                slices.append(Slice(int(document), 0, part, part + 1))
        replicas.append(ReplicaPlan(tuple(slices), tuple(forward)))
    return replicas


def test_a_longer_warm_up_of_one_replica_needs_aligned_orders():
    replicas = plan_of([1], 1, [[], [], [], [2]])
    counts = [len(replica.forward) for replica in replicas]
    shared = meetings_of(sharers_of(replicas))
    with pytest.raises(ValueError, match="rank 2 waits for the other replicas that run 0B0"):
        check_replicas(programs_of(1, map(backward_order, replicas)), counts, shared=shared)
    check_replicas(programs_of(1, backward_orders(replicas)), counts, shared=shared)


@given(
    st.lists(st.integers(1, 3), max_size=3),
    st.integers(0, 2),
    st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=4, max_size=4),
    st.integers(1, 4),
)
def test_shared_first_never_deadlocks(quads, pairs, own, ranks):
    replicas = plan_of(quads, pairs, own)
    programs = programs_of(ranks, backward_orders(replicas))
    shared = meetings_of(sharers_of(replicas))
    check_replicas(programs, [len(replica.forward) for replica in replicas], shared=shared)
    results = simulate_replicas(
        programs, lambda replica, action: 1 + replica, sharers=sharers_of(replicas)
    )
    begins = {}
    for replica, result in enumerate(results):
        for span in (span for rank in result.spans for span in rank):
            name = shared(replica, span.action)
            if name is not None:
                assert begins.setdefault(name, span.begin_ns) == span.begin_ns
