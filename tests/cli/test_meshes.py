"""``lightning-wlb plan --mesh auto``: what it prints, and that its rows come out the same again."""

import json
from typing import Any

import numpy as np
import pytest

import lightning_wlb as wlb
from lightning_wlb.cli import meshes
from lightning_wlb.cli.main import main
from lightning_wlb.mesh_search.evaluate import MeshChoice
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.mesh_search.search import choose_mesh
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.cli.test_shared_options import LLAMA

MODEL = "dim=512,layers=4,heads=8,kv_heads=4,ffn_dim=1408,vocab_size=32000"


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
    np.save(path, np.where(rng.random(60) < 0.1, 16_384, rng.integers(64, 2048, 60)))
    return str(path)


def run(
    capsys: pytest.CaptureFixture[str], lengths: str, *options: str, mesh: str = "auto"
) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    given = ["plan", "--lengths", lengths, "--model", MODEL, "--mesh", mesh, "--profile", "h100"]
    given += ["--context-window", "16384", "--micro-batches", "4", *options]
    code = main(given)
    out, err = capsys.readouterr()
    return code, out, err


def searched(capsys: pytest.CaptureFixture[str], lengths: str, *options: str) -> dict[str, Any]:
    code, out, err = run(capsys, lengths, "--devices", "4", "--json", *options)
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    for line in report["verdict"]["text"] + report["verdict"]["trainer"]:
        assert line[:40] in out
    return report


def test_the_report_and_its_rows_planned_again(capsys, lengths):
    report = searched(capsys, lengths, "--steps", "1")
    times = [row["step_ms"] for row in report["rows"]]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= 1.01 * min(times)
    assert report["simulated"]
    assert report["devices"] == 4
    mine, verdict = report["rows"][0], report["verdict"]
    for name in ("original", "best_fit"):
        gain = mine["tokens_per_second"] / report[name]["tokens_per_second"]
        assert verdict[f"times_{name}"] == pytest.approx(gain)
    work = [row["flops"] / row["steps_ns"] for row in (mine, report["original"])]
    assert verdict["times_original_for_equal_work"] == pytest.approx(work[0] / work[1])
    assert "is not measured" in verdict["text"][0]
    left = sum(each["count"] for each in report["left_out"])
    assert len(report["rows"]) + left == 18  # six, and four pipelines with 1, 2 and 4 stages
    # One of them by the command without a search.
    row = report["rows"][-1]
    sizes = [str(row["mesh"][axis]) for axis in ("data", "pipeline", "context", "tensor")]
    options = ["--schedule", row["schedule"], "--steps", "1", "--packing", "auto", "--json"]
    options += ["--virtual-stages", str(row["mesh"]["virtual_stages"])]
    code, out, err = run(capsys, lengths, *options, mesh=",".join(sizes))
    assert code == 0, err
    again = json.loads(out.splitlines()[-1])["rows"][-1]
    assert again["packing"] == "auto"
    assert again["step_ms_mean"] == pytest.approx(row["step_ms"], rel=1e-12)
    assert again["peak_gigabytes"] == pytest.approx(row["peak_bytes"] / 1e9, rel=1e-12)
    assert again["recomputed"] == row["recomputed"]


def test_the_lines_to_paste_make_that_strategy(capsys, lengths):
    report = searched(
        capsys, lengths, "--steps", "1", "--packing", "best_fit", "--mesh", "auto,2,auto,1",
        "--reduce-dtype", "bfloat16", "--compile",
    )  # fmt: skip
    assert report["verdict"]["trainer"][1].endswith(", compile=True)")
    trainer = report["verdict"]["trainer"][0]
    start = "Trainer(devices=4, precision='bf16-mixed', strategy=WLBStrategy("
    assert trainer.startswith(start)
    strategy = eval(trainer[trainer.index("WLBStrategy(") : -1], {"WLBStrategy": WLBStrategy})
    assert strategy._asked_reduce_dtype == "bfloat16"
    assert report["verdict"]["trainer"][2].endswith("packing='best_fit', profile='h100')")
    assert repr(strategy).startswith(
        f"WLBStrategy({', '.join(report['verdict']['mesh'].split(','))}"
    )
    words = report["verdict"]["text"]
    assert words[1].startswith("Take packing best_fit")
    assert not any(line.startswith("Beside whole documents") for line in words)


