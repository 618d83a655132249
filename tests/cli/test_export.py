"""``lightning-wlb export``: what comes out opens in transformers, with the weights that went in."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_wlb.checkpoints import manifest
from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint
from lightning_wlb.cli.export import export
from lightning_wlb.cli.main import main
from lightning_wlb.models.huggingface import load_and_export
from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.data.tokenising.support import PLAIN, saved_chat_tokenizer
from tests.data.tokenising.support import tokenizer as words
from tests.models.huggingface.configs import tiny
from tests.models.huggingface.folders import write
from tests.models.huggingface.support import ByDocument, KeepDouble
from tests.ranks import run_ranks
from tests.strategy.harness import Case, config, data, relative_error, trainer

CASE = Case("wlb", masked=True)
TOKENS = torch.arange(3, 40)[None]
UNTOUCHED = {"learning_rate": 0.0, "weight_decay": 0.0}


def opened(folder: Path, **options: Any) -> Any:
    """The model in a folder, every tensor of which must be one of its own, and the other way."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, experts_implementation="eager", **options
    )
    assert not any(info.values()), info
    return model.eval()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def save_untouched(rank: int, mesh: tuple[int, ...], folders: list[str]) -> None:
    for folder in folders:
        module = HuggingFaceModule(folder, pretrained=True, **UNTOUCHED)
        runner = trainer(WLBStrategy(*mesh), 4, precision="32-true", max_steps=1)
        runner.fit(module, data(CASE))
        runner.save_checkpoint(f"{folder}.ckpt", weights_only=True)


@pytest.mark.parametrize(
    "families",
    [
        # Tied embeddings with a buffer, and experts.
        ("gemma3_text", "mixtral"),
        pytest.param(("deepseek_v3", "phi3"), marks=pytest.mark.families),
    ],
    ids="-".join,
)
def test_what_was_not_trained_comes_out_bit_for_bit(families, tmp_path, monkeypatch):
    folders = [tmp_path / family for family in families]
    for folder in folders:
        write(folder, tiny(folder.name), torch.bfloat16)
        (folder / "tokenizer.json").write_text("{}")
    run_ranks(save_untouched, 4, (1, 2, 1, 2), [str(each) for each in folders], process_group=False)
    monkeypatch.setattr(load_and_export, "FILE_BYTES", 20_000)
    for folder in folders:
        out = tmp_path / f"{folder.name}-exported"
        path, tensors, copied = export(f"{folder}.ckpt", out)
        assert str(path) == f"{folder}.ckpt"
        assert len({file.stat().st_mode for file in out.iterdir()}) == 1, "who reads one reads all"
        assert copied == [folder / "generation_config.json", folder / "tokenizer.json"]
        assert tensors == len(stored(folder))
        assert same(stored(folder), stored(out))
        # Several files, each with what the index says and none too large.
        index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        files = {file: load_file(out / file) for file in set(index.values())}
        assert len(files) > 3
        assert all(name in files[file] for name, file in index.items())
        assert all(
            len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= 20_000
            for tensors in files.values()
        )
        before, after = opened(folder), opened(out)
        assert torch.equal(before(TOKENS).logits, after(TOKENS).logits)
    # Of a folder of checkpoints it is the newest.
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copytree(f"{folder}.ckpt", runs / "one.ckpt")
    assert export(runs, tmp_path / "newest")[0] == runs / "one.ckpt"
    # The folder also becomes a module again, in one process.
    module = HuggingFaceModule.load_from_checkpoint(f"{folder}.ckpt")
    weights = StoredCheckpoint(Path(f"{folder}.ckpt"))
    parameters = dict(module.named_parameters())
    assert set(parameters) == weights.names
    assert same({name: each.data for name, each in parameters.items()}, weights.read(parameters))


class Started(HuggingFaceModule):
    """Starts from a folder; of float64 also where the family makes float32."""

    def build_model(self) -> Any:
        return super().build_model().double()


class StartedByDocument(ByDocument):
    """transformers' own model from the same folder, document by document in one process."""

    def init_weights(self) -> None:
        self.model.load_state_dict(opened(self.pretrained, dtype=torch.float64).state_dict())


def train(rank: int, mesh: tuple[int, ...], folders: list[str]) -> None:
    for folder in folders:
        with KeepDouble():
            runner = trainer(WLBStrategy(*mesh), 4)
            runner.fit(Started(folder, pretrained=True, learning_rate=1e-2), data(CASE))
            runner.save_checkpoint(f"{folder}.ckpt")


