"""Pieces cut apart: nothing is lost, and no micro-batch holds slices of two of them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.flops import PassWork
from lightning_wlb.plan import Slice
from lightning_wlb.planning.slicing import cut_apart
from tests.planning.test_slicing import pieces_of

LINEAR = PassWork(1, 0)


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
