"""HuggingFaceModule: what it takes, what its checkpoints hold, and short runs of it."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
from pathlib import Path
from unittest import mock

import lightning.pytorch as L
import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig

import lightning_wlb as wlb
from lightning_wlb import model_folder_checks
from lightning_wlb.models import decoder as decoders
from lightning_wlb.models.decoder import without_values
from lightning_wlb.models.huggingface import huggingface_module, safetensors_folder
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.recurrent import FAMILIES as RECURRENT
from lightning_wlb.strategy import split_model
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.models.huggingface.configs import tiny
from tests.models.huggingface.folders import write
from tests.models.huggingface.support import (
    OPTIONS,
    KeepDouble,
    Packed,
    Run,
    by_document,
    named_by_family,
    worst_error,
)
from tests.ranks import run_ranks
from tests.strategy.harness import Recorder, data, trainer

FAMILY = "qwen2_moe"


def test_pretrained_needs_a_folder():
    with pytest.raises(ValueError, match="pretrained='FOLDER'"):
        wlb.HuggingFaceModule(tiny("llama"), pretrained=True)


def test_weights_beside_a_config_are_not_passed_over_in_silence(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    assert wlb.HuggingFaceModule(str(tmp_path)).pretrained is None
    (tmp_path / "model.safetensors").touch()
    for config in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ValueError, match=r"pretrained=True .* or pretrained=False"):
            wlb.HuggingFaceModule(config)
        assert wlb.HuggingFaceModule(config, pretrained=False).pretrained is None
    assert wlb.HuggingFaceModule(tmp_path, pretrained=True).pretrained == str(tmp_path)


def test_hyperparameters_are_plain_and_make_the_module_again(tmp_path):
    module = wlb.HuggingFaceModule(tiny("gemma3_text"), learning_rate=1e-4, seed=3)
    path = tmp_path / "hyperparameters.pt"
    torch.save(dict(module.hparams), path)
    again = wlb.HuggingFaceModule(**torch.load(path, weights_only=True))
    assert again.config.to_dict() == module.config.to_dict()
    assert (again.learning_rate, again.seed) == (1e-4, 3)
    assert dict(again.hparams) == dict(module.hparams)


def test_tables_are_not_cast_to_a_narrower_dtype():
    """Rotary angles of bfloat16 would be those of another model."""
    module = wlb.HuggingFaceModule(tiny("deepseek_v3"))
    module.configure_model()
    before = {name: each.clone() for name, each in module.named_buffers()}
    for one in ("inv_freq", "e_score_correction_bias"):
        assert any(one in name for name in before)
    for name, each in module.bfloat16().named_buffers():
        assert torch.equal(each, before[name]), name
        assert each.dtype == torch.float32
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
    assert {each.dtype for each in module.double().buffers()} == {torch.float64}


def test_a_checkpoint_with_all_weights_needs_no_other(tmp_path):
    """Whoever made it may name any model, which would be fetched."""
    write(tmp_path / "llama", tiny("llama"))
    module = wlb.HuggingFaceModule(str(tmp_path / "llama"), pretrained=True)
    runner = trainer("auto", 1, precision="32-true", max_steps=1)
    runner.fit(module, data(Run(FAMILY, (1, 1, 1, 1)).case))
    runner.save_checkpoint(tmp_path / "one.ckpt")
    shutil.rmtree(tmp_path / "llama")
    again = wlb.HuggingFaceModule.load_from_checkpoint(tmp_path / "one.ckpt")
    assert again.pretrained == module.pretrained
    for name, parameter in module.model.named_parameters():
        assert torch.equal(again.model.get_parameter(name), parameter), name


def hub_facts(rank: int, folder: Path) -> list[str]:
    """What a rank tells of the weights of each of two revisions in its cache."""
    said = []
    for revision in ("1", "2"):
        write(folder / revision, tiny("llama", initializer_range=float(revision) / 10))
        module = wlb.HuggingFaceModule(tiny("llama"), pretrained="org/name")
        with (
            mock.patch.object(safetensors_folder, "hub_copy", return_value=folder / revision),
            mock.patch.object(split_model, "compare_ranks") as compared,
        ):
            runner = trainer("wlb", 1, precision="32-true", max_steps=1)
            runner.fit(module, data(Run(FAMILY, (1, 1, 1, 1)).case))
            said.append(compared.call_args.args[0]()["files of pretrained weights"])
    return said


def test_ranks_compare_the_weights_that_a_name_on_the_hub_means(tmp_path):
    """Their caches may have different revisions."""
    (said,) = run_ranks(hub_facts, 1, tmp_path, process_group=False)
    assert said[0] != said[1]
    assert all(each.startswith("1 files (") for each in said)


class SavesSome(wlb.HuggingFaceModule):
    """Leaves frozen weights out of its checkpoints, as Lightning's users do."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: each for name, each in state.items() if "norm" in name}


