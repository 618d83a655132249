"""The demo's results: what is kept of a run, and what the guide says of it."""

from benchmarks.demo import by_round, caption, summary


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
