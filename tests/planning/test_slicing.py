from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.plan import Piece, Slice, StepPlan
from lightning_wlb.planning.dp_merge import Dealing
from lightning_wlb.planning.replica_plans import replica_plan
from lightning_wlb.planning.slicing import cut_apart, pack_shares, share_packs, slice_pieces

SHAPE = ModelShape(4096, 1, 32, 32, 128, 11008, 0)
LLAMA2_7B_LAYER = Work.of(SHAPE)
WORK = LLAMA2_7B_LAYER.total
LINEAR = PassWork(1, 0)


def pieces_of(lengths):
    return [Piece(document, 0, length, 0) for document, length in enumerate(lengths)]


def load(pack, work=WORK):
    return sum(work(part.context + part.tokens) - work(part.context) for part in pack)


def plan_of(pieces, packs_of_replicas, cap):
    return StepPlan(
        step=0,
        epoch=0,
        replicas=tuple(
            replica_plan(packs, number, "per_document")
            for number, packs in enumerate(packs_of_replicas)
        ),
        pieces=tuple(sorted(pieces)),
        target_tokens=0,
        cap=cap,
        micro_batches=4,
        nominal_tokens=4 * cap,
    )


@pytest.mark.parametrize("stages", [2, 8, 16, 64])
def test_taper_of_deep_pipelines(stages):
    """Large work is counted as finely as the shares of many tapered packs ask for."""
    work = Work.of(ModelShape(8192, 80, 64, 8, 128, 28_672, 128_256)).total
    pieces = pieces_of([131_072] * 6 + [40_000] * 12 + [4_000] * 150 + [700] * 400)
    packs = slice_pieces(pieces, 96, 131_072, work, taper=stages - 1)
    shares = pack_shares(96, stages - 1)
    target = sum(work(piece.tokens) for piece in pieces) / sum(shares)
    loads = [load(pack, work) for pack in packs]
    assert max(loads) <= 1.03 * target * shares[0]
    assert min(loads[: 96 - min(stages - 1, 24)]) >= 0.97 * target * shares[0]


def test_long_piece_over_packs_and_its_gap():
    """Without attention: document 2 takes two packs; the others share the gap of the third."""
    packs = slice_pieces(pieces_of([200, 700, 2600]), 3, 4000, LINEAR, tile=100, least=200)
    assert packs == [
        [Slice(2, 0, 0, 1200)],
        [Slice(2, 0, 1200, 2400)],
        [Slice(2, 0, 2400, 2600), Slice(1, 0, 0, 700), Slice(0, 0, 0, 200)],
    ]


def test_slim_mix_and_pack():
    """Document 0 is slimmed; the gap behind it takes the largest that fits; the rest is packed."""
    packs = slice_pieces(pieces_of([2600, 700, 500, 200]), 4, 4000, LINEAR, tile=100, least=300)
    assert packs == [
        [Slice(0, 0, 0, 1000)],
        [Slice(0, 0, 1000, 2000)],
        [Slice(0, 0, 2000, 2600), Slice(3, 0, 0, 200)],
        [Slice(1, 0, 0, 700), Slice(2, 0, 0, 500)],
    ]


def test_cuts_are_at_tiles_from_the_origin():
    piece = Piece(3, 1000, 1000 + 100_000, 0)
    packs = slice_pieces([piece], 4, 100_000, WORK)
    assert [pack[0].start - 1000 for pack in packs] == [0, 42_112, 65_792, 84_352]
    loads = [load(pack) for pack in packs]
    assert max(loads) * 4 < sum(loads) * 1.005


def test_no_slice_is_shorter_than_the_least():
    assert slice_pieces(pieces_of([1000]), 4, 4000, WORK) == [[Slice(0, 0, 0, 1000)]]
    assert slice_pieces(pieces_of([1024]), 4, 4000, WORK, tile=1) == [
        [Slice(0, 0, 0, 512)],
        [Slice(0, 0, 512, 1024)],
    ]


def test_more_packs_where_the_cap_needs_them():
    packs = slice_pieces(pieces_of([3000, 3000]), 2, 1000, WORK)
    assert [sum(part.tokens for part in pack) for pack in packs] == [1000] * 6


def test_dense_slices_never_leave_too_many_tokens_for_the_last_packs():
    lengths = [100_000] + [500] * 300
    packs = slice_pieces(pieces_of(lengths), 4, 63_000, WORK)
    assert len(packs) == 4
    assert max(sum(part.tokens for part in pack) for pack in packs) <= 63_000


def test_the_last_pack_reaches_its_work_under_the_cap():
    """The shortest pieces, of little work for their tokens, are not all left for it."""
    lengths = [120_000, 118_000, 62_000] + [int(6799 * 0.97**place) for place in range(150)]
    packs = slice_pieces(pieces_of(lengths), 8, 131_072, WORK)
    loads = [load(pack) for pack in packs]
    assert len(packs) == 8
    assert max(loads) * 8 < sum(loads) * 1.005
    assert max(sum(part.tokens for part in pack) for pack in packs) <= 131_072
    assert sum(map(len, packs)) - len(lengths) <= 7


