"""What a fit's Trainer saves, and goes on to train, if a module has come to other weights."""

import copy
import warnings

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.models.language_module import LanguageModule
from tests.models.steps import config, documents, trainer

OTHERS = "The weights may not be those after this Trainer's [24] steps"


def made():
    return LanguageModule(config(), seed=3, warmup_tokens=1000)


def opened():
    documents_and_others = {"validation_documents": documents(), "num_workers": 0}
    return WLBDataModule(documents(), context_window=32, micro_batches=1, **documents_and_others)


def quietly(call, *given, **options):
    """Call with the warning of other weights as an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The weights may not be")
        return call(*given, **options)


@pytest.fixture
def fit(tmp_path):
    """A Trainer after two of four steps, its module, and the checkpoint of the first step."""
    early = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    run = trainer(tmp_path, max_steps=2, callbacks=[early], enable_checkpointing=True)
    module = made()
    quietly(run.fit, module, opened())
    run.callbacks.remove(early)
    return run, module, tmp_path / "step=1.ckpt"


def evaluated_by_another(run, module, one, home):
    trainer(home).validate(module, opened(), ckpt_path=one, verbose=False)


def evaluated_without_data_module(run, module, one, home):
    data = run.datamodule.val_dataloader()
    trainer(home).validate(module, data, ckpt_path=one, verbose=False)


def evaluated_by_itself(run, module, one, home):
    run.validate(module, opened(), ckpt_path=one, verbose=False)


def another_module(run, module, one, home):
    run.validate(LanguageModule.load_from_checkpoint(one), run.datamodule, verbose=False)


def fitted_by_another(run, module, one, home):
    trainer(home, max_steps=1).fit(module, opened())


KINDS = [
    evaluated_by_another,
    evaluated_without_data_module,
    evaluated_by_itself,
    another_module,
    fitted_by_another,
]


@pytest.mark.parametrize("happens", KINDS)
def test_no_fit_resumes_from_weights_of_other_steps(tmp_path, fit, happens):
    run, module, one = fit
    quietly(run.save_checkpoint, tmp_path / "own.ckpt")
    assert "evaluated" not in torch.load(tmp_path / "own.ckpt", weights_only=True)
    happens(run, module, one, tmp_path)
    with pytest.warns(match=OTHERS):
        run.save_checkpoint(tmp_path / "others.ckpt")
    with pytest.raises(MisconfigurationException, match="this one serves to evaluate"):
        trainer(tmp_path, max_steps=4).fit(made(), opened(), ckpt_path=tmp_path / "others.ckpt")
    # The weights can be evaluated, and read.
    trainer(tmp_path).validate(made(), opened(), ckpt_path=tmp_path / "others.ckpt", verbose=False)
    LanguageModule.load_from_checkpoint(tmp_path / "others.ckpt")


@pytest.mark.parametrize("happens", KINDS)
def test_a_fit_that_goes_on_from_other_weights_says_so_once(tmp_path, fit, happens):
    run, module, one = fit
    happens(run, module, one, tmp_path)
    run.fit_loop.epoch_loop.max_steps = 4
    with pytest.warns(match=OTHERS):
        run.fit(run.lightning_module, opened())
    quietly(run.save_checkpoint, tmp_path / "more.ckpt")
    assert "evaluated" not in torch.load(tmp_path / "more.ckpt", weights_only=True)


class Evaluates(L.Callback):
    """Another Trainer evaluates the fit's module before the end is saved."""

    def __init__(self, one):
        self.one = one

    def on_train_end(self, run, module):
        evaluated_by_another(run, module, self.one, run.default_root_dir)
        with pytest.warns(match=OTHERS):
            run.save_checkpoint(self.one.with_name("end.ckpt"))


def test_what_is_saved_as_a_fit_ends_may_have_other_weights_too(tmp_path, fit):
    _, _, one = fit
    trainer(tmp_path, max_steps=2, callbacks=[Evaluates(one)]).fit(made(), opened())
    assert torch.load(tmp_path / "end.ckpt", weights_only=True)["evaluated"] is True


