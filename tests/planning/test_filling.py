from itertools import pairwise

from lightning_wlb.planning.filling import UNBOUNDED, Rule, fill

RULE = Rule(linear=7, pair=2, window=UNBOUNDED, cap=4000, tile=100, least=200)


def packs_of(made):
    slices = list(zip(made.pieces, made.starts, made.stops, strict=True))
    return [slices[first:end] for first, end in pairwise([0, *made.ends])]


def test_long_piece_over_packs_and_its_gap():
    """Without attention: piece 3 takes two packs; the short ones share the gap of the third."""
    made = fill([200, 700, 2600], [1, 1, 1], RULE._replace(linear=1, pair=0))
    assert packs_of(made) == [
        [(3, 0, 1200)],
        [(3, 1200, 2400)],
        [(3, 2400, 2600), (2, 0, 700), (1, 0, 200)],
    ]


def test_work_of_more_bits_than_an_integer_of_numba():
    """It is counted in coarser units: 80 bits more, and a rest, make the same packs."""
    tokens = sorted([3900, 2500, 1700, 900, 850, 600, 450, 300, 120, 70, 33, 5])
    small = fill(tokens, [1] * 5, RULE)
    large = RULE._replace(linear=(7 << 80) + 12345, pair=(2 << 80) + 54321)
    assert fill(tokens, [1] * 5, large) == small
    assert sum(small.stops) - sum(small.starts) == sum(tokens)
