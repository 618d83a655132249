"""Hydraulis' assignment keeps to its bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.mesh import Mesh
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.packing.hydraulis import pack_pipeline
from tests.planning.test_dealing import lower_bound
from tests.planning.test_packings import WORK
from tests.planning.test_slicing import LINEAR, pieces_of


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    stages=st.integers(1, 5),
    utilised=st.integers(1, 40),
)
def test_no_packing_is_below_the_bound(lengths, stages, utilised) -> None:
    packed = pack_pipeline(pieces_of(lengths), stages, 40, LINEAR, utilised=utilised)
    heaviest = max(sum(piece.tokens for piece in own) for own in packed)
    assert heaviest <= 40
    assert sorted(piece.tokens for own in packed for piece in own) == sorted(lengths)
    bound = lower_bound([[each] for each in lengths], range(len(lengths)), 0, stages)
    assert (stages - 1 + len(packed)) * heaviest >= bound


def test_the_method_deals_and_packs_for_the_mesh() -> None:
    """Two long documents go to different replicas, short ones to where the bound is low."""
    data = DataSettings(60, 4, packing="hydraulis", shuffle=False)
    lengths = [60, 60, *[10] * 12]
    plan = Planner(lengths, data, WORK, Mesh(data=2, pipeline=2)).next_step()
    assert plan is not None
    both = [sorted(part.tokens for part in replica.slices) for replica in plan.replicas]
    assert both == [[10] * 6 + [60]] * 2
    assert all(part.context == 0 for replica in plan.replicas for part in replica.slices)
