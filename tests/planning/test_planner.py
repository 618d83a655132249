"""The planner keeps the promises: nothing lost, resume exact, data independent of the mesh."""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.cost.attention_tiles import reference_kernel_cost
from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece, Slice, StepPlan
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.packing import PACKINGS, wlb
from lightning_wlb.sharding import choose, layout

# Forward and backward of d tokens: d·(d + 20).
work = Work(PassWork(6, 1), PassWork(13, 1))


def pieces_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(piece.document, piece.origin, piece.stop) for piece in plan.pieces]


def epoch(planner: Planner) -> list[StepPlan]:
    plans = []
    while (plan := planner.next_step()) is not None:
        plans.append(plan)
        assert len(plans) < 2000, "an epoch that does not end"
    return plans


@st.composite
def data_settings(draw) -> DataSettings:
    window = draw(st.integers(1, 40))
    method = draw(st.sampled_from(sorted(PACKINGS)))
    options = {
        "wlb": {
            "queues": draw(st.integers(0, 3)),
            "max_age": draw(st.integers(1, 12)),
        },
        "slim": {"micro_packs": draw(st.integers(1, 4))},
    }
    return DataSettings(
        context_window=window,
        micro_batches=draw(st.integers(1, 5)),
        packing={"method": method, **options.get(method, {})},
        cap=draw(st.none() | st.integers(window, 2 * window + 1)),
        long_documents=draw(st.sampled_from(["split", "truncate"])),
        seed=draw(st.integers(0, 3)),
        shuffle=draw(st.booleans()),
    )


meshes = st.fixed_dictionaries(
    {
        "mesh": st.builds(
            Mesh,
            data=st.integers(1, 6),
            pipeline=st.integers(1, 4),
            context=st.sampled_from([1, 2, 3]),
            tensor=st.sampled_from([1, 2]),
        ),
        "sharding": st.sampled_from(["per_sequence", "per_document", "per_document_contiguous"]),
    }
)
store_lengths = st.lists(st.integers(1, 120), min_size=1, max_size=30)


@settings(max_examples=80)
@given(lengths=store_lengths, data=data_settings(), mesh=meshes)
def test_every_token_exactly_once_per_epoch(lengths, data, mesh) -> None:
    """Promise 2, over two epochs, whatever is split, truncated, delayed, carried or drained."""
    planner = Planner(lengths, data, work, **mesh)
    kept = lengths
    if data.long_documents == "truncate":
        kept = [min(length, data.context_window) for length in lengths]
    assert planner.dropped_tokens == sum(lengths) - sum(kept)
    step = 0
    for number in range(2):
        covered: dict[int, list[tuple[int, int]]] = defaultdict(list)
        targets = 0
        draining, drained = False, -1
        first_step = step
        for plan in epoch(planner):
            assert (plan.step, plan.epoch) == (step, number)
            assert plan.tokens > 0
            assert plan.validate() is plan
            assert list(plan.pieces) == sorted(plan.pieces)
            assert plan.drain or not draining
            draining = plan.drain
            micro_batches = [micro_batch for part in plan.replicas for micro_batch in part.forward]
            assert len(micro_batches) >= 1
            assert plan.micro_batches == data.micro_batches
            # Those make as many as it takes: they carry nothing, or fill the pipeline.
            if data.packing_choice.method not in ("slim", "auto", "hydraulis"):
                assert len(micro_batches) <= 2 * data.micro_batches
            assert len(plan.replicas) == mesh["mesh"].data
            if draining and len(plan.pieces) > 1:
                assert plan.tokens <= data.nominal_tokens == plan.nominal_tokens
            if draining:  # oldest first
                assert min(piece.arrival for piece in plan.pieces) >= drained
                drained = max(piece.arrival for piece in plan.pieces)
            for piece in plan.pieces:
                assert first_step <= piece.arrival <= step
                assert piece.tokens <= data.context_window
                covered[piece.document].append((piece.origin, piece.stop))
            targets += plan.target_tokens
            step += 1
        for document, length in enumerate(kept):
            at = 0
            for origin, stop in sorted(covered[document]):
                assert origin == at, "tokens lost or doubled"
                at = stop
            assert at == length
        assert targets == sum(min(k, n - 1) for k, n in zip(kept, lengths, strict=True))
        state = planner.state_dict()
        assert (state["epoch"], state["position"], state["offset"]) == (number + 1, 0, 0)
        assert not planner.packer.held


