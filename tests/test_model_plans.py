"""The configurations in examples/models/: published sizes, whose kept plans can be made.

None of them is run. Nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.model_plans import MODELS, RESULT
from lightning_wlb.cli.main import main

PARAMETERS = {
    "gemma3_27b": 27_009_346_304,  # without the vision tower
    "gpt_oss_20b": 20_914_757_184,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "mistral_small": 23_572_403_200,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_32b": 32_762_123_264,
    "qwen3_8b": 8_190_735_360,
}
PLANS = json.loads(RESULT.read_text())["plans"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_models_plan_can_be_made(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path: Path = MODELS / f"{name}.yaml"
    run = yaml.safe_load(path.read_text())
    sizes = run["model"]["init_args"]["config"]
    config = AutoConfig.for_model(**sizes)
    assert {key: getattr(config, key) for key in sizes if "rope" not in key} == {
        key: value for key, value in sizes.items() if "rope" not in key
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(each.numel() for each in model.parameters()) == PARAMETERS[name]
    devices = run["trainer"]["devices"] * run["trainer"]["num_nodes"]
    fits = {count: each for count, each in PLANS[name].items() if "mesh" in each}
    assert str(devices) in fits
    mesh = dict(fits[str(devices)]["mesh"])
    stages = mesh.pop("virtual_stages")
    schedule = ["--schedule", "interleaved", "--virtual-stages", str(stages)] if stages > 1 else []
    data = run["data"]
    command = [
        *("plan", "--model", str(path), "--mesh", ",".join(map(str, mesh.values())), *schedule),
        *("--lengths", "generator-a", "--long-documents", "split", "--steps", "1", "--json"),
        *("--context-window", str(data["context_window"]), "--profile", data["profile"]),
        *("--micro-batches", str(data["micro_batches"]), "--packing", "auto"),
    ]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["rows"][-1]["packing"] == "auto"


def test_every_configuration_has_its_plans() -> None:
    assert {path.stem for path in MODELS.glob("*.yaml")} == set(PARAMETERS) == set(PLANS)
    for planned in PLANS.values():
        assert list(planned) == ["8", "16", "32", "64"]
        assert "mesh" in planned["64"]
