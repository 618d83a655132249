import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.schedule.actions import receipts, source_of, target_of
from lightning_wlb.schedule.packflow import packflow
from tests.schedule.support import parse_program
from tests.schedule.textbook import interleaved, one_f_one_b


def of_rank(programs, rank, stages=None):
    return receipts(dict(enumerate(programs)), rank, len(programs), stages or len(programs))


def most_held(programs, rank, stages):
    """Sends that a rank holds at once, at most."""
    proven = of_rank(programs, rank, stages)
    held, most = set(), 0
    for action in programs[rank]:
        held -= set(proven.get(action, ()))
        target = target_of(action, stages)
        if target is not None and target.stage % len(programs) != rank:
            held.add(action)
        most = max(most, len(held))
    return most


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


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_what_is_held_depends_on_the_pipeline_and_not_on_the_micro_batches(ranks, virtual_stages):
    def most(micro_batches):
        programs = [
            one_f_one_b(rank, ranks, micro_batches)
            if virtual_stages == 1
            else interleaved(rank, ranks, micro_batches, virtual_stages)
            for rank in range(ranks)
        ]
        return [most_held(programs, rank, ranks * virtual_stages) for rank in range(ranks)]

    assert most(8 * ranks) == most(32 * ranks)
    assert max(most(32 * ranks)) <= 4 * ranks * virtual_stages


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
