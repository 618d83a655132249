"""Recurrences over packed rows: their segments, their states between slices, and their ranks.

Linear attention, a state-space layer and a causal convolution carry a state from row to row, which
restarts with every piece, but goes on if a slice continues a piece:

* *Segments* are the pieces, or parts of pieces, of a micro-batch (:class:`RecurrentRows`).
* *States* at the end of a slice are left for the next slice of its piece, whose backward runs first
  and leaves the state's gradient for this one (:class:`RecurrentStates`).
* *Ranks that share the rows* cannot split a recurrence by rows. One all-to-all brings each rank its
  part of the heads (for a convolution: of the channels) of all rows (:func:`to_all_rows`); a second
  all-to-all brings the results back (:func:`to_own_rows`).

Cost: two all-to-alls in each pass if ranks share rows; a state for each sliced piece and layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_to_all_single

from lightning_wlb.attention.kv_cache import RecurrentStates, State
from lightning_wlb.distributed.collectives import padded
from lightning_wlb.distributed.process_groups import group_rank, group_size
from lightning_wlb.plan import Slice
from lightning_wlb.sharding import Layout
from lightning_wlb.sharding.integer_ranges import offsets, ranges


@dataclass(frozen=True)
class Segment:
    """Tokens ``[start, stop)`` of a piece, (document, origin), counted from its origin.

    ``goes_on`` says whether a later micro-batch has a further slice of the piece.
    """

    piece: tuple[int, int]
    start: int
    stop: int
    goes_on: bool


@dataclass(frozen=True)
class RecurrentRows:
    """The segments of a micro-batch, and where their rows lie on the ranks that share it."""

    segments: tuple[Segment, ...]  #: in the order in which a recurrence computes them
    counts: tuple[int, ...]  #: rows of each rank that hold a token
    #: int64 [sum of counts], for each row in the order of segments its index in the concatenated
    #: rows of all ranks; None if these are in the order of segments
    order: Tensor | None = None
    replicas: int = 1  #: data-parallel replicas whose context-parallel groups share the micro-batch
    #: the step's states, which ``MicroBatchTensors.with_cache`` fills in
    states: RecurrentStates | None = None

    @property
    def tokens(self) -> int:
        """Rows of all ranks that hold a token."""
        return sum(self.counts)


def recurrent_rows(
    layout: Layout, slices: Sequence[Slice], ends: Mapping[tuple[int, int], int], replicas: int
) -> RecurrentRows:
    """The segments of a micro-batch and where their rows lie.

    ``slices`` are in the layout's order; ``ends`` of sliced pieces: (document, origin) -> token.
    """
    pieces = dict.fromkeys(each[:2] for each in slices)
    number = {piece: index for index, piece in enumerate(pieces)}
    # The slices of each piece one after another, in the order of the piece's tokens.
    by = sorted(range(len(slices)), key=lambda i: (number[slices[i][:2]], slices[i].start))
    segments: list[Segment] = []
    for index in by:
        each = slices[index]
        piece, start, stop = each[:2], each.context, each.stop - each.origin
        goes_on = each.stop < ends.get(piece, 0)
        if segments and segments[-1].piece == piece and segments[-1].stop == start:
            segments[-1] = replace(segments[-1], stop=stop, goes_on=goes_on)
        else:
            segments.append(Segment(piece, start, stop, goes_on))
    place = np.empty(len(by), dtype=np.int64)
    place[by] = np.arange(len(by))
    _, document, first, last = layout.table.T
    rows = offsets(last - first)
    chunks = np.lexsort((first, place[document]))
    order = ranges(rows[:-1][chunks], (last - first)[chunks])
    counts = tuple(np.diff(rows[layout.first]).tolist())
    moved = not np.array_equal(order, np.arange(len(order)))
    return RecurrentRows(
        tuple(segments), counts, torch.from_numpy(order) if moved else None, replicas
    )


def to_all_rows(
    tensors: Sequence[Tensor], rows: RecurrentRows, group: ProcessGroup | None
) -> list[Tensor]:
    """Send and receive this rank's part of the heads of all rows, in the order of the segments.

    Args:
        tensors: [own rows, heads, ...] each, padding included; the group size divides ``heads``.

    Returns:
        [rows of all ranks, own heads, ...] each.
    """
    size = group_size(group)
    own = rows.counts[group_rank(group)]
    parts = [each[:own] for each in tensors]
    if size > 1 and rows.tokens:
        # Tensors of equal dtype are sent together.
        for dtype in dict.fromkeys(each.dtype for each in parts):
            places = [place for place, each in enumerate(parts) if each.dtype == dtype]
            sent = [parts[place].unflatten(1, (size, -1)).flatten(2) for place in places]
            every = _all_to_all(torch.cat(sent, 2), rows.counts, group, True)
            widths = [each.shape[2] for each in sent]
            for place, each in zip(places, every.split(widths, 1), strict=True):
                _, heads, *rest = parts[place].shape
                parts[place] = each.reshape(rows.tokens, heads // size, *rest)
    return parts if rows.order is None else [each.index_select(0, rows.order) for each in parts]


def to_own_rows(
    out: Tensor, padded_rows: int, rows: RecurrentRows, group: ProcessGroup | None
) -> Tensor:
    """The reverse, for one result: [rows of all, own heads, width] -> [own rows, heads, width].

    Rows of padding, up to ``padded_rows``, are zero.
    """
    if rows.order is not None:
        out = torch.empty_like(out).index_copy(0, rows.order, out)
    if group_size(group) > 1 and rows.tokens:
        sent = _all_to_all(out.flatten(1), rows.counts, group, False)
        out = sent.unflatten(2, out.shape[1:]).flatten(1, 2)
    return padded(out, padded_rows)


def _all_to_all(
    x: Tensor, counts: tuple[int, ...], group: ProcessGroup | None, to_all: bool
) -> Tensor:
    """[own rows, ranks, width] of every rank -> [rows of all ranks, width], or the reverse."""
    every, own = list(counts), [counts[group_rank(group)]] * len(counts)
    if to_all:
        parts = x.transpose(0, 1).flatten(0, 1).contiguous()
        return all_to_all_single(
            x.new_empty(sum(every), x.shape[2]), parts, every, own, group=group
        )
    out = all_to_all_single(
        x.new_empty(sum(own), x.shape[1]), x.contiguous(), own, every, group=group
    )
    return out.view(len(own), own[0], x.shape[1]).transpose(0, 1)


class SegmentRows(NamedTuple):
    """The input of a recurrence over segments."""

    inputs: Sequence[Tensor]  #: [rows of all segments, ...] each
    tokens: list[int]  #: tokens of each segment
    before: Sequence[State | None]  #: the state before each segment; None if its piece begins
    goes_on: Sequence[bool]  #: whether the state after each segment is needed


Computed = tuple[Tensor, Sequence[State | None]]
"""The result of a recurrence: [rows of all segments, ...], and the states that are needed."""

Compute = Callable[[SegmentRows], Computed]


def by_segment(
    rows: RecurrentRows, layer: Any, inputs: Sequence[Tensor], compute: Compute
) -> Tensor:
    """Run a recurrence over each segment's rows, from the state that the previous slice has left.

    Args:
        layer: a key that distinguishes this recurrence from others of the model.
        inputs: [rows of all ranks, ...] each, in the order of the segments.

    Returns:
        [rows of all ranks, ...].

    Raises:
        ValueError: a slice, without the step's states.
    """
    states, segments = rows.states, rows.segments
    if states is None and any(each.start or each.goes_on for each in segments):
        raise ValueError(
            "a sliced micro-batch needs the step's states: give the model"
            " micro_batch.with_cache(cache), as LanguageModule.step does."
        )
    before: list[State | None] = [None] * len(segments)
    for number, each in enumerate(segments):
        if states is not None and each.start:
            before[number] = states.take((layer, each.piece, each.start), inputs[0])
    tokens = [each.stop - each.start for each in segments]
    out, after = compute(SegmentRows(inputs, tokens, before, [each.goes_on for each in segments]))
    for each, state in zip(segments, after, strict=True):
        if states is not None and state is not None:
            out = states.leave((layer, each.piece, each.stop), out, state)
    return out


def one_by_one(compute: Compute) -> Compute:
    """A recurrence over several segments, made from a recurrence over a single segment."""

    def every(given: SegmentRows) -> Computed:
        parts = zip(*(each.split(given.tokens) for each in given.inputs), strict=True)
        results = [
            compute(SegmentRows(part, [tokens], [state], [wanted]))
            for part, tokens, state, wanted in zip(parts, *given[1:], strict=True)
        ]
        return torch.cat([out for out, _ in results]), [after[0] for _, after in results]

    return every
