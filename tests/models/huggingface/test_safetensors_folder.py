"""Where a model's folder comes from, and rectangles of its tensors.

Stored tensors as transformers' conversions put them together.
"""

from __future__ import annotations

import json

import huggingface_hub
import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from lightning_wlb.models.huggingface.safetensors_folder import (
    Folder,
    find_sources,
    resolve,
)
from tests.models.huggingface.configs import tiny
from tests.models.huggingface.folders import write

NAME = "model.safetensors"


def test_rectangles_of_tensors(tmp_path):
    values = torch.arange(24).view(4, 6)
    save_file({"a": values, "b": torch.tensor(3.0)}, tmp_path / NAME)
    folder = Folder(tmp_path)
    assert folder.names == {"a", "b"}
    assert folder.shape("a") == (4, 6)
    assert folder.read("a", (slice(1, 3), slice(2, 5))).tolist() == [[8, 9, 10], [14, 15, 16]]
    assert folder.read("b").item() == 3.0


def test_any_other_name_is_fetched_from_the_hub(tmp_path, monkeypatch):
    asked = {}

    def fetch(name, allow_patterns, ignore_patterns, local_files_only):
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("someone/model") == tmp_path
    assert "*.safetensors" in asked["someone/model"]
    assert not any("bin" in pattern for pattern in asked["someone/model"])


def test_a_name_that_cannot_be_fetched_is_refused(monkeypatch):
    def fetch(name, allow_patterns, ignore_patterns, local_files_only):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ValueError, match=r"no folder 'someone/model' here, and the hub.* no"):
        resolve("someone/model")


@pytest.mark.parametrize("text", ["{broken", '{"metadata": {}}', "[]", '{"weight_map": {"a": 7}}'])
def test_an_index_that_is_none_is_refused_by_name(tmp_path, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ValueError, match=rf"{index} is no index of safetensors"):
        Folder(tmp_path)


@pytest.mark.parametrize("name", [".experts." * 112, "model.layers.\u00b2.weight"])
def test_tensors_whose_names_no_expression_should_see_are_refused(tmp_path, name):
    """transformers' expressions took hours for a name of 4 MB."""
    save_file({"a": torch.zeros(1), name: torch.zeros(1)}, tmp_path / NAME)
    with pytest.raises(ValueError, match=rf"{NAME} has a tensor named '.+', not in ASCII or of"):
        Folder(tmp_path)


