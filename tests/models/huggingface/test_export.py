"""From a folder into a decoder and out again: the same files, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from lightning_wlb.models.huggingface import weights
from lightning_wlb.models.huggingface.export import files_beside, write_model
from lightning_wlb.models.huggingface.families import EXACT
from tests.models.huggingface.configs import tiny
from tests.models.huggingface.folders import write
from tests.models.huggingface.test_weights import emptied, wrong


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def check_round_trip(family: str, folder: Path) -> None:
    config = tiny(family)
    model, decoder, out = write(folder, config), emptied(config), folder / "out"
    weights.load(decoder, folder)
    assert wrong(decoder, model.state_dict()) == []
    values = dict(decoder.named_parameters()) | dict(decoder.persistent_buffers())
    out.mkdir()
    steps = []
    count = write_model(
        lambda names: {name: values[name].detach() for name in names},
        config,
        out,
        dtype=torch.float32,
        report=lambda done, of: steps.append((done, of)),
    )
    before, after = stored(folder), stored(out)
    assert count == len(before)
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
    # Each layer and the two ends.
    groups = len(decoder.layers) + 2
    assert steps == [(done, groups) for done in range(1, groups + 1)]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_what_is_read_comes_out_again(family, tmp_path):
    check_round_trip(family, tmp_path)


@pytest.mark.families
@pytest.mark.parametrize("family", sorted(EXACT))
def test_what_is_read_comes_out_again_for_every_family(family, tmp_path):
    check_round_trip(family, tmp_path)


def test_the_tokenizers_files_are_known_by_their_names(tmp_path):
    tokenizer = (
        "tokenizer.json",
        "spiece.model",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    )
    for name in (*tokenizer, "generation_config.json", "config.json", "model.safetensors", "x.md"):
        (tmp_path / name).touch()
    (tmp_path / "tokenizers").mkdir()
    assert files_beside(tmp_path) == sorted([*tokenizer, "generation_config.json"])
