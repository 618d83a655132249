import dataclasses

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.loader import StepDataset, StepLoader
from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.planning import DataSettings
from tests.device import DEVICE
from tests.models.steps import (
    MICRO_BATCHES,
    PIECES,
    VOCABULARY,
    config,
    documents,
    loader,
    loss_masks,
    module,
    step_batch,
    trainer,
)
from tests.oracle import count_targets, oracle, relative_error


class Recorder(L.Callback):
    """Losses of each step, and the learning rate that the step used."""

    def __init__(self):
        self.losses, self.rates = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(trainer.callback_metrics["train_loss"].item())


@pytest.mark.parametrize("backend", ["auto", "exact"])
@pytest.mark.parametrize(
    ("normalisation", "sliding_window"), [("step", None), ("nominal", None), ("step", 7)]
)
def test_a_steps_gradient_equals_the_oracle(normalisation, sliding_window, backend):
    texts, masks = documents(), loss_masks()
    options = {"loss_normalisation": normalisation, "attention_backend": backend}
    trained = module(sliding_window, **options).to(DEVICE)
    loss, wanted = oracle(trained.model, texts, PIECES, masks)
    divisor = 200 if normalisation == "nominal" else count_targets(texts, PIECES, masks)
    found = trained.step(step_batch(texts, masks=masks).to(DEVICE))
    found.backward()
    assert found.item() == pytest.approx(loss / divisor, rel=1e-12)
    for name, parameter in trained.model.named_parameters():
        assert relative_error(parameter.grad, wanted[name] / divisor) <= 1e-10, name


@pytest.mark.parametrize("groups", [[[(0, 0, 1)]], [[(0, 0, 1)], [(4, 39, 40)]], []], ids=str)
def test_a_step_without_targets_has_zero_loss_and_zero_gradients(groups):
    trained = module()
    loss = trained.step(step_batch(documents(), groups))
    loss.backward()
    assert loss.item() == 0
    for name, parameter in trained.model.named_parameters():
        assert parameter.grad.norm() == 0, name


def test_a_step_without_targets_is_said(tmp_path):
    fit = trainer(tmp_path, max_steps=1, max_epochs=-1)
    with pytest.warns(UserWarning, match="A step has no token with a target"):
        fit.fit(LanguageModule(config(), seed=3), loader([step_batch(documents(), [[(0, 0, 1)]])]))


def test_trains_under_the_trainer_and_the_loss_falls(tmp_path):
    recorder = Recorder()
    trained = LanguageModule(config(), learning_rate=1e-2, seed=3)
    fit = trainer(tmp_path, max_steps=12, max_epochs=-1, callbacks=[recorder])
    fit.fit(trained, loader([step_batch(documents(), step=step) for step in range(3)]))
    assert len(recorder.losses) == 12
    # Nothing is known at first: the uniform distribution's entropy.
    assert recorder.losses[0] == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=0.02)
    assert recorder.losses[-1] < recorder.losses[0] - 0.2
    assert trained.tokens_seen == 12 * 85
    assert fit.callback_metrics["tokens"].item() == 85


def test_a_loop_without_a_trainer_is_data_parallel_by_summing_gradients():
    def gradients(replicas):
        trained = module()
        for replica in range(replicas):
            dataset = StepDataset.for_model(
                documents(),
                DataSettings(context_window=32, micro_batches=2, packing="wlb"),
                trained.model_shape,
                Rank(Mesh(data=replicas), replica),
            )
            trained.step(next(iter(StepLoader(dataset)))).backward()
        return {name: parameter.grad for name, parameter in trained.named_parameters()}

    wanted = gradients(1)
    for name, gradient in gradients(2).items():
        assert relative_error(gradient, wanted[name]) <= 1e-10, name


def test_precision_does_not_change_initial_values(tmp_path):
    batches = [step_batch(documents())]
    values = {}
    for precision in ("32-true", "64-true", "bf16-true"):
        trained = LanguageModule(config(), seed=3, learning_rate=0.0)
        fit = trainer(tmp_path, max_steps=1, precision=precision)
        fit.fit(trained, loader(batches))
        values[precision] = {name: p.detach() for name, p in trained.named_parameters()}
    for name, value in values["32-true"].items():
        assert values["64-true"][name].dtype == torch.float64
        assert torch.equal(values["64-true"][name], value.double())
        assert torch.equal(values["bf16-true"][name], value.bfloat16())


def test_validation_weighs_steps_by_their_targets(tmp_path):
    texts = documents()
    tested = LanguageModule(config(), seed=3, loss_normalisation="nominal")
    tested.configure_model()
    steps = [[MICRO_BATCHES[0]], [MICRO_BATCHES[1], MICRO_BATCHES[2]], [[(0, 0, 1)]]]
    batches = [step_batch(texts, micro_batches) for micro_batches in steps]
    (results,) = trainer(tmp_path).validate(tested, loader(batches), verbose=False)
    loss, _ = oracle(tested.model, texts, PIECES)
    assert results["val_loss"] == pytest.approx(loss / count_targets(texts, PIECES), rel=1e-5)
    (results,) = trainer(tmp_path).test(tested, loader(batches), verbose=False)
    assert results["test_loss"] == pytest.approx(loss / count_targets(texts, PIECES), rel=1e-5)


