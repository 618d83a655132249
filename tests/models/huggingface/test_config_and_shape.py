"""Configs from what a user has.

Shapes of Hugging Face decoders against torch's FLOP counter, and real sizes.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig

from lightning_wlb.cost.flops import Work, attention_flops, causal_pairs, linear_flops
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.data.tokenising.texts import hugging_face_tokenizer
from lightning_wlb.models.huggingface.config_and_shape import read_config, shape_of
from tests.data.tokenising.support import tokenizer
from tests.models.huggingface.configs import WINDOW, tiny


def test_a_config_a_mapping_a_folder_and_its_file_are_the_same(tmp_path) -> None:
    config = tiny("qwen3")
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["num_parameters"] = 10**9  # which tells of the model, and asks for nothing
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
        (7, "config=7 is of type int"),
        ({"model_type": "llama", "hidden_size": "wide"}, "'llama'.*'hidden_size'"),
        ({"model_type": "llama", "num_hidden_layers": 2001}, "num_hidden_layers=2,001"),
        ({"model_type": "ernie4_5_moe", "moe_num_experts": 10**6}, "moe_num_experts=1,000,000"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 10**12]]}, "attention_types="),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M" * 2001}, "pattern=2,001"),
        ({"model_type": "llama", "torch_dtype": "load"}, "torch_dtype='load', which is no dtype"),
    ],
)
def test_what_is_no_config_is_refused(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(given)


def test_a_folder_without_a_config_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"neither a folder with a config\.json"):
        read_config(tmp_path)


def test_a_field_that_the_family_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"no field 'hidden_sizes'\. Is 'hidden_size' meant"):
        read_config({"model_type": "llama", "hidden_sizes": 8})
    with pytest.warns(UserWarning, match="no field 'xyz'; it changes nothing"):
        read_config({"model_type": "llama", "xyz": 8})
    written = {"model_type": "llama", "hidden_sizes": 8, "transformers_version": "5.0"}
    with pytest.warns(UserWarning, match="no field 'hidden_sizes'; it changes nothing"):
        read_config(written)


def test_fields_that_nobody_knows_are_few() -> None:
    """Each is looked at by reading all of them again."""
    for count, architecture in ((900, "b"), (3, "b" * 1_000_000)):
        fields = {"model_type": "llama", "architectures": [architecture]}
        with pytest.raises(ValueError, match=rf"{count} fields that .* too many for its length"):
            read_config(fields | dict.fromkeys(map(str, range(count)), 1))


def test_a_field_that_is_read_under_another_name_is_no_mistake(recwarn) -> None:
    config = read_config({"model_type": "llama", "rope_theta": 123.0})
    assert config.rope_parameters["rope_theta"] == 123.0
    assert not [str(each.message) for each in recwarn if "no field" in str(each.message)]


def test_the_fields_of_a_checkpoint_are_known(recwarn) -> None:
    for family in ("llama", "gemma3_text", "deepseek_v3", "gpt_oss"):
        read_config(json.loads(tiny(family).to_json_string(use_diff=False)))
    assert not [str(each.message) for each in recwarn if "no field" in str(each.message)]


TOKENS = 16
FAMILIES = [
    "llama", "qwen3", "gemma2", "gemma3_text", "phi3", "deepseek_v3", "mixtral", "qwen2_moe",
    "gpt_oss", "cohere2", "starcoder2", "granite", "granite_swa", "mimo_v2_flash",
]  # fmt: skip


@contextmanager
def model_without_attention(config: Any) -> Iterator[Any]:
    """A model whose attention computes nothing."""

    def attention(module, query, key, value, *_, **__):
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS, "none", attention)
        yield transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="none", experts_implementation="eager"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_that_torch_counts_and_every_parameter_counts_once(family: str) -> None:
    config = tiny(family)
    shape = shape_of(config)
    assert (shape.dim, shape.layers, shape.vocab_size) == (32, 4, 64)
    with (
        model_without_attention(config) as model,
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
    ):
        model(torch.randint(3, 60, (1, TOKENS)), use_cache=False)
    assert linear_flops(shape, TOKENS) == counter.get_total_flops()
    for layer, counted in zip(model.model.layers, shape.each_layer, strict=True):
        parameters = (value for name, value in asdict(counted).items() if "parameters" in name)
        assert sum(parameters) == sum(parameter.numel() for parameter in layer.parameters())


def test_a_plain_decoder_is_a_plain_shape() -> None:
    shape = shape_of(tiny("llama"))
    plain = ModelShape(dim=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=64)
    assert shape.each_layer == plain.each_layer
    assert Work.of(shape) == Work.of(plain)


def test_attention_is_counted_by_each_layers_window() -> None:
    shape = shape_of(tiny("gemma3_text"))
    windows = [layer.sliding_window for layer in shape.each_layer]
    assert sorted(windows, key=str) == [WINDOW, WINDOW, None, None]
    assert shape.sliding_window is None
    pairs = 2 * causal_pairs(100) + 2 * causal_pairs(100, 0, WINDOW)
    assert attention_flops(shape, 100) == 4 * 4 * 8 * pairs


def test_latent_attention_has_narrower_values_and_a_mixture_idle_experts() -> None:
    dense, mixture = shape_of(tiny("deepseek_v3")).kinds
    assert (dense.heads, dense.kv_heads, dense.head_dim, dense.value_dim) == (4, 4, 12, 8)
    assert dense.feed_forward_parameters == 3 * 32 * 48
    assert dense.idle_parameters == 0
    # Two of four experts, a shared one, and the router.
    assert mixture.feed_forward_parameters == 3 * 3 * 32 * 16 + 4 * 32
    assert mixture.idle_parameters == 2 * 3 * 32 * 16


def test_a_shape_leaves_the_config_as_it_was() -> None:
    config = tiny("qwen3")
    before = config.to_dict()
    shape_of(config)
    assert config.to_dict() == before
    assert config._attn_implementation != "lightning_wlb_probe"


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("longcat_flash", "LongcatFlashDecoderLayer calls attention 2 times"),
        ("minimax", "MiniMaxDecoderLayer calls attention 0 times"),
        ("deepseek_v32", "DeepseekV32Model does not run on embeddings and positions alone"),
        ("t5", "cannot be built as a causal language model"),
    ],
)
def test_families_without_one_attention_a_layer_are_refused(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of(tiny(family))


def foreign(folder: Path, made: Path) -> Path:
    """A folder whose config and tokenizer are of classes that are in the folder."""
    folder.mkdir()
    code = f"import pathlib\npathlib.Path({str(made)!r}).touch()\n"
    (folder / "configuration_own.py").write_text(
        code + "from transformers import PretrainedConfig\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    (folder / "tokenization_own.py").write_text(
        code + "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    auto = {"AutoConfig": "configuration_own.OwnConfig"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    auto = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": auto})
    )
    (folder / "tokenizer.json").write_text("{}")
    return folder


def refusals(folder: Path) -> list[str]:
    """What is answered where whoever is asked whether to run the code says yes."""

    def answer(read: Callable[[str], Any]) -> str:
        try:
            return str(read(str(folder)))
        except ValueError as error:
            return str(error)

    with mock.patch("builtins.input", return_value="y"):
        return [answer(read_config), answer(hugging_face_tokenizer)]


def test_the_code_of_a_folder_is_not_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder, made = foreign(tmp_path / "folder", tmp_path / "made"), tmp_path / "made"
    alone = refusals(folder)
    for said in alone:
        assert "asks for Python code of its own, which is not run" in said
        assert "register them before (AutoConfig.register, AutoTokenizer.register" in said
    with multiprocessing.get_context("fork").Pool(2) as ranks:
        assert ranks.map_async(refusals, [folder, folder], 1).get(30) == [alone, alone]
    assert not made.exists()


GPT2 = {"model_type": "gpt2"}
# Opens two tokenizers by AutoTokenizer, whatever it was told of foreign code.
RAG = {"model_type": "rag", "question_encoder": GPT2, "generator": GPT2}


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"tokenizer_class": "AutoModelForImageClassification"}, {}),
        ({"tokenizer_class": "GPT2LMHeadModelFast"}, {}),
        ({"tokenizer_class": "AutoTokenizer"}, {}),
        ({"tokenizer_class": "RagTokenizer"}, {}),
        ({}, {"tokenizer_class": "AutoModelForImageClassification"}),
        ({}, {"attribute_map": {"tokenizer_class": "other"}, "other": "AutoModel"}),
        ({}, RAG),
        ({}, {"model_type": "encoder-decoder", "encoder": RAG, "decoder": GPT2}),
    ],
)
def test_a_tokenizers_folder_is_opened_by_a_tokenizers_class_alone(
    tmp_path, monkeypatch, settings, config
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder, made = foreign(tmp_path / "folder", tmp_path / "made"), tmp_path / "made"
    auto = {"AutoModelForImageClassification": "configuration_own.OwnConfig"}
    fields = {"model_type": "gpt2", "n_layer": 1, "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(fields | config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    refused = pytest.raises(ValueError, match=r"is no tokenizer's class|has attribute_map=")
    with mock.patch("builtins.input", return_value="y"), refused:
        hugging_face_tokenizer(str(folder))
    assert not made.exists()


def test_a_field_of_a_config_stands_for_no_other(tmp_path) -> None:
    for own in ({"mamba_chunk_size": 4096}, {"rope_parameters": {"partial_rotary_factor": 9.0}}):
        with pytest.raises(ValueError, match=r"has (mamba_chunk_size=4096|partial_r.*=9\.0), of"):
            read_config({"model_type": "llama"} | own)
    fields = {"model_type": "llama", "attribute_map": {"num_hidden_layers": "few"}, "few": 10**7}
    with pytest.raises(ValueError, match="has attribute_map="):
        read_config(fields)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="has attribute_map="):
        read_config(tmp_path)


def test_no_config_fetches_another(tmp_path, monkeypatch) -> None:
    """transformers would ask the hub for it, whatever it was told, and read it unbounded."""
    asked = mock.Mock(side_effect=AssertionError("the hub was asked"))
    monkeypatch.setattr("transformers.backbone_utils.hf_api", asked, raising=False)
    vision = {"model_type": "rf_detr", "backbone": "somebody/backbone"}
    for fields in (vision, {"model_type": "llava", "vision_config": vision}):
        with pytest.raises(ValueError, match="backbone='somebody/backbone', by which another"):
            read_config(fields)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        (tmp_path / "tokenizer.json").write_text(tokenizer().to_str())
        with pytest.raises(ValueError, match="backbone='somebody/backbone', by which another"):
            hugging_face_tokenizer(str(tmp_path))
    assert read_config({"model_type": "llama", "backbone": None}).model_type == "llama"


@pytest.mark.parametrize("name", ["hc_sinkhorn_iters", "H_cycles", "of_iterations"])
def test_so_are_repetitions_of_a_part(name) -> None:
    with pytest.raises(ValueError, match=f"has {name}=1,000,000,000: building more than 2,000"):
        read_config({"model_type": "llama", name: 10**9})


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 10**7}, {"vocab_size": 10**15}])
def test_sizes_without_bounds_are_refused(fields) -> None:
    with pytest.raises(ValueError, match=r"num_hidden_layers=10,000,000: building|cannot be built"):
        shape_of(read_config({"model_type": "llama", **fields}))


@pytest.mark.parametrize("name", ["id2label", "per_layer_config"])
def test_texts_that_become_integers_of_one_hash_are_refused(name) -> None:
    labels = {str(k * (2**61 - 1) + 7): "a" for k in range(3)}
    with pytest.raises(ValueError, match="has a field named '2305843009213693958': take it out"):
        read_config({"model_type": "llama", name: labels})


@pytest.mark.parametrize(
    ("kind", "name"),
    [("nemotron_h", "layers_block_type"), ("zamba2", "hybrid_layer_ids"), ("llama", "x_layers")],
)
def test_a_list_by_layers_is_as_long_as_a_model_may_have_them(kind, name) -> None:
    with pytest.raises(ValueError, match=rf"{name}=2,001: building more than 2,000"):
        read_config({"model_type": kind, name: ["attention"] * 2001})


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("gpt_neo", "attention_types", [[["global"] * 30_000, 3]]),
        ("gpt_neo", "attention_types", [[["global"], 30_000]]),
        ("gpt_neo", "attention_types", [[["global"], 1500]] * 100),
        ("efficientloftr", "stage_num_blocks", [30_000] * 4),
    ],
)
def test_nor_may_many_together_be_more(kind, name, value) -> None:
    with pytest.raises(ValueError, match=rf"has {name}=[0-9,]+: building more than 1?[02]0?,000"):
        read_config({"model_type": kind, name: value})


def test_a_config_names_no_other_weights() -> None:
    with pytest.raises(ValueError, match=r"transformers_weights='b\.safetensors', by which other"):
        read_config({"model_type": "llama", "transformers_weights": "b.safetensors"})


def test_a_config_is_not_read_from_a_file_that_it_names(tmp_path) -> None:
    fields = {"model_type": "qwen2", "configuration_files": ["config.4.0.0.json"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "config.4.0.0.json").write_text('{"model_type": "qwen2"}')
    for given in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ValueError, match=r"config.json names other files \(configuration_fi"):
            read_config(given)


@pytest.mark.timeout(120)  # the first makes a list of them by itself, the others are built
@pytest.mark.parametrize(
    "field",
    [
        "qwen2 num_hidden_layers",
        "gpt2 n_layer",
        "bart decoder_layers",
        "cohere2_moe first_k_dense_replace",
    ],
)
def test_counts_without_bounds_are_refused_by_any_name(field, tmp_path) -> None:
    kind, name = field.split()
    fields = {"model_type": kind, name: 10**9}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for given in (fields, tmp_path):
        with pytest.raises(ValueError, match=rf"{name}=1,000,000,000: building"):
            read_config(given)


def test_a_class_that_is_registered_is_taken_though_the_folder_has_code(tmp_path) -> None:
    folder = foreign(tmp_path / "folder", tmp_path / "made")
    with mock.patch.dict(CONFIG_MAPPING._extra_content):
        AutoConfig.register("own", type("Own", (LlamaConfig,), {"model_type": "own"}))
        assert read_config(folder).model_type == "own"
    assert not (tmp_path / "made").exists()
