"""The plan's language: validation that names what is wrong, JSON, digest, print, backward order."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.plan import (
    MicroBatch,
    Piece,
    ReplicaPlan,
    Slice,
    StepPlan,
    micro_batches,
    piece_counts,
)


def micro_batch(*slices: int, replicas: tuple[int, ...] = (0,), rows: int = 64) -> MicroBatch:
    return MicroBatch(slices, "per_document", rows, replicas)


def replica(slices, forward) -> ReplicaPlan:
    return ReplicaPlan(tuple(slices), tuple(forward))


def step(replicas, pieces, **changes) -> StepPlan:
    fields = {
        "step": 3,
        "epoch": 1,
        "target_tokens": 20,
        "cap": 64,
        "micro_batches": 4,
        "nominal_tokens": 128,
    }
    return StepPlan(replicas=tuple(replicas), pieces=tuple(pieces), **{**fields, **changes})


def plain() -> StepPlan:
    """Three documents on two replicas; document 7 is split at 30 and its second piece sliced."""
    first = replica([Slice(2, 0, 0, 40), Slice(5, 0, 0, 10)], [micro_batch(0), micro_batch(1)])
    second = replica(
        [Slice(7, 0, 0, 30), Slice(7, 30, 30, 50), Slice(7, 30, 50, 61)],
        [micro_batch(0, 1, replicas=(1,)), micro_batch(2, replicas=(1,))],
    )
    pieces = [Piece(2, 0, 40, 3), Piece(5, 0, 10, 1), Piece(7, 0, 30, 3), Piece(7, 30, 61, 2)]
    return step([first, second], pieces)


def merged() -> StepPlan:
    """Document 1 runs on replicas 0 and 1 together, document 2 on replica 0 alone."""
    both = micro_batch(0, replicas=(0, 1))
    first = replica([Slice(1, 0, 0, 50), Slice(2, 0, 0, 20)], [both, micro_batch(1)])
    second = replica([Slice(1, 0, 0, 50)], [both])
    return step([first, second], [Piece(1, 0, 50, 3), Piece(2, 0, 20, 3)])


@pytest.mark.parametrize("plan", [plain(), merged(), step([replica([], [])], [], target_tokens=0)])
def test_a_right_plan_is_valid_and_survives_json(plan: StepPlan) -> None:
    assert plan.validate() is plan
    copy = StepPlan.from_json(plan.to_json())
    assert copy == plan
    assert copy.digest == plan.digest
    assert copy.to_json() == plan.to_json()
    assert isinstance(copy.replicas[0].forward, tuple)


def test_numbers_of_a_plan() -> None:
    plan = plain()
    assert plan.tokens == 111
    assert plan.delay == (10 * 2 + 31 * 1) / 111
    assert plan.max_delay == 2
    assert [part.tokens for part in plan.replicas] == [50, 61]
    second = plan.replicas[1]
    assert second.tokens_of(second.forward[0]) == 50
    assert second.slices_of(second.forward[1]) == (Slice(7, 30, 50, 61),)
    assert Slice(7, 30, 50, 61).context == 20
    assert merged().tokens == 70  # a merged micro-batch counts once


def test_empty_plan_has_no_delay() -> None:
    empty = step([replica([], [])], [], target_tokens=0)
    assert (empty.tokens, empty.delay, empty.max_delay) == (0, 0.0, 0)


def test_digest_is_63_bits_and_sees_every_field() -> None:
    plan = plain()
    first, second = plan.replicas
    variants = [
        plan,
        replace(plan, step=4),
        replace(plan, epoch=0),
        replace(plan, drain=True),
        replace(plan, target_tokens=21),
        replace(plan, cap=65),
        replace(plan, micro_batches=5),
        replace(plan, nominal_tokens=129),
        replace(plan, replicas=(second, first)),
        replace(plan, pieces=plan.pieces[::-1]),
        replace(plan, replicas=(first, replace(second, forward=second.forward[::-1]))),
    ]
    digests = {variant.digest for variant in variants}
    assert len(digests) == len(variants)
    assert all(0 <= digest < 2**63 for digest in digests)


def test_str_shows_documents() -> None:
    text = str(plain())
    assert text.splitlines() == [
        "step 3 (epoch 1): 111 tokens, 20 targets, cap 64, delay mean 0.46 max 2",
        "  replica 0 forward 0: 40 tokens, per_document, 64 rows per rank: 2[0:40)",
        "  replica 0 forward 1: 10 tokens, per_document, 64 rows per rank: 5[0:10)",
        "  replica 1 forward 0: 50 tokens, per_document, 64 rows per rank: 7[0:30) 7@30[30:50)",
        "  replica 1 forward 1: 11 tokens, per_document, 64 rows per rank: 7@30[50:61)",
    ]
    assert "shared by (0, 1)" in str(merged())
    assert "(epoch 1, drain)" in str(replace(plain(), drain=True))


# --- the order of backwards ---------------------------------------------------------------


def test_backward_without_slices_runs_in_forward_order() -> None:
    slices = [Slice(number, 0, 0, 5) for number in range(4)]
    forward = (micro_batch(2), micro_batch(0, 1), micro_batch(), micro_batch(3))
    assert replica(slices, forward).backward == (0, 1, 2, 3)


def test_backward_reverses_each_chain_of_shared_pieces() -> None:
    # Piece 0 links micro-batches 0-1, piece 1 links 1-2; 3 stands alone; piece 3 links 4-6 over 5.
    slices = [
        Slice(0, 0, 0, 5),
        Slice(0, 0, 5, 9),
        Slice(1, 0, 0, 5),
        Slice(1, 0, 5, 7),
        Slice(2, 0, 0, 5),
        Slice(3, 0, 0, 5),
        Slice(4, 0, 0, 5),
        Slice(3, 0, 5, 7),
    ]
    forward = [micro_batch(*own) for own in [(0,), (1, 2), (3,), (4,), (5,), (6,), (7,)]]
    made = replica(slices, forward)
    assert made.backward == (2, 1, 0, 3, 6, 5, 4)
    assert made.needs == (2, 3, 3, 4, 7, 6, 7)
    (written,) = json.loads(step([made], []).to_json())["replicas"]
    assert [each["slices"] for each in written["backward"]] == [
        [3], [1, 2], [0], [4], [7], [6], [5],
    ]  # fmt: skip


def test_two_pieces_of_one_document_are_not_a_chain() -> None:
    slices = [Slice(0, 0, 0, 5), Slice(0, 5, 5, 9)]
    assert replica(slices, (micro_batch(0), micro_batch(1))).backward == (0, 1)


@given(
    cuts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=8),
    count=st.integers(1, 6),
    data=st.data(),
)
def test_slices_in_order_are_valid_and_their_backward_runs_from_the_last(cuts, count, data) -> None:
    """Pieces sliced into increasing micro-batches, anywhere."""
    slices, micro_batches, pieces = [], [[] for _ in range(count)], []
    for document, lengths in enumerate(cuts):
        lengths = lengths[:count]
        chosen = data.draw(
            st.lists(
                st.integers(0, count - 1),
                min_size=len(lengths),
                max_size=len(lengths),
                unique=True,
            )
        )
        at = 0
        for index, length in zip(sorted(chosen), lengths, strict=True):
            micro_batches[index].append(len(slices))
            slices.append(Slice(document, 0, at, at + length))
            at += length
        pieces.append(Piece(document, 0, at, 0))
    forward = [micro_batch(*own) for own in micro_batches]
    plan = step([replica(slices, forward)], pieces, target_tokens=0, cap=1000)
    assert plan.validate() is plan
    assert StepPlan.from_json(plan.to_json()) == plan
    order = plan.replicas[0].backward
    assert sorted(order) == list(range(count))
    for piece in pieces:
        own = [
            at
            for at, each in enumerate(micro_batches)
            if piece.document in (slices[i].document for i in each)
        ]
        assert sorted(own, key=order.index) == own[::-1]


# --- what validation catches --------------------------------------------------------------

A, B = Slice(1, 0, 0, 10), Slice(2, 0, 0, 8)
PIECES = (Piece(1, 0, 10, 0), Piece(2, 0, 8, 0))


def two(slices=(A, B), forward=None, pieces=PIECES, **changes) -> StepPlan:
    """One replica with a slice in each of two micro-batches, unless told otherwise."""
    forward = [micro_batch(0), micro_batch(1)] if forward is None else forward
    return step([replica(slices, forward)], pieces, **{"target_tokens": 5, **changes})


SPLIT = Slice(1, 0, 0, 4), Slice(1, 0, 4, 10)
ONE = PIECES[:1]

# What is wrong, as changes of ``two``, and what is said of it.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"slices": (Slice(1, 5, 2, 10), B)}, r"slice \(1, 5, 2, 10\) is not .* 0 <= origin <= start"),
    ({"slices": (Slice(1, 0, 10, 10), B)}, r"step 3, replica 0: slice \(1, 0, 10, 10\) is not"),
    (
        {"slices": (A, A), "pieces": ONE},
        r"slice 1\[0:10\) in micro-batch 0 runs before 1\[0:10\) in micro-batch 1; .* each once",
    ),
    ({"slices": (Slice(1, 0, 4, 10), B)}, r"tokens \[0, 4\) of document 1 .* are in no slice"),
    ({"slices": (Slice(1, 0, 0, 9), B)}, r"tokens \[9, 10\) of document 1 .* are in no slice"),
    (
        {"slices": (SPLIT[0], Slice(1, 0, 6, 10)), "pieces": ONE},
        r"tokens \[4, 6\) of document 1 were released",
    ),
    (
        {"slices": (A,), "forward": [micro_batch(0)]},
        r"tokens \[0, 8\) of document 2 were released",
    ),
    (
        {"slices": (Slice(1, 0, 0, 6), SPLIT[1]), "pieces": ONE},
        r"tokens \[4, 6\) of document 1 are in two slices",
    ),
    ({"slices": (Slice(1, 0, 0, 12), B)}, r"tokens \[10, 12\) .* end of their piece at 10"),
    ({"pieces": ONE}, r"the piece of document 2 at 0 is in 1 slice\(s\) but was not released"),
    ({"pieces": (*PIECES, PIECES[0])}, r"\[0, 10\) of document 1 are doubled: two released pieces"),
    (
        {"slices": (A, Slice(1, 6, 6, 14)), "pieces": (PIECES[0], Piece(1, 6, 14, 0))},
        r"tokens \[6, 10\) of document 1 are doubled: two released pieces",
    ),
    ({"pieces": (*PIECES, Piece(3, 4, 4, 0))}, r"released piece \(3, 4, 4, 0\) is not"),
    (
        {"forward": [micro_batch(0), micro_batch(2)]},
        r"micro-batch 1 lists slice 2, but the replica has 2 slices",
    ),
    (
        {"forward": [micro_batch(0), micro_batch(0, 1)]},
        r"slice 1\[0:10\) is in micro-batches 0 and 1",
    ),
    ({"forward": [micro_batch(0)]}, r"replica 0: slice 2\[0:8\) is in no micro-batch"),
    (
        {"forward": [micro_batch(0, 1)], "cap": 17},
        r"micro-batch 0 has 18 tokens, more than the cap of 17",
    ),
    (
        {"forward": [micro_batch(0), micro_batch(1, replicas=(1,))]},
        r"micro-batch 1 names replicas \(1,\); it must name 0 and replicas below 1",
    ),
    (
        {"forward": [micro_batch(0), micro_batch(1, replicas=())]},
        r"micro-batch 1 names replicas \(\)",
    ),
    (
        {"slices": SPLIT, "forward": [micro_batch(1), micro_batch(0)], "pieces": ONE},
        r"slice 1\[4:10\) in micro-batch 0 runs before 1\[0:4\)",
    ),
    ({"target_tokens": 19}, r"target_tokens=19 is not between 0 and the step's 18 tokens"),
    ({"target_tokens": -1}, r"target_tokens=-1"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_validation_names_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        two(**changes).validate()


@pytest.mark.parametrize("slices", [(A, A), SPLIT])
def test_a_piece_is_on_one_replica(slices: tuple[Slice, Slice]) -> None:
    replicas = [
        replica([part], [micro_batch(0, replicas=(number,))]) for number, part in enumerate(slices)
    ]
    with pytest.raises(ValueError, match=r"of document 1 at 0 are on replicas \(0,\) and \(1,\)"):
        step(replicas, ONE, target_tokens=5).validate()


def shared_by(members: tuple[int, ...], replicas: int) -> StepPlan:
    """Document 1 shared by ``members`` among ``replicas`` replicas."""
    parts = [
        replica([A], [micro_batch(0, replicas=members)]) if number in members else replica([], [])
        for number in range(replicas)
    ]
    return step(parts, PIECES[:1], target_tokens=5)


@pytest.mark.parametrize("members", [(0, 1), (2, 3), (0, 1, 2, 3), (3,)])
def test_aligned_powers_of_two_may_merge(members) -> None:
    shared_by(members, 4).validate()


@pytest.mark.parametrize("members", [(1, 2), (0, 2), (0, 1, 2), (1, 0)])
def test_other_ranges_may_not_merge(members) -> None:
    with pytest.raises(ValueError, match="not an aligned power-of-two range"):
        shared_by(members, 4).validate()


def test_every_member_lists_a_shared_micro_batch() -> None:
    first, _ = merged().replicas
    alone = replace(merged(), replicas=(first, replica([], [])))
    with pytest.raises(ValueError, match="replica 1 does not list it"):
        alone.validate()
    plan = shared_by((0, 1), 2)
    other = replica([A], [micro_batch(0, replicas=(0, 1), rows=65)])
    with pytest.raises(ValueError, match=r"shares a micro-batch .* replica 1 does not"):
        replace(plan, replicas=(plan.replicas[0], other)).validate()


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 15), st.integers(1, 7))
def test_pieces_are_counted_by_length(lengths, window, at_once) -> None:
    expected = Counter(
        min(window, length - origin) for length in lengths for origin in range(0, length, window)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batches, "_AT_ONCE", at_once)
        assert piece_counts(np.array(lengths, np.int64), window) == expected


def test_of_thousands_of_documents_a_few_are_printed() -> None:
    slices = [Slice(number, 0, 0, 8) for number in range(1024)]
    whole = replica(slices, [micro_batch(*range(1024))])
    plan = step([whole], [Piece(number, 0, 8, 0) for number in range(1024)])
    _, line = str(plan).splitlines()
    assert line.endswith(
        ": 0[0:8) 1[0:8) 2[0:8) 3[0:8) 4[0:8) 5[0:8) 6[0:8) 7[0:8) ... and 1016 more"
    )


# --- recomputation ------------------------------------------------------------------------


def recomputing(plan: StepPlan, *modes: str) -> StepPlan:
    """The plan, whose micro-batches of replica 0 have these modes, by their first slice."""
    first, *others = plan.replicas
    own = first.changed(lambda each: replace(each, recompute=modes[each.slices[0]]))
    return replace(plan, replicas=(own, *others))


def test_a_plan_says_what_each_micro_batch_recomputes() -> None:
    plan = recomputing(plain(), "selective", "full").validate()
    copy = StepPlan.from_json(plan.to_json())
    assert copy == plan
    assert [each.recompute for each in copy.replicas[0].forward] == ["selective", "full"]
    assert plan.digest != plain().digest
    assert str(plan).splitlines()[1:4] == [
        "  replica 0 forward 0: 40 tokens, per_document, 64 rows per rank, recompute selective:"
        " 2[0:40)",
        "  replica 0 forward 1: 10 tokens, per_document, 64 rows per rank, recompute full: 5[0:10)",
        "  replica 1 forward 0: 50 tokens, per_document, 64 rows per rank: 7[0:30) 7@30[30:50)",
    ]


def test_json_from_before_recomputation_was_planned_means_none() -> None:
    fields = json.loads(plain().to_json())
    for replica in fields["replicas"]:
        for micro_batch in (*replica["forward"], *replica["backward"]):
            del micro_batch["recompute"]
    assert StepPlan.from_json(json.dumps(fields)) == plain()


def test_modes_that_cannot_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"replica 0: micro-batch 1 has recompute='some'"):
        recomputing(plain(), "none", "some").validate()
    with pytest.raises(ValueError, match=r"replica 1 does not list it"):
        recomputing(merged(), "full", "none").validate()


def test_replicas_that_would_wait_for_each_other_are_refused() -> None:
    """Each begins with what the other runs second."""
    slices, pieces = [A, B], (Piece(1, 0, A.stop, 0), Piece(2, 0, B.stop, 0))
    both = [micro_batch(0, replicas=(0, 1)), micro_batch(1, replicas=(0, 1))]
    plan = step([replica(slices, both)] * 2, pieces, target_tokens=1)
    plan.validate()
    crossed = replace(plan, replicas=(plan.replicas[0], replica(slices, both[::-1])))
    with pytest.raises(
        ValueError, match=r"replicas \(0, 1\) share .* wait for each other for ever"
    ):
        crossed.validate()
