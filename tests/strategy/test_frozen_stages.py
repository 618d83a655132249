"""Fine-tuning of some layers: a pipeline stage whose parameters are all frozen trains along."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, Recorder, config, data, relative_error, trainer

# What begins with one of these is frozen; with two layers, all of the first or of the last stage.
LOWER, UPPER = ("embed.", "layers.0."), ("layers.1.", "head.")


class Freezes(LanguageModule):
    """A module whose parameters are frozen by name."""

    frozen: tuple[str, ...] = ()

    def build_model(self) -> Decoder:
        model = super().build_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))
        return model


class OwnOptimizer(Freezes):
    """As a tutorial writes it, which leaves torch without any parameter."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad])


def frozen_module(frozen: tuple[str, ...], kind: type[Freezes] = Freezes) -> Freezes:
    # A schedule whose saved state, rank 0's, has a value for each group of parameters.
    module = kind(config(False, layers=2), learning_rate=1e-2, warmup_tokens=300, seed=7)
    module.frozen = frozen
    return module


def fit(frozen: tuple[str, ...], strategy: Any, devices: int, **options: Any) -> dict[str, Any]:
    recorder = Recorder()
    keeper = ModelCheckpoint(options.pop("folder"), every_n_train_steps=2, save_top_k=-1)
    resume = options.pop("resume", None)
    given = {"callbacks": [recorder, keeper], "enable_checkpointing": True, "max_steps": 3}
    trainer(strategy, devices, **given, **options).fit(
        frozen_module(frozen), data(SMALL), ckpt_path=resume
    )
    return recorder.record()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    return run_ranks(on_ranks, 2, tmp_path_factory.mktemp("frozen"), process_group=False)


def on_ranks(rank: int, folder: Path) -> tuple[Any, ...]:
    found = {}
    for frozen in (LOWER, UPPER):
        home = folder / frozen[0]
        saved = {"folder": home, "resume": home / "epoch=0-step=2.ckpt"}
        found[frozen] = [fit(frozen, WLBStrategy(1, 2), 2, folder=home)]
        found[frozen] += [fit(frozen, WLBStrategy(*mesh), 2, **saved) for mesh in ((1, 2), (2,))]
    return found, refusals()


def refusals() -> list[str]:
    found = []
    for module in (frozen_module((*LOWER, *UPPER)), frozen_module(LOWER, OwnOptimizer)):
        with pytest.raises(MisconfigurationException) as error:
            trainer(WLBStrategy(1, 2), 2).fit(module, data(SMALL))
        found.append(str(error.value))
    return found


@pytest.mark.parametrize("frozen", [LOWER, UPPER], ids=["lower", "upper"])
def test_a_frozen_stage_trains_as_one_process_does(frozen, runs, tmp_path):
    whole = fit(frozen, "auto", 1, folder=tmp_path)
    assert any(not name.startswith(frozen) for name in whole["parameters"])
    gradients: list[dict[str, Any]] = [{} for _ in whole["gradients"]]
    for found, _ in runs:
        first, again, other = found[frozen]
        np.testing.assert_allclose(first["losses"], whole["losses"], rtol=1e-12)
        assert again["losses"] == first["losses"][2:], "resumed bit for bit"
        np.testing.assert_allclose(other["losses"], whole["losses"][2:], rtol=1e-12)
        for step, mine in enumerate(first["gradients"]):
            gradients[step] |= mine
        for name, value in first["parameters"].items():
            assert relative_error(value, whole["parameters"][name]) <= 1e-10, name
            np.testing.assert_array_equal(value, again["parameters"][name])
    for mine, wanted in zip(gradients, whole["gradients"], strict=True):
        assert mine.keys() == wanted.keys()
        for name, value in mine.items():
            assert relative_error(value, wanted[name]) <= 1e-10, name


def test_what_trains_nothing_is_refused_on_every_rank(runs):
    for _, (nothing, own) in runs:
        assert "All parameters of Freezes are frozen" in nothing
        assert "All parameters of the pipeline stages on ranks [0] are frozen" in own
