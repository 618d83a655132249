"""The demo's results and picture: what is kept of a run, and what is drawn."""

import json

from benchmarks.demo import by_round, caption, main, summary


def figures() -> dict:
    times = {
        "original": [(60.0, 30.0, 0.2), (90.0, 40.0, 0.3)],
        "auto": [(50.0, 20.0, 0.02), (100.0, 40.0, 0.04)],
    }
    return {
        "rounds": {
            packing: [
                {
                    "microseconds_per_token": per_token,
                    "seconds_per_tflop": per_tflop,
                    "waiting": waiting,
                    "crowded": 0.25,
                }
                for per_token, per_tflop, waiting in of
            ]
            for packing, of in times.items()
        }
    }


RUN = {
    "rounds": 2,
    "crowded": 0.25,
    "original": {"waiting": [0.2, 0.3], "per_token": [1.2, 0.9], "per_flop": [1.5, 1.0]},
    "auto": {"waiting": [0.02, 0.04], "per_token": [1.0, 1.0], "per_flop": [1.0, 1.0]},
}


def test_ratios_are_taken_within_a_round_and_absolute_times_left_out():
    assert by_round(figures()) == RUN


def test_summary_of_runs():
    other = {**RUN, "original": {"waiting": [0.4], "per_token": [1.4], "per_flop": [2.0]}}
    assert summary([RUN, other], ["original"]) == {
        "original": {
            "waiting": {
                "medians_of_runs": [0.25, 0.4],
                "median_of_rounds": 0.3,
                "least_round": 0.2,
                "most_round": 0.4,
            },
            "per_token": {
                "medians_of_runs": [1.05, 1.4],
                "median_of_rounds": 1.2,
                "least_round": 0.9,
                "most_round": 1.4,
            },
            "per_flop": {
                "medians_of_runs": [1.25, 2.0],
                "median_of_rounds": 1.5,
                "least_round": 1.0,
                "most_round": 2.0,
            },
        }
    }


def test_the_sentences_of_the_readme():
    packings = ["original", "auto"]
    quiet = {**RUN, "crowded": 0.02, "rounds": 3}
    quiet["original"] = {"waiting": [0.2], "per_token": [1.01], "per_flop": [1.25]}
    runs = [quiet, quiet]
    said = caption({"packings": packings, "runs": runs, "summary": summary(runs, packings)})
    assert said == (
        "Medians of 2 runs of 3 rounds, as multiples of `auto`'s time: per token, `original` 1.01"
        " times (rounds 1.01 to 1.01); for equal work, `original` 1.25 times (rounds 1.25 to 1.25)."
        " Of its time a core waited for the busier one 20 % with `original`, 3 % with `auto`."
    )
    runs = [RUN, quiet]
    said = caption({"packings": packings, "runs": runs, "summary": summary(runs, packings)})
    assert said.startswith("Medians of 2 runs of 2 to 3 rounds, ")
    assert "per token, `original` 1.01 to 1.05 times (rounds 0.90 to 1.20)" in said
    assert said.endswith(
        "Other programs were running: a process was without a core 2 to 25 % of its time."
    )


# Stands for the demo, which tests/test_examples.py runs: leaves its figures where it is told to.
DEMO = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--output") + 1])
assert sys.argv[-2:] == ["--rounds", "2"]
(folder / "figures.json").write_text(json.dumps({figures!r}))
"""


def test_a_run_is_kept_and_drawn_again(tmp_path, capfd, monkeypatch):
    script, result, picture = (tmp_path / name for name in ("demo.py", "demo.json", "gain.png"))
    script.write_text(DEMO.format(figures=figures()))
    monkeypatch.setattr("benchmarks.demo.DEMO", script)
    kept = ["--result", str(result), "--picture", str(picture)]
    main(["--runs", "2", *kept, "--rounds", "2"])
    written = json.loads(result.read_text())
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == written
    assert written["command"] == "python -m benchmarks.demo --runs 2 --rounds 2"
    assert written["packings"] == ["original", "auto"]
    assert written["runs"] == [RUN, RUN]
    assert written["summary"] == summary(written["runs"], written["packings"])
    picture.unlink()
    main(["--runs", "0", *kept])
    assert picture.exists()
    assert json.loads(result.read_text()) == written
