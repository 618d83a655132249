"""What becomes of a model's buffers and of its memory; its gradients are test_gradients.py's."""

import lightning.pytorch as L
import pytest
import torch

from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.tensor_parallel import held
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.training.parallelize import check_parameters
from tests.ranks import run_ranks
from tests.strategy.harness import Case, config, data, trainer


class Buffered(LanguageModule):
    """Its model has a buffer of numbers and one of integers, made on ``device``."""

    device_of_buffers: str | None = "cpu"

    def configure_model(self) -> None:
        if self.model is not None:
            return
        with torch.device("meta"):
            self.model = Transformer(self.config)
            values = torch.arange(3.0, device=self.device_of_buffers)
            self.model.register_buffer("numbers", values + 0.5)
            self.model.register_buffer("integers", values.long() + 2**40)


class Meta(Buffered):
    device_of_buffers = None


class Look(L.Callback):
    def on_train_start(self, trainer, pl_module) -> None:
        self.numbers = pl_module.model.numbers.clone()
        self.integers = pl_module.model.integers.clone()


def buffers() -> tuple[torch.Tensor, torch.Tensor, str]:
    look = Look()
    runner = trainer(WLBStrategy(2), 2, callbacks=[look], max_steps=1)
    runner.fit(Buffered(config(False)), data(Case()))
    with pytest.raises(ValueError, match="lack values") as info:
        trainer(WLBStrategy(2), 2).fit(Meta(config(False)), data(Case()))
    return look.numbers, look.integers, str(info.value)


class Filled(LanguageModule):
    """Counts the values for which it has memory when it is to fill them, and those it has whole."""

    def init_weights(self) -> None:
        parameters = list(self.parameters())
        self.memory = sum(held(parameter).numel() for parameter in parameters)
        self.whole = sum(parameter.numel() for parameter in parameters)
        super().init_weights()


def fill() -> tuple[int, int]:
    module = Filled(config(False))
    trainer(WLBStrategy(2), 2, max_steps=1).fit(module, data(Case()))
    return module.memory, module.whole


class Shares(LanguageModule):
    """Two layers with one norm."""

    def configure_model(self) -> None:
        super().configure_model()
        first, second = self.model.layers["0"], self.model.layers["1"]
        second.attention_norm.weight = first.attention_norm.weight


class Scaled(LanguageModule):
    """A parameter of the model itself, in none of its parts."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.scale = torch.nn.Parameter(torch.ones(3, device=self.model.head.weight.device))


def refusals() -> list[str]:
    messages = []
    for kind, said in ((Shares, "is in two layers"), (Scaled, "is in none of")):
        with pytest.raises(ValueError, match=said) as info:
            trainer(WLBStrategy(1, 2), 2).fit(kind(config(False)), data(Case()))
        messages.append(str(info.value))
    return messages


def run(rank: int) -> tuple:
    return buffers(), fill(), refusals()


@pytest.fixture(scope="module")
def ranks() -> list[tuple]:
    return run_ranks(run, 2, process_group=False)


def test_buffers_keep_their_values_or_are_refused(ranks):
    for (numbers, integers, message), *_ in ranks:
        assert torch.equal(numbers, torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64))
        assert torch.equal(integers, torch.arange(3) + 2**40)
        assert "numbers, integers" in message


def test_a_rank_fills_nothing_but_its_shards(ranks):
    for _, (memory, whole), _ in ranks:
        assert memory == whole // 2


def test_a_parameter_of_two_stages_is_refused(ranks):
    # Each stage would train its own copy, by its own part of the gradient.
    for *_, (shared, outside) in ranks:
        assert shared.startswith("Transformer: the parameter layers.1.attention_norm.weight is in")
        assert outside.startswith("Transformer: scale is in none of embed, layers and head")


def test_what_one_rank_may_share():
    model = Transformer(config(True))
    model.scale = torch.nn.Parameter(torch.ones(3))
    check_parameters(model, 1)
    model.scale.requires_grad_(False)
    check_parameters(model, 2)
    model.layers["1"].scale = model.scale
    with pytest.raises(ValueError, match="scale is in two layers, or in a layer"):
        check_parameters(model, 1)


def test_ends_that_share_a_parameter_say_so():
    model = Transformer(config(False))
    model.head.weight = model.embed.weight
    with pytest.raises(ValueError, match=r"head\.weight is the parameter embed\.weight, which its"):
        check_parameters(model, 1)


def test_a_hook_that_would_never_run_is_refused():
    model = Transformer(config(False))
    model.embed.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ValueError, match=r"embed\.weight has a hook"):
        check_parameters(model, 1)