def test_what_a_checkpoint_lacks_is_read_from_the_folder(tmp_path):
    write(tmp_path / "llama", tiny("llama"))
    module = SavesSome(str(tmp_path / "llama"), pretrained=True, learning_rate=0.0)
    runner = trainer("auto", 1, precision="32-true", max_steps=1)
    runner.fit(module, data(Run(FAMILY, (1, 1, 1, 1)).case))
    runner.save_checkpoint(tmp_path / "one.ckpt")
    again = SavesSome.load_from_checkpoint(tmp_path / "one.ckpt")
    for name, parameter in module.model.named_parameters():
        assert torch.equal(again.model.get_parameter(name), parameter), name


def test_buffers_that_a_checkpoint_lacks_are_read_from_the_folder(tmp_path):
    """Zeros in place of a router's biases would choose other experts."""
    write(tmp_path / "glm", tiny("glm4_moe"))
    module = wlb.HuggingFaceModule(str(tmp_path / "glm"), pretrained=True)
    module.configure_model()
    module.init_weights()
    saved = {
        "state_dict": {name: each.detach() for name, each in module.named_parameters()},
        "hyper_parameters": dict(module.hparams),
        "pytorch-lightning_version": L.__version__,
    }
    torch.save(saved, tmp_path / "one.ckpt")
    with pytest.warns(UserWarning, match="not in the checkpoint"):
        again = wlb.HuggingFaceModule.load_from_checkpoint(tmp_path / "one.ckpt", strict=False)
    biases = module.state_dict().keys() - saved["state_dict"].keys()
    assert biases
    for name in biases:
        assert module.state_dict()[name].any()
        assert torch.equal(again.state_dict()[name], module.state_dict()[name])


def test_no_config_is_fetched_while_a_checkpoint_is_loaded(monkeypatch):
    """Whoever made it may name any."""
    monkeypatch.setattr(model_folder_checks, "hub_is_out_of_reach", lambda: False)
    token = decoders.STORED.set(decoders.StoredWeights(0, frozenset()))
    try:
        with pytest.raises(ValueError, match=r"nothing is fetched .*download\('stranger/model'\)"):
            wlb.HuggingFaceModule("stranger/model", pretrained=False)
    finally:
        decoders.STORED.reset(token)


def test_a_checkpoint_of_other_arguments_is_refused():
    lora = {"r": 2, "target_modules": ["q_proj"]}
    module = wlb.HuggingFaceModule(tiny("llama"), pretrained="base", lora=lora)
    saved = dict(module.hparams)
    module.on_load_checkpoint({"hyper_parameters": saved})
    module.on_load_checkpoint({"hyper_parameters": saved | {"lora": lora | {"lora_alpha": 8}}})
    for other in (lora | {"lora_alpha": 16}, lora | {"target_modules": ["v_proj"]}, None):
        with pytest.raises(ValueError, match="adapters would mean something else"):
            module.on_load_checkpoint({"hyper_parameters": saved | {"lora": other}})
    config = saved["config"] | {"rms_norm_eps": 0.5, "transformers_version": "0"}
    with pytest.raises(ValueError, match=r"now\): {'rms_norm_eps': \(0.5, 1e-06\)}\. Resume"):
        module.on_load_checkpoint({"hyper_parameters": saved | {"config": config}})


