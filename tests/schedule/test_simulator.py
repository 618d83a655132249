import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.programs import make_programs
from lightning_wlb.schedule.simulator import simulate_replicas
from tests.schedule.support import parse_program, simulate


def parse(*programs):
    return [parse_program(program) for program in programs]


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


sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4))


@given(sizes, st.integers(0, 2**32 - 1))
def test_equal_to_watching_the_clock(sizes, seed):
    choose = random.Random(seed)
    programs = random_programs(choose, *sizes)
    durations = {action: choose.randint(0, 6) for program in programs for action in program}
    transfers = {action: choose.randint(0, 4) for action in durations}
    found = simulate(programs, durations.__getitem__, transfers.__getitem__, synchronisation_ns=9)
    expected = watch_the_clock(programs, durations.__getitem__, transfers.__getitem__)
    assert {action: (b, e) for spans in found.spans for action, b, e in spans} == expected
    last = max((end for _, end in expected.values()), default=0)
    assert (found.compute_ns, found.total_ns) == (last, last + 9)
    for program, spans, busy, idle in zip(
        programs, found.spans, found.busy_ns, found.idle_ns, strict=True
    ):
        assert [span.action for span in spans] == program
        assert busy == sum(durations[action] for action in program)
        assert idle == last - busy


@given(sizes, st.integers(0, 2**32 - 1))
def test_a_deadlock_is_found_if_and_only_if_the_clock_finds_one(sizes, seed):
    choose = random.Random(seed)
    programs = random_programs(choose, *sizes)
    for _ in range(choose.randint(1, 3)):
        program = choose.choice(programs)
        if len(program) > 1:
            first, second = choose.sample(range(len(program)), 2)
            program[first], program[second] = program[second], program[first]
    if watch_the_clock(programs, lambda _: 1, lambda _: 1) is None:
        with pytest.raises(ValueError, match=r"the schedule deadlocks: rank \d+ waits at"):
            simulate(programs, lambda _: 1)
    else:
        simulate(programs, lambda _: 1)


def test_by_hand():
    """Two stages, two micro-batches of different length, messages of 1 ns."""
    programs = parse("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    times = {"F": (4, 2), "B": (6, 3)}
    found = simulate(programs, lambda a: times[a.kind][a.micro_batch], lambda _: 1)
    shown = [[(str(action), begin, end) for action, begin, end in spans] for spans in found.spans]
    assert shown == [
        [("0F0", 0, 4), ("0F1", 4, 6), ("0B0", 16, 22), ("0B1", 22, 25)],
        [("1F0", 5, 9), ("1B0", 9, 15), ("1F1", 15, 17), ("1B1", 17, 20)],
    ]
    assert (found.total_ns, found.busy_ns, found.idle_ns) == (25, (15, 15), (10, 10))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 50), st.integers(0, 50))
def test_equal_micro_batches(schedule, ranks, micro_batches, forward, backward):
    programs = make_programs(schedule, ranks, micro_batches)
    found = simulate(programs, lambda a: forward if a.kind == "F" else backward)
    assert found.total_ns == (ranks - 1 + micro_batches) * (forward + backward)
    assert set(found.idle_ns) == {(ranks - 1) * (forward + backward)}


@given(
    st.integers(1, 8), st.integers(1, 4), st.integers(1, 28), st.integers(1, 50), st.integers(1, 50)
)
def test_interleaving_divides_the_bubble(ranks, virtual_stages, micro_batches, forward, backward):
    """Also where the micro-batches do not divide by the ranks, or are fewer."""
    programs = make_programs("interleaved", ranks, micro_batches, virtual_stages)
    found = simulate(programs, lambda a: forward if a.kind == "F" else backward)
    passes = virtual_stages * max(micro_batches, ranks) + min(micro_batches, ranks) - 1
    assert found.total_ns == passes * (forward + backward)


def test_memory_of_1f1b_and_gpipe():
    """A stage p of P holds min(M, P - p) micro-batches under 1F1B and M under GPipe."""
    for micro_batches in (2, 7):
        for schedule, held in (
            ("1f1b", [min(micro_batches, 4 - p) for p in range(4)]),
            ("gpipe", [micro_batches] * 4),
        ):
            found = simulate(
                make_programs(schedule, 4, micro_batches),
                lambda _: 3,
                opened_bytes=lambda _: 10,
                constant_bytes=[100, 0, 0, 7],
            )
            assert found.peak_bytes == tuple(
                10 * count + constant for count, constant in zip(held, [100, 0, 0, 7], strict=True)
            )


