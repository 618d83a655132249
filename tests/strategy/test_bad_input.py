"""Every mistake is answered with one paragraph: the values, and what to do."""

import re

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_wlb import (
    InMemoryDocuments,
    LanguageModule,
    Transformer,
    TransformerConfig,
    WLBStrategy,
)
from tests.ranks import run_ranks
from tests.strategy.harness import CASES, config, data, module, trainer

CASE = CASES[0]
VERBS = (
    "use remove change give move return derive choose ask save call subclass lower raise set check"
)
REMEDY = re.compile(rf"\b({VERBS.replace(' ', '|')})\b", re.IGNORECASE)


def refused(words: str, strategy, model=None, batches=None, devices: int = 1, **options) -> None:
    """That a fit ends with a MisconfigurationException of one paragraph that matches."""
    runner = trainer(strategy, devices, gradient_clip_val=None, **options)
    with pytest.raises((MisconfigurationException, ValueError), match=words) as error:
        runner.fit(model or module(CASE), batches or data(CASE))
    text = str(error.value)
    assert "\n" not in text
    assert REMEDY.search(text), f"no remedy: {text}"


class Extra(LanguageModule):
    def __init__(self) -> None:
        super().__init__(config(False))
        self.extra = torch.nn.Linear(2, 2)


class NoModel(LanguageModule):
    def configure_model(self) -> None:
        pass


class WrongModel(LanguageModule):
    def configure_model(self) -> None:
        self.model = torch.nn.Linear(2, 2)


class Penalty(LanguageModule):
    def training_step(self, batch, batch_idx):
        return self.step(batch) + sum(p.square().sum() for p in self.parameters())


class Twice(LanguageModule):
    def training_step(self, batch, batch_idx):
        self.step(batch)
        return self.step(batch)


class Never(LanguageModule):
    def training_step(self, batch, batch_idx):
        return torch.zeros((), device=self.device)


class Own(Transformer):
    def __init__(self, config, dropout: float = 0.0) -> None:
        super().__init__(config)
        layer = self.layers["1"]
        layer.feed_forward = torch.nn.Sequential(torch.nn.Dropout(dropout), layer.feed_forward)


class Ignoring(LanguageModule):
    def __init__(self) -> None:
        super().__init__(config(False), activation_checkpointing="full")

    def build_model(self):
        model = Own(self.config)
        model.activation_checkpointing = "none"
        return model


class WithDropout(LanguageModule):
    def build_model(self):
        return Own(self.config, 0.1)


def changed(**attributes) -> LanguageModule:
    result = module(CASE)
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


def on_one_rank(rank: int) -> None:
    refused(
        "data 2 × pipeline 2 .* a multiple of 4 ranks, but the Trainer runs 1", WLBStrategy(2, 2)
    )
    refused("sets automatic_optimization=False", "wlb", changed(automatic_optimization=False))
    refused("accumulate_grad_batches=2", "wlb", accumulate_grad_batches=2)
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop):
        made = lambda kind=kind: kind([torch.nn.Parameter(torch.ones(1))])  # noqa: E731
        refused(f"{kind.__name__} needs whole", "wlb", changed(configure_optimizers=made))
    refused("LanguageModule and its subclasses, but got BoringModel", "wlb", BoringModel())
    refused("outside of self.model.*extra.weight, extra.bias", "wlb", Extra())
    refused("NoModel.build_model must return a whole", "wlb", NoModel(config(False)))
    refused("the model is Linear without embed, layers, head", "wlb", WrongModel(config(False)))
    refused(
        "batch of type Tensor", "wlb", LanguageModule(config(False)), DataLoader(torch.ones(4, 3))
    )
    refused("returned a loss of .* but the step that ran has", "wlb", Penalty(config(False)))
    refused("called self.step more than once", "wlb", Twice(config(False)))
    refused("loss of 0, but the step that ran has none", "wlb", Never(config(False)))
    for callback in (StochasticWeightAveraging(0.1), EMAWeightAveraging()):
        refused("Averaging copies the whole model", "wlb", callbacks=[callback])
    refused(
        "activation_checkpointing='full', but the Own .* always has 'none'",
        "wlb",
        Ignoring(),
    )
    refused("Own: layers.1.feed_forward.0 is a Dropout of p=0.1", "wlb", WithDropout(config(False)))
    # Of documents that are trained on, or only validated on.
    small = TransformerConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=50)
    fits, wrong = (InMemoryDocuments([[each] * 40] * 9, vocab_size=50) for each in (49, 60))
    for strategy in ("wlb", "auto"):
        for options in ({"documents": wrong}, {"documents": fits, "validation_documents": wrong}):
            words = r"InMemoryDocuments.* has the token \d+ at .*, outside the vocabulary \[0, 50\)"
            batches = data(CASE, **options)
            refused(words, strategy, LanguageModule(small), batches)
    # The process is none the worse for it; on one rank the clock may say when to validate.
    trainer("wlb", 1, max_steps=1, val_check_interval={"hours": 1}).fit(module(CASE), data(CASE))


def on_two_ranks(rank: int) -> None:
    one_layer = TransformerConfig(dim=32, layers=1, heads=4, vocab_size=64)
    refused("1 layer.* 2 ", WLBStrategy(1, 2), LanguageModule(one_layer), devices=2)
    odd = TransformerConfig(dim=30, layers=2, heads=3, kv_heads=3, vocab_size=64, head_dim=10)
    refused(
        "tensor_parallel_size=2 .* heads=3", WLBStrategy(1, 1, 1, 2), LanguageModule(odd), devices=2
    )
    refused("use strategy='wlb'", "ddp", devices=2)
    used = module(CASE)
    trainer(WLBStrategy(1, 2), 2).fit(used, data(CASE))
    refused(
        "Trainer split the module for the mesh data 1 × pipeline 2 .* split for the mesh data 2",
        WLBStrategy(2, 1),
        used,
        devices=2,
    )


@pytest.mark.parametrize(("mistakes", "ranks"), [(on_one_rank, 1), (on_two_ranks, 2)])
def test_mistakes_are_refused(mistakes, ranks):
    run_ranks(mistakes, ranks, process_group=False)


def test_a_trainer_of_the_other_namespace():
    """What pytorch_lightning itself says, and our words where it asks us."""
    other = pytest.importorskip("pytorch_lightning")
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False}
    with pytest.raises(ValueError, match=r"for lightning.pytorch.Trainer, not pytorch_lightning"):
        other.Trainer(strategy=WLBStrategy(), **quiet)
    with pytest.raises(ValueError, match=r"'wlb'.*instance of `pytorch_lightning.strategies"):
        other.Trainer(strategy="wlb", **quiet)
    with pytest.raises(TypeError, match=r"must be a `LightningModule`.*got `LanguageModule`"):
        other.Trainer(**quiet).fit(module(CASE), data(CASE))

    class Theirs(other.LightningModule):
        pass

    with pytest.raises(MisconfigurationException, match=r"Write `import lightning.pytorch as L`"):
        other.Trainer(**quiet).fit(Theirs(), datamodule=data(CASE))
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        L.Trainer(strategy="wlb", **quiet).fit(Theirs(), data(CASE))
