"""Text of the command line: models, meshes, names, and options of packings."""

from __future__ import annotations

import json

import pytest

from lightning_wlb.cli.arguments import (
    mesh_of,
    model_config,
    names_of,
    packing_option_names,
    packing_options,
)
from lightning_wlb.cli.main import main
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.planning.packing import PackingChoice

SMALL = [
    "plan", "--lengths", "generator-a", "--model", "tiny", "--mesh", "1,2,1,1", "--profile", "cpu",
    "--context-window", "1024", "--steps", "8", "--packing", "wlb",
]  # fmt: skip


def test_a_model_by_preset_by_sizes_and_by_both() -> None:
    assert model_config("7b") == TransformerConfig.preset("7b")
    assert model_config("7b,layers=16") == TransformerConfig.preset("7b", layers=16)
    sizes = {"dim": 8, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 16, "vocab_size": 32}
    text = ",".join(f"{name}={size}" for name, size in sizes.items())
    assert model_config(text) == TransformerConfig(**sizes)


def test_a_mesh_is_data_pipeline_context_tensor() -> None:
    assert mesh_of("1,4,2,8") == Mesh(data=1, pipeline=4, context=2, tensor=8)


def test_names_are_kept_in_order_and_once() -> None:
    assert names_of("--packing", "wlb,auto,wlb", ["auto", "wlb"]) == ["wlb", "auto"]


def test_options_of_packings_are_json_or_text_by_method() -> None:
    given = ["wlb.queues=3", "wlb.thresholds=[512, 768]", "fixed_ilp.solver=highs", "wlb.max_age=4"]
    assert packing_options(given, ["wlb", "fixed_ilp"]) == {
        "wlb": {"queues": 3, "thresholds": [512, 768], "max_age": 4},
        "fixed_ilp": {"solver": "highs"},
    }
    assert packing_options([], ["wlb"]) == {}
    # A value may have an equals sign, and the last one given counts.
    assert packing_options(["slim.a=b=c", "slim.a=1", "slim.a=x=1"], ["slim"]) == {
        "slim": {"a": "x=1"}
    }


def test_every_option_that_help_names_is_one_with_that_default() -> None:
    names = packing_option_names()
    assert "wlb.queues=2" in names
    methods = [name.partition(".")[0] for name in names]
    for method, options in packing_options(names, methods).items():
        assert PackingChoice.of({"method": method, **options}) == PackingChoice.of(method)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("queues=3", "'queues=3' is not METHOD.NAME=VALUE, as in wlb.queues=3"),
        ("wlb.queues", "'wlb.queues' is not METHOD.NAME=VALUE"),
        ("slim.micro_packs=8", "'slim' is not compared; --packing names wlb"),
        ("wlb.method=auto", "'wlb.method=auto': --packing names the methods"),
        ("wlb.queue=3", "packing 'wlb' has no option 'queue'. It takes queues, thresholds"),
        ("wlb.queues=many", "queues='many' is of type str. Give a whole number"),
        ("wlb.queues=-1", "queues=-1, but it must be at least 0"),
        ("wlb.thresholds=[2048]", "1024"),
    ],
)
def test_a_wrong_option_is_answered(
    capsys: pytest.CaptureFixture[str], given: str, message: str
) -> None:
    assert main([*SMALL, "--packing-option", given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_an_option_reaches_its_packing(capsys: pytest.CaptureFixture[str]) -> None:
    delays = {}
    for queues in (0, 2):
        assert main([*SMALL, "--packing-option", f"wlb.queues={queues}", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
        delays[queues] = rows[1]["delay_mean"]
    assert delays[0] < delays[2]


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = capsys.readouterr().out
    for name in packing_option_names():
        assert name in out
