"""The recurrence ends every replica's step when the simulator does."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.schedule.actions import FORWARD
from lightning_wlb.schedule.fast_simulator import Pipeline, members_of, step_ends
from lightning_wlb.schedule.packflow import backward_orders, planned_warm_up
from lightning_wlb.schedule.simulator import simulate_replicas
from tests.schedule.support import programs_of, sharers_of
from tests.schedule.test_shared import plan_of


def pipelines_of(replicas, ranks, numbers, begins):
    """Pipelines with durations and transfers drawn from a pool of numbers."""

    def table(number, salt):
        count = len(replicas[number].forward)
        at = iter(range(salt * 7919, (salt + 1) * 7919))
        return [
            [numbers[(next(at) * 31) % len(numbers)] for _ in range(count)] for _ in range(ranks)
        ]

    found = []
    for number, (replica, (order, needs)) in enumerate(
        zip(replicas, backward_orders(replicas), strict=True)
    ):
        found.append(
            Pipeline(
                table(number, 3 * number),
                table(number, 3 * number + 1),
                table(number, 3 * number + 2),
                order,
                planned_warm_up(needs),
                members_of(replica),
                begins,
            )
        )
    return found


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 3), max_size=3),
    st.integers(0, 2),
    st.lists(st.lists(st.integers(1, 5), max_size=5), min_size=4, max_size=4),
    st.integers(1, 5),
    st.lists(st.integers(0, 100), min_size=1, max_size=40),
    st.lists(st.integers(0, 300), min_size=5, max_size=5),
)
def test_replicas_end_when_the_simulator_ends_them(quads, pairs, own, ranks, numbers, begins):
    replicas = plan_of(quads, pairs, own)
    begins = begins[:ranks]
    pipelines = pipelines_of(replicas, ranks, numbers, begins)

    def duration(replica, action):
        each = pipelines[replica]
        return (each.forward if action.kind == FORWARD else each.backward)[action.stage][
            action.micro_batch
        ]

    def transfer(replica, action):
        receiver = action.stage if action.kind == FORWARD else action.stage + 1
        return pipelines[replica].transfer[receiver][action.micro_batch]

    steps = simulate_replicas(
        programs_of(ranks, backward_orders(replicas)),
        duration,
        transfer,
        begins=lambda replica, action: begins[action.stage],
        sharers=sharers_of(replicas),
    )
    ends = [
        [
            spans[-1].end_ns if spans else begin
            for spans, begin in zip(each.spans, begins, strict=True)
        ]
        for each in steps
    ]
    assert step_ends(pipelines) == ends


def test_a_pipeline_without_micro_batches_takes_no_time():
    assert step_ends([Pipeline([[], []], [[], []], [[], []], [], [])]) == [[0, 0]]
