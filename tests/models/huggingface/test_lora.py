"""LoRA: on any mesh what peft does by itself in one process, and nothing but adapters changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import PeftModel, inject_adapter_in_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint
from lightning_wlb.cli.export import export
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule
from lightning_wlb.models.huggingface.lora import (
    base_name,
    checked_fields,
    initial_value,
    is_adapter,
    peft_config,
)
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.models.huggingface.configs import tiny
from tests.models.huggingface.folders import write
from tests.models.huggingface.support import (
    ByDocument,
    KeepDouble,
    Run,
    on_ranks,
    value,
)
from tests.ranks import run_ranks
from tests.strategy.harness import Recorder, data, relative_error, trainer

LORA: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
# peft would take "all-linear" for the experts too.
ATTENTION = LORA | {"target_modules": r".*\.self_attn\..*_(proj|mqa)"}
OPTIONS: dict[str, Any] = {"learning_rate": 1e-2}
TOKENS = torch.arange(3, 40)[None]


RUNS = (
    # Packed projections whose columns are gathered; tied ends on two stages, both frozen.
    Run("phi3", (1, 2, 1, 2), lora=LORA),
    Run("gemma3_text", (1, 2, 1, 2), checkpointing="full", lora=LORA),
    # More ranks than a packed parameter or an adapter has rows.
    Run("phi3", (4, 1, 1, 1), lora=LORA),
    # Latent attention and experts; a norm inside of the block, more ranks than key/value heads.
    Run("deepseek_v3", (1, 1, 2, 2), lora=ATTENTION),
    Run("gemma2", (1, 1, 1, 4), lora=LORA),
    # Recurrent layers.
    Run("qwen3_5_text", (1, 2, 2, 1), lora=LORA),
)
MORE = (Run("olmo_hybrid", (2, 2, 1, 1), lora=LORA),)


class Adapted(ByDocument):
    """peft's own adapters in transformers' own model, one document at a time."""

    def build_model(self) -> Any:
        return inject_adapter_in_model(peft_config(self.lora), super().build_model()).double()

    def init_weights(self) -> None:
        for name, parameter in self.model.named_parameters():
            with torch.no_grad():
                parameter.copy_(value(base_name(name), parameter.shape))


def expected(run: Run) -> dict[str, Any]:
    recorder = Recorder()
    with KeepDouble():
        module = Adapted(tiny(run.family), pretrained="none", lora=run.lora, **OPTIONS)
        runner = trainer("auto", 1, max_steps=RUNS[0].steps, callbacks=[recorder])
        runner.fit(module, data(RUNS[0].case))
    return recorder.record()


@pytest.mark.parametrize("runs", [RUNS, pytest.param(MORE, marks=pytest.mark.families)])
def test_adapters_train_on_meshes_as_peft_trains_them_in_one_process(runs):
    ranks = run_ranks(on_ranks, 4, runs, process_group=False, timeout=200)
    for number, run in enumerate(runs):
        wanted = expected(run)
        after = {
            base_name(name.removeprefix("model.")): p for name, p in wanted["parameters"].items()
        }
        for record in (each[number] for each in ranks):
            assert np.allclose(record["losses"], wanted["losses"], rtol=1e-10, atol=0), run
            for got, want in zip(record["gradients"], wanted["gradients"], strict=True):
                # Adapters alone have gradients, and all of them.
                assert set(got) == {name for name in record["parameters"] if is_adapter(name)}
                for name, gradient in got.items():
                    want_gradient = want[f"model.{name}"].reshape(gradient.shape)
                    assert relative_error(gradient, want_gradient) < 1e-10, (run, name)
            for name, parameter in record["parameters"].items():
                wanted_value = after[name].reshape(parameter.shape)
                assert relative_error(parameter, wanted_value) < 1e-10, (run, name)
                if not is_adapter(name):
                    assert np.array_equal(parameter, wanted_value), (run, name)
        held = {name for each in ranks for name in each[number]["parameters"]}
        assert held == set(after)


class Started(HuggingFaceModule):
    """Starts from a folder; of float64 also where the family makes float32."""

    def build_model(self) -> Any:
        return super().build_model().double()


def train(rank: int, folder: str, mesh: tuple[int, ...], steps: int, resumed: bool) -> int:
    with KeepDouble():
        module = Started(folder, pretrained=True, lora=ATTENTION, seed=3, **OPTIONS)
        runner = trainer(WLBStrategy(*mesh), 4, max_steps=steps)
        runner.fit(module, data(RUNS[0].case), ckpt_path=f"{folder}.ckpt" if resumed else None)
        runner.save_checkpoint(f"{folder}.ckpt")
    return sum(len(group["params"]) for group in runner.optimizers[0].param_groups)


class StartedByDocument(Adapted):
    """The same start, by transformers and peft."""

    def init_weights(self) -> None:
        weights = AutoModelForCausalLM.from_pretrained(self.pretrained, dtype=torch.float64)
        base = weights.state_dict()
        decoder = HuggingFaceDecoder(self.config, lora=self.lora)
        own = {decoder.family_name(name): name for name, _ in decoder.named_parameters()}
        for name, parameter in self.model.named_parameters():
            whole = (
                initial_value(own[name], parameter.shape, 3, self.lora)
                if is_adapter(name)
                else base[base_name(name)]
            )
            with torch.no_grad():
                parameter.copy_(whole)


def test_a_run_resumes_on_another_mesh_and_exports_adapters_that_peft_opens(tmp_path):
    folder = tmp_path / "qwen2_moe"
    write(folder, tiny("qwen2_moe"), torch.float64)
    run_ranks(train, 4, str(folder), (1, 2, 1, 2), 1, False, process_group=False)
    run_ranks(train, 4, str(folder), (2, 1, 2, 1), 2, True, process_group=False)
    stored = StoredCheckpoint(Path(f"{folder}.ckpt"))
    assert stored.names
    assert all(is_adapter(name) for name in stored.names)
    # As a module in one process the folder's adapters are on the pretrained weights.
    again = HuggingFaceModule.load_from_checkpoint(f"{folder}.ckpt")
    adapters = {name: each.data for name, each in again.named_parameters() if each.requires_grad}
    assert set(adapters) == stored.names
    for name, saved in stored.read(adapters).items():
        assert torch.equal(adapters[name], saved.to(adapters[name].dtype)), name
    _, tensors, _ = export(f"{folder}.ckpt", tmp_path / "adapters")
    assert tensors == len(stored.names)
    assert {each.name for each in (tmp_path / "adapters").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
        "manifest.json",
    }
    with KeepDouble():
        module = StartedByDocument(str(folder), pretrained=True, lora=ATTENTION, **OPTIONS)
        trainer("auto", 1, max_steps=2).fit(module, data(RUNS[0].case))
        options = {"dtype": torch.float64, "experts_implementation": "eager"}
        base = AutoModelForCausalLM.from_pretrained(folder, **options)
        # In the Trainer its table was made in float64.
        module.model.model.rotary_emb = base.model.rotary_emb
        before = base(TOKENS).logits
        opened = PeftModel.from_pretrained(base, tmp_path / "adapters")
        logits, wanted = opened(TOKENS).logits, module.model(TOKENS).logits
    assert (before - wanted).abs().max() > 1e-3
    assert (logits - wanted).abs().max() < 1e-10


def test_one_process_keeps_nothing_but_adapters_in_its_file(tmp_path):
    write(tmp_path / "llama", tiny("llama"))

    def module() -> HuggingFaceModule:
        folder = str(tmp_path / "llama")
        return HuggingFaceModule(folder, pretrained=True, lora=LORA, seed=3, **OPTIONS)

    first = module()
    runner = trainer("auto", 1, precision="32-true", max_steps=2)
    runner.fit(first, data(RUNS[0].case))
    runner.save_checkpoint(tmp_path / "one.ckpt")
    names = StoredCheckpoint(tmp_path / "one.ckpt").names
    assert names == {f"model.{n}" for n, _ in first.model.named_parameters() if is_adapter(n)}
    again = HuggingFaceModule.load_from_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match=r"nothing is fetched .*snapshot_download\('some/where'"):
        HuggingFaceModule.load_from_checkpoint(tmp_path / "one.ckpt", pretrained="some/where")
    for name, parameter in first.model.named_parameters():
        assert torch.equal(again.model.get_parameter(name), parameter), name
    # Three steps are three steps, with the file between or not.
    trainer("auto", 1, precision="32-true", max_steps=3).fit(
        resumed := module(), data(RUNS[0].case), ckpt_path=tmp_path / "one.ckpt"
    )
    straight = module()
    trainer("auto", 1, precision="32-true", max_steps=3).fit(straight, data(RUNS[0].case))
    for name, parameter in straight.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), parameter), name
    export(tmp_path / "one.ckpt", tmp_path / "out", dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}


def test_other_weights_below_the_adapters_are_refused_when_a_run_resumes(tmp_path, monkeypatch):
    """They are in no checkpoint: exchanged under one name, the run would go on with others."""
    folder, moved, steps = tmp_path / "llama", tmp_path / "moved", {"max_steps": 1}
    model = write(folder, tiny("llama"))
    monkeypatch.chdir(tmp_path)

    def module(where: str) -> HuggingFaceModule:
        return HuggingFaceModule(where, pretrained=True, lora=LORA, **OPTIONS)

    runner = trainer("auto", 1, precision="32-true", **steps)
    runner.fit(module("llama"), data(RUNS[0].case))
    runner.save_checkpoint(tmp_path / "one.ckpt")
    assert StoredCheckpoint(tmp_path / "one.ckpt").hyper_parameters["pretrained"] == str(folder)
    # The same weights are the same in any folder, in other files and of another dtype.
    model.double().save_pretrained(moved, max_shard_size="100KB")
    trainer("auto", 1, precision="32-true", **steps).fit(
        module("moved"), data(RUNS[0].case), ckpt_path=tmp_path / "one.ckpt"
    )
    model.model.layers[1].self_attn.q_proj.weight.data.mul_(2)
    model.save_pretrained(folder)
    again = trainer("auto", 1, precision="32-true", **steps)
    told = r"were trained on '.*llama' as it was then \(digest .*'.*llama' holds other weights"
    with pytest.raises(ValueError, match=told):
        again.fit(module("llama"), data(RUNS[0].case), ckpt_path=tmp_path / "one.ckpt")
    with pytest.warns(UserWarning, match=told):  # as the message says
        HuggingFaceModule.load_from_checkpoint(tmp_path / "one.ckpt")


def test_adapters_begin_without_effect_and_the_frozen_model_as_without_them():
    plain, adapted = HuggingFaceDecoder(tiny("llama")), HuggingFaceDecoder(tiny("llama"), lora=LORA)
    plain.initialise(5)
    adapted.initialise(5)
    values = {adapted.family_name(name): p for name, p in adapted.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert torch.equal(values[plain.family_name(name)], parameter), name
    matrices = {name: p for name, p in adapted.named_parameters() if is_adapter(name)}
    assert len(matrices) == 4 * 7 * 2
    for name, parameter in matrices.items():
        assert parameter.requires_grad
        if ".lora_B." in name:
            assert not parameter.any()
        else:
            # Uniform up to 1 / sqrt(width), as nn.Linear begins.
            assert 0.5 < parameter.abs().max() * parameter.shape[1] ** 0.5 <= 1
    gaussian = initial_value(
        "x.lora_A.default.weight", (64, 512), 0, {"init_lora_weights": "gaussian"}
    )
    assert gaussian.std().item() == pytest.approx(1 / 64, rel=0.05)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 4}, r"lora: rank cannot be set\. Known are r, lora_alpha"),
        ({"use_dora": True}, r"lora: use_dora cannot be set"),
        ({"lora_dropout": 0.1}, r"lora_dropout=0\.1\. Only 0\.0"),
        ({"bias": "all"}, r"bias='all'"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights='pissa'"),
        ({"r": 0}, r"lora: r=0, but it must be at least 1"),
        ({"r": True}, r"lora: r=True is of type bool"),
        ({"lora_alpha": 0}, r"lora: lora_alpha=0 is out of range"),
        (
            {"rank_pattern": {"k_proj": 4}, "target_modules": ["q_proj"]},
            r"rank_pattern has 'k_proj'",
        ),
        ({"target_modules": ["qkv"]}, r"qkv.*linear modules down_proj, gate_proj, k_proj"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"makes adapters model\.embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"makes adapters lm_head"),
        ({"target_modules": r".*layers\.[01]\..*q_proj"}, r"names nothing in layers \[2, 3\]"),
        ({"target_modules": "([a-z_.]+)+!"}, r"'\(\[a-z_\.\]\+\)\+!' may take for ever to match"),
        ({"exclude_modules": "(a|a)" * 40}, "may take for ever"),
        (
            {"rank_pattern": {f"a{each}": 2 for each in range(501)}},
            "a list of 501 mod.* beyond 500",
        ),
        ({"rank_pattern": {"a?" * 40 + "a" * 40: 2}}, "may take for ever"),
        ({"alpha_pattern": {".*" * 9: 2}}, "may take for ever"),
        ({"target_modules": ["q_proj"] * 20_000}, "a list of 20,000 modules, beyond 10,000, may"),
        ({"rank_pattern": dict.fromkeys(map(str, range(20_000)), 2)}, "a list of 20,000 modules"),
        ({"target_modules": "(" * 9}, r"'\(\(.* is no regular expression"),
    ],
)
def test_what_lora_cannot_do_is_refused(lora, message):
    with pytest.raises(ValueError, match=message):
        HuggingFaceDecoder(tiny("llama"), lora={"r": 2} | lora)


@pytest.mark.parametrize(
    "repeated", [r"(?=m){9999}", "", r"\b", r"(?>\b)", "(?!x)", "a|", "a?", r"()\1", "(x)?(?(1)a|)"]
)
def test_what_may_be_empty_is_not_repeated_by_a_count(repeated):
    """No name is so short that it ends: (?:(?=m){9999}){9999} took memory for each."""
    for count in ("{9999}", "{2,}?", "{2,9999}+"):
        with pytest.raises(ValueError, match="or may be empty"):
            checked_fields({"target_modules": f"(?:{repeated}){count}.*"})
    for other in (r"\w{3}.*", r"(?:mo){2,2}.*", f"(?:{repeated.partition('{')[0]})?m.*"):
        assert checked_fields({"target_modules": other})


def test_expressions_are_held_to_a_time_together():
    patterns = {".*" * 3 + str(number): 2 for number in range(50)}
    with pytest.raises(ValueError, match="may take for ever to match, with those before it"):
        checked_fields({"rank_pattern": patterns})
    assert checked_fields({"rank_pattern": dict(list(patterns.items())[:40])})


def test_adapters_of_experts_are_refused():
    with pytest.raises(ValueError, match=r"not the embedding, the head or experts.*'all-linear'"):
        HuggingFaceDecoder(tiny("mixtral"), lora=LORA)


def test_a_rank_by_itself_is_refused():
    with pytest.raises(ValueError, match=r"lora=16 is of type int\. Give fields"):
        HuggingFaceDecoder(tiny("llama"), lora=16)


def test_adapters_need_weights_to_belong_to():
    with pytest.raises(ValueError, match="lora without pretrained"):
        HuggingFaceModule(tiny("llama"), lora={"r": 2})
