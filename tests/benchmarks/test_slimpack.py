"""The benchmark of slices computes what it says."""

import pytest

from benchmarks.slimpack import measure, replicas
from benchmarks.slimpack_plans import Step, whole_packs
from benchmarks.slimpack_tables import targets
from lightning_wlb.plan import Slice


def test_a_step_of_equal_micro_batches_by_hand():
    """Four of forward 1 and backward 2 on four ranks: (4 + 3) · 3 over 12."""
    step = Step([10] * 4, [20] * 4, [0, 1, 2, 3], [1, 2, 3, 4], [7] * 4, 120)
    assert step.imbalance == (1, 1, 1)
    assert step.simulate() == (7 / 4, 28)
    assert step.simulate(overhead=1)[0] == pytest.approx(7 / 4 * 32 / 30)
    assert step.simulate(2)[0] == pytest.approx((2 * 4 + 3) * 15 / 120)


def test_asymmetric_packs_as_whole_actions():
    a, b, c = Slice(0, 0, 0, 600), Slice(0, 0, 600, 1000), Slice(1, 0, 0, 500)
    step = whole_packs([[a], [b, c]], [[b], [a, c]])
    assert step.needs == [2, 2]
    assert step.tokens == [600, 900]
    assert step.work == sum(step.forward) + sum(step.backward)


def test_slices_beat_whole_pieces():
    rows = {f"4/{name}": method.row() for name, method in measure(4, 131_072, 4, [1]).items()}
    reached = targets({"4/slim 4·N": rows["4/slim 4·N"]})
    assert all(each.met for each in reached if "ms" not in each.name)
    assert rows["4/slim 4·N"]["step"] < rows["4/slim 2·N"]["step"] < rows["4/wlb"]["step"]
    assert rows["4/asymmetric 4·N, units"]["step"] > 1.1 * rows["4/slim 4·N"]["step"]


def test_many_replicas_are_as_good_as_one():
    ratios = replicas(131_072, 8, 1, [1, 4])
    assert ratios["4"] < 1.01 * ratios["1"]
