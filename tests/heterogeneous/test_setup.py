"""WLBStrategy(dynamic=...): runs whose steps change their pipelines, against one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.cost.profile import Profile
from lightning_wlb.heterogeneous.setup import check_buffers
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Scheme, StepPlan
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.heterogeneous.fixed_choices import take_in_turn
from tests.ranks import run_ranks
from tests.strategy.harness import Case, Recorder, data, module, relative_error, trainer

STRATEGIES = (
    (Scheme(0, (2,), tensor=2), Scheme(2, (1, 1))),
    (Scheme(0, (2,), context=2), Scheme(2, (2,)), Scheme(3, (2,))),
)
PROFILE = replace(Profile.load("cpu"), devices_per_node=4)
CASE = Case("slim", "adaptive", tied=True, masked=True, layers=2)


def fit(strategy, devices: int, **options) -> dict:
    recorder = Recorder()
    runner = trainer(strategy, devices, callbacks=[recorder], max_steps=4)
    own = module(CASE, compile=devices > 1)
    runner.fit(own, data(CASE, validation_documents=5, **options))
    return recorder.record()


def run(rank: int) -> dict:
    take_in_turn((*STRATEGIES, ()))
    built, compiled, build = [], [], LanguageModule.build_model

    def built_in(self: LanguageModule) -> Transformer:
        built.append(str(torch.get_default_dtype()))
        return build(self)

    LanguageModule.build_model = built_in
    # A compiler would take longer than the test.
    Transformer.compile_blocks = lambda model: compiled.append(model)
    found = fit(WLBStrategy(1, 2, 1, 2, dynamic=STRATEGIES), 4, profile=PROFILE)
    return found | {"built": set(built), "compiled": len(compiled)}


def test_runs_that_change_pipelines_train_as_one_process_does() -> None:
    """A tied weight, masks, pieces that are split, clipping; validated on the mesh at the end."""
    want = fit("auto", 1)
    tied = {"model.head.weight": "model.embed.weight"}
    for found in run_ranks(run, 4, timeout=150, process_group=False):
        plans = [StepPlan.from_json(text) for text in found["plans"]]
        assert [plan.schemes for plan in plans] == [*STRATEGIES, (), STRATEGIES[0]]
        members = {m.replicas for plan in plans for r in plan.replicas for m in r.forward}
        assert (1, 2) in members, "the two that are alike share a piece"
        assert found["built"] == {"torch.float64"}  # Hugging Face models ask for it
        # The mesh's stages, the whole that tells parameters, and the stages of each strategy.
        assert found["compiled"] == 2 + len(STRATEGIES)
        np.testing.assert_allclose(found["losses"], want["losses"], rtol=1e-12)
        for got, right in zip(
            [*found["gradients"], found["parameters"]],
            [*want["gradients"], want["parameters"]],
            strict=True,
        ):
            for name, value in got.items():
                assert relative_error(value, right[tied.get(name, name)]) <= 1e-10, name


class NormFrozen(LanguageModule):
    """Changes its model after it was built, where one rank has it."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.head.norm.requires_grad_(False)


def refused(rank: int) -> list[str]:
    """What a run of two ranks answers, on every rank."""
    found = []
    one = (Scheme(0, (2,)), Scheme(1, (2,)))
    for kind, dynamic, options in (
        (NormFrozen, (one,), {"profile": "cpu"}),
        (LanguageModule, (one,), {}),
        (LanguageModule, "auto", {"profile": None}),
        (LanguageModule, ((Scheme(0, (2,)),),), {"profile": "cpu"}),
        (LanguageModule, ((Scheme(0, (1, 2)),),), {"profile": "cpu"}),
        (LanguageModule, (one,), {"profile": "cpu", "packing": "wlb"}),
    ):
        runner = trainer(WLBStrategy(1, 2, 1, 1, dynamic=dynamic), 2)
        with pytest.raises(MisconfigurationException) as error:
            runner.fit(kind(module(CASE).config), data(CASE, **options))
        found.append(str(error.value))
    return found


def test_what_cannot_run_is_refused_on_every_rank() -> None:
    wanted = (
        "head.norm.weight of the model is not as NormFrozen.build_model makes it",
        *["chooses each step's pipelines by simulated times, so give WLBDataModule"] * 2,
        "sharded over 2 ranks, and the pipelines of the step have 1",
        "has 3 layers, the model 2",
        "Use packing='auto', 'slim' or 'hydraulis'",
    )
    for found in run_ranks(refused, 2, timeout=100, process_group=False):
        for message, part in zip(found, wanted, strict=True):
            assert part in message


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ("on", "dynamic='on' is neither 'off', 'auto' nor strategies"),
        (True, "dynamic=True is neither"),
        ([[]], "is neither 'off', 'auto' nor strategies"),
        ([[1]], "is neither 'off', 'auto' nor strategies"),
        ([Scheme(0, (2,))], "is neither 'off', 'auto' nor strategies"),
        ([[Scheme(1, (2,))]], "begins at rank 1, but the next free rank is 0"),
    ],
)
def test_what_is_no_strategy_is_refused(dynamic, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WLBStrategy(dynamic=dynamic)


def buffers(persistent: bool, device: str) -> None:
    model = Transformer(module(CASE).config).to("meta")
    model.layers["0"].register_buffer("absent", None)
    model.layers["0"].register_buffer("bias", torch.ones(2, device=device), persistent)
    check_buffers(model)


def test_buffers_whose_values_are_not_computed_are_named() -> None:
    buffers(persistent=False, device="cpu")
    with pytest.raises(ValueError, match=r"layers.0.bias is a buffer that belongs"):
        buffers(persistent=True, device="cpu")
    with pytest.raises(ValueError, match=r"Buffers on the meta device .* layers.0.bias"):
        buffers(persistent=False, device="meta")