def test_biases_of_experts_do_not_decay():
    module = wlb.HuggingFaceModule(tiny("gpt_oss"))
    module.configure_model()
    decayed, others = module.configure_optimizers().param_groups
    names = {id(each): name for name, each in module.named_parameters()}
    assert not [names[id(p)] for p in decayed["params"] if names[id(p)].endswith("bias")]
    assert {p.ndim for p in decayed["params"]} == {2, 3}
    assert {p.ndim for p in others["params"]} == {1, 2}


def test_initial_values_are_the_familys_and_a_function_of_the_seed():
    decoder = HuggingFaceDecoder(tiny("gpt_oss", hidden_size=128, initializer_range=0.05))
    decoder.initialise(3)
    first = {name: each.detach().clone() for name, each in decoder.named_parameters()}
    weight = first["layers.1.self_attn.q_proj.weight"]
    assert float(weight.std()) == pytest.approx(0.05, rel=0.1)
    assert not torch.equal(weight, first["layers.2.self_attn.q_proj.weight"])
    assert torch.equal(first["head.norm.weight"], torch.ones(128))
    decoder.initialise(3)
    assert all(torch.equal(each, first[name]) for name, each in decoder.named_parameters())
    decoder.initialise(4)
    assert not torch.equal(decoder.layers["1"].self_attn.q_proj.weight, weight)


def test_constants_without_a_rule_keep_their_constructors_values_on_the_meta_device():
    config = tiny("apertus")
    with torch.device("meta"):
        deferred = HuggingFaceDecoder(config)
    real = dict(HuggingFaceDecoder(config).named_parameters())
    name = "layers.0.mlp.act_fn.alpha_p"
    assert torch.equal(deferred.get_parameter(name), real[name])
    assert deferred.layers["0"].mlp.down_proj.weight.is_meta
    assert not any(buffer.is_meta for buffer in deferred.buffers())


def test_a_folders_sizes_are_compared_before_values_are_made(tmp_path, monkeypatch):
    write(tmp_path, tiny("llama"))
    fields = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setattr(huggingface_module, "HuggingFaceDecoder", None)  # which would be built
    for field, size, said in (
        ("vocab_size", 10**9, r"\(64, 32\), in the model \(1000000000, 32\)"),
        ("head_dim", 10**9, r"q_proj.weight is \(32, 32\), in the model \(4000000000, 32\)"),
        ("head_dim", -2, "sizes that no memory can hold: .* negative dimension"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | {field: size}))
        with pytest.raises(ValueError, match=said):
            wlb.HuggingFaceModule(str(tmp_path), pretrained=True).configure_model()


def too_large(rank: int) -> None:
    decoders.machine_bytes = lambda: 100_000
    with pytest.raises(ValueError, match=r"needs 280,\d{3} bytes.*has 100,000\. Its largest"):
        trainer(WLBStrategy(), 1).fit(wlb.HuggingFaceModule(tiny("llama")), data(Run("llama").case))


def test_more_values_than_the_machine_has_memory_for_are_not_made(monkeypatch):
    monkeypatch.setattr(decoders, "machine_bytes", lambda: 100_000)
    module = wlb.HuggingFaceModule(tiny("llama"))
    with pytest.raises(ValueError, match=r"needs 140,\d{3} bytes.*has 100,000\. Its largest"):
        module.configure_model()
    run_ranks(too_large, 1, process_group=False)
    with without_values():
        assert all(each.is_meta for each in HuggingFaceDecoder(tiny("llama")).buffers())


def resume(rank: int, family: str, mesh: tuple[int, ...], folder: str, first: bool) -> dict:
    recorder = Recorder()
    with KeepDouble():
        module = Packed(tiny(family), **OPTIONS)
        steps = 1 if first else 2
        runner = trainer(
            WLBStrategy(*mesh), int(np.prod(mesh)), max_steps=steps, callbacks=[recorder]
        )
        runner.fit(module, data(Run(family).case), ckpt_path=None if first else folder)
        if first:
            runner.save_checkpoint(folder)
    return named_by_family(recorder.record(), module.model)


ON_OTHERS = ((1, 2, 1, 1), (1, 1, 2, 1))
EVERY = [pytest.param(each, ON_OTHERS, marks=pytest.mark.families) for each in sorted(RECURRENT)]


