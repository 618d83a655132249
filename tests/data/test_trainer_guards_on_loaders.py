"""What a Trainer trains on is noted, and what it trains stays its own until the fit is over."""

import copy
from unittest import mock

import lightning.pytorch as L
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.loader import StepDataset, StepLoader
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.planning import DataSettings
from tests.models.steps import config, documents, trainer

LENGTHS = (25, 9, 38, 17, 30, 6, 40, 21)


class Taken(LanguageModule):
    """Notes the steps that it is trained on."""

    def training_step(self, batch, _):
        self.__dict__.setdefault("steps", []).append((batch.plan.epoch, batch.plan.step))
        return self.step(batch)


class Reads(Taken):
    """Opens its documents itself."""

    def train_dataloader(self):
        self.data = opened()
        self.data.trainer = self.trainer
        return self.data.train_dataloader()


class Holds(L.LightningDataModule):
    """A data module of the user's own around one."""

    def __init__(self):
        super().__init__()
        self.inner = opened()

    def setup(self, stage):
        self.inner.trainer = self.trainer
        self.inner.setup(stage)

    def train_dataloader(self):
        return self.inner.train_dataloader()


class Forwards(Holds):
    """One that passes on what happens to a batch."""

    def on_after_batch_transfer(self, batch, number):
        return self.inner.on_after_batch_transfer(batch, number)


class Watches(Taken):
    """Has a hook of its own where a data module would note a batch."""

    def on_after_batch_transfer(self, batch, number):
        return batch


def opened(**options):
    defaults = {"context_window": 40, "micro_batches": 1, "num_workers": 0}
    return WLBDataModule(documents(LENGTHS), **defaults, **options)


def dataset():
    settings = DataSettings(context_window=40, micro_batches=1)
    return StepDataset.for_model(documents(LENGTHS), settings, config().shape)


def made(kind=Taken, **options):
    return kind(config(), seed=3, **options)


@pytest.mark.parametrize("kind", ["loader", "module", "holder"])
def test_a_loader_is_not_trained_on_without_its_data_module(tmp_path, kind):
    """Every epoch would be the first one, and so would a resumed run."""
    run, data, module = trainer(tmp_path, max_epochs=2), opened(), made()
    if kind == "loader":
        with_validation = opened(validation_documents=documents())
        run.validate(module, with_validation, verbose=False)
        given = {"train_dataloaders": with_validation.train_dataloader()}
    elif kind == "module":
        module, given = made(Reads), {}
    else:
        given = {"datamodule": Holds()}
    with pytest.raises(MisconfigurationException, match=r"Give the Trainer the WLBDataModule: tra"):
        run.fit(module, **given)
    assert "steps" not in vars(module)
    whole = made()
    trainer(tmp_path, max_epochs=2).fit(whole, data)
    assert [epoch for epoch, _ in whole.steps] == [0] * 5 + [1] * (len(whole.steps) - 5)


def test_nor_is_one_of_the_users_own_by_a_module_with_that_hook(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"Give the Trainer the WLBDataModule: tra"):
        trainer(tmp_path, max_steps=1).fit(made(Watches), StepLoader(dataset()))


def test_accelerate_is_not_given_a_loader_of_steps():
    """It takes a batch ahead, so that the position of the user's loader would be a step ahead."""
    accelerate = pytest.importorskip("accelerate")
    state = pytest.importorskip("accelerate.state")
    settings = accelerate.utils.DataLoaderConfiguration(dispatch_batches=False)
    try:
        prepared = accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare(
            StepLoader(dataset())
        )
        with pytest.raises(MisconfigurationException, match="given to accelerator"):
            next(iter(prepared))
    finally:
        state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_data_module_that_passes_its_batches_on_may_hold_one(tmp_path):
    module, whole = made(), made()
    trainer(tmp_path, max_epochs=2).fit(module, Forwards())
    trainer(tmp_path, max_epochs=2).fit(whole, opened())
    assert module.steps == whole.steps


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_end"])
@pytest.mark.parametrize("copied", [False, True])
def test_no_other_trainer_runs_the_module_in_the_middle_of_a_fit(tmp_path, hook, copied):
    """Its tokens would not be counted any more, by which the learning rate goes."""

    class Evaluates(L.Callback):
        def evaluate(self, _, module, *__):
            given = copy.deepcopy(module) if copied else module
            data = opened(validation_documents=documents())
            trainer(tmp_path).validate(given, data, verbose=False)

    setattr(Evaluates, hook, Evaluates.evaluate)
    run, module = trainer(tmp_path, max_steps=2, callbacks=[Evaluates()]), made(warmup_tokens=1000)
    if copied or hook == "on_train_end":
        run.fit(module, opened())
        plain = made(warmup_tokens=1000)
        trainer(tmp_path, max_steps=2).fit(plain, opened())
        assert module.tokens_seen == plain.tokens_seen > 0
        copy.deepcopy(module).setup("validate")  # by hand, without a Trainer
    else:
        with pytest.raises(MisconfigurationException, match=r"given the Taken of another one"):
            run.fit(module, opened())


@pytest.mark.parametrize("options", [{}, {"warmup_tokens": 100}, {"decay_tokens": 100}])
def test_a_part_of_another_module_has_no_schedule_by_tokens(tmp_path, options):
    """Lightning saves the outer module only."""

    class Around(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.part = made(**options)
            self.part.configure_model()
            self.model_shape = self.part.model_shape

        def training_step(self, batch, _):
            return self.part.step(batch)

        def configure_optimizers(self):
            return self.part.configure_optimizers()

    run = trainer(tmp_path, max_steps=2)
    if options:
        with pytest.raises(MisconfigurationException, match="Taken is a part of another module"):
            run.fit(Around(), opened())
    else:
        run.fit(Around(), opened())
        assert run.global_step == 2


@pytest.mark.parametrize("refused", [False, True])
def test_a_run_without_a_checkpoint_begins_at_its_own_beginning(tmp_path, refused):
    """Whether the Trainer has evaluated a checkpoint, or a fit was refused one, before."""
    first, run = trainer(tmp_path, max_steps=3), trainer(tmp_path, max_steps=2)
    first.fit(made(), opened())
    first.save_checkpoint(tmp_path / "three.ckpt")
    module, data = made(), opened(validation_documents=documents())
    if refused:
        fails = mock.patch.object(Taken, "on_load_checkpoint", side_effect=ZeroDivisionError)
        with fails, pytest.raises(ZeroDivisionError):
            run.fit(made(), data, ckpt_path=tmp_path / "three.ckpt")
    else:
        run.validate(module, data, ckpt_path=tmp_path / "three.ckpt", verbose=False)
    run.fit(module, data)
    assert module.steps == [(0, 0), (0, 1)]
