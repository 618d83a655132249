"""What is refused of a Trainer, its loaders and data modules, and hooks that stay."""

from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.loader import StepDataset, StepLoader
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.planning import DataSettings
from tests.models.steps import config, documents, loader, module, trainer


class Plain(L.LightningModule):
    """A module of the user's own around one, which takes the first of the batches it is given."""

    def __init__(self):
        super().__init__()
        self.inner, self.steps = module(), []

    def training_step(self, batches, _):
        batch, *_ = batches.values() if isinstance(batches, dict) else (batches,)
        self.steps.append(batch.plan.step)
        return self.inner.step(batch)

    validation_step = training_step

    def configure_optimizers(self):
        return self.inner.configure_optimizers()


class Rereads(L.Callback):
    """Runs a loop of its own inside a Trainer's."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps = [each.plan.step for each in steps_of(module.inner)]


def steps_of(trained):
    settings = DataSettings(context_window=32, micro_batches=2)
    return StepLoader(StepDataset.for_model(documents(), settings, trained.model_shape))


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 1}])
@pytest.mark.parametrize("own", [Plain, lambda: LanguageModule(config(), seed=3)])
@pytest.mark.parametrize(
    "given",
    [
        lambda each: each,
        lambda each: {"t": each},
        lambda each: [each],
        lambda each: (b for b in each),
    ],
    ids=["bare", "dictionary", "list", "iterable"],
)
def test_a_trainer_refuses_a_loader_that_keeps_its_own_position(tmp_path, given, own, options):
    loader = given(steps_of(module()))
    with pytest.raises(
        MisconfigurationException, match=r"would repeat or skip steps.*WLBDataModule"
    ):
        trainer(tmp_path, max_steps=1, **options).fit(own(), loader)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_trainer_refuses_torchs_loaders_of_steps(tmp_path, kind, workers):
    """One lost a step on resume, the other repeated all of them."""
    loader = steps_of(module())
    next(iter(loader))
    given = kind(loader.dataset, batch_size=None, num_workers=workers)
    with pytest.raises(MisconfigurationException, match="WLBDataModule"):
        trainer(tmp_path, max_steps=1).fit(Plain(), given)


class AddsUp(LanguageModule):
    """Takes an optimizer step for every two batches."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.step(batch))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Two(LanguageModule):
    """Takes the steps of two optimizers with each batch, and fails between those of the second."""

    automatic_optimization = False
    fails = True
    times = 1  # that the first steps in each batch

    def configure_optimizers(self):
        weights = list(self.parameters())
        return SGD(weights[::2], lr=0.1), SGD(weights[1::2], lr=0.1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.step(batch)
        self.zero_grad()
        self.manual_backward(loss)
        for _ in range(self.times):
            first.step()
        if self.fails and batch.plan.step == 1:
            raise ZeroDivisionError
        second.step()


def test_gradients_of_several_batches_are_not_added_up_by_hand(tmp_path):
    """Each epoch would have repeated the last one, and half of the tokens been counted."""
    data = WLBDataModule(documents(), context_window=32, micro_batches=1, num_workers=0)
    with pytest.raises(MisconfigurationException, match=r"Step 0 .* Take an optimizer step for"):
        trainer(tmp_path, max_epochs=2).fit(AddsUp(config(), seed=3), data)


@pytest.mark.parametrize("times", [1, 3])
def test_half_of_an_update_is_not_saved(tmp_path, times, monkeypatch):
    """The position would be behind a batch of which one optimizer had not taken its step."""
    monkeypatch.setattr(Two, "times", times)
    every = times + 1  # steps a batch
    keeper = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=every, save_on_exception=True)
    options = {"callbacks": [keeper], "enable_checkpointing": True, "max_steps": 2 * every}
    data = WLBDataModule(documents(), context_window=32, micro_batches=1, num_workers=0)
    with (
        pytest.raises(ZeroDivisionError),
        pytest.warns(match=f"had taken {times} of its steps"),
    ):
        trainer(tmp_path, **options).fit(Two(config(), seed=3), data)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [f"step={every}.ckpt"]
    whole, resumed = Two(config(), seed=3), Two(config(), seed=3)
    whole.fails = resumed.fails = False
    for each, path in ((whole, None), (resumed, tmp_path / f"step={every}.ckpt")):
        data = WLBDataModule(documents(), context_window=32, micro_batches=1, num_workers=0)
        trainer(tmp_path, max_steps=2 * every).fit(each, data, ckpt_path=path)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def held_out(kind=WLBDataModule):
    given = {"context_window": 32, "micro_batches": 1, "num_workers": 0}
    return kind(documents(), validation_documents=2, **given)


