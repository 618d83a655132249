"""Mixtures: proportions of tokens, every document once a pass, exact resume."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.mesh import Mesh
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.global_batches import Stream
from lightning_wlb.planning.mixture import MixedBatches, StoreShare
from tests.planning.test_planner import meshes, work

STORES = st.lists(
    st.tuples(
        st.lists(st.integers(1, 60), min_size=1, max_size=12),
        st.sampled_from([0.1, 0.3, 1.0, 2.5]),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)
Stores = list[tuple[list[int], float, bool]]


def shares_of(stores: Stores) -> list[StoreShare]:
    return [
        StoreShare(str(number), len(lengths), weight, repeat)
        for number, (lengths, weight, repeat) in enumerate(stores)
    ]


def batches(stores: Stores, cuts: bool = False, shuffle: bool = True) -> MixedBatches:
    lengths = np.array([length for lengths, *_ in stores for length in lengths])
    return MixedBatches(shares_of(stores), lengths, Stream(40, 20, cuts, 5, shuffle))


@settings(max_examples=100)
@given(stores=STORES, cuts=st.booleans(), shuffle=st.booleans())
def test_nothing_is_lost_or_doubled_within_a_stores_pass(stores, cuts, shuffle) -> None:
    mixed = batches(stores, cuts, shuffle)
    lengths = [length for store, *_ in stores for length in store]
    ranges: dict[int, list[tuple[int, int]]] = {}
    for epoch in range(2):
        mixed.start_epoch(epoch)
        while (pieces := mixed.draw(0)) is not None:
            for piece in pieces:
                assert piece.tokens <= 20
                ranges.setdefault(piece.document, []).append((piece.origin, piece.stop))
    # Every document that came is whole: its pieces in order, from its first token to its last.
    for number, parts in ranges.items():
        assert [0, *(stop for _, stop in parts)] == [
            *(origin for origin, _ in parts),
            lengths[number % len(lengths)],
        ]
    first = 0
    for share, standing in zip(
        shares_of(stores), mixed.state_dict()["mixture"].values(), strict=True
    ):
        came = [divmod(number, len(lengths)) for number in ranges]
        here = [(p, n - first) for p, n in came if first <= n < first + share.documents]
        passes = Counter(p for p, _ in here)
        if share.repeat:
            whole = {each: share.documents for each in range(standing["passes"])}
            rest = {standing["passes"]: standing["position"]} if standing["position"] else {}
            assert passes == whole | rest
        else:
            assert passes == {0: share.documents, 1: share.documents}
        first += share.documents


@settings(max_examples=40)
@given(stores=STORES, cuts=st.booleans(), shuffle=st.booleans())
def test_a_state_is_a_place(stores, cuts, shuffle) -> None:
    mixed = batches(stores, cuts, shuffle)
    for epoch in range(2):
        mixed.start_epoch(epoch)
        while not mixed.exhausted:
            resumed = batches(stores, cuts, shuffle)
            resumed.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
            assert resumed.draw(3) == mixed.draw(3)
            assert resumed.state_dict() == mixed.state_dict()


def test_a_token_beyond_the_next_document_is_refused_and_no_other() -> None:
    mixed = batches([([15, 60], 1.0, True)])
    begun = mixed.state_dict()
    with pytest.raises(ValueError, match="no run stands at token 90 of the next document"):
        batches([([15, 60], 1.0, True)]).load_state_dict(begun | {"offset": 90})
    states = [begun]
    while mixed.draw(0) is not None:
        states.append(mixed.state_dict())
    assert any(state["offset"] for state in states)
    for state in states:  # whatever was drawn before
        mixed.load_state_dict(state)
        assert mixed.state_dict() == state


@pytest.mark.parametrize(
    ("repeat", "made_up"),
    [
        (True, {"position": 2}),
        (False, {"position": 3}),
        (True, {"passes": 1 << 31}),
        (False, {"position": 2}),  # although none was drawn
    ],
)
def test_a_place_beyond_a_store_is_refused(repeat: bool, made_up: dict[str, int]) -> None:
    mixed = batches([([5, 6], 1.0, repeat)])
    state = mixed.state_dict()
    state["mixture"]["0"] |= made_up
    with pytest.raises(ValueError, match=r"no run stands at document \d of 0"):
        mixed.load_state_dict(state)


@given(stores=STORES)
def test_an_epoch_ends_as_it_is_defined(stores) -> None:
    mixed = batches(stores)
    standings = []
    while mixed.draw(0) is not None:
        standings.append(mixed.state_dict()["mixture"])
    shares = shares_of(stores)
    once = [share for share in shares if not share.repeat] or shares
    enough = [
        all(standing[share.name]["drawn"] >= share.documents for share in once)
        for standing in standings
    ]
    assert enough == [False] * (len(enough) - 1) + [True]


def drawn_in_order(stores: Stores) -> list[int]:
    mixed = batches(stores, cuts=True, shuffle=False)
    numbers = []
    while (pieces := mixed.draw(0)) is not None:
        numbers += [piece.document for piece in pieces]
    return numbers


def test_the_order_is_that_of_the_least_tokens_for_the_weight() -> None:
    # Three tokens of the first store for one of the second, which runs out after its two.
    assert drawn_in_order([([1] * 7, 0.75, False), ([1] * 2, 0.25, False)]) == [
        *(0, 7, 1, 2, 3, 8),
        *(4, 5, 6),
    ]
    # Documents of the second pass of a repeated store of 1 have numbers above all of the first.
    assert drawn_in_order([([1] * 4, 1.0, False), ([1], 1.0, True)]) == [0, 4, 1, 9, 2, 14, 3]


def test_a_new_pass_has_a_new_order() -> None:
    mixed = batches([([1] * 50, 1.0, True)])
    passes = []
    for epoch in range(2):
        mixed.start_epoch(epoch)
        passes.append([])
        while (pieces := mixed.draw(0)) is not None:
            passes[-1] += [piece.document - 50 * epoch for piece in pieces]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(50))
    assert passes[0] != passes[1]


def test_proportions_hold_within_one_percent_over_a_thousand_steps() -> None:
    random = np.random.default_rng(0)
    sizes, weights = (3000, 500, 40), (0.6, 0.3, 0.1)
    lengths = np.concatenate(
        [
            np.minimum(random.lognormal(mean, 1.0, size).astype(int) + 1, 4096)
            for size, mean in zip(sizes, (6, 5, 4), strict=True)
        ]
    )
    shares = [
        StoreShare(name, size, weight)
        for name, size, weight in zip("abc", sizes, weights, strict=True)
    ]
    data = DataSettings(4096, 2, packing="wlb")
    planner = Planner(lengths, data, work, mixture=shares)
    tokens, planned = np.zeros(3), 0
    bounds = np.cumsum(sizes)
    while planned < 1000:
        if (plan := planner.next_step()) is None:
            continue
        planned += 1
        for piece in plan.pieces:
            number = piece.document % len(lengths)
            tokens[int(np.searchsorted(bounds, number, side="right"))] += piece.tokens
    assert np.abs(tokens / tokens.sum() - weights).max() < 0.01
    state = planner.state_dict()
    assert len(json.dumps({**state, "packer": None})) < 2000
    assert state["mixture"]["c"]["passes"] > 100


@settings(max_examples=40)
@given(data=st.data(), stores=STORES, here=meshes, there=meshes)
def test_plans_resume_from_any_step_on_any_mesh(data, stores, here, there) -> None:
    lengths = [length for store, *_ in stores for length in store]
    method = data.draw(st.sampled_from(["wlb", "original", "slim"]))
    settings = DataSettings(20, 3, packing=method)

    def planner(on: dict) -> Planner:
        return Planner(lengths, settings, work, **on, mixture=shares_of(stores))

    whole, other = planner(here), planner(there)
    for _ in range(data.draw(st.integers(0, 12))):
        whole.next_step()
    other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(6):
        plans = whole.next_step(), other.next_step()
        assert (plans[0] is None) == (plans[1] is None)
        if plans[0] is not None and plans[1] is not None:
            assert plans[0].pieces == plans[1].pieces
            assert plans[0].target_tokens == plans[1].target_tokens
        assert whole.state_dict() == other.state_dict()


def test_another_mixture_is_refused_on_resume() -> None:
    lengths, data = [5] * 10, DataSettings(20, 1, packing="wlb")
    shares = [StoreShare("a", 4, 1.0), StoreShare("b", 6, 1.0)]
    state = Planner(lengths, data, work, Mesh(), mixture=shares).state_dict()
    changed = [shares[0], shares[1]._replace(weight=2.0)]
    with pytest.raises(ValueError, match=r"mixture=.*'b', 6, 1.0.* in the saved state, .*6, 2.0"):
        Planner(lengths, data, work, mixture=changed).load_state_dict(state)
    with pytest.raises(ValueError, match=r"mixture=.* in the saved state, None here"):
        Planner(lengths, data, work).load_state_dict(state)
