"""Actions, the messages that follow from them, and what an arrived message proves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.schedule.actions import Action, channel_of, receipts, source_of, target_of
from lightning_wlb.schedule.packflow import packflow
from tests.schedule.proof import check_schedule
from tests.schedule.support import format_program, parse_program
from tests.schedule.textbook import one_f_one_b


def test_an_action_prints():
    assert str(Action(2, "F", 10)) == "2F10"


def test_1f1b_of_the_textbook():
    assert [format_program(one_f_one_b(stage, 3, 4)) for stage in range(3)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (["0F0 0B0", "1F0"], "rank 1: 1B0 never run"),
        (["0F0 0F0 0B0", "1F0 1B0"], "rank 0: action 0F0 is listed twice"),
        (["0F0 0B0", "1B0 1F0"], "rank 1: 1B0 comes before its forward"),
        (["0F0 1F0 0B0", "1F0 1B0"], "rank 0: action 1F0 does not belong there"),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            "deadlocks: rank 0 waits for the message that 0B0 needs from rank 1; rank 1 waits for"
            " the message that 1F1 needs from rank 0",
        ),
        (["0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0"], "deadlocks"),
    ],
)
def test_a_wrong_schedule_is_named(programs, message):
    parsed = [parse_program(program) for program in programs]
    count = max(action.micro_batch for program in parsed for action in program) + 1
    with pytest.raises(ValueError, match=message):
        check_schedule(parsed, count)


def parse(*programs):
    return [parse_program(program) for program in programs]


def test_the_ring_closes_on_a_channel_of_its_own():
    assert channel_of(Action(1, "F", 0), 2) == ("F", False)
    assert channel_of(Action(2, "F", 0), 2) == ("F", True)
    assert channel_of(Action(1, "B", 0), 2) == ("B", True)
    assert channel_of(Action(2, "B", 0), 2) == ("B", False)


@given(st.integers(0, 5), st.sampled_from("FB"), st.integers(0, 3))
def test_source_and_target_are_inverse(stage, kind, micro_batch):
    action = Action(stage, kind, micro_batch)
    target = target_of(action, 6)
    if target is None:
        assert stage == (5 if kind == "F" else 0)
    else:
        assert source_of(target, 6) == action
        assert target.stage - stage == (1 if kind == "F" else -1)


def of_rank(programs, rank, stages=None):
    return receipts(dict(enumerate(programs)), rank, len(programs), stages or len(programs))


def test_what_a_message_proves():
    programs = [one_f_one_b(rank, 2, 3) for rank in range(2)]
    # 0F0 0F1 0B0 0F2 0B1 0B2 and 1F0 1B0 1F1 1B1 1F2 1B2
    assert of_rank(programs, 0) == {
        action: parse_program(sent)
        for action, sent in zip(parse_program("0B0 0B1 0B2"), ["0F0", "0F1", "0F2"], strict=True)
    }
    # 0B0 ran before 0F2 was sent; 0B1 and 0B2 are followed by nothing.
    assert of_rank(programs, 1) == {
        action: parse_program(sent)
        for action, sent in zip(parse_program("1F0 1F1 1F2"), ["", "", "1B0"], strict=True)
    }


@given(st.data(), st.integers(1, 8), st.integers(2, 4), st.integers(1, 2))
@settings(max_examples=50)
def test_a_send_is_proven_by_a_message_that_was_sent_after_its_arrival(data, count, ranks, each):
    order = data.draw(st.permutations(range(count)))
    needs = [data.draw(st.integers(index + 1, count)) for index in order]
    programs = [packflow(rank, ranks, order, needs, each) for rank in range(ranks)]
    stages = ranks * each
    for rank in range(ranks):
        seen = set()
        for receiver, sends in of_rank(programs, rank, stages).items():
            sender = source_of(receiver, stages)
            peer = programs[sender.stage % ranks]
            for sent in sends:
                target = target_of(sent, stages)
                assert target.stage % ranks == sender.stage % ranks
                # The target has its message when it runs, and the sender sends when it has run.
                assert peer.index(target) <= peer.index(sender)
                assert sent not in seen
                seen.add(sent)