def fitted(run, path=None):
    """A module of the Trainer's fit, which goes on from a checkpoint."""
    made = LanguageModule(config(), seed=3)
    run.fit(made, held_out(), ckpt_path=path)
    return made


def test_a_fit_that_fails_before_it_trains_saves_nothing(tmp_path):
    """It is restored by halves then, and would take the place of what it was to go on from."""

    def run(steps, epochs=-1):
        keeper = ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1, save_on_exception=True
        )
        options = {"max_epochs": epochs, "limit_train_batches": 2, "callbacks": [keeper]}
        return trainer(tmp_path, max_steps=steps, enable_checkpointing=True, **options)

    fitted(run(6))
    saved = tmp_path / "step=6.ckpt"
    before = saved.read_bytes()
    with (
        pytest.raises(MisconfigurationException, match="restored a checkpoint with current_epoch"),
        pytest.warns(match="since training had not begun"),
    ):
        fitted(run(8, epochs=1), saved)
    assert saved.read_bytes() == before
    resumed, unbroken = fitted(run(8), saved), fitted(run(8))
    for one, other in zip(resumed.parameters(), unbroken.parameters(), strict=True):
        assert torch.equal(one, other)


def test_no_search_for_a_learning_rate_makes_a_resumed_run_forget_its_steps(tmp_path):
    """Lightning keeps neither the steps nor the optimizer's state of what it goes on from."""
    search = LearningRateFinder(num_training_steps=5, update_attr=False)
    first = trainer(tmp_path, max_steps=2, callbacks=[search])
    fitted(first)
    assert first.global_step == 2
    first.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(MisconfigurationException, match="leave a LearningRateFinder out of a run"):
        fitted(trainer(tmp_path, max_steps=4, callbacks=[search]), tmp_path / "a.ckpt")


class Fails(L.Callback):
    def __init__(self, hook):
        setattr(self, hook, self.fail)

    def fail(self, *_):
        raise ZeroDivisionError


@pytest.mark.parametrize("hook", ["on_validation_start", "on_fit_start", "on_train_start"])
def test_no_evaluation_or_fit_that_fails_early_replaces_a_checkpoint(tmp_path, hook):
    """The logger is told of the failure, although a callback raises."""
    saved = tmp_path / "on_exception.ckpt"
    keeper, logger = OnExceptionCheckpoint(tmp_path), mock.Mock(spec=CSVLogger(tmp_path))
    callbacks = [keeper, Fails(hook)]
    options = {"enable_checkpointing": True, "callbacks": callbacks, "logger": logger}
    run = trainer(tmp_path, max_steps=4, **options)
    fitted(first := trainer(tmp_path, max_steps=2))
    first.save_checkpoint(saved)
    before = saved.read_bytes()
    made = LanguageModule(config(), seed=3)
    with pytest.raises(ZeroDivisionError), pytest.warns(match="training had not begun"):
        (run.validate if "validation" in hook else run.fit)(made, held_out())
    assert saved.read_bytes() == before
    logger.finalize.assert_called_once_with("failed")


class SavesEarly(L.Callback):
    def on_fit_start(self, run, module):
        run.save_checkpoint(run.default_root_dir + "/early.ckpt")


class OwnSetup(WLBDataModule):
    def setup(self, stage):
        """As Lightning's, which does nothing."""


def test_no_fit_goes_on_from_half_a_checkpoint(tmp_path):
    """Saved as a fit begins that is to be restored, or after another checkpoint was evaluated."""
    run = trainer(tmp_path, max_steps=2, callbacks=[SavesEarly()])
    made = fitted(run)
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "early.ckpt").exists()
    with pytest.raises(MisconfigurationException, match="before the run has the steps"):
        fitted(run, tmp_path / "a.ckpt")
    run.validate(made, held_out(), ckpt_path=tmp_path / "a.ckpt")
    run.save_checkpoint(tmp_path / "b.ckpt")
    run.callbacks.clear()
    run.fit_loop.epoch_loop.max_steps = 4
    with pytest.raises(MisconfigurationException, match="this one serves to evaluate"):
        fitted(run, tmp_path / "b.ckpt")
    run.validate(made, held_out(), ckpt_path=tmp_path / "b.ckpt")
    data = held_out(OwnSetup)
    run.validate(made, data)
    run.fit(made, data)
    run.save_checkpoint(tmp_path / "b.ckpt")
    run.fit(made, held_out(OwnSetup), ckpt_path=tmp_path / "b.ckpt")
    run.callbacks += [OnExceptionCheckpoint(tmp_path), Fails("on_fit_start")]
    with pytest.raises(ZeroDivisionError), pytest.warns(match="training had not begun"):
        run.fit(made, data)


