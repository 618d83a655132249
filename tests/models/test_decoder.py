"""The base class of models: what it gives, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_wlb.models import decoder
from lightning_wlb.models.decoder import Decoder, check_decoder
from lightning_wlb.models.language_module import LanguageModule
from tests.models.steps import config, documents, step_batch


class Bare(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 3, bias=False)
        self.layers = nn.ModuleDict({"0": nn.Linear(3, 3)})
        self.head = nn.Linear(3, 2, bias=False)


def test_without_a_plan_tensor_parallelism_is_refused():
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: Bare has no tensor_parallel_pl"):
        Bare().tensor_parallel_plan(2)


def test_forward_is_the_subclasss():
    assert Bare().tied == {}
    with pytest.raises(NotImplementedError, match=r"Bare\.forward"):
        Bare()(None)


@pytest.mark.parametrize("own", ["none", "selective", "auto"])
@pytest.mark.parametrize("asked", ["auto", "none", "full"])
def test_plans_ask_for_what_the_model_recomputes(own, asked):
    """What the model always does, or else what was asked for; one is not turned into the other."""
    module = LanguageModule(config(), activation_checkpointing=asked)
    assert module.planned_checkpointing == asked  # before there is a model
    module.model = Bare()
    module.model.activation_checkpointing = own
    if own == "auto" or asked in ("auto", own):
        check_decoder(module.model, asked)
        assert module.planned_checkpointing == (asked if own == "auto" else own)
    else:
        with pytest.raises(ValueError, match=f"'{asked}', but the Bare that .* has '{own}'"):
            check_decoder(module.model, asked)


@pytest.mark.parametrize(("asked", "own"), [("auto", "none"), ("none", "auto")])
def test_a_plan_with_another_recomputation_is_refused(asked, own):
    module = LanguageModule(config(), activation_checkpointing=asked)
    module.model = Bare()
    module.model.activation_checkpointing = own
    batch = step_batch(documents(), recompute=("none", "full"))
    with pytest.raises(ValueError, match=r"recomputes 'full', but plans .*checkpointing='none'"):
        module.step(batch)


@pytest.mark.parametrize("own", [0, 3])
def test_tables_may_have_as_many_values_as_the_weights_and_a_few(monkeypatch, own):
    """Fields of a small config may size them, as no stored weight shows."""
    monkeypatch.setattr(decoder, "_FEW_VALUES", own)
    model = nn.Linear(4, 2, bias=False)
    model.register_buffer("table", torch.zeros(8 + own), persistent=False)
    decoder.check_size(model)
    model.register_buffer("table", torch.zeros(9 + own), persistent=False)
    said = rf"has {17 + own} values .* weights hold 8\. Its largest tensor is table, \({9 + own},\)"
    with pytest.raises(ValueError, match=said):
        decoder.check_size(model)
