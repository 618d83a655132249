"""The benchmark of SlimPack's settings computes what it says."""

import pytest

from benchmarks.slimpack_paper import Case, markdown
from benchmarks.workloads import CORPORA, K
from lightning_wlb.cost.profile import Profile

H100 = Profile.load("h100")


def test_a_case_says_where_the_time_goes():
    row = Case("7B", 64 * K, CORPORA["github"], H100, samples=48).run(1, seed=1, per_rank=1)
    assert row["gain"] > 1
    for method in ("best_fit", "auto"):
        parts = ("work", "warm_up", "imbalance", "communication")
        assert sum(row[method][part] for part in parts) == pytest.approx(1)
    page = markdown({"provenance": H100.provenance, "steps": 1, "seed": 1, "rows": {"7B 64K": row}})
    assert f"| 7B 64K | {row['N']} | {row['gain']:.2f} |" in page
    assert "analytic" in page