def test_an_index_of_files_that_no_system_names(tmp_path):
    named = {"weight_map": {"a": "\ud800"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(named))
    with pytest.raises(ValueError, match=rf"{tmp_path}/.* cannot be read: 'utf-8' codec"):
        Folder(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        # Renamed, stacked and joined.
        ("mixtral", "model.layers.1.mlp.experts.gate_up_proj"),
        ("qwen2_moe", "model.layers.1.mlp.experts.down_proj"),
    ],
)
def test_a_rectangle_of_a_parameter(family, name, tmp_path):
    model = write(tmp_path, tiny(family))
    whole = model.state_dict()[name]
    source = find_sources(Folder(tmp_path), model)[name]
    assert source.shape == tuple(whole.shape)
    # Across experts and across the two matrices of a joined parameter.
    box = tuple(slice(size // 4, size - size // 5) for size in whole.shape)
    target = torch.full_like(whole[box], torch.nan)
    source.copy_to(target, box)
    assert torch.equal(target, whole[box])


def test_a_family_whose_parameters_are_cut_from_stored_tensors_is_refused(tmp_path):
    model = write(tmp_path, tiny("hrm_text"))
    with pytest.raises(ValueError, match="by Chunk, so no rank can read its part"):
        find_sources(Folder(tmp_path), model)


@pytest.mark.parametrize("which", ["all", "one", "shifted"])
def test_stored_tensors_that_leave_a_part_of_a_parameter_out_are_refused(which, tmp_path):
    """It would be trained with whatever the memory held."""
    model = write(tmp_path, tiny("mixtral"))
    stored = load_file(tmp_path / NAME)
    experts = [name for name in stored if "1.block_sparse_moe.experts." in name]
    w1, w3 = (sorted(name for name in experts if each in name) for each in (".w1.", ".w3."))
    if which == "shifted":  # a row more of one and less of the other: as many values in all
        stored[w1[0]] = torch.cat([stored[w1[0]], stored[w1[0]][:1]])
        stored[w3[0]] = stored[w3[0]][:-1].clone()
    else:
        for name in w3 if which == "all" else w3[:1]:
            stored[name] = stored[name][:, :1].clone()
    save_file(stored, tmp_path / NAME)
    match = "together do not fill a tensor of shape" if which == "all" else "are of several shapes"
    with pytest.raises(ValueError, match=match):
        find_sources(Folder(tmp_path), model)


def test_one_file_is_read_before_an_index_as_transformers_does(tmp_path):
    old, new = torch.zeros(2), torch.ones(2)
    save_file({"a": old}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(Folder(tmp_path).read("a"), old)
    save_file({"a": new}, tmp_path / NAME)
    assert torch.equal(Folder(tmp_path).read("a"), new)


def test_files_say_what_is_in_them_and_not_their_index_as_in_transformers(tmp_path):
    model = write(tmp_path, tiny("llama"), max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    places = content["weight_map"]
    names, files = list(places), sorted(set(places.values()))
    places.pop(names[1])
    places[names[0]] = next(each for each in files if each != places[names[0]])
    index.write_text(json.dumps(content))
    folder, stored = Folder(tmp_path), model.state_dict()
    assert folder.names == set(stored)
    assert all(torch.equal(folder.read(name), stored[name]) for name in names[:2])
    # Of a name in two files transformers takes the last file's, whatever the index says.
    first, last = (load_file(tmp_path / each) for each in (files[0], files[-1]))
    save_file(last | {next(iter(first)): torch.ones(1)}, tmp_path / files[-1])
    with pytest.raises(ValueError, match=rf"of {files[0]}, \S+ of {files[-1]} as \S+ A parameter"):
        Folder(tmp_path)


def test_adapters_beside_weights_are_not_passed_over(tmp_path):
    """transformers would add them: another model than the one that is trained."""
    write(tmp_path, tiny("llama"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has adapters beside weights \(adapter_config\.json\)"):
        Folder(tmp_path)


def test_names_that_are_one_parameter_are_refused(tmp_path):
    model = write(tmp_path, tiny("llama"))
    stored = load_file(tmp_path / NAME)
    stored["norm.weight"] = stored["model.norm.weight"] * 2  # transformers knows both names
    save_file(stored, tmp_path / NAME)
    with pytest.raises(ValueError, match=r"norm\.weight as model\.norm\.weight\. A"):
        find_sources(Folder(tmp_path), model)


def test_two_tensors_of_one_name_in_the_language_model_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {}}')
    twice = {"model.language_model.norm.weight": torch.ones(2)}
    save_file(twice | {"language_model.model.norm.weight": torch.zeros(2)}, tmp_path / NAME)
    with pytest.raises(ValueError, match=r"as model\.norm\.weight\. A parameter has"):
        Folder(tmp_path)


@pytest.mark.parametrize("first", ["5", "01", "two"])
def test_experts_that_are_not_numbered_from_0_are_refused(first, tmp_path):
    """They would be stacked in order, each in the place of another."""
    model = write(tmp_path, tiny("mixtral"))
    stored = load_file(tmp_path / NAME)
    there, moved = (f"1.block_sparse_moe.experts.{each}." for each in (0, first))
    renamed = {name.replace(there, moved): each for name, each in stored.items()}
    save_file(renamed, tmp_path / NAME)
    with pytest.raises(ValueError, match=r"as model\.layers\.1\.mlp\.experts\..*from 0"):
        find_sources(Folder(tmp_path), model)
