"""The configurations in examples/ run as a newcomer would run them, on a small model and corpus."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_wlb.cli.main import main
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
WORDS = 200
END = "<end>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts, chats, a tokenizer and a model with weights, all small."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("recipes")
    words = [f"w{number}" for number in range(WORDS)]
    vocabulary = {word: number for number, word in enumerate([END, "user", "assistant", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(vocabulary),
    )
    LlamaForCausalLM(config).save_pretrained(path / "model")
    wrapped.save_pretrained(path / "model")
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(words, k=min(int(draw.lognormvariate(3, 1)) + 1, 200)))

    texts = [{"text": text()} for _ in range(200)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": text()},
                {"role": "assistant", "content": text()},
            ]
        }
        for _ in range(60)
    ]
    for name, lines in (("texts", texts), ("chats", chats)):
        written = "".join(json.dumps(line) + "\n" for line in lines)
        (path / f"{name}.jsonl").write_text(written)
    command = ["tokenize", str(path / "texts.jsonl"), str(path / "corpus")]
    assert main([*command, "--tokenizer", str(path / "model"), "--workers", "1"]) == 0
    return path


def run_fit(rank: int, folder: Path, arguments: list[str]) -> int:
    os.chdir(folder)
    os.environ["LIGHTNING_WLB_TRACEBACK"] = "1"
    return main(arguments)


def fit(folder: Path, name: str, *options: str, ranks: int = 1) -> None:
    """``lightning-wlb fit`` with an example for two steps, on ranks that are there as of torchrun.

    How a command starts further ranks is tested with examples/cli.py (tests/test_examples.py).
    """
    arguments = [
        *("fit", f"--config={EXAMPLES / name}", f"--trainer.devices={ranks}"),
        *("--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.precision=32-true"),
        *(f"--trainer.logger.init_args.save_dir={name}", "--trainer.enable_model_summary=false"),
        *("--data.micro_batches=2", "--data.context_window=128", "--data.profile=none"),
        *("--data.num_workers=0", *options),
    ]
    codes = run_ranks(run_fit, ranks, folder, arguments, process_group=False)
    assert codes == [0] * ranks
    assert any((folder / name).rglob("hparams.yaml"))


def checkpoint(folder: Path, name: str) -> str:
    (path,) = (folder / name).rglob("*.ckpt")
    return str(path)


def test_the_readme_plans_what_it_trains(folder, monkeypatch, capsys):
    """Its command is right as it is printed: the profile, the devices, a model that fits."""
    monkeypatch.chdir(folder)
    block = (EXAMPLES.parent / "README.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^lightning-wlb (plan .*)$", block, re.MULTILINE)
    config = yaml.safe_load((EXAMPLES / "pretrain.yaml").read_text())
    assert "wlb" not in config
    # It does not warn about itself, and its export carries the window.
    model = config["model"]["init_args"]["config"]
    assert config["data"]["context_window"] <= model["max_position_embeddings"]
    assert f"--mesh auto --devices {config['trainer']['devices']} " in command
    assert f"--micro-batches {config['data']['micro_batches']} " in command
    assert f"--context-window {config['data']['context_window']} " in command
    command = command.replace("examples/", f"{EXAMPLES}/")
    assert main([*command.split(), "--steps", "2", "--packing", "wlb"]) == 0
    assert "Verdict, simulated with profile cpu" in capsys.readouterr().out


def test_pretraining_from_a_tokenised_folder(folder):
    fit(
        folder,
        "pretrain.yaml",
        "--data.documents=corpus",
        "--model.init_args.config.vocab_size=256",
        "--model.init_args.config.hidden_size=32",
    )


def test_a_hybrid_on_context_parallel_ranks(folder):
    fit(
        folder,
        "hybrid.yaml",
        "--data.documents=corpus",
        "--model.init_args.config.vocab_size=256",
        "--model.init_args.config.hidden_size=32",
        "--wlb.context_parallel_size=2",
        ranks=2,
    )


def test_continued_pretraining_on_a_mixture_and_export(folder, monkeypatch):
    # The checkpoint names its weights' folder, and so the tokenizer's, as the run was given it.
    monkeypatch.chdir(folder)
    mixture = (
        '{"mixture": [{"documents": "corpus", "weight": 0.7, "name": "new"},'
        ' {"documents": {"path": "corpus"}, "weight": 0.3, "name": "old"}]}'
    )
    fit(
        folder,
        "continue.yaml",
        "--model.init_args.config=model",
        f"--data.documents={mixture}",
        "--wlb.context_parallel_size=2",
        "--trainer.callbacks=ModelCheckpoint",
        "--trainer.callbacks.every_n_train_steps=2",
        ranks=2,
    )
    out = folder / "exported"
    assert main(["export", checkpoint(folder, "continue.yaml"), str(out)]) == 0
    before = AutoModelForCausalLM.from_pretrained(folder / "model")
    after = AutoModelForCausalLM.from_pretrained(out)
    assert {*after.state_dict()} == {*before.state_dict()}
    assert (out / "tokenizer.json").is_file()
    changed = [
        name
        for name, value in after.state_dict().items()
        if not torch.equal(value, before.state_dict()[name])
    ]
    assert changed


def test_chats_with_low_rank_adapters_and_export(folder):
    from peft import PeftModel

    fit(
        folder,
        "chat_lora.yaml",
        "--model.init_args.config=model",
        "--data.documents.chats=chats.jsonl",
        "--data.documents.tokenizer=model",
    )
    out = folder / "adapters"
    assert main(["export", checkpoint(folder, "chat_lora.yaml"), str(out)]) == 0
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapted = PeftModel.from_pretrained(base, out)
    lora = [each for name, each in adapted.named_parameters() if "lora_B" in name]
    assert lora
    assert any(float(each.detach().abs().max()) > 0 for each in lora)
