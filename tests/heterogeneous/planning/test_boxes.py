"""Boxes: what two of them have in common, cells of several, copies."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.heterogeneous.planning.sharded_layouts import (
    Regions,
    cells,
    copies,
    meet,
    regions,
)

SIDE = 4
ends = st.tuples(st.integers(0, SIDE), st.integers(0, SIDE)).map(sorted)
boxes = st.lists(st.tuples(ends, ends), max_size=5).map(
    lambda found: np.array(found, np.int64).reshape(-1, 2, 2)
)


def filled(box: np.ndarray) -> np.ndarray:
    mask = np.zeros((SIDE, SIDE), bool)
    mask[tuple(slice(*each) for each in box)] = True
    return mask


def made(of: np.ndarray) -> Regions:
    return regions(np.arange(len(of)), np.arange(len(of)) % 2, of)


@settings(max_examples=30)
@given(boxes, boxes)
def test_boxes_meet_where_both_are(own: np.ndarray, need: np.ndarray) -> None:
    first, second = made(own), made(need)
    found = meet(first, second)
    pairs = {(a, b): box for a, b, box in zip(found.own, found.need, found.box, strict=True)}
    assert len(pairs) == len(found.own)
    for a in range(len(first.rank)):
        for b in range(len(second.rank)):
            both = filled(first.box[a]) & filled(second.box[b])
            if first.parameter[a] != second.parameter[b] or not both.any():
                assert (a, b) not in pairs
            else:
                np.testing.assert_array_equal(filled(pairs[a, b]), both)


@settings(max_examples=30)
@given(boxes)
def test_cells_cover_the_same_without_overlap_and_no_box_in_part(of: np.ndarray) -> None:
    kept = made(of)  # without empty boxes
    if len(kept.box) == 0:
        return
    found = [filled(cell) for cell in cells(kept.box)]
    np.testing.assert_array_equal(
        np.sum(found, axis=0), np.logical_or.reduce([filled(box) for box in kept.box])
    )
    for cell in found:
        for box in map(filled, kept.box):
            assert (cell & box).any() == (cell & box == cell).all()


def test_copies_have_a_number() -> None:
    box = np.array([[[0, 2]], [[0, 2]], [[2, 4]], [[0, 2]], [[0, 0]]])
    of = regions(np.array([0, 1, 0, 1, 2]), np.array([0, 0, 0, 1, 1]), box)
    assert len(of.rank) == 4  # an empty box is none
    number = copies(of)
    assert number[0] == number[1]
    assert len({*number.tolist()}) == 3
