"""What actions leave for others to free, by hand on small programs."""

from __future__ import annotations

from lightning_wlb.cost.memory_model import MemoryModel
from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice
from lightning_wlb.prediction.micro_batch import MicroBatchCost
from lightning_wlb.prediction.step_memory import StepMemory, first_readers
from lightning_wlb.schedule.actions import Action
from lightning_wlb.schedule.programs import program_of
from tests.prediction.test_predictor import SHAPE
from tests.schedule.support import simulate


def replica_of(*micro_batches: list[Slice]) -> ReplicaPlan:
    slices, forward = [], []
    for micro_batch in micro_batches:
        members = tuple(range(len(slices), len(slices) + len(micro_batch)))
        forward.append(
            MicroBatch(members, "per_sequence", sum(part.tokens for part in micro_batch), (0,))
        )
        slices += micro_batch
    return ReplicaPlan(tuple(slices), tuple(forward))


LONG = [Slice(0, 0, start, start + 10) for start in (0, 10, 20)]
SHORT = [Slice(number, 0, 0, 10) for number in range(1, 6)]


def programs_of(replica: ReplicaPlan, ranks: int) -> list[list[Action]]:
    return [program_of("1f1b", rank, ranks, 1, [replica], 0) for rank in range(ranks)]


def test_the_last_of_a_chain_is_the_first_to_run_backward() -> None:
    replica = replica_of([LONG[0]], [LONG[1], SHORT[0]], [LONG[2]], [SHORT[1]])
    # Backward runs 2, 1, 0, 3.
    assert first_readers(replica) == {0: 0, 1: 0}
    assert first_readers(replica_of(SHORT[:1], SHORT[1:])) == {}


def test_pieces_that_overlap_are_read_first_by_the_last_of_their_chain() -> None:
    other = [Slice(9, 0, 0, 10), Slice(9, 0, 10, 20)]
    replica = replica_of([LONG[0]], [LONG[1], other[0]], [LONG[2]], [other[1]])
    # 1 and 3 share a piece and so do 0, 1 and 2: backward runs 3, 2, 1, 0.
    assert first_readers(replica) == {0: 1, 1: 0}


def memory_of(stages: int) -> StepMemory:
    return StepMemory.of(MemoryModel(SHAPE), [range(at, at + 1) for at in range(stages)])


def cost_of(rows: int, kept_rows: int = 0) -> MicroBatchCost:
    return MicroBatchCost(rows, rows, 0, kept_rows, ())


def test_gradients_of_keys_go_from_the_first_reader_to_their_owner() -> None:
    replica, memory = replica_of([LONG[0]], [LONG[1]], [LONG[2]]), memory_of(1)
    costs = [cost_of(10, 10), cost_of(10, 20), cost_of(10)]
    freed = memory.freed(programs_of(replica, 1), replica, costs)
    first, second = (memory.model.key_gradient_bytes(memory.parts[0], rows) for rows in (10, 20))
    assert {str(action): size for action, size in freed.items()} == {
        "0B2": -first - second, "0B1": second, "0B0": first,
    }  # fmt: skip


def test_sent_gradients_wait_for_the_next_message_that_comes_back() -> None:
    replica = replica_of(*([part] for part in SHORT[:4]))
    programs = programs_of(replica, 2)
    assert [str(action) for action in programs[1]] == [
        "1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3",
    ]  # fmt: skip
    memory = memory_of(2)
    freed = memory.freed(programs, replica, [cost_of(10)] * 4)
    one = memory.model.boundary_bytes(10)

    def changed_bytes(action: Action) -> int:
        return freed.get(action, 0) * (1 if action.kind == "B" else -1)

    simulated = simulate(programs, lambda _: 1, changed_bytes=changed_bytes)
    # Stage 0 runs 0B0 before it sends for 1F2: two gradients are on their way at most, and the
    # last two until the step's end.
    assert simulated.held_bytes[1] == (0, 0, *(6 * (one,)))
    last = simulated.spans[1][-1].action
    assert simulated.held_bytes[1][-1] - changed_bytes(last) == 2 * one
    assert simulated.held_bytes[0] == (0,) * 8
