import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.programs import SCHEDULES
from lightning_wlb.schedule.simulator import simulate_replicas
from tests.schedule.support import make_programs, parse_program, simulate


def watch_the_clock(programs, duration, transfer):
    """Every action's begin and end, found by letting time pass one nanosecond at a time.

    Shares nothing with the simulator: ranks hold a running action, links hold flying messages.
    Returns None if everything stands still before the end.
    """
    stages = 1 + max((action.stage for program in programs for action in program), default=0)
    home = {action: rank for rank, program in enumerate(programs) for action in program}
    left = [list(program) for program in programs]
    running = [None] * len(programs)
    arrivals, spans = {}, {}
    now = 0

    def input_of(action):
        if action.kind == "F":
            return None if action.stage == 0 else Action(action.stage - 1, "F", action.micro_batch)
        if action.stage == stages - 1:
            return Action(action.stage, "F", action.micro_batch)
        return Action(action.stage + 1, "B", action.micro_batch)

    while any(left) or any(running):
        moved = True
        while moved:
            moved = False
            for rank in range(len(programs)):
                if running[rank] and running[rank][1] == now:
                    action = running[rank][0]
                    running[rank] = None
                    spans[action] = (spans[action], now)
                    for other, other_rank in home.items():
                        if input_of(other) == action:
                            arrivals[other] = now + (transfer(other) if other_rank != rank else 0)
                    moved = True
                if running[rank] is None and left[rank]:
                    action = left[rank][0]
                    if input_of(action) is None or arrivals.get(action, now + 1) <= now:
                        left[rank].pop(0)
                        spans[action] = now
                        running[rank] = (action, now + duration(action))
                        moved = True
        if not any(running) and all(at <= now for at in arrivals.values()) and any(left):
            return None
        now += 1
    return spans


def random_programs(choose, ranks, virtual_stages, micro_batches):
    """Programs in an order in which they could have run: any ready action, on any rank."""
    stages = ranks * virtual_stages
    programs = [[] for _ in range(ranks)]
    done = set()
    todo = {Action(s, k, m) for s in range(stages) for k in "FB" for m in range(micro_batches)}
    while todo:
        ready = sorted(
            action
            for action in todo
            if (
                action.kind == "F"
                and (action.stage == 0 or action._replace(stage=action.stage - 1) in done)
            )
            or (
                action.kind == "B"
                and action._replace(kind="F") in done
                and (action.stage == stages - 1 or action._replace(stage=action.stage + 1) in done)
            )
        )
        action = choose.choice(ready)
        todo.remove(action)
        done.add(action)
        programs[action.stage % ranks].append(action)
    return programs


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4)),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_equal_to_watching_the_clock(sizes, swaps, seed):
    """Also in standing still, as programs may where actions have changed places."""
    choose = random.Random(seed)
    programs = random_programs(choose, *sizes)
    for _ in range(swaps):
        program = choose.choice(programs)
        if len(program) > 1:
            first, second = choose.sample(range(len(program)), 2)
            program[first], program[second] = program[second], program[first]
    durations = {action: choose.randint(0, 6) for program in programs for action in program}
    transfers = {action: choose.randint(0, 4) for action in durations}
    functions = durations.__getitem__, transfers.__getitem__
    expected = watch_the_clock(programs, *functions)
    if expected is None:
        with pytest.raises(ValueError, match=r"deadlocks: rank \d+ of replica 0 stands still at"):
            simulate(programs, *functions)
        return
    found = simulate(programs, *functions, synchronisation_ns=9)
    assert {action: (b, e) for spans in found.spans for action, b, e in spans} == expected
    last = max((end for _, end in expected.values()), default=0)
    assert (found.compute_ns, found.total_ns) == (last, last + 9)
    for program, spans, busy in zip(programs, found.spans, found.busy_ns, strict=True):
        assert [span.action for span in spans] == program
        assert busy == sum(durations[action] for action in program)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(
    st.integers(1, 8), st.integers(1, 4), st.integers(1, 28), st.integers(1, 50), st.integers(1, 50)
)
def test_equal_micro_batches(schedule, ranks, virtual_stages, micro_batches, forward, backward):
    """Interleaving divides the bubble, also where the micro-batches do not divide by the ranks."""
    virtual_stages = virtual_stages if SCHEDULES[schedule].virtual_stages else 1
    programs = make_programs(schedule, ranks, micro_batches, virtual_stages)
    found = simulate(programs, lambda a: forward if a.kind == "F" else backward)
    passes = virtual_stages * max(micro_batches, ranks) + min(micro_batches, ranks) - 1
    assert found.total_ns == passes * (forward + backward)
    bubble = passes - virtual_stages * micro_batches
    assert set(found.idle_ns) == {bubble * (forward + backward)}


