"""``lightning-wlb plan``: the table, its JSON, files, and answers to mistakes."""

import json
import re

import pytest

from lightning_wlb.cli.main import main
from lightning_wlb.cost.profile import Profile

SMALL = [
    "plan", "--lengths", "generator-a", "--model", "550m", "--mesh", "2,2,2,1",
    "--context-window", "8192", "--profile", "h100", "--steps", "6", "--packing", "original,wlb",
]  # fmt: skip


def answer(capsys: pytest.CaptureFixture[str], *changes: str) -> tuple[int, str, str]:
    """Exit code, output and errors; an option in ``changes`` replaces that of SMALL."""
    arguments = list(SMALL)
    pairs = list(changes)
    while pairs:
        option = pairs.pop(0)
        values = [pairs.pop(0)] if pairs and not pairs[0].startswith("--") else []
        if option in arguments:
            at = arguments.index(option)
            arguments[at + 1 : at + 2] = values
        else:
            arguments += [option, *values]
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def report_of(capsys: pytest.CaptureFixture[str], *changes: str) -> dict:
    """What it prints as JSON where all is well."""
    code, out, err = answer(capsys, *changes, "--json")
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def test_the_acceptance_command_prints_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        [
            "plan", "--lengths", "generator-a", "--model", "7b", "--mesh", "1,4,2,8",
            "--context-window", "131072", "--profile", "h100", "--packing", "original,wlb",
            "--steps", "40", "--json",
        ]
    )  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert report["simulated"] is True
    assert report["profile"]["measured"] is False
    original, best_fit, wlb = report["rows"]
    assert [row["packing"] for row in report["rows"]] == ["original", "best_fit", "wlb"]
    assert original["speedup_per_token"] == original["speedup_per_flop"] == 1
    assert wlb["imbalance_pipeline_aggregate"] < 1.1 < original["imbalance_pipeline_aggregate"]
    assert wlb["speedup_per_flop"] > 1.1
    assert original["delay_mean"] == 0 < wlb["delay_mean"] < 1
    assert original["tokens_per_step"] == 4 * 131072
    assert original["tokens_per_step_spread"] == 0 < wlb["tokens_per_step_spread"] < 0.5
    assert 0 < original["model_flop_utilisation"] < wlb["model_flop_utilisation"] < 0.6
    verdict = report["verdict"]
    assert (verdict["packing"], verdict["sharding"]) == ("wlb", "adaptive")
    gain = wlb["tokens_per_second"] / best_fit["tokens_per_second"]
    assert verdict["times_best_fit"] == gain > 1.05
    # The table repeats what it is.
    assert "analytic (published figures, not measured)" in out
    assert "Simulated" in out


def test_the_default_packing_is_compared_with_the_baseline_and_the_papers(capsys):
    arguments = [*SMALL[: SMALL.index("--packing")], "--json"]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["packing"] for row in rows] == ["original", "best_fit", "wlb", "auto"]
    assert rows[3]["speedup_per_flop"] > max(1, rows[1]["speedup_per_flop"])
    assert rows[3]["speedup_per_flop"] > rows[2]["speedup_per_flop"]
    assert rows[3]["delay_max"] == 0