def test_learning_rate_goes_by_tokens_and_resumes(tmp_path):
    options = {"learning_rate": 0.1, "warmup_tokens": 170, "decay_tokens": 510, "seed": 3}
    batches = [step_batch(documents(), step=step) for step in range(10)]
    recorder = Recorder()
    whole = LanguageModule(config(), **options)
    trainer(tmp_path, max_steps=9, callbacks=[recorder]).fit(whole, loader(batches))
    # 85 tokens per step: warm-up over 2 steps, then a cosine over 4 down to a tenth.
    wanted = [0, 0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1, 0.1, 0.1]
    assert recorder.rates == pytest.approx([0.1 * rate for rate in wanted], abs=1e-7)

    first = trainer(tmp_path, max_steps=4)
    first.fit(LanguageModule(config(), **options), loader(batches))
    first.save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    later = Recorder()
    resumed = LanguageModule(config(), **options)
    trainer(tmp_path, max_steps=9, callbacks=[later]).fit(
        resumed, loader(batches), ckpt_path=tmp_path / "a.ckpt"
    )
    assert resumed.tokens_seen == 9 * 85
    assert later.rates == recorder.rates[4:]
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)

    anew = Recorder()
    trainer(tmp_path, max_steps=3, callbacks=[anew]).fit(resumed, loader(batches))
    assert anew.rates == recorder.rates[:3]


def test_a_step_that_failed_and_is_trained_by_a_second_fit_has_its_own_rate(tmp_path):
    class Fails(LanguageModule):
        fails = True

        def on_after_backward(self):
            if self.fails and self.global_step == 2:
                self.fails = False
                raise ZeroDivisionError

    options = {"learning_rate": 0.1, "warmup_tokens": 850, "seed": 3}
    batches = [step_batch(documents(), step=step) for step in range(6)]
    seen = Recorder()
    run, broken = trainer(tmp_path, max_steps=6, callbacks=[seen]), Fails(config(), **options)
    with pytest.raises(ZeroDivisionError):
        run.fit(broken, loader(batches))
    run.fit(broken, loader(batches[2:]))
    assert seen.rates == pytest.approx([0.01 * step for step in range(6)])


def test_a_run_goes_on_with_its_own_model_and_position(tmp_path):
    fit = trainer(tmp_path, max_steps=1)
    fit.fit(LanguageModule(config()), loader([step_batch(documents())]))
    fit.save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    other = LanguageModule(dataclasses.replace(config(), rope_theta=5e5))
    data = WLBDataModule(documents(), context_window=32, micro_batches=2, num_workers=0)
    for trained, match in (
        (other, r"another config.*'rope_theta': \(10000.0, 500000.0\)"),
        (LanguageModule(config()), "no position in the documents of a WLBDataModule"),
    ):
        with pytest.raises(ValueError, match=match):
            trainer(tmp_path, max_steps=2).fit(trained, data, ckpt_path=tmp_path / "a.ckpt")


def test_learning_rate_factor():
    scheduled = LanguageModule(warmup_tokens=100, decay_tokens=300, min_learning_rate_ratio=0.2)
    factors = [scheduled.learning_rate_factor(at) for at in (0, 25, 100, 200, 300, 1000)]
    assert factors == pytest.approx([0, 0.25, 1, 0.6, 0.2, 0.2])
    assert LanguageModule().learning_rate_factor(10**9) == 1.0


def test_norm_weights_do_not_decay():
    optimizer = module(weight_decay=0.3).configure_optimizers()
    decays = {
        p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decays == {1: 0.0, 2: 0.3}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 * 9 + 3


def test_gradients_are_clipped_for_a_fused_optimizer_in_mixed_precision(tmp_path, monkeypatch):
    """On a GPU it is fused; Lightning would refuse to clip for it."""
    made = torch.optim.AdamW
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda *given, **options: made(*given, **(options | {"fused": True}))
    )
    trained, bound = LanguageModule(config(), seed=3), 2**-12
    clipping = {"gradient_clip_val": bound, "gradient_clip_algorithm": "value"}
    fit = trainer(tmp_path, max_steps=1, precision="bf16-mixed", **clipping)
    fit.fit(trained, loader([step_batch(documents())]))
    assert max(each.grad.abs().max() for each in trained.parameters()) == bound


def test_a_checkpoint_holds_plain_types_and_rebuilds_the_module(tmp_path):
    trained = LanguageModule(config(kv_heads=1), learning_rate=0.5, betas=(0.8, 0.9))
    fit = trainer(tmp_path, max_steps=1)
    fit.fit(trained, loader([step_batch(documents())]))
    fit.save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert content["tokens_seen"] == 85
    assert content["hyper_parameters"]["config"]["kv_heads"] == 1
    loaded = LanguageModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.config == trained.config
    assert (loaded.learning_rate, loaded.betas) == (0.5, (0.8, 0.9))
    for one, two in zip(trained.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("batch", [torch.zeros(2, 8), {"input_ids": torch.zeros(2, 8)}], ids=type)
@pytest.mark.parametrize("method", ["training_step", "validation_step", "test_step"])
def test_a_batch_that_is_no_step_is_refused(batch, method):
    with pytest.raises(MisconfigurationException, match=rf"{type(batch).__name__}.*WLBDataModule"):
        getattr(module(), method)(batch, 0)


def test_the_seed_is_that_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    seeded = LanguageModule(config())
    seeded.configure_model()
    assert torch.equal(seeded.model.embed.weight.double(), module().model.embed.weight)