def test_a_long_piece_starts_in_a_fresh_pack():
    lengths = [60_000, 50_000] + [1000] * 80 + [100] * 200
    packs = slice_pieces(pieces_of(lengths), 12, 131_072, WORK)
    for document in (0, 1):
        first = next(pack for pack in packs if any(part.document == document for part in pack))
        assert [part.document for part in first] == [document]


@given(
    st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), max_size=40),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(100, 3000),
    st.sampled_from([(1, 1), (8, 16), (128, 512)]),
    st.sampled_from([WORK, LINEAR, PassWork(1, 50)]),
)
def test_every_plan_is_valid(lengths, packs, replicas, cap, grain, work):
    tile, least = grain
    pieces = pieces_of(lengths)
    dealt = Dealing(pieces, replicas, work, 0).merged.own
    made = [slice_pieces(own, packs, cap, work, tile=tile, least=least) for own in dealt]
    plan_of(pieces, made, cap).validate()
    for own, of_replica in zip(dealt, made, strict=True):
        assert all(of_replica)
        assert len(of_replica) <= max(packs, -(-sum(piece.tokens for piece in own) // cap))
        # Only the cap may force a slice that is off the tiles or short.
        if sum(lengths) <= cap:
            for part in (part for pack in of_replica for part in pack):
                whole = part.tokens == lengths[part.document]
                assert part.start % tile == 0
                assert whole or part.tokens >= least


def test_tapered_packs_at_the_end():
    """A quarter at most, each with 5/6 of the work of the one before."""
    lengths = [6] * 72 + [5] * 36 + [1] * 6
    pieces = pieces_of(lengths)
    packs = slice_pieces(pieces, 8, 10_000, LINEAR, tile=1, least=1, taper=5)
    loads = [load(pack, LINEAR) for pack in packs]
    total = sum(lengths)
    whole = total * 36 / (6 * 36 + 30 + 25)
    assert loads == pytest.approx([whole] * 6 + [whole * 5 / 6, whole * 25 / 36], abs=1.5)
    equal = slice_pieces(pieces, 3, 10_000, LINEAR, tile=1, least=1, taper=5)
    assert [load(pack, LINEAR) for pack in equal] == [total // 3] * 3


def test_deterministic_whatever_the_order():
    lengths = [5000, 100, 100, 7000, 100, 2000]
    pieces = pieces_of(lengths)
    assert slice_pieces(pieces, 5, 9000, WORK) == slice_pieces(pieces[::-1], 5, 9000, WORK)


def test_packs_of_a_replica_by_its_work():
    assert share_packs([10, 10], 8, 20) == [4, 4]
    assert share_packs([30, 10], 8, 40) == [6, 2]
    assert share_packs([100, 1, 0], 8, 101) == [8, 1, 0]
    assert share_packs([0, 0], 8, 0) == [0, 0]


def test_long_pieces_get_slices_of_equal_work_and_short_ones_fill_up():
    packs = cut_apart(pieces_of([400, 200, 60, 30]), 7, 400, LINEAR, tile=1, least=1)
    assert packs == [
        [Slice(0, 0, 0, 100)],
        [Slice(0, 0, 100, 200)],
        [Slice(0, 0, 200, 300)],
        [Slice(0, 0, 300, 400)],
        [Slice(1, 0, 0, 100)],
        [Slice(1, 0, 100, 200)],
        [Slice(2, 0, 0, 60), Slice(3, 0, 0, 30)],
    ]


def test_the_last_micro_batches_without_slices_are_tapered():
    packs = cut_apart(pieces_of([1] * 1000), 8, 400, LINEAR, taper=2)
    sizes = [len(pack) for pack in packs]
    assert sizes[:6] == [max(sizes)] * 6 or max(sizes[:6]) - min(sizes[:6]) == 1
    assert [round(size * 100 / sizes[0]) for size in sizes[6:]] == [83, 69]


def test_more_micro_batches_where_pieces_do_not_fit_so_few():
    packs = cut_apart(pieces_of([60] * 5), 2, 100, LINEAR, tile=1, least=100)
    assert [sum(part.tokens for part in pack) for pack in packs] == [60] * 5


@given(
    st.lists(st.integers(1, 900), max_size=25),
    st.integers(1, 40),
    st.integers(0, 4),
    st.integers(0, 3),
)
def test_every_token_once_and_one_cut_piece_at_most_in_each(lengths, count, pairs, taper):
    pieces = pieces_of(lengths)
    packs = cut_apart(pieces, count, 900, PassWork(3, pairs), tile=8, least=20, taper=taper)
    parts = [part for pack in packs for part in pack]
    assert all(packs)
    assert max((sum(part.tokens for part in pack) for pack in packs), default=0) <= 900
    cuts = Counter(part.document for part in parts)
    for piece in pieces:
        stops = [0]
        for at, pack in enumerate(packs):
            for part in pack:
                if part.document == piece.document:
                    assert part.start == stops[-1]
                    stops.append(part.stop)
                    last = at
        assert stops[-1] == piece.tokens
        if cuts[piece.document] > 1:  # its micro-batches follow one another
            first = last - cuts[piece.document] + 1
            assert all(
                piece.document in {p.document for p in packs[at]} for at in range(first, last + 1)
            )
    assert all(sum(cuts[part.document] > 1 for part in pack) <= 1 for pack in packs)
