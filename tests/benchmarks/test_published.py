"""The comparison with published measurements: its arithmetic, its tables, and what it wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import CLASSES, ROLES, Fact, Source, drawn, facts, fits, kernels, sources
from benchmarks.published.__main__ import errors, is_rate, page, picture, summaries, summary
from benchmarks.published.attention import predict
from lightning_wlb.cost.profile import Profile, shipped_profiles

RESULT = json.loads(
    (Path(fits.__file__).parents[1] / "results" / "published.json").read_text(encoding="utf-8")
)
SOME = Source("a/b", "A", "https://a/b", "2026-01-01", "", False, "judge")


def fact(unit: str, value: float = 1.0, **sizes: object) -> Fact:
    return Fact("attention", SOME, "judge", value, unit, {k: str(v) for k, v in sizes.items()})


@pytest.mark.parametrize("kind", CLASSES)
def test_every_fact_has_a_source_that_can_be_opened(kind: str) -> None:
    every = facts(kind)
    assert every
    for each in every:
        assert each.source.url.startswith("https://")
        assert each["where"]
        assert each["device"]
        assert each.role in ROLES
        assert each.value > 0
        assert each["profile"] in shipped_profiles()


def test_sources_are_dated_and_used_and_the_lot_is_the_rule_s() -> None:
    used = {each.source.id for kind in CLASSES for each in facts(kind)}
    assert used == set(sources())
    for each in sources().values():
        year, month, day = map(int, each.date.split("-"))
        assert year >= 2020
        assert 1 <= month <= 12
        assert 1 <= day <= 31
    assert {each.id for each in sources().values() if each.role == "lot"} == drawn()
    lots = [each for kind in CLASSES for each in facts(kind) if each.source.role == "lot"]
    assert {each.role for each in lots} == {"lot"}


def test_errors_are_of_times() -> None:
    assert is_rate(fact("TFLOP/s"))
    assert is_rate(fact("tokens/s/GPU"))
    assert not is_rate(fact("ms"))
    rows = [
        {"class": "steps", "role": "judge", "source": name, "ratio": ratio, "profile": "h100-fa2"}
        for name, ratio in (("a", 0.9), ("a", 1.0), ("b", 1.2))
    ]
    found = summary(rows)
    assert (found["points"], found["sources"]) == (3, 2)
    assert (found["lowest"], found["median"], found["highest"]) == (0.9, 1.0, 1.2)
    assert found["median_error"] == pytest.approx(0.1)
    assert found["worst_error"] == pytest.approx(0.2)
    # The standard deviation of -0.105, 0 and 0.182.
    assert found["spread"] == pytest.approx(0.1188, abs=1e-4)
    fitted = {**rows[0], "role": "fit", "ratio": 3.0}
    unlike = {**rows[0], "unlike": "another kernel", "ratio": 0.1}
    every = [*rows, fitted, unlike]
    assert list(summaries(every)) == ["steps, judge", "steps, fit", "steps, judge, not comparable"]
    assert errors(every, "h100") == {"whole steps": 0.1}
    assert errors(every, "h200") == {}


def test_a_figure_in_tflops_counts_half_of_the_square() -> None:
    sizes = {
        "profile": "h100", "pass": "both", "documents": 2, "queries": 4096, "keys": 4096,
        "heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": "",
    }  # fmt: skip
    ms = predict(fact("ms", **sizes))
    flops = 3.5 * 2 * 32 * 4 * 128 * 4096**2 / 2
    assert predict(fact("TFLOP/s", **sizes)) == pytest.approx(flops / ms / 1e9)
    assert predict(fact("ms", **{**sizes, "window": 512})) < ms


def test_memory_bound_kernels_run_at_the_bandwidth_and_products_at_the_rate_of_their_rows() -> None:
    profile = Profile.load("h100")
    of = {"profile": "h100", "bytes": 3015, "rows": 65536, "inputs": 8192, "outputs": 8192}
    rate = profile.element_bytes_per_second
    assert kernels.predict(fact("GB/s", work="stream", **of)) == rate / 1e9
    assert kernels.predict(fact("ms", work="stream", **of)) == pytest.approx(3015e3 / rate)
    assert kernels.predict(fact("GB/s", work="eager", **of)) == pytest.approx(
        rate / 1e9 / profile.eager_factor
    )
    assert kernels.predict(fact("TFLOP/s", work="product", **of)) == pytest.approx(
        profile.layer.forward[-1] / 1e12
    )


def test_a_fit_finds_the_overhead_and_the_unit_that_calls_were_made_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    for tokens in (1024, 4096):
        count = tokens // 128
        read = count * (count + 1) / 2
        waiting = 132 * (count - (count + 1) / 2) / 2
        ns = 8000 + 12.0 * (50 * (3 * count + read) + waiting)
        sizes = {"pass": "forward", "queries": tokens, "documents": 1, "heads": 50}
        one = fact("ms", ns / 1e6, profile="h100", head_dim=128, **sizes)
        made.append(replace(one, role="fit"))
    monkeypatch.setattr(fits, "facts", lambda kind: made)
    found = fits.fit("h100", 128, backward=False)
    assert found.overhead == pytest.approx(3)
    assert found.unit_ns == pytest.approx(12)
    # One tile alone: an overhead and one key tile.
    rate = fits.rates(found, 128, backward=False, single=1.0)[0][0]
    assert rate == pytest.approx(4 * 128 * 128 * 129 / 2 / (12e-9 * 4), rel=1e-6)


@pytest.mark.parametrize("name", ["h100", "h100-fa2"])
def test_the_shipped_rates_are_those_of_the_fits(name: str) -> None:
    attention, _ = fits.tables(name)
    for other in (name, name.replace("h100", "h200")):
        for table, shipped in zip(attention, Profile.load(other).attention, strict=True):
            for way in ("forward", "backward"):
                for made, kept in zip(getattr(table, way), getattr(shipped, way), strict=True):
                    assert kept == pytest.approx(made, rel=1e-5)


def test_profiles_and_page_say_what_the_kept_result_says(tmp_path: Path) -> None:
    for name in ("h100", "h100-fa2", "h200", "h200-fa2"):
        profile = Profile.load(name)
        assert profile.errors == errors(RESULT["rows"], name)
        for work, error in profile.errors.items():
            assert f"{error:.0%} ({work})" in profile.accuracy
    assert Profile.load("cpu").accuracy == ""
    assert RESULT["summary"] == summaries(RESULT["rows"])
    assert sum(each["points"] for each in RESULT["summary"].values()) == sum(
        len(facts(kind)) for kind in CLASSES
    )
    text = page(RESULT)
    for each in (RESULT["summary"], RESULT["before"]):
        for group, found in each.items():
            assert f"| {group} | {found['points']} |" in text
    picture(RESULT["rows"], tmp_path / "published.png")
    assert (tmp_path / "published.png").stat().st_size > 10_000
