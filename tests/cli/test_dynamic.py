"""``lightning-wlb plan --dynamic auto``: what it prints, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_wlb.cli.main import main
from tests.heterogeneous.planning.test_pool_search import MIXED

MODEL = "dim=2048,layers=4,heads=16,kv_heads=16,ffn_dim=5504,vocab_size=32000"


def run(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    np.save(path / "lengths.npy", MIXED)
    given = ["plan", "--lengths", str(path / "lengths.npy"), "--model", MODEL, "--profile", "h100"]
    given += ["--context-window", "32768", "--micro-batches", "2", "--mesh", "2,1,1,2"]
    code = main([*given, "--steps", "6", "--packing", "slim", "--dynamic", "auto", *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_it_prints_the_pool_its_gain_and_how_often_each_is_chosen(capsys, tmp_path: Path) -> None:
    code, out, _ = run(capsys, tmp_path, "--json")
    assert code == 0
    report = json.loads(out.splitlines()[-1])["dynamic"]
    assert report["pays"] is True
    assert report["gain"] == pytest.approx(report["mesh_ms"] / report["pool_ms"])
    assert report["gain"] > report["asked"] == 1.02
    assert report["strategies"] == [
        {"pipelines": "4 × (pipeline 1, context 1, tensor 1)", "chosen": 3}
    ]
    words = " ".join(out.split())
    for line in report["text"]:
        assert " ".join(line.split()) in words
    assert "0 of 3 steps stay on the mesh." in words
    assert "All of them do, so rather take the mesh 4,1,1,1." in words


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--packing", "wlb"], "no packing that is compared can deal to pipelines that differ"),
        (["--steps", "1"], "--dynamic auto needs --steps 2 or more"),
        (["--mesh", "1,2,1,2", "--schedule", "interleaved"], "the mesh has 2 virtual stages"),
        (["--mesh", "auto", "--devices", "4"], "--dynamic auto needs the sizes of a mesh"),
    ],
)
def test_what_it_cannot_answer_is_refused(capsys, tmp_path: Path, options, reason: str) -> None:
    code, _, err = run(capsys, tmp_path, *options)
    assert code != 0
    assert reason in " ".join(err.split())