@settings(max_examples=40)
@given(lengths=store_lengths, data=data_settings(), first=meshes, second=meshes)
def test_what_enters_a_step_does_not_depend_on_the_mesh(lengths, data, first, second) -> None:
    one, other = (Planner(lengths, data, work, **mesh) for mesh in (first, second))
    for _ in range(2):
        plans, others = epoch(one), epoch(other)
        assert [plan.pieces for plan in plans] == [plan.pieces for plan in others]
        assert [plan.target_tokens for plan in plans] == [plan.target_tokens for plan in others]
        assert one.state_dict() == other.state_dict()


@settings(max_examples=75)
@given(
    lengths=store_lengths, data=data_settings(), mesh=meshes, other=meshes, stop=st.integers(0, 25)
)
def test_resume_is_exact(lengths, data, mesh, other, stop) -> None:
    """Promise 3, through JSON (plain types only), on the same mesh and on another one."""
    whole = Planner(lengths, data, work, **mesh)
    for _ in range(stop):
        whole.next_step()
    state = json.loads(json.dumps(whole.state_dict()))
    same, moved = (Planner(lengths, data, work, **each) for each in (mesh, other))
    same.next_step()  # a planner that has moved on is overwritten
    same.load_state_dict(state)
    moved.load_state_dict(state)
    for _ in range(6):
        plan, copy, elsewhere = whole.next_step(), same.next_step(), moved.next_step()
        assert plan == copy
        if plan is None:
            assert elsewhere is None
            continue
        assert copy.digest == plan.digest
        assert (elsewhere.step, elsewhere.pieces) == (plan.step, plan.pieces)
        assert (elsewhere.epoch, elsewhere.drain) == (plan.epoch, plan.drain)
    assert whole.state_dict() == same.state_dict() == moved.state_dict()


def test_state_does_not_change_with_later_steps() -> None:
    planner = Planner(
        [30, 5, 7, 30, 9] * 4, DataSettings(30, 2, {"method": "wlb", "queues": 1}), work
    )
    planner.next_step()
    state = planner.state_dict()
    before = json.dumps(state)
    planner.next_step()
    assert json.dumps(state) == before


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("made_up", "why"),
    [
        ({"position": float("nan")}, "position=nan"),  # which no number of documents reaches
        ({"position": 21}, "no run stands at token 0 of document 21"),
        ({"offset": -(10**18)}, "offset=-1"),
        ({"offset": 30}, "no run stands at token 30 of document"),
        ({"step": 1.5}, "step=1.5"),
        ({"tokens": "1"}, "tokens='1'"),
        ({"packer": {}}, "'carried'"),
        ({"packer": {"carried": [], "queues": []}}, "longer"),
        ({"packer": {"carried": [[0, 0, 31, 0]], "queues": [[]]}}, r"piece \(0, 0, 31, 0\)"),
        ({"packer": {"carried": [[99, 0, 5, 0]], "queues": [[]]}}, "99"),
        ({"packer": {"carried": [[1, 0, 5, 0]] * 2, "queues": [[]]}}, "waits twice"),
    ],
    ids=str,
)
def test_a_state_that_no_run_can_have_saved_is_refused(made_up, why) -> None:
    data = DataSettings(30, 2, {"method": "wlb", "queues": 1})
    planner = Planner([30, 5, 7, 30, 9] * 4, data, work)
    planner.next_step()
    with pytest.raises(ValueError, match=f"data state is damaged or made up .*{why}"):
        planner.load_state_dict(planner.state_dict() | made_up)