def check_training(
    tmp_path: Path, mesh: tuple[int, int, int, int], families: tuple[str, ...]
) -> None:
    """Trained on ranks, exported and opened: the weights that one process trains."""
    folders = [tmp_path / family for family in families]
    for folder in folders:
        write(folder, tiny(folder.name), torch.float64)
    run_ranks(train, 4, mesh, [str(each) for each in folders], process_group=False)
    for folder in folders:
        with KeepDouble():
            module = StartedByDocument(str(folder), pretrained=True, learning_rate=1e-2)
            trainer("auto", 1).fit(module, data(CASE))
        export(f"{folder}.ckpt", folder.parent / "out", force=True)
        model = opened(folder.parent / "out", dtype=torch.float64)
        wanted = dict(module.model.named_parameters())
        assert {name for name, _ in model.named_parameters()} == set(wanted)
        worst = max(
            relative_error(value.detach().numpy(), wanted[name].detach().numpy())
            for name, value in model.named_parameters()
        )
        assert worst < 1e-10, (folder, worst)


def test_weights_trained_on_four_ranks_equal_those_of_one_process(tmp_path):
    check_training(tmp_path, (2, 1, 1, 2), ("qwen2_moe",))


@pytest.mark.families
@pytest.mark.parametrize("mesh", [(2, 1, 1, 2), (1, 2, 2, 1), (4, 1, 1, 1)])
def test_trained_weights_of_more_families(mesh, tmp_path):
    # Dense, experts under other names, a persistent buffer, packed, experts stored transposed.
    families = ("llama", "gemma3_text", "mixtral", "deepseek_v3", "phi3", "gpt_oss")
    check_training(tmp_path, mesh, families)


def one_process(folder: Path) -> Path:
    """A single-file checkpoint of a run in one process."""
    runner = trainer("auto", 1, precision="32-true", max_steps=1)
    runner.fit(HuggingFaceModule(str(folder), pretrained=True, **UNTOUCHED), data(CASE))
    runner.save_checkpoint(folder.parent / "one.ckpt")
    return folder.parent / "one.ckpt"


def test_the_command_exports_a_single_file(tmp_path, capsys):
    # Whose name is no markup where it is printed.
    folder, tokenizer, out = tmp_path / "llama", tmp_path / "tokenizer", tmp_path / "[" / "red]"
    write(folder, tiny("llama"))
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "notes.md").write_text("")
    checkpoint = str(one_process(folder))
    assert main(["export", checkpoint, str(out), "--tokenizer", str(tokenizer)]) == 0
    assert same(stored(folder), stored(out))
    assert not (out / "notes.md").exists()
    printed = capsys.readouterr().out
    assert f"{len(stored(folder))} tensors of {checkpoint} in {out}" in printed
    assert (
        f"Copied beside them: {folder}/generation_config.json, {tokenizer}/tokenizer.json"
        in printed
    )
    # A folder in use is left alone, and replaced if asked.
    assert main(["export", checkpoint, str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["export", checkpoint, str(out), "--force", "--dtype", "bfloat16"]) == 0
    assert {each.dtype for each in stored(out).values()} == {torch.bfloat16}
    assert opened(out).dtype == torch.bfloat16
    assert not (out / "tokenizer.json").exists()
    assert not (tmp_path / ".partial").exists()
    manifest.check(out)
    # A file is copied itself, and the model's own generation config stays.
    mine = tokenizer / "tokenizer-32k.json"  # not the one beside it
    mine.write_text(words().to_str())
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    copied = export(checkpoint, tmp_path / "mine", tokenizer=mine)[2]
    assert copied == [folder / "generation_config.json", mine]
    for each, name in zip(copied, ("generation_config.json", "tokenizer.json"), strict=True):
        assert (tmp_path / "mine" / name).read_text() == each.read_text()
    if os.geteuid() == 0:  # a stranger's is not
        folder.chmod(0o1777)
        os.chown(folder / "generation_config.json", 65534, 65534)
        with pytest.raises(ValueError, match=r"generation_config\.json is another user's"):
            export(checkpoint, tmp_path / "strangers", tokenizer=mine)
        os.chown(folder / "generation_config.json", 0, 0)
    with pytest.raises(ValueError, match=r"notes\.md is no tokenizer\.json"):
        export(checkpoint, tmp_path / "mine", tokenizer=tokenizer / "notes.md", force=True)
    # Names of code in a stranger's folder do not travel on.
    names = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"auto_map": names, "eos": "é"}))
    saved = torch.load(checkpoint, weights_only=True)
    coded = ("auto_map", "custom_pipelines", "custom_generate")
    saved["hyper_parameters"]["config"].update(dict.fromkeys(coded, names))
    torch.save(saved, tmp_path / "strange.ckpt")
    export(tmp_path / "strange.ckpt", tmp_path / "plain", tokenizer=tokenizer)
    assert not json.loads((tmp_path / "plain/config.json").read_text()).keys() & {*coded}
    assert json.loads((tmp_path / "plain/tokenizer_config.json").read_text()) == {"eos": "é"}
    # Only an export is replaced.
    (out / "notes.md").write_text("mine")
    assert main(["export", checkpoint, str(out), "--force"]) == 2
    assert "is not a lightning_wlb export: it holds notes.md" in capsys.readouterr().err