def test_a_loader_of_the_users_own_serves_to_evaluate_and_in_hooks(tmp_path):
    trained, rereads = Plain(), Rereads()
    batches = list(steps_of(trained.inner))
    numbers = [each.plan.step for each in batches]
    run = trainer(tmp_path, max_epochs=1, callbacks=[rereads], num_sanity_val_steps=0)
    run.fit(trained, loader(batches), steps_of(trained.inner))
    assert rereads.steps == numbers
    assert trained.steps == numbers * 2
    run.validate(trained, steps_of(trained.inner))
    assert trained.steps == numbers * 3


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"callbacks": [GradientAccumulationScheduler({1: 2})]},
    ],
)
def test_gradients_of_several_batches_are_not_accumulated(tmp_path, options):
    """The tokens of one of them alone would count."""
    pattern = (
        r"(accumulate_grad_batches=2|GradientAccumulationScheduler\(\{1: 2, 0: 1\}\)) would"
        r" accumulate .*WLBDataModule\(micro_batches=...\)"
    )
    data = WLBDataModule(documents(), context_window=32, micro_batches=2, num_workers=0)
    with pytest.raises(MisconfigurationException, match=pattern):
        trainer(tmp_path, **options).fit(LanguageModule(config()), data)


class OwnHooks(LanguageModule):
    """Overrides what keeps a run's position, as Lightning's own hooks, which do nothing, may be."""

    seen = None

    def setup(self, stage):
        pass

    def on_train_start(self):
        pass

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = self.trainer.global_step

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["mine"]


class Rescaled:
    def on_load_checkpoint(self, checkpoint):
        self.seen = 10 * checkpoint["mine"]


class OwnHooksOfAMixin(Rescaled, OwnHooks):
    pass


class OwnData(WLBDataModule):
    seen = None

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch

    def state_dict(self):
        return {"mine": 5}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["mine"]


class InADictionary(WLBDataModule):
    def train_dataloader(self):
        return {"t": super().train_dataloader()}


class Converts(WLBDataModule):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch]


@pytest.mark.parametrize("kind", [InADictionary, Converts])
def test_a_data_module_that_hides_its_batches_is_refused(tmp_path, kind):
    """Documents would come again in every epoch."""
    data = kind(documents(), context_window=32, micro_batches=2, num_workers=0)
    trained = Plain()
    trained.model_shape = trained.inner.model_shape
    with pytest.raises(MisconfigurationException, match=r"came as a (dict|list): .* repeat them"):
        trainer(tmp_path, max_epochs=1).fit(trained, data)


class Steps(L.Callback):
    def __init__(self):
        self.taken = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"].item()
        self.taken.append((batch.plan.step, loss, self.rate, module.tokens_seen))


def test_a_run_goes_on_whatever_hooks_are_overridden_without_super(tmp_path):
    options = {"learning_rate": 0.1, "warmup_tokens": 170, "decay_tokens": 510, "seed": 3}

    def run(module, data, steps, ckpt_path=None):
        recorder = Steps()
        built = module(config(), **options)
        given = data(documents(), context_window=32, micro_batches=2, num_workers=0)
        fit = trainer(tmp_path, max_steps=steps, max_epochs=-1, callbacks=[recorder])
        fit.fit(built, given, ckpt_path=ckpt_path)
        fit.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
        return recorder.taken, built, given

    plain, *_ = run(LanguageModule, WLBDataModule, 6)
    assert [step for step, *_ in plain] == [0, 1, 2, 3, 4, 5]
    for kind, factor in ((OwnHooks, 1), (OwnHooksOfAMixin, 10)):
        first, *_ = run(kind, OwnData, 3)
        second, built, given = run(kind, OwnData, 6, tmp_path / "last.ckpt")
        assert first + second == plain
        assert (built.seen, given.seen) == (3 * factor, 5)
        # Another run of the same module begins anew.
        assert trainer(tmp_path, max_steps=1).fit(built, given) is None
        assert built.tokens_seen == plain[0][3]
