"""Configs from what a user has."""

from __future__ import annotations

import json

import pytest

from tests.models.huggingface.configs import tiny

pytest.importorskip("transformers")

from lightning_wlb.models.huggingface.config import read_config


def test_a_config_a_mapping_a_folder_and_its_file_are_the_same(tmp_path) -> None:
    config = tiny("qwen3")
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert read_config(config) is config
    for given in (fields, tmp_path, str(tmp_path), tmp_path / "config.json"):
        read = read_config(given)
        assert type(read) is type(config)
        assert (read.hidden_size, read.num_hidden_layers) == (32, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden_size": 4}, "with model_type=None"),
        ({"model_type": "lama"}, "with model_type='lama', which transformers does not know"),
        (7, "A config of type int"),
        ({"model_type": "llama", "hidden_size": "wide"}, "'llama'.*'hidden_size'"),
    ],
)
def test_what_is_no_config_is_refused(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(given)


def test_a_folder_without_a_config_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"neither a folder with a config\.json"):
        read_config(tmp_path)


def test_a_field_that_the_family_does_not_have_is_named() -> None:
    with pytest.warns(UserWarning, match="no field 'hidden_sizes'.*Is 'hidden_size' meant"):
        read_config({"model_type": "llama", "hidden_sizes": 8})


def test_the_fields_of_a_checkpoint_are_known(recwarn) -> None:
    for family in ("llama", "gemma3_text", "deepseek_v3", "gpt_oss"):
        read_config(json.loads(tiny(family).to_json_string(use_diff=False)))
    assert not [str(each.message) for each in recwarn if "no field" in str(each.message)]
