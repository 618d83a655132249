"""What is collected of a model and its optimizers, and what is refused or said when it is read."""

import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from lightning_wlb.checkpoints import sharded, writing
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.checkpoints.small_checkpoints import model as small_model
from tests.ranks import run_ranks
from tests.strategy.harness import Case, data, module, trainer, whole

CASE = Case("wlb", masked=True, layers=2)


class NAdamModule(LanguageModule):
    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters())


def with_nadam(rank: int, path: Path) -> list[dict]:
    """The state of one parameter in an optimizer that was saved, and in one that was read."""
    states = []
    for resume in (None, path):
        runner, model = trainer(WLBStrategy(), 1, max_steps=1), module(CASE)
        model.__class__ = NAdamModule
        runner.fit(model, data(CASE), ckpt_path=resume)
        runner.save_checkpoint(path)
        states.append(runner.optimizers[0].state[model.model.head.norm.weight])
    return [
        {key: (each.dtype, whole(each).tolist()) for key, each in state.items()} for state in states
    ]


def test_what_an_optimizer_keeps_in_another_dtype_stays_in_it(tmp_path):
    [[saved, read]] = run_ranks(with_nadam, 1, tmp_path / "a.ckpt", process_group=False)
    assert saved == read
    assert saved["mu_product"][0] == torch.float32 != saved["exp_avg"][0]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    def model(*widths: int) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(2, width, False) for width in widths))

    writing.write(tmp_path / "two", sharded.collect(model(2, 2), [], {}, {}))
    for other, message in (
        (model(2, 2, 2), "another model; missing: 2.weight. Give"),
        # torch would pass over the layer that is not there.
        (model(2), "another model; not in the model: 1.weight. Give"),
        (model(2, 3), "another model; of another shape: 1.weight. Give"),
    ):
        with pytest.raises(ValueError, match=message):
            sharded.load(tmp_path / "two", other, [], {})


def test_state_that_no_optimizer_keeps_is_not_left_out(tmp_path):
    """As where parameters were trained when it was saved and are frozen, or left out, here."""
    layers, optimizer = small_model(1.0)
    writing.write(tmp_path / "a", sharded.collect(layers, [optimizer], {}, {}))
    other, _ = small_model(2.0)
    some = torch.optim.AdamW([other[0].weight, other[0].bias])
    with pytest.raises(ValueError, match=r"a holds optimizer state: 1\.bias\.exp_avg, .*"):
        sharded.load(tmp_path / "a", other, [some], {})
    frozen = torch.optim.AdamW(other.parameters())
    other[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r": 0\.bias\.exp_avg, .* 3 more.* unfreeze them"):
        sharded.load(tmp_path / "a", other, [frozen], {})
    layers, full = small_model(3.0)
    amsgrad = torch.optim.AdamW(layers.parameters(), amsgrad=True)
    amsgrad.step()
    writing.write(tmp_path / "c", sharded.collect(layers, [amsgrad], {}, {}))
    with pytest.raises(ValueError, match=r"max_exp_avg_sq.* Make the same optimizer"):
        sharded.load(tmp_path / "c", layers, [full], {})
    sharded.load(tmp_path / "a", other, [], {})  # to evaluate
    # What is always frozen has no state to lose.
    for each in other[1].parameters():
        each.grad = torch.ones_like(each)
    frozen.step()
    writing.write(tmp_path / "b", sharded.collect(other, [frozen], {}, {}))
    sharded.load(tmp_path / "b", other, [frozen], {})


def test_weights_that_are_rounded_when_a_run_resumes_are_said(tmp_path):
    layers, optimizer = small_model(1 / 3)
    writing.write(tmp_path / "a", sharded.collect(layers, [optimizer], {}, {}))
    narrow = small_model(2.0)[0].bfloat16()
    other = torch.optim.AdamW(narrow.parameters())
    with pytest.warns(UserWarning, match=r"rounded to it; torch\.bfloat16: 0\.weight, 0\.bias, 1"):
        sharded.load(tmp_path / "a", narrow, [other], {})
    with warnings.catch_warnings():  # a wider dtype holds all values
        warnings.simplefilter("error", UserWarning)
        wide = small_model(2.0)[0].double()
        sharded.load(tmp_path / "a", wide, [torch.optim.AdamW(wide.parameters())], {})


def test_options_that_a_checkpoint_brings_are_said(tmp_path):
    """What a schedule moves is not: a run resumes with it."""
    layers, _ = small_model(1.0)
    groups = [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), "mine": (1,)}]
    saved = torch.optim.AdamW(groups, lr=0.5, betas=(0.5, 0.5))
    writing.write(tmp_path / "a", sharded.collect(layers, [saved], {}, {}))
    saved.param_groups[1].update(maximize=True, weight_decay=-1.0)
    writing.write(tmp_path / "b", sharded.collect(layers, [saved], {}, {}))

    def fresh():
        groups = [{"params": each.parameters(), "mine": (1,)} for each in layers]
        return torch.optim.AdamW(groups, lr=0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sharded.load(tmp_path / "a", layers, [fresh()], {})
        sharded.load(tmp_path / "b", layers, [], {})
    with pytest.warns(
        UserWarning, match=r"b brings .*: maximize True \(here False\), weight_d.* -1"
    ):
        sharded.load(tmp_path / "b", layers, [optimizer := fresh()], {})
    assert [each["maximize"] for each in optimizer.param_groups] == [False, True]


def test_a_models_state_is_a_plain_dictionary(monkeypatch):
    """As torch 2.11 gives it, it would be no state of plain types."""
    monkeypatch.setattr(sharded, "get_model_state_dict", lambda *_, **__: OrderedDict(w=1))
    assert type(sharded.collect(torch.nn.Module(), [], {}, {}).state[sharded.WEIGHTS]) is dict