def test_a_run_that_keeps_or_restores_its_weights_hears_nothing(tmp_path, fit):
    run, module, one = fit
    run.validate(module, run.datamodule, verbose=False)
    quietly(copy.deepcopy(run).save_checkpoint, tmp_path / "copy.ckpt")
    evaluated_by_another(run, module, one, tmp_path)
    run.fit_loop.epoch_loop.max_steps = 4
    quietly(run.fit, module, opened(), ckpt_path=tmp_path / "copy.ckpt")
    quietly(run.save_checkpoint, tmp_path / "four.ckpt")
    again = trainer(tmp_path, max_steps=4)
    quietly(again.fit, module, opened(), ckpt_path=tmp_path / "copy.ckpt")
    quietly(again.save_checkpoint, tmp_path / "again.ckpt")
    saved = [torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("four", "again")]
    weights, others = (each["state_dict"] for each in saved)
    torch.testing.assert_close(weights, others, rtol=0, atol=0)
    # A new run of a module that was trained or read begins anew.
    new = trainer(tmp_path, max_steps=1)
    quietly(new.fit, LanguageModule.load_from_checkpoint(one), opened())
    quietly(new.save_checkpoint, tmp_path / "new.ckpt")


class Fails(L.Callback):
    def on_fit_start(self, *_):
        raise ZeroDivisionError


@pytest.mark.parametrize("what", ["config", "evaluated", "position"])
def test_a_checkpoint_that_is_refused_changes_no_counts(tmp_path, fit, what):
    run, module, one = fit
    saved = torch.load(one, weights_only=True)
    if what == "config":
        saved["hyper_parameters"]["config"]["dim"] += 2
    elif what == "evaluated":
        saved["evaluated"] = True
    else:
        del saved["WLBDataModule"]
    torch.save(saved, tmp_path / "refused.ckpt")
    seen = module.tokens_seen
    again = trainer(tmp_path, max_steps=4)
    with pytest.raises((ValueError, MisconfigurationException), match=r"config|evaluate|position"):
        run.fit(module, run.datamodule, ckpt_path=tmp_path / "refused.ckpt")
    assert module.tokens_seen == seen
    run.fit_loop.epoch_loop.max_steps = 4
    quietly(run.fit, module, run.datamodule)
    quietly(again.fit, whole := made(), opened())
    assert module.tokens_seen == whole.tokens_seen > seen


def test_a_fit_that_ends_before_it_begins_leaves_it_known_that_counts_began_anew(tmp_path, fit):
    run, module, _ = fit
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, max_steps=4, callbacks=[Fails()]).fit(module, opened())
    with pytest.warns(match=OTHERS):
        run.save_checkpoint(tmp_path / "counts.ckpt")
    with pytest.raises(MisconfigurationException, match="or another Trainer or module"):
        trainer(tmp_path, max_steps=4).fit(made(), opened(), ckpt_path=tmp_path / "counts.ckpt")


def test_nor_does_a_fit_resume_from_weights_without_their_steps(tmp_path, fit):
    read, run = LanguageModule.load_from_checkpoint(fit[2]), trainer(tmp_path)
    run.validate(read, opened(), verbose=False)
    with pytest.warns(match="after this Trainer's 0 steps"):
        run.save_checkpoint(tmp_path / "read.ckpt")
    saved = {}
    quietly(read.on_save_checkpoint, saved)  # by another way than a Trainer's
    assert saved == {"tokens_seen": read.tokens_seen}


def test_a_search_for_a_learning_rate_leaves_it_known_whose_weights_there_are(tmp_path, fit):
    run, module, one = fit
    options = {"num_training": 3, "early_stop_threshold": None, "update_attr": False}
    evaluated_by_another(run, module, one, tmp_path)
    run.fit_loop.epoch_loop.max_steps = 4
    quietly(Tuner(run).lr_find, module, run.datamodule, attr_name="learning_rate", **options)
    with pytest.warns(match=OTHERS):
        run.fit(module, run.datamodule)
