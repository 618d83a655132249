"""The benchmark of slices computes what it says."""

import pytest

from benchmarks.slimpack import Method, by_replicas, measure, merges, steps_of, stream_of
from benchmarks.slimpack_tables import targets
from benchmarks.workloads import REFERENCE_WORK
from lightning_wlb.plan import Slice
from lightning_wlb.planning.replica_plans import replica_plan


def test_a_step_of_equal_micro_batches_by_hand():
    """Four on four ranks: (4 + 3) times one of them, over four."""
    method = Method("equal", 1000)
    packs = [[Slice(number, 0, 0, 700)] for number in range(4)]
    method.add(replica_plan(packs, 0, "per_sequence"), 4)
    (step,) = method.steps
    assert (step["imbalance"], step["imbalance_forward"], step["imbalance_backward"]) == (1, 1, 1)
    assert step["step"] == 7 / 4
    assert (step["open_tokens"], step["micro_batches"], step["cuts"]) == (2.8, 4, 0)
    overhead = 2 * REFERENCE_WORK.forward.per_token * 10  # of a forward and a backward
    whole = REFERENCE_WORK.total(700)
    assert step["step_overhead"] == pytest.approx(7 / 4 * (whole + overhead) / whole)
    # Two stages of half the length on each rank.
    assert step["step_interleaved"] == pytest.approx((2 * 4 + 3) / 2 / 4)
    method.add(replica_plan(packs, 0, "per_sequence"), 3, interleaved=1.25)
    assert (method.steps[1]["step_interleaved"], method.steps[1]["cuts"]) == (1.25, 1)
    assert method.row()["step"] == method.row()["step_p99"] == 7 / 4


def test_global_batches_are_full():
    batches = steps_of(stream_of(4, 131_072, 4, seed=1), 4 * 131_072, 4)
    assert [sum(piece.tokens for piece in batch) for batch in batches] == [4 * 131_072] * 4
    assert [piece.document for batch in batches for piece in batch] == list(
        range(sum(map(len, batches)))
    )


def test_slices_beat_whole_pieces():
    rows = {f"4/{name}": method.row() for name, method in measure(4, 131_072, 4, [1]).items()}
    reached = targets({"4/slim 4·N": rows["4/slim 4·N"]})
    assert all(each.met for each in reached if "ms" not in each.name)
    assert rows["4/slim 4·N"]["step"] < rows["4/slim 2·N"]["step"] < rows["4/wlb"]["step"]


def test_many_replicas_are_as_good_as_one():
    ratios = by_replicas(131_072, 8, 1, [1, 4])
    assert ratios["4"] < 1.01 * ratios["1"]


def test_sharing_pieces_evens_replicas_out():
    made = merges(1_048_576, 1, 1)
    balance, times = made["balance"], made["T·DP/S"]
    assert balance["best alpha of each step"] <= 1.13 < balance["not merged"]
    assert times["auto"] < 0.5 * times["not merged"]
