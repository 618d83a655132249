"""PackFlow: chains of slices, its cases 1F1B and interleaved, and that none deadlocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.plan import MicroBatch, ReplicaPlan, Slice
from lightning_wlb.schedule.packflow import backward_order, packflow, planned_warm_up
from tests.schedule.proof import check_schedule
from tests.schedule.support import format_program, make_programs
from tests.schedule.textbook import one_f_one_b


def chains(lengths):
    """Backward order and needs of chains of so many micro-batches."""
    backward, needs, first = [], [], 0
    for length in lengths:
        backward += reversed(range(first, first + length))
        needs += [first + length] * length
        first += length
    return backward, needs


def replica_of(*micro_batches):
    """A replica from, for each micro-batch, the document numbers that have a slice in it."""
    slices, forward, length = [], [], {}
    for documents in micro_batches:
        first = len(slices)
        for document in documents:
            start = length.get(document, 0)
            slices.append(Slice(document, 0, start, start + 1))
            length[document] = start + 1
        forward.append(MicroBatch(tuple(range(first, len(slices))), "per_document", 1, (0,)))
    return ReplicaPlan(tuple(slices), tuple(forward))


def test_a_chain_of_three_on_two_ranks():
    backward, needs = chains([1, 3, 1])
    assert [format_program(packflow(rank, 2, backward, needs)) for rank in range(2)] == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B3 0B2 0B1 0B4",
        "1F0 1F1 1F2 1B0 1F3 1B3 1B2 1B1 1F4 1B4",
    ]


def test_forwards_missing_for_a_late_chain_are_spread_over_the_backwards_before_it():
    assert planned_warm_up([1, 2, 3, 8, 8, 8]) == [5, 6, 7, 8, 8, 8]
    assert planned_warm_up([1, 2, 2, 6, 3]) == [3, 4, 5, 6, 6]
    assert planned_warm_up([]) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [0, 1, 2, 3, 5, 8, 17])
def test_without_slices_it_is_1f1b(ranks, micro_batches):
    order, needs = chains([1] * micro_batches)
    for rank in range(ranks):
        assert packflow(rank, ranks, order, needs) == one_f_one_b(rank, ranks, micro_batches)


@given(st.data(), st.integers(1, 10), st.integers(1, 5), st.integers(1, 3))
def test_no_deadlock_whatever_the_order_and_needs(data, count, ranks, virtual_stages):
    order = data.draw(st.permutations(range(count)))
    needs = [data.draw(st.integers(index + 1, count)) for index in order]
    programs = [packflow(rank, ranks, order, needs, virtual_stages) for rank in range(ranks)]
    check_schedule(programs, count, virtual_stages)
    for rank, program in enumerate(programs):
        for stage in range(rank, ranks * virtual_stages, ranks):
            of_stage = [action for action in program if action.stage == stage]
            assert [a.micro_batch for a in of_stage if a.kind == "B"] == order
            for place, (micro_batch, need) in enumerate(zip(order, needs, strict=True)):
                at = of_stage.index((stage, "B", micro_batch))
                assert at - place >= need


def test_order_and_needs_of_a_plan():
    assert backward_order(replica_of([0, 1], [1, 2], [3], [4], [4, 5], [5])) == (
        [1, 0, 2, 5, 4, 3],
        [2, 2, 3, 6, 6, 5],
    )
    assert backward_order(replica_of([0], [], [1], [])) == ([0, 1, 2, 3], [1, 2, 3, 4])


def test_interleaved_of_the_textbook():
    """Megatron-LM's order of two rounds."""
    assert list(map(format_program, make_programs("interleaved", 2, 4, 2))) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]