# --- which documents arrive ---------------------------------------------------------------


def test_windows_of_layers_are_part_of_the_saved_settings() -> None:
    mixed = Work(PassWork(6, 1, 20, ((5, 2),)), PassWork(13, 1, 20, ((5, 2),)))
    data = DataSettings(10, 2, packing="wlb")
    planner = Planner([3, 9, 4] * 5, data, mixed)
    planner.next_step()
    state = json.loads(json.dumps(planner.state_dict()))
    same = Planner([3, 9, 4] * 5, data, mixed)
    same.load_state_dict(state)
    assert same.next_step() == planner.next_step()
    other = Work(PassWork(6, 1, 20, ((4, 2),)), PassWork(13, 1, 20, ((4, 2),)))
    with pytest.raises(ValueError, match=r"work=\[19, 2, 20, \[5, 4\]\] in the saved state"):
        Planner([3, 9, 4] * 5, data, other).load_state_dict(state)


def test_a_long_document_goes_on_in_the_next_step() -> None:
    # N·C = 20; 45 tokens are 5 pieces. The last arrives with two of 9, which fill both bins.
    data = DataSettings(10, 2, {"method": "wlb", "queues": 0}, shuffle=False, cap=10)
    plans = epoch(Planner([45, 9, 9, 9], data, work))
    assert [pieces_of(plan) for plan in plans] == [
        [(0, 0, 10), (0, 10, 20)],
        [(0, 20, 30), (0, 30, 40)],
        [(1, 0, 9), (2, 0, 9)],
        [(0, 40, 45), (3, 0, 9)],
    ]
    assert not any(plan.drain for plan in plans)
    assert [plan.max_delay for plan in plans] == [0, 0, 0, 1]


def test_original_cuts_the_stream_exactly() -> None:
    data = DataSettings(10, 2, packing="original", shuffle=False)
    plans = epoch(Planner([25, 3, 8, 1], data, work, Mesh(data=2)))
    assert [part.slices for part in plans[0].replicas] == [
        (Slice(0, 0, 0, 10),),
        (Slice(0, 10, 10, 20),),
    ]
    assert [part.slices for part in plans[1].replicas] == [
        (Slice(0, 20, 20, 25), Slice(1, 0, 0, 3), Slice(2, 0, 0, 2)),
        (Slice(2, 2, 2, 8), Slice(3, 0, 0, 1)),
    ]
    # The target of a token is the document's next token, also where the stream is cut.
    assert [plan.target_tokens for plan in plans] == [20, 4 + 2 + 2 + 5 + 0]


def test_queues_wait_for_n_and_are_drained_oldest_first(monkeypatch) -> None:
    monkeypatch.setattr(wlb, "thresholds_from_lengths", lambda *given: (5, 8))
    data = DataSettings(10, 3, "wlb", shuffle=False, cap=20)
    lengths = [9, 4, 4, 4, 4, 4, 4, 6, 9, 4, 4, 4, 4, 7, 3, 10]
    plans = epoch(Planner(lengths, data, work))
    assert [[piece.tokens for piece in plan.pieces] for plan in plans] == [
        [4] * 5,  # 9 waits; of 29 tokens
        [4] * 4,  # 6 and 9 wait; of 31 tokens
        [9, 9, 4, 3, 10],  # 7 waits; the queue of 8 has its three
        [6, 7],  # drained
    ]
    assert [plan.drain for plan in plans] == [False, False, False, True]
    assert plans[2].max_delay == 2
    assert plans[2].delay == (9 * 2 + 9 * 1) / 35
    assert plans[3].pieces == (Piece(7, 0, 6, 1), Piece(13, 0, 7, 2))