def test_a_tokenizers_further_templates_are_exported(tmp_path):
    """Those that transformers keeps in a folder: chats with tools would be written otherwise."""
    write(tmp_path / "llama", tiny("llama"))
    checkpoint = one_process(tmp_path / "llama")
    name = saved_chat_tokenizer(tmp_path / "chats", {"default": PLAIN, "tool_use": "T" + PLAIN})
    others = Path(name, "additional_chat_templates")
    assert (others / "tool_use.jinja").exists()
    for at in range(3):
        copied = export(checkpoint, tmp_path / f"{at}", tokenizer=Path(name))[2]
        default = "default.jinja" if at else "chat_template.jinja"
        assert {each.name for each in copied[-2:]} == {default, "tool_use.jinja"}
        before, after = (AutoTokenizer.from_pretrained(each) for each in (name, tmp_path / f"{at}"))
        assert after.chat_template == before.chat_template
        assert set(after.chat_template) == {"default", "tool_use"}
        manifest.check(tmp_path / f"{at}")
        # Of two by a name one counts; and a tokenizer's settings may be missing.
        (others / "default.jinja").write_text("D" + PLAIN)
        Path(name, "tokenizer_config.json").unlink(missing_ok=True)


def test_what_cannot_be_exported_is_refused(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="is not a checkpoint"):
        export(tmp_path / "gone.ckpt", out)
    (tmp_path / "bad.ckpt").write_text("no")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        export(tmp_path / "bad.ckpt", out)
    runner = trainer("auto", 1, max_steps=1)
    runner.fit(LanguageModule(config(False)), data(CASE))
    runner.save_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(ValueError, match=r"is not of a HuggingFaceModule.*rotates neighbouring"):
        export(tmp_path / "own.ckpt", out)
    write(tmp_path / "llama", tiny("llama"))
    checkpoint = one_process(tmp_path / "llama")
    with pytest.raises(ValueError, match="there is no tokenizer in that folder"):
        export(checkpoint, out, tokenizer=tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        export(checkpoint, out, tokenizer=tmp_path / "gone")
    (tmp_path / "endless").mkdir()
    (tmp_path / "endless" / "tokenizer.model").symlink_to("/proc/self/pagemap")
    with pytest.raises(ValueError, match=r"tokenizer\.model says that it has no bytes, but more"):
        export(checkpoint, out, tokenizer=tmp_path / "endless")
    # What is read is not replaced, whatever is asked.
    for folder in (checkpoint, tmp_path / "llama", tmp_path):
        with pytest.raises(ValueError, match=r"is or holds the .* which is read"):
            export(checkpoint, folder, force=True)
    incomplete = torch.load(checkpoint, weights_only=True)
    incomplete["hyper_parameters"]["config"]["head_dim"] = 10**9
    torch.save(incomplete, tmp_path / "large.ckpt")
    with pytest.raises(ValueError, match=r"is \(32, 32\), and by .* should be \(4000000000, 32\)"):
        export(tmp_path / "large.ckpt", out)
    incomplete["hyper_parameters"]["config"]["head_dim"] = 8
    del incomplete["state_dict"]["model.head.norm.weight"]
    torch.save(incomplete, checkpoint)
    with pytest.raises(ValueError, match=r"has no model\.head\.norm\.weight"):
        export(checkpoint, out)
    assert not out.exists()
