"""Modules out of checkpoints: the class that was saved, and no class that a stranger names."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from lightning_wlb.checkpoints import sharded, writing
from lightning_wlb.cli.train import WLBCLI
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.load_from_checkpoint import _values
from lightning_wlb.models.transformer import TransformerConfig
from tests.models.steps import documents, trainer

ARGUMENTS = [
    *("--data.documents=stdlib", "--data.context_window=512", "--data.micro_batches=2"),
    *("--trainer.logger=false", "--trainer.accelerator=cpu"),
]
SIZES = TransformerConfig(
    dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=16, vocab_size=32, tied_embeddings=True
)


class Special(LanguageModule):
    """A module of the user's own, as LightningCLI is told to make it."""

    def __init__(self, extra: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.save_hyperparameters({"extra": extra})


def written(kind: str, path: Path, module: LanguageModule, **changed: Any) -> Path:
    """A checkpoint of either kind with the module's weights and arguments."""
    module.configure_model()
    given = dict(module.hparams) | changed
    if kind == "folder":
        writing.write(path, sharded.collect(module, [], {"hyper_parameters": given}, {}))
    else:
        torch.save({"state_dict": module.state_dict(), "hyper_parameters": given}, path)
    return path


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_lightning_cli_has_made_is_made_again(kind, tmp_path):
    config = f"--model.config={json.dumps(vars(SIZES))}"
    saved = WLBCLI(
        run=False, args=[*ARGUMENTS, f"--model={__name__}.Special", "--model.seed=7", config]
    ).model
    assert saved.hparams["_instantiator"] == "lightning.pytorch.cli.instantiate_module"
    path = written(kind, tmp_path / "run.ckpt", saved)
    for cls in (LanguageModule, Special):
        loaded = cls.load_from_checkpoint(path, learning_rate=0.5)
        assert type(loaded) is Special
        assert (loaded.config, loaded.seed, loaded.learning_rate) == (SIZES, 7, 0.5)
        for name, value in saved.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("key", ["config", "extra", "_class_path"])
def test_no_class_that_a_stranger_names_is_imported(kind, key, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("class Ran: pass")
    monkeypatch.syspath_prepend(tmp_path)
    named: Any = {"class_path": "stranger.Ran", "init_args": {}}
    if key == "_class_path":
        named = "stranger.Ran"
    way = {"_instantiator": "lightning.pytorch.cli.instantiate_module", key: named}
    path = written(kind, tmp_path / "run.ckpt", Special(config=SIZES), **way)
    with pytest.raises(ValueError, match="no option") if key == "config" else nullcontext():
        Special.load_from_checkpoint(path)
    assert "stranger" not in sys.modules


def test_no_module_makes_the_class_that_a_stranger_names(tmp_path, monkeypatch):
    """transformers' imports one of its own for each class that it is asked for."""
    lazy = ModuleType("lazy")
    asked: list[str] = []
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    path = written("file", tmp_path / "run.ckpt", Special(config=SIZES), _class_path="lazy.Any")
    assert isinstance(Special.load_from_checkpoint(path), Special)
    assert "Any" not in asked


def test_an_address_is_read_as_plain_types(monkeypatch):
    asked = []

    def download(address: str, **options: Any) -> None:
        asked.append(options["weights_only"])
        raise ConnectionError

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    for given in (None, True, False):
        with pytest.raises(ConnectionError):
            LanguageModule.load_from_checkpoint("https://a/b.ckpt", weights_only=given)
    assert asked == [True, True, False]


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize(
    ("field", "size", "said"),
    [
        (
            "vocab_size",
            10**7,
            r"160,001,584 values .* 2,(608|096)\. .* embed.weight, \(10000000, 16\)",
        ),
        (
            "head_dim",
            10**9,
            r"96,000,001,328 .* layers.0.attention.wq, \(2000000000, 16\)",
        ),
        ("ffn_dim", 10**30, "sizes that no memory can hold.*Overflow"),
        ("dim", 10**18, "sizes that no memory can hold.*overflowed"),
    ],
)
def test_sizes_that_a_checkpoint_does_not_hold_are_made_no_room_for(
    kind, field, size, said, tmp_path
):
    given = {"config": vars(SIZES) | {field: size}}
    path = written(kind, tmp_path / "run.ckpt", LanguageModule(SIZES), **given)
    with pytest.raises(ValueError, match=said):
        LanguageModule.load_from_checkpoint(path)
    # A module's own hooks may still make more of the weights, as of a vocabulary.
    written(kind, tmp_path / "next.ckpt", LanguageModule(SIZES), config=vars(SIZES) | {"layers": 9})
    with pytest.raises(RuntimeError, match="Missing key"):
        LanguageModule.load_from_checkpoint(tmp_path / "next.ckpt")


def test_values_that_tensors_share_or_repeat_are_stored_once() -> None:
    one = torch.zeros(8, 2, dtype=torch.bfloat16)
    repeated = torch.zeros(1).expand(100)
    assert _values([one, one.T, one[:4], repeated, torch.zeros(3), "no tensor"]) == 16 + 1 + 3
    assert _values([one[:4]]) == 8


class OnlyMatrices(LanguageModule):
    """As with LoRA: the optimizer's group of vectors is empty."""

    def configure_model(self) -> None:
        super().configure_model()
        for each in self.parameters():
            each.requires_grad_(each.ndim > 1)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_optimizer_states_by_name_are_read_into_an_empty_group_too(tmp_path):
    """As consolidate_checkpoint writes them."""
    data = {"context_window": 32, "micro_batches": 1, "num_workers": 0}
    saved = OnlyMatrices(SIZES, seed=3)
    runner = trainer(tmp_path, max_steps=2)
    runner.fit(saved, WLBDataModule(documents(), **data))
    runner.save_checkpoint(tmp_path / "whole.ckpt")
    content = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    content["optimizer_states"] = [
        get_optimizer_state_dict(saved, o, options=options) for o in runner.optimizers
    ]
    torch.save(content, tmp_path / "named.ckpt")
    ends = []
    for name in ("whole", "named"):
        module = OnlyMatrices(SIZES, seed=3)
        runner = trainer(tmp_path, max_steps=4)
        runner.fit(module, WLBDataModule(documents(), **data), ckpt_path=tmp_path / f"{name}.ckpt")
        assert [len(each["params"]) for each in runner.optimizers[0].param_groups][1] == 0
        rate = torch.tensor(runner.optimizers[0].param_groups[0]["lr"])
        ends.append(module.state_dict() | {"rate": rate})
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