def test_the_baseline_is_first_and_a_picture_is_drawn(capsys, tmp_path):
    picture, rows = tmp_path / "deep" / "p.png", {}
    for sharding in ("per_sequence", "per_document"):
        report = report_of(
            capsys, "--packing", "wlb", "--sharding", sharding, "--picture", str(picture)
        )
        assert report["sharding"] == sharding
        assert [row["packing"] for row in report["rows"]] == ["original", "best_fit", "wlb"]
        rows[sharding] = report["rows"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    degrees = [each[2]["imbalance_context_aggregate"] for each in rows.values()]
    assert degrees[0] > degrees[1]


def test_the_same_command_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    dtypes = ("float32", "float32", "bfloat16")
    reports = [
        answer(capsys, "--json", "--reduce-dtype", dtype)[1].splitlines()[-1] for dtype in dtypes
    ]
    assert reports[0] == reports[1]
    wide, narrow = (json.loads(each)["rows"][0]["step_ms_mean"] for each in reports[1:])
    assert narrow < wide
    compiled = answer(capsys, "--json", "--reduce-dtype", "bfloat16", "--compile")[1]
    assert json.loads(compiled.splitlines()[-1])["rows"][0]["step_ms_mean"] < narrow


def test_the_standard_library_needs_no_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--context-window", "16384", "--steps", "3"]
    assert report_of(capsys, "--lengths", "stdlib", *options)["documents"] > 500


def test_a_measured_profile_is_called_measured(capsys, tmp_path):
    path = tmp_path / "mine.json"
    text = Profile.load("h100").to_json().replace('"measured": false', '"measured": true')
    path.write_text(text.replace('"name": "h100"', '"name": "mine"'))
    code, out, _ = answer(capsys, "--profile", str(path), "--json")
    assert code == 0
    assert "analytic" not in out
    assert json.loads(out.splitlines()[-1])["profile"]["measured"] is True


def test_schedules_and_checkpointing(capsys: pytest.CaptureFixture[str]) -> None:
    steps = {}
    for name, options in {
        "1f1b": [],
        "interleaved": ["--schedule", "interleaved"],
        "full": ["--activation-checkpointing", "full"],
    }.items():
        report = report_of(capsys, *options, "--packing", "original")
        steps[name] = report["rows"][0]["step_ms_mean"]
        assert report["virtual_stages"] == (2 if name == "interleaved" else 1)
        share = 1.0 if name == "full" else 0.0
        assert report["rows"][0]["recomputed"] == share
    assert steps["full"] > steps["1f1b"]
    assert steps["interleaved"] != steps["1f1b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--profile", "v100"], "h200, h200-fa2) nor a file that can be read"),
        (["--precision", "32-true"], "made for dtype 'bfloat16', not for 'float32'"),
        (["--profile", "cpu", "--reduce-dtype", "bfloat16"], "round what is computed in float32"),
        (["--mesh", "2,2"], "data,pipeline,context,tensor, each a whole number"),
        (["--mesh", "0,2,2,1"], "data=0, but it must be at least 1"),
        (["--mesh", "1,2,1,5"], "tensor_parallel_size=5 does not divide"),
        (["--mesh", "1,17,1,1"], "16 layers cannot be split into 17 "),
        (["--lengths", "nowhere.txt"], "nowhere.txt is no file or folder"),
        (["--model", "8c"], "'8c' is none of the presets"),
        (["--model", "7b,layers=many"], "layers='many' is of type str. Give a whole"),
        (["--model", "7b,dime=64"], "no option 'dime'"),
        (["--packing", "best"], "--packing='best' is not one of original"),
        (["--steps", "0"], "--steps=0, but it must be at least 1"),
        (["--context-window", "0"], "context_window=0"),
        (["--micro-batches", "0"], "micro_batches=0, but it must be at least 1"),
        (["--cap", "100"], "cap=100 is below context_window"),
        (["--virtual-stages", "2"], "one stage a rank"),
        (["--schedule", "interleaved", "--virtual-stages", "9"], "split into 18 "),
    ],
)
def test_a_mistake_is_answered(capsys, changes, message):
    code, _, err = answer(capsys, *changes)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_lengths_above_the_window_are_answered_with_what_would_fit(capsys, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("100 9000 20000 " * 100)
    code, _, err = answer(capsys, "--lengths", str(path), "--long-documents", "error")
    assert code == 2
    assert "Document 1 has 9000 tokens" in err
    assert "context_window=8192, and long_documents='error'" in err
    assert answer(capsys, "--lengths", str(path))[0] == 0


BIG = ["--model", "7b", "--context-window", "1048576", "--packing", "original", "--steps", "2"]


@pytest.mark.parametrize(
    ("model", "mesh", "message"),
    [
        (["--model", "70b"], "1,1,1,8", "The model does not fit on the mesh"),
        (BIG, "1,4,2,1", "The run with packing best_fit does not fit"),
    ],
)
def test_what_does_not_fit_is_answered_with_meshes_on_which_it_does(capsys, model, mesh, message):
    code, _, err = answer(capsys, *model, "--mesh", mesh)
    assert code == 2
    assert message in err
    suggested = err.rpartition("--mesh auto")[2].partition(" finds")[0].split()
    _, _, err = answer(capsys, *model, "--packing", "auto", "--mesh", "auto", *suggested)
    assert re.search(r"With \d+ devices there is one\.", err)


TIGHT = ["--model", "7b", "--mesh", "1,4,2,8", "--context-window", "150000", "--steps", "5"]


def test_how_much_of_messages_is_behind_products_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = answer(capsys, *TIGHT, "--json")
    assert code == 0
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert all(0 < row["hidden_messages"] < 1 for row in rows)
    shares = ", ".join(f"{row['packing']} {row['hidden_messages']:.0%}" for row in rows)
    assert f"of tensor-parallel messages: {shares}." in " ".join(out.split())
    assert "Behind products" not in answer(capsys)[1], "nobody sends any"


def test_a_row_that_does_not_fit_is_named_beside_those_that_do(capsys):
    code, out, _ = answer(capsys, *TIGHT, "--activation-checkpointing", "none", "--json")
    assert code == 0
    report = json.loads(out.splitlines()[-1])
    # Windows of one length just fit; micro-batches of up to one and a half do not.
    assert [row["packing"] for row in report["rows"]] == ["original", "best_fit"]
    assert [row["packing"] for row in report["does_not_fit"]] == ["wlb"]
    assert report["does_not_fit"][0]["peak_gigabytes"] > 73.6
    assert "Does not fit in memory: wlb" in out


def test_each_plan_recomputes_as_little_as_fits(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, *TIGHT)
    shares = {row["packing"]: row["recomputed"] for row in report["rows"]}
    assert shares["original"] == shares["best_fit"] == 0 < shares["wlb"] < 0.5
    assert report["does_not_fit"] == []
    assert max(row["peak_gigabytes"] for row in report["rows"]) <= 73.6


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["plan", "--help"])
    assert error.value.code == 0
    out = capsys.readouterr().out
    words = ("generator-a", "h100", "adaptive", "wlb", "--picture", "interleaved", "70b")
    assert all(word in out for word in words)


def test_a_window_beyond_the_positions_of_a_config_is_told(capsys, tmp_path):
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    for positions, warned in ((8191, True), (8192, False)):
        given = {"model_type": "llama", **fields, "max_position_embeddings": positions}
        config.write_text(json.dumps(given))
        changes = ("--model", str(config), "--mesh", "2,1,1,1", "--steps", "1")
        code, _, err = answer(capsys, *changes)
        assert code == 0
        told = "Warning: context_window=8192, but the config was made for max_position_embeddings="
        assert (f"{told}{positions} positions." in err) == warned