@pytest.mark.parametrize(
    ("lengths", "queues", "cap"),
    [([10, 6, 10, 5, 7, 7, 3, 6, 8], 1, 10), ([4, 5, 6, 10, 9, 7, 7], 2, 12)],
)
def test_a_drain_step_opens_micro_batches_rather_than_let_old_pieces_wait(
    lengths, queues, cap
) -> None:
    data = DataSettings(10, 2, {"method": "wlb", "queues": queues}, shuffle=False, cap=cap)
    drained = [plan for plan in epoch(Planner(lengths, data, work)) if plan.drain]
    arrivals = [
        piece.arrival
        for plan in drained
        for piece in sorted(plan.pieces, key=lambda piece: piece.arrival)
    ]
    assert arrivals == sorted(arrivals)


def test_epochs_differ_by_seed_and_number_and_shuffle_can_be_off() -> None:
    def order(seed: int, shuffle: bool = True) -> list[list[int]]:
        data = DataSettings(1, 1, seed=seed, shuffle=shuffle)
        planner = Planner([1] * 30, data, work)
        return [[plan.pieces[0].document for plan in epoch(planner)] for _ in range(2)]

    first, second = order(0)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert order(0) == [first, second]
    assert order(1)[0] != first
    assert order(0, shuffle=False) == [list(range(30))] * 2
    assert first == np.random.default_rng((0, 0)).permutation(30).tolist()


def test_rows_and_sharding_come_from_the_mesh() -> None:
    mesh = Mesh(data=2, context=2, tensor=4)
    planner = Planner([9, 13, 30, 2], DataSettings(30, 2), work, mesh, sharding="per_document")
    plan = planner.next_step()
    micro_batches = [(part, micro_batch) for part in plan.replicas for micro_batch in part.forward]
    assert micro_batches
    for part, micro_batch in micro_batches:
        lengths = [piece.tokens for piece in part.slices_of(micro_batch)]
        assert (
            micro_batch.rows
            == layout("per_document", lengths, 2 * len(micro_batch.replicas), 4).rows
        )
        assert micro_batch.rows % 4 == 0
        assert micro_batch.sharding == "per_document"


def test_adaptive_sharding_is_resolved_for_each_micro_batch() -> None:
    """Each gets the sharding of least cost, and the cost that was given decides."""
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(1, 2000, 60).tolist(), 8192, 8192]
    data = DataSettings(8192, 4, packing={"method": "wlb", "queues": 0})
    mesh = Mesh(context=4, tensor=2)

    def fewest_queries_in_a_segment(queries, keys):
        return queries * queries

    chosen = set()
    for cost in (reference_kernel_cost, fewest_queries_in_a_segment):
        for plan in epoch(Planner(lengths, data, work, mesh, kernel_cost=cost)):
            for micro_batch in plan.replicas[0].forward:
                tokens = [piece.tokens for piece in plan.replicas[0].slices_of(micro_batch)]
                name, made = choose(tokens, 4, 2, cost)
                assert (micro_batch.sharding, micro_batch.rows) == (name, made.rows)
                chosen.add(name)
    assert len(chosen) > 1


def test_targets_of_the_store_are_used() -> None:
    planner = Planner(
        [9, 13], DataSettings(30, 2), work, targets=lambda document, start, stop: document
    )
    assert planner.next_step().target_tokens == 1


def test_truncated_tokens_are_counted_and_left_out() -> None:
    for packing in PACKINGS:
        data = DataSettings(10, 2, packing=packing, long_documents="truncate")
        planner = Planner([25, 3, 11], data, work)
        assert planner.dropped_tokens == 16
        plans = epoch(planner)
        assert sum(plan.tokens for plan in plans) == 23
        # The last kept token of a truncated document still has a target.
        assert sum(plan.target_tokens for plan in plans) == 10 + 2 + 10
    assert Planner([25, 3, 11], DataSettings(10, 2), work).dropped_tokens == 0