@pytest.mark.parametrize(
    ("family", "meshes"),
    [(FAMILY, ((1, 1, 1, 2), (1, 2, 1, 1))), ("qwen3_5_text", ON_OTHERS), *EVERY],
)
def test_a_checkpoint_resumes_on_another_mesh(family, meshes, tmp_path):
    folder = str(tmp_path / "checkpoint")
    run_ranks(resume, 2, family, meshes[0], folder, True, process_group=False)
    records = run_ranks(resume, 2, family, meshes[1], folder, False, process_group=False)
    wanted = by_document(Run(family))
    wanted["losses"], wanted["gradients"] = wanted["losses"][1:], wanted["gradients"][1:]
    assert worst_error(records, wanted) < 1e-10


class Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))


PRECISIONS = [
    ("qwen2_moe", "32-true", 1e-5),
    ("llama", "bf16-mixed", 1e-2),
    ("llama", "bf16-true", 1e-2),
]


def losses(rank: int, mesh: tuple[int, ...]) -> dict[tuple[str, str], list[float]]:
    """Of two steps with each precision and in float64; the buffers stay what they are made."""
    results = {}
    for family, precision, _ in [*PRECISIONS, ("qwen2_moe", "64-true", 0), ("llama", "64-true", 0)]:
        callback = Losses()
        module = wlb.HuggingFaceModule(tiny(family), learning_rate=1e-3, seed=7)
        runner = trainer(
            WLBStrategy(*mesh),
            int(np.prod(mesh)),
            precision=precision,
            max_steps=2,
            callbacks=[callback],
        )
        runner.fit(module, data(Run(family).case))
        assert {str(each.dtype) for each in module.model.buffers()} == {"torch.float32"}
        results[family, precision] = callback.losses
    return results


def test_precisions():
    # Outside of float64 transformers multiplies all experts at once, split ones too.
    got, *_ = run_ranks(losses, 2, (1, 1, 1, 2), process_group=False)
    for family, precision, tolerance in PRECISIONS:
        assert got[family, precision] == pytest.approx(got[family, "64-true"], rel=tolerance)


def large(rank: int) -> tuple[int, int]:
    """Parameters, and the most MiB that the process has held."""
    config = LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
    )
    with torch.device("meta"):
        decoder = HuggingFaceDecoder(config)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return sum(each.numel() for each in decoder.parameters()), held


def test_70_billion_parameters_are_built_in_less_than_a_gibibyte():
    ((parameters, mebibytes),) = run_ranks(large, 1, process_group=False)
    assert parameters == 70_553_706_496
    assert mebibytes < 1024


def test_without_transformers_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("lightning_wlb.models.hugg")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(vars(wlb), "HuggingFaceModule", raising=False)  # kept by an earlier use
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-wlb\[hf\]'"):
        _ = wlb.HuggingFaceModule


def test_without_peft_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"lora needs.*'lightning-wlb\[hf\]'"):
        HuggingFaceDecoder(tiny("llama"), lora={"r": 2})


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("llama", {"max_position_embeddings": 31}, "context_window=32.*max_position_embeddings=31"),
        ("mixtral", {}, "without the load-balancing loss of router_aux_loss_coef=0.001"),
        ("mixtral", {"router_aux_loss_coef": 0.0}, None),
    ],
)
def test_what_a_run_does_otherwise_than_its_config_may_mean_is_said(family, fields, said, recwarn):
    module = wlb.HuggingFaceModule(tiny(family, **fields))
    runner = trainer("auto", 1, precision="32-true", max_steps=1)
    runner.fit(module, data(Run(family).case))
    found = [str(each.message) for each in recwarn]
    assert any(re.search(said or "load-balancing", each) for each in found) == (said is not None)


def test_of_a_multimodal_model_the_language_model_is_read(tmp_path):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = Gemma3Config(
        text_config=tiny("gemma3_text").to_dict(),
        vision_config=vision | {"num_attention_heads": 4, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    whole = Gemma3ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="Only its language model, 'gemma3_text'"):
        module = wlb.HuggingFaceModule(str(tmp_path), pretrained=True)
    module.configure_model()
    wanted = whole.model.language_model.state_dict()
    for name, parameter in module.model.named_parameters():
        theirs = module.model.family_name(name).removeprefix("model.")
        assert torch.equal(parameter, wanted[theirs])
