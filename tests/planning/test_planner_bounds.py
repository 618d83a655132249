"""Where a run ends, and what the planner refuses."""

from __future__ import annotations

import pytest

from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.planning import DataSettings, Planner
from tests.planning.test_planner import epoch, work


def test_max_tokens_ends_the_run_for_ever() -> None:
    data = DataSettings(10, 1, shuffle=False, cap=10, max_tokens=25)
    planner = Planner([10] * 2, data, work)
    assert planner.next_step().tokens == 10
    assert planner.next_step().tokens == 10
    assert planner.next_step() is None
    assert not planner.finished  # only the epoch is over
    assert planner.next_step().tokens == 10  # 30 >= 25
    assert planner.finished
    assert planner.next_step() is None
    resumed = Planner([10] * 2, data, work)
    resumed.load_state_dict(planner.state_dict())
    assert resumed.finished
    assert resumed.next_step() is None
    assert resumed.state_dict() == planner.state_dict()


def test_a_finished_run_may_go_on_with_a_higher_bound() -> None:
    planner = Planner([10] * 9, DataSettings(10, 1, max_tokens=10), work)
    planner.next_step()
    assert planner.finished
    longer = Planner([10] * 9, DataSettings(10, 1, max_tokens=40), work)
    longer.load_state_dict(planner.state_dict())
    assert not longer.finished
    assert longer.next_step().step == 1


LENGTHS = [9, 13, 30, 2]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("context_window", DataSettings(31, 2, "wlb", cap=40)),
        ("micro_batches", DataSettings(30, 3, "wlb", cap=40)),
        ("packing", DataSettings(30, 2, cap=40)),
        ("cap", DataSettings(30, 2, "wlb", cap=41)),
        ("thresholds", DataSettings(30, 2, {"method": "wlb", "queues": 1}, cap=40)),
        ("max_age", DataSettings(30, 2, {"method": "wlb", "max_age": 3}, cap=40)),
        ("long_documents", DataSettings(30, 2, "wlb", cap=40, long_documents="truncate")),
        ("seed", DataSettings(30, 2, "wlb", cap=40, seed=1)),
        ("shuffle", DataSettings(30, 2, "wlb", cap=40, shuffle=False)),
    ],
)
def test_state_of_other_settings_is_refused(name, other) -> None:
    state = Planner(LENGTHS, DataSettings(30, 2, "wlb", cap=40), work).state_dict()
    with pytest.raises(ValueError, match=rf"data settings: (.*; )?{name}=.* in the saved state"):
        Planner(LENGTHS, other, work).load_state_dict(state)


def test_state_of_other_documents_or_model_is_refused() -> None:
    data = DataSettings(30, 2, "slim")
    state = Planner(LENGTHS, data, work).state_dict()
    with pytest.raises(ValueError, match="documents=4 in the saved state, 3 here"):
        Planner(LENGTHS[:3], data, work).load_state_dict(state)
    with pytest.raises(ValueError, match=r"data settings: document_lengths="):
        Planner(LENGTHS[::-1], data, work).load_state_dict(state)
    with pytest.raises(ValueError, match=r"data settings: work="):
        Planner(LENGTHS, data, Work(PassWork(1, 0), PassWork(2, 0))).load_state_dict(state)


@pytest.mark.parametrize(
    ("lengths", "data", "mesh", "message"),
    [
        ([], {}, {}, "document store is empty"),
        ([4, 0, 3], {}, {}, r"Document 1 has 0 tokens.* Leave empty documents out"),
        (
            [4, 31],
            {"long_documents": "error"},
            {},
            r"Document 1 has 31 tokens, more than context_window=30.*'split'.* or 'truncate'",
        ),
        ([4], {}, {"sharding": "per_page"}, r"sharding='per_page' is not one of .*per_document"),
    ],
)
def test_bad_input_is_named(lengths, data, mesh, message) -> None:
    with pytest.raises(ValueError, match=message):
        Planner(lengths, DataSettings(30, 2, **data), work, **mesh)


def test_document_of_exactly_the_window_is_no_error() -> None:
    data = DataSettings(30, 2, long_documents="error", cap=30)
    assert [plan.tokens for plan in epoch(Planner([30, 30, 30], data, work))] == [60, 30]