@pytest.mark.parametrize("changes", ["", ",vocab_size=300,tie_word_embeddings=true"])
def test_the_lines_to_paste_make_that_hugging_face_model(capsys, lengths, tmp_path, changes):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = "--model", f"{tmp_path}{changes}"
    report = searched(capsys, lengths, "--steps", "1", "--mesh", "4,1,auto,auto", *model)
    line = report["verdict"]["trainer"][1].replace("pretrained=...", "pretrained=False")
    names = {"HuggingFaceModule": wlb.HuggingFaceModule, "AutoConfig": transformers.AutoConfig}
    config = eval(line, names).config
    assert config.vocab_size == (300 if changes else LLAMA["vocab_size"])
    assert config.tie_word_embeddings == bool(changes)


def test_what_to_paste_has_the_stages_and_the_settings_that_were_simulated(capsys, lengths):
    # Interleaved pipelines of one rank have one stage, the strategy's default is two.
    options = ["--schedule", "interleaved", "--packing", "best_fit", "--steps", "1"]
    options += ["--cap", "20000", "--seed", "3", "--long-documents", "truncate"]
    report = searched(capsys, lengths, *options, "--mesh", "auto,1,auto,auto")
    trainer = report["verdict"]["trainer"][0]
    strategy = eval(trainer[trainer.index("WLBStrategy(") : -1], {"WLBStrategy": WLBStrategy})
    assert strategy.options.usual[1] == report["rows"][0]["mesh"]["virtual_stages"] == 1
    data = report["verdict"]["trainer"][2]
    assert "packing='best_fit', cap=20000, long_documents='truncate', seed=3, profile=" in data


def test_short_documents_are_told_that_it_does_not_pay(capsys, tmp_path):
    np.save(tmp_path / "short.npy", np.full(400, 256))
    short = str(tmp_path / "short.npy")
    report = searched(capsys, short, "--steps", "1", "--schedule", "1f1b", "--micro-batches", "2")
    verdict = report["verdict"]
    assert not verdict["worth_it"]
    assert verdict["packing"] == "best_fit"
    assert "Balancing is not for you" in verdict["text"][1]
    assert verdict["mesh"] == ",".join(
        str(report["best_fit"]["mesh"][axis]) for axis in ("data", "pipeline", "context", "tensor")
    )


def test_a_reference_that_fits_on_no_mesh_is_said(capsys, lengths, monkeypatch):
    def only_slices(request: MeshRequest, **options: Any) -> MeshChoice:
        if request.data.packing_choice.method == "best_fit":
            raise ValueError("no mesh")
        return choose_mesh(request, **options)

    monkeypatch.setattr(meshes, "choose_mesh", only_slices)
    report = searched(capsys, lengths, "--steps", "1", "--mesh", "4,1,auto,auto")
    assert report["best_fit"] is None
    assert report["verdict"]["times_best_fit"] is None
    assert "(best_fit): that fits in memory on no mesh of these" in report["verdict"]["text"][3]
    assert report["verdict"]["packing"] == "auto"


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ("auto", (), "--mesh auto needs --devices"),
        ("auto,2", ("--devices", "4"), "neither auto nor data,pipeline,context,tensor"),
        ("auto,x,1,1", ("--devices", "4"), "neither auto nor data,pipeline,context,tensor"),
        ("auto,3,1,1", ("--devices", "4"), "together 3, which does not go into 4 devices"),
        ("auto", ("--devices", "4", "--packing", "slim,auto"), "one at a time"),
        ("auto", ("--devices", "4", "--picture", "t.png"), "--picture shows one mesh"),
        ("auto", ("--devices", "0"), "devices=0"),
        ("2,2,1,1", ("--devices", "8"), "has 4 devices, not --devices 8"),
    ],
)
def test_mistakes_are_answered(capsys, lengths, mesh, options, message):
    code, _, err = run(capsys, lengths, *options, mesh=mesh)
    assert code == 2
    assert message in " ".join(err.split())


def test_micro_batches_have_to_be_given(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", MODEL, "--profile", "h100", "--context-window", "16384"]
    given = ["plan", "--lengths", lengths, "--mesh", "auto", "--devices", "4", *options]
    assert main(given) == 2
    assert "needs --micro-batches" in " ".join(capsys.readouterr().err.split())
