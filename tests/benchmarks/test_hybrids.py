"""The benchmark of hybrids plans by the right costs."""

from benchmarks.hybrids import SHAPES, compare
from lightning_wlb.cost.profile import Profile


def test_planning_by_attention_is_the_same_where_all_layers_attend():
    result = compare(Profile.load("h100"), steps=1)
    assert result["attention"]["over_auto"]["auto by attention"] == 1
    assert result["hybrid"]["over_auto"]["auto"] == 1
    assert result["hybrid"]["over_auto"]["auto by attention"] >= 1
    assert result["hybrid"]["attention_share"] < result["attention"]["attention_share"] / 2
    assert SHAPES["hybrid"].recurrent
