from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.cost.flops import Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Piece
from lightning_wlb.planning.dp_merge import Dealing, most_sharers
from tests.planning.test_slicing import LINEAR, pieces_of


def test_without_large_pieces_it_deals_longest_first():
    merged = Dealing(pieces_of([10, 9, 8, 3, 2, 2]), 2, LINEAR, 1).merged
    assert merged.shared == []
    assert [[piece.tokens for piece in own] for own in merged.own] == [[10, 3, 2, 2], [9, 8]]
    assert merged.loads == [17, 17]


def test_a_piece_above_the_capacity_is_shared_by_as_few_as_suffice():
    lengths = [150, 90] + [10] * 16  # capacity 100
    merged = Dealing(pieces_of(lengths), 4, LINEAR, 1).merged
    assert merged.shared == [(Piece(0, 0, 150, 0), (0, 1))]
    # Half of 165 each, 90 and nothing, and then sixteen times 10.
    assert merged.loads == [102, 102, 110, 100]
    by_four = Dealing(pieces_of([250] + [10] * 15), 4, LINEAR, 1).merged
    assert by_four.shared[0][1] == (0, 1, 2, 3)


def test_a_smaller_share_merges_more_over_more():
    pieces = pieces_of([150, 90, *[10] * 16])
    assert Dealing(pieces, 4, LINEAR, 0).merged.shared == []
    halves = Dealing(pieces, 4, LINEAR, 2).merged.shared
    assert [members for _, members in halves] == [(0, 1, 2, 3), (0, 1)]


def test_the_overhead_counts():
    merged = Dealing(pieces_of([160, 80, *[10] * 16]), 4, LINEAR, 1).merged
    assert sum(merged.loads) == 400 + 16


@given(
    st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 12), st.sampled_from([0, 1, 2, 8])
)
def test_sets_are_aligned_and_in_one_order(lengths, replicas, per_capacity):
    pieces = pieces_of(lengths)
    merged = Dealing(pieces, replicas, LINEAR, per_capacity).merged
    dealt = [piece for piece, _ in merged.shared] + [piece for own in merged.own for piece in own]
    assert sorted(dealt) == sorted(pieces)
    sizes = [len(members) for _, members in merged.shared]
    assert sizes == sorted(sizes, reverse=True)
    for _, members in merged.shared:
        size = len(members)
        assert size & (size - 1) == 0
        assert members[0] % size == 0
        assert members[-1] < replicas
    # What comes before a shared piece is the same for all that share it.
    for at, (_, members) in enumerate(merged.shared):
        before = {
            tuple(piece for piece, other in merged.shared[:at] if replica in other)
            for replica in members
        }
        assert len(before) == 1


def test_a_piece_that_one_replica_cannot_hold_is_shared_by_as_many_as_hold_it():
    pieces = pieces_of([150, 90, *[10] * 16])
    held = Dealing(pieces, 4, LINEAR, 0, most_tokens=75).merged.shared
    assert held == [(Piece(0, 0, 150, 0), (0, 1)), (Piece(1, 0, 90, 0), (2, 3))]
    assert Dealing(pieces, 4, LINEAR, 0, most_tokens=74).merged.shared[0][1] == (0, 1, 2, 3)
    # No four replicas hold it: all that there are.
    assert Dealing(pieces, 4, LINEAR, 0, most_tokens=10).merged.shared[0][1] == (0, 1, 2, 3)


def test_pieces_are_dealt_beside_work_that_replicas_are_taken_to_have():
    merged = Dealing(pieces_of([4, 3, 2, 1]), 2, LINEAR, 0, handicaps=[-6, 2]).merged
    assert [[piece.tokens for piece in own] for own in merged.own] == [[4, 3, 2], [1]]
    assert merged.loads == [9, 1]


def test_long_pieces_stay_where_they_are_dealt_without_that_work():
    pieces = pieces_of([50, 49, 40, 39, 8, 6, 4, 2, 2])
    before = Dealing(pieces, 2, LINEAR, 0).merged
    after = Dealing(pieces, 2, LINEAR, 0, handicaps=[5, -5]).merged
    assert [[piece.tokens for piece in own] for own in before.own] == [
        [50, 39, 8, 2, 2],
        [49, 40, 6, 4],
    ]
    assert [[piece.tokens for piece in own] for own in after.own] == [
        [50, 39, 4, 2],
        [49, 40, 8, 6, 2],
    ]
    assert after.loads == [95, 105]


def test_no_more_replicas_share_a_piece_than_divide_the_heads_of_recurrences():
    work = Work(LINEAR, LINEAR, recurrent_heads=12)
    assert most_sharers(work, Mesh(data=8)) == 4
    assert most_sharers(work, Mesh(data=8, context=2)) == 2
    assert most_sharers(work, Mesh(data=8, context=2, tensor=2)) == 1
    assert most_sharers(work, Mesh(data=8, context=5)) == 1
    assert most_sharers(Work(LINEAR, LINEAR), Mesh(data=8)) == 8
    pieces = pieces_of([250] + [10] * 15)
    assert Dealing(pieces, 4, LINEAR, 1, sharers=2).merged.shared[0][1] == (0, 1)
    assert Dealing(pieces, 4, LINEAR, 1, sharers=1).merged.shared == []