def test_what_actions_leave_to_others():
    """A backward leaves 4 when it ends; a forward frees 3 of them when it begins."""
    left = {"0B0": -4, "0F1": 3, "0B1": 1}
    found = simulate(
        parse("0F0 0B0 0F1 0B1"),
        lambda _: 5,
        opened_bytes=lambda _: 10,
        freed_bytes=lambda action: left.get(str(action), 0),
        constant_bytes=[100],
    )
    assert found.memory == (((0, 100), (0, 110), (10, 104), (10, 111), (20, 100)),)
    assert found.held_bytes == ((110, 110, 111, 111),)
    assert found.peak_bytes == (111,)


def test_an_evaluation_frees_what_each_forward_opened():
    found = simulate(parse("0F0 0F1", "1F0 1F1"), lambda _: 5, opened_bytes=lambda _: 10)
    assert found.memory[0] == ((0, 0), (0, 10), (5, 0), (5, 10), (10, 0))
    assert found.peak_bytes == (10, 10)
    assert found.total_ns == 15


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_replicas_end_together(counts, seed):
    choose = random.Random(seed)
    programs = [make_programs("1f1b", 2, count) for count in counts]
    times = {}

    def draw(replica, action):
        return times.setdefault((replica, action), choose.randint(0, 9))

    found = simulate_replicas(
        programs, draw, draw, opened_bytes=draw, constant_bytes=[3, 4], synchronisation_ns=5
    )
    alone = [
        simulate(
            programs[replica],
            lambda action, replica=replica: times[replica, action],
            lambda action, replica=replica: times[replica, action],
            opened_bytes=lambda action, replica=replica: times[replica, action],
            constant_bytes=[3, 4],
        )
        for replica in range(len(counts))
    ]
    slowest = max(each.compute_ns for each in alone)
    for together, each in zip(found, alone, strict=True):
        assert (together.spans, together.memory) == (each.spans, each.memory)
        assert (together.compute_ns, together.total_ns) == (slowest, slowest + 5)
        assert together.idle_ns == tuple(slowest - busy for busy in each.busy_ns)


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
            "the schedule deadlocks: rank 0 waits at 0B0 for 1B0, which rank 1 runs only after"
            " 1F1; rank 1 waits at 1F1 for 0F1, which rank 0 runs only after 0B0.",
        ),
        (
            ["0B0 0F0"],
            "the schedule deadlocks: rank 0 waits at 0B0 for 0F0, which rank 0 runs only after"
            " 0B0.",
        ),
        (
            ["0F0 0B0", "1F0 1B0", "2B0 2F0"],
            "the schedule deadlocks: rank 2 waits at 2B0 for 2F0, which rank 2 runs only after"
            " 2B0; ranks 0, 1 wait for these.",
        ),
        (["0B0", "1F0 1B0"], "the schedule cannot run: 0B0 needs 0F0, which no rank runs."),
        (["0F0 0B0", "1F0"], "the schedule cannot run: 0B0 needs 1B0, which no rank runs."),
        (["", "1F0"], "the schedule cannot run: 1F0 needs 0F0, which no rank runs."),
        (["0F0 0F0"], "the schedule lists 0F0 twice."),
        (["0F0", "0B0"], "stage 0 is on ranks 0 and 1; a stage lives on one."),
    ],
)
def test_a_schedule_that_cannot_run_is_explained(programs, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        simulate(parse(*programs), lambda _: 1)
    assert str(caught.value) == message


def test_numbers_are_whole_and_not_negative():
    programs = make_programs("1f1b", 2, 1)
    exact = simulate(programs, lambda _: np.int64(2))
    assert type(exact.total_ns) is int
    assert exact.total_ns == 8
    with pytest.raises(TypeError):
        simulate(programs, lambda _: 1.5)
    with pytest.raises(ValueError, match="duration of 1F0 is -3"):
        simulate(programs, lambda action: -3 if str(action) == "1F0" else 1)
    with pytest.raises(ValueError, match="transfer of 0B0 is -1"):
        simulate(programs, lambda _: 1, lambda action: -1 if action.kind == "B" else 1)
    with pytest.raises(ValueError, match="constant_bytes has 1 entries for 2 ranks"):
        simulate(programs, lambda _: 1, constant_bytes=[1])


def test_more_than_32_bits_of_nanoseconds():
    found = simulate(make_programs("1f1b", 4, 8), lambda _: 10**12)
    assert found.total_ns == (4 - 1 + 8) * 2 * 10**12
