"""The loops that fill packs with slices: the part of :mod:`~.slicing` that numba can compile.

Pieces go by number, 1, 2, ... by ascending length. Those that wait are found through two forests:
every number's way to the nearest one that waits, downwards (0: none) and upwards (P + 1: none).

Cost: O(log P) for each slice of P pieces, and O(P) for a pack where the token cap binds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from lightning_wlb.planning.compiled import compiled, count_below, count_up_to, integers

OPEN_GAPS = 400  # a gap below target / OPEN_GAPS stays open
UNBOUNDED = 1 << 40  # tokens; a window that no piece fills
_BITS = 62  # that an integer of numba holds


class Rule(NamedTuple):
    """What slices must be.

    Attributes:
        linear: work of a token, see :func:`prefix_work`.
        pair: of a query and a key.
        window: most keys that a query sees.
        cap: most tokens of a pack.
        tile: cut positions are multiples of it from the piece's origin.
        least: tokens of the shortest slice, but for whole pieces.
    """

    linear: int
    pair: int
    window: int
    cap: int
    tile: int
    least: int


class Filled(NamedTuple):
    """Slices in the order of packs, in tokens from their piece's origin.

    Attributes:
        pieces: number of each one's piece.
        starts: where it begins.
        stops: where it ends.
        ends: slices up to the end of each pack.
    """

    pieces: list[int]
    starts: list[int]
    stops: list[int]
    ends: list[int]


def fill(tokens: Sequence[int], shares: Sequence[int], rule: Rule) -> Filled:
    """Packs of pieces.

    Args:
        tokens: of each piece, ascending; at least one.
        shares: relative work of each pack; their sum below 2^40.
        rule: for the slices.
    """
    works = [prefix_work(rule.linear, rule.pair, rule.window, each) for each in tokens]
    excess = sum(works).bit_length() - _BITS
    if excess > 0:  # for the integers of numba: these bits are left out
        rule = rule._replace(linear=rule.linear >> excess, pair=rule.pair >> excess)
        works = [prefix_work(rule.linear, rule.pair, rule.window, each) for each in tokens]
    return Filled(*_fill(integers(tokens), integers(works), integers(shares), rule))


def prefix_work(linear: int, pair: int, window: int, tokens: int) -> int:
    """Work of a piece's first ``tokens`` tokens.

    Args:
        linear: of each token.
        pair: of each query and key that it sees.
        window: most keys that a query sees, its own included.
        tokens: of the prefix.
    """
    inside = min(tokens, window)
    return linear * tokens + pair * (inside * (inside + 1) // 2 + (tokens - inside) * window)


_prefix_work = compiled(prefix_work)


@compiled
def _prefix_tokens(rule: Rule, work: int) -> int:
    """The most tokens whose prefix has at most ``work``."""
    linear, pair, window = rule.linear, rule.pair, rule.window
    full = _prefix_work(linear, pair, window, window) if window < UNBOUNDED else -1
    if 0 <= full <= work:
        return window + (work - full) // (linear + pair * window)
    if pair == 0:
        return work // linear
    # The root in floating point is close; integers decide.
    half = linear / pair + 0.5
    found = int(sqrt(half * half + 2.0 * work / pair) - half)
    while _prefix_work(linear, pair, window, found) > work:
        found -= 1
    while _prefix_work(linear, pair, window, found + 1) <= work:
        found += 1
    return found


@compiled
def _part(whole: int, share: int, total: int) -> int:
    """``whole`` · ``share`` // ``total``, with no larger integer on the way."""
    return whole // total * share + whole % total * share // total


class _Waiting(NamedTuple):
    """The pieces, and each number's way to the nearest one that waits, itself included."""

    tokens: Sequence[int]
    works: Sequence[int]
    shorter: list[int]
    longer: list[int]


@compiled
def _nearest(way: list[int], number: int) -> int:
    """Follow the way from ``number`` to its end, and shorten it."""
    end = number
    while way[end] != end:
        end = way[end]
    while way[number] != end:
        way[number], number = end, way[number]
    return end


@compiled
def _append(waiting: _Waiting, made: Filled, piece: int, start: int, stop: int) -> None:
    """Put a slice into the pack; the piece waits no longer."""
    made.pieces.append(piece)
    made.starts.append(start)
    made.stops.append(stop)
    if start == 0:
        waiting.shorter[piece], waiting.longer[piece] = piece - 1, piece + 1


@compiled
def _pour(
    waiting: _Waiting, made: Filled, most: int, room: int, gap: int, slack: int, pieces: int
) -> tuple[int, int]:
    """Put whole pieces into the pack, at each turn the longest that fits.

    Args:
        waiting: what there is to take.
        made: gets the slices.
        most: the longest piece to take.
        room: tokens that fit.
        gap: work that fits.
        slack: what may be more, or missing.
        pieces: how many to take at most.

    Returns:
        Tokens and work that would still fit.
    """
    tokens, works, shorter, _ = waiting
    last = len(made.pieces) + pieces
    while gap > slack and len(made.pieces) < last:
        piece = _nearest(shorter, most)
        if piece == 0:
            break
        if tokens[piece - 1] > room or works[piece - 1] > gap + slack:
            most = min(count_up_to(tokens, room), count_up_to(works, gap + slack), piece - 1)
            continue
        _append(waiting, made, piece, 0, tokens[piece - 1])
        room -= tokens[piece - 1]
        gap -= works[piece - 1]
        most = piece - 1
    return room, gap