@pytest.mark.parametrize("micro_batches", [2, 7])
def test_memory_of_1f1b(micro_batches):
    """A stage p of P holds min(M, P - p) micro-batches."""
    constant = [100, 0, 0, 7]
    found = simulate(
        make_programs("1f1b", 4, micro_batches),
        lambda _: 3,
        changed_bytes=lambda _: 10,
        constant_bytes=constant,
    )
    held = [min(micro_batches, 4 - p) for p in range(4)]
    peaks = (10 * count + own for count, own in zip(held, constant, strict=True))
    assert found.peak_bytes == tuple(peaks)


def test_a_forward_adds_bytes_when_it_begins_and_a_backward_frees_them_when_it_ends():
    changes = {"0F0": 10, "0B0": 6, "0F1": 7, "0B1": 11, "0F2": 0, "0B2": -1}
    found = simulate(
        [parse_program("0F0 0B0 0F1 0B1 0F2 0B2")],
        lambda _: 5,
        changed_bytes=lambda action: changes[str(action)],
        constant_bytes=[100],
    )
    assert found.held_bytes == ((110, 110, 111, 111, 100, 100),)
    assert found.peak_bytes == (111,)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_replicas_end_together(counts, seed):
    choose = random.Random(seed)
    programs = [make_programs("1f1b", 2, count) for count in counts]
    times = {}

    def draw(replica, action):
        return times.setdefault((replica, action), choose.randint(0, 9))

    found = simulate_replicas(programs, draw, draw, synchronisation_ns=5)
    # With as many pipelines as it has a number, so that its times are asked for under that number.
    alone = [
        simulate_replicas([*[[[]]] * at, own], draw, draw)[-1] for at, own in enumerate(programs)
    ]
    slowest = max(each.compute_ns for each in alone)
    for together, each in zip(found, alone, strict=True):
        assert together.spans == each.spans
        assert (together.compute_ns, together.total_ns) == (slowest, slowest + 5)
        assert together.idle_ns == tuple(slowest - each.begin_ns - busy for busy in each.busy_ns)


def test_forwards_wait_for_parameters_and_the_step_for_gradients():
    seen = []

    def begins(replica, action):
        seen.append((replica, str(action)))
        return 7 if action.stage == 0 else 30

    def reduced(last):
        assert last == {0: [(55, 5), (45, 5)], 1: [(50, 5), (40, 5)]}
        return 70

    programs = [make_programs("1f1b", 2, count) for count in (2, 1)]
    long, short = simulate_replicas(
        programs, lambda *_: 5, begins=begins, reduced=reduced, synchronisation_ns=4
    )
    assert sorted(seen) == [(0, "0F0"), (0, "1F0"), (1, "0F0"), (1, "1F0")]
    # 0F0 begins at 7 and 1F0, whose input is there at 12, at 30.
    assert [str(span.action) for span in long.spans[1]] == ["1F0", "1B0", "1F1", "1B1"]
    assert [span.begin_ns for span in long.spans[1]] == [30, 35, 40, 45]
    assert (long.begin_ns, long.compute_ns, long.synchronisation_ns) == (7, 55, 15 + 4)
    assert long.total_ns == short.total_ns == 74
    assert long.idle_ns == (55 - 7 - 20, 55 - 7 - 20)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            "the schedule deadlocks: rank 0 of replica 0 stands still at 0B0, rank 1 of replica 0"
            " stands still at 1F1.",
        ),
        (["0B0", "1F0 1B0"], "rank 0 of replica 0 stands still at 0B0, rank 1 of replica 0"),
    ],
)
def test_a_schedule_that_cannot_run_is_explained(programs, message):
    with pytest.raises(ValueError, match=message):
        simulate([parse_program(program) for program in programs], lambda _: 1)
