from functools import cache

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision

import lightning_wlb  # noqa: F401  registers "wlb"
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.training.precision import WLBPrecision
from tests.ranks import run_ranks
from tests.strategy.changed_plans import changed_data
from tests.strategy.harness import SMALL, data, module, reference, trainer

CASE = SMALL
STEPS = 2
DATA, PIPELINE, CONTEXT, TENSOR = (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)
# Each precision; mixed, which casts arguments, passes process groups on every axis. The change of a
# plan lets two replicas share micro-batches. (float64: tests/strategy/test_gradients.py.)
RUNS = (
    (PIPELINE, "32-true", "none"),
    (DATA, "bf16-true", "none"),
    (PIPELINE, "bf16-mixed", "none"),
    (CONTEXT, "bf16-mixed", "none"),
    (TENSOR, "bf16-mixed", "none"),
    (DATA, "bf16-mixed", "merged"),
)
# The loss's tolerance; dtypes at rest, of activations and of the loss.
EXPECTED = {
    "32-true": (1e-5, "float32", "float32", "float32"),
    # The optimizer is given gradients in the parameters' own dtype.
    "bf16-true": (2e-2, "bfloat16", "bfloat16", "float32"),
    "bf16-mixed": (5e-3, "float32", "bfloat16", "float32"),
}


class Watch(L.Callback):
    """The dtypes of a run, and its losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.dtypes: dict[str, set[str]] = {}

    def _note(self, what: str, dtype: torch.dtype) -> None:
        self.dtypes.setdefault(what, set()).add(str(dtype).removeprefix("torch."))

    def on_train_start(self, trainer, pl_module) -> None:
        for layer in pl_module.model.layers.values():
            layer.register_forward_hook(lambda *call: self._note("hidden", call[-1].dtype))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        for parameter in pl_module.parameters():
            self._note("parameter", parameter.dtype)
            self._note("gradient", parameter.grad.dtype)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._note("loss", outputs["loss"].dtype)
        self.losses.append(float(outputs["loss"]))
        for state in trainer.optimizers[0].state.values():
            self._note("optimizer", state["exp_avg"].dtype)


def runs(rank: int) -> list[tuple[list[float], dict[str, set[str]]]]:
    results = []
    for mesh, precision, change in RUNS:
        watch = Watch()
        options = {"precision": precision, "callbacks": [watch], "max_steps": STEPS}
        batches = data(CASE) if change == "none" else changed_data(CASE, change)
        trainer(WLBStrategy(*mesh), 2, **options).fit(module(CASE), batches)
        assert torch.get_default_dtype() == torch.float32, "left as it was found"
        results.append((watch.losses, watch.dtypes))
    return results


@pytest.fixture(scope="module")
def results():
    return run_ranks(runs, 2, process_group=False)


@cache
def exact() -> list[float]:
    return reference(CASE, max_steps=STEPS)["losses"]


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda number: str(RUNS[number]))
def test_losses_are_as_close_as_the_precision_allows_and_dtypes_are_its_own(results, number):
    tolerance, rest, compute, wide = EXPECTED[RUNS[number][1]]
    for rank in results:
        losses, dtypes = rank[number]
        assert losses == pytest.approx(exact(), rel=tolerance)
        assert losses != exact(), "another precision gives other bits"
        assert dtypes == {
            "parameter": {rest},
            "gradient": {rest},
            "optimizer": {rest},
            "hidden": {compute},
            "loss": {wide},
        }


def test_bfloat16_is_reduced_in_float32():
    """What that is worth is in test_gather_and_reduce.py."""
    for precision in ("bf16-true", "bf16-mixed"):
        plugin = WLBPrecision(precision)
        assert (plugin.compute_dtype, plugin.sum_dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "transformer-engine"])
def test_other_precisions_are_refused(precision):
    with pytest.raises(MisconfigurationException) as error:
        WLBPrecision(precision)
    assert f"precision='{precision}'" in str(error.value)
    assert "32-true, 64-true, bf16-true, bf16-mixed" in str(error.value)


@pytest.mark.parametrize("make", [lambda: "wlb", WLBStrategy], ids=["name", "object"])
def test_half_precision_is_refused_or_lightning_says_what_it_becomes_on_a_cpu(make):
    """It changes the precision before the strategy sees it: right numerics, and not silently."""
    with pytest.raises(MisconfigurationException, match="cannot train with precision='16-true'"):
        L.Trainer(accelerator="cpu", devices=1, strategy=make(), precision="16-true")
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        runner = L.Trainer(accelerator="cpu", devices=1, strategy=make(), precision="16-mixed")
    assert runner.strategy.precision_plugin.compute_dtype == torch.bfloat16


def test_mixed_half_precision_of_a_gpu_is_refused():
    with pytest.raises(MisconfigurationException, match="precision='16-mixed'"):
        WLBStrategy().precision_plugin = MixedPrecision("16-mixed", "cuda")


@pytest.mark.parametrize("precision", [None, 32, "bf16-mixed", "bf16", "bf16-true", 64])
def test_other_trainers_get_what_they_ask_for(precision):
    runner = L.Trainer(accelerator="cpu", devices=1, strategy="wlb", precision=precision)
    named = {None: "32-true", 32: "32-true", 64: "64-true", "bf16": "bf16-mixed"}
    assert runner.precision == named.get(precision, precision)
    assert isinstance(runner.strategy.precision_plugin, WLBPrecision)