@compiled
def _sample(
    waiting: _Waiting, made: Filled, most: int, left: int, room: int, gap: int
) -> tuple[int, int]:
    """Put every ``left``-th piece up to number ``most`` into the pack: a part of all lengths.

    Returns:
        Tokens and work that would still fit.
    """
    tokens, works, shorter, _ = waiting
    piece = _nearest(shorter, most)
    place = left // 2
    while piece:
        after = _nearest(shorter, piece - 1)
        if place % left == 0 and tokens[piece - 1] <= room and works[piece - 1] <= gap:
            _append(waiting, made, piece, 0, tokens[piece - 1])
            room -= tokens[piece - 1]
            gap -= works[piece - 1]
        piece = after
        place += 1
    return room, gap


@compiled
def _stop(rule: Rule, tokens: int, start: int, gap: int, room: int) -> int:
    """Where a slice from ``start`` of a piece ends that fills a gap; 0 where none can."""
    before = _prefix_work(rule.linear, rule.pair, rule.window, start)
    wanted = _prefix_tokens(rule, before + gap) + rule.tile // 2
    stop = min(wanted, tokens - rule.least, start + room) // rule.tile * rule.tile
    return stop if stop >= start + rule.least else 0


@compiled
def _extend(
    waiting: _Waiting, made: Filled, first: int, piece: int, at: int, stop: int
) -> tuple[int, int]:
    """Put tokens from ``at`` to ``stop`` of a piece into the pack that begins with slice ``first``.

    Returns:
        The piece, and where its rest begins; zeros if there is none.
    """
    place = first
    while place < len(made.pieces) and made.pieces[place] != piece:
        place += 1
    if place < len(made.pieces):  # one slice of a piece in a pack
        made.stops[place] = stop
    else:
        _append(waiting, made, piece, at, stop)
    return (piece, stop) if stop < waiting.tokens[piece - 1] else (0, 0)


@compiled
def _fill(tokens: Sequence[int], works: Sequence[int], shares: Sequence[int], rule: Rule) -> Filled:
    """:func:`fill`, told the work of each piece."""
    count, packs, total = len(tokens), len(shares), 0
    waiting = _Waiting(tokens, works, list(range(count + 2)), list(range(count + 2)))
    made = Filled([0][:0], [0][:0], [0][:0], [0][:0])
    largest = 0
    for share in shares:
        total += share
        largest = max(largest, share)
    rest_work, rest_tokens = 0, 0
    for piece in range(count):
        rest_work += works[piece]
        rest_tokens += tokens[piece]
    short = count_up_to(works, _part(rest_work, largest, total))  # up to the work of a pack
    cuttable = count_below(tokens, 2 * rule.least)
    cut, at = 0, 0  # the piece of which only a part is placed, and where its rest begins
    for pack in range(packs):
        first, left = len(made.pieces), packs - pack
        target = _part(rest_work, shares[pack], total)
        slack = target // OPEN_GAPS
        # What the packs after this one cannot hold, whatever its work.
        owed = rest_tokens - (left - 1) * rule.cap
        room, gap = rule.cap, target
        tight = 2 * owed > rule.cap
        if tight:  # short pieces in every pack, not the shortest of all in the last one
            room, gap = _sample(waiting, made, short, left, room, gap)
        while gap > slack and room:
            opened = cut
            if cut == 0:
                longest = _nearest(waiting.shorter, count)
                if longest == 0:
                    break
                if works[longest - 1] > gap + slack and (tight or len(made.pieces) == first):
                    opened = longest
                else:
                    before = len(made.pieces)
                    room, gap = _pour(waiting, made, count, room, gap, slack, 1 if tight else count)
                    if len(made.pieces) > before:
                        continue
                    fits = min(count_up_to(works, gap + slack), count_up_to(tokens, room))
                    opened = _nearest(waiting.longer, max(fits, cuttable) + 1)
                    if opened > count:
                        break
            end = tokens[opened - 1]
            work = _prefix_work(rule.linear, rule.pair, rule.window, at)
            fits = end - at <= room and works[opened - 1] - work <= gap + slack
            stop = end if fits else _stop(rule, end, at, gap, room)
            if stop == 0:
                break
            room -= stop - at
            gap -= _prefix_work(rule.linear, rule.pair, rule.window, stop) - work
            cut, at = _extend(waiting, made, first, opened, at, stop)
            if cut:
                break
        while rule.cap - room < owed:
            missing = owed - (rule.cap - room)
            unused, unspent = _pour(waiting, made, count, missing, rest_work, 0, count)
            room -= missing - unused
            gap -= rest_work - unspent
            if unused:
                opened = cut if cut else _nearest(waiting.longer, 1)
                stop = min(at + unused, tokens[opened - 1])
                room -= stop - at
                gap -= _prefix_work(rule.linear, rule.pair, rule.window, stop)
                gap += _prefix_work(rule.linear, rule.pair, rule.window, at)
                cut, at = _extend(waiting, made, first, opened, at, stop)
        made.ends.append(len(made.pieces))
        rest_work -= target - gap
        rest_tokens -= rule.cap - room
        total -= shares[pack]
    return made
