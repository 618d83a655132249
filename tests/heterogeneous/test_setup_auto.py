"""WLBStrategy(dynamic="auto"): runs that find out by themselves whether leaving the mesh pays."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from lightning_wlb.callbacks.monitor import ImbalanceMonitor
from lightning_wlb.cost.profile import Profile
from lightning_wlb.heterogeneous import setup
from lightning_wlb.heterogeneous.planning.dealing import arrange
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.heterogeneous.planning.pool_search import PoolChoice
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Scheme, StepPlan
from lightning_wlb.planning.step_chooser import PlannedStep
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import Case, Recorder, data, module, trainer

CASE = Case("slim", "adaptive", tied=True, layers=2)
APART, STAGES = (Scheme(0, (2,)), Scheme(1, (2,))), (Scheme(0, (1, 1)),)
MEASURED = replace(Profile.load("cpu"), name="of here", kernel="cpu", dtype="float64")


def by_pieces(self: Pool, pieces, packer) -> list[PlannedStep]:
    """The mesh or one of two strategies: the same again for the same pieces."""
    strategy = [*self.kinds, None][sum(piece.document for piece in pieces) % 3]
    if strategy is None:
        return []
    made = arrange(pieces, strategy, self.kinds[strategy], packer)
    return [made._replace(excess=-1)]  # it is taken however long it takes


def on_two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    said: list[str] = []
    records: dict[str, dict[str, Any]] = {}

    def fit(name: str, own: LanguageModule, steps: int, dynamic: str = "auto", **options) -> None:
        strategy, recorder = WLBStrategy(1, 1, 1, 2, dynamic=dynamic), Recorder()
        monitor = ImbalanceMonitor(heat_map=False)
        runner = trainer(strategy, 2, callbacks=[recorder, monitor], max_steps=steps)
        given, saved = data(CASE, validation_documents=4, **options), folder / "half.ckpt"
        if name == "half":
            runner.validate(own, given, verbose=False)
            assert strategy.planning.schemes == ()  # there is nothing to choose for
        runner.fit(own, given, ckpt_path=saved if name == "rest" else None)
        if name == "half":
            runner.save_checkpoint(saved)
        if name == "promised":  # a step of another module, and the choice recalled
            runner.fit_loop.epoch_loop.max_steps += 1
            runner.fit(module(CASE), given)
        plans = [StepPlan.from_json(text).schemes for text in recorder.plans]
        seen = {each["strategy"]: each["steps"] for each in monitor.strategies()}
        records[name] = recorder.record() | {
            "plans": plans,
            "pool": strategy.planning.schemes,
            "seen": seen,
        }

    with ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch("lightning_wlb.data.cache.user_cache_dir", return_value=str(folder)))
        patch(mock.patch.object(setup, "rank_zero_info", said.append))
        chooses = patch(mock.patch.object(setup, "choose_pool", wraps=setup.choose_pool))
        fit("promised", module(CASE), 8, profile="cpu")

        patch(mock.patch.object(Pool, "arranged", by_pieces))
        # Nothing that an earlier run has kept, but for the checkpoint.
        patch(mock.patch.object(setup, "remembered", lambda name, make: make()))
        two = PoolChoice((APART, STAGES), (APART, STAGES), 2, Mesh(tensor=2), 2, 1, (2, 1), 4)
        again = patch(mock.patch.object(setup, "choose_pool", return_value=two))
        fit("unbroken", module(CASE), 4, profile=MEASURED)
        fit("half", module(CASE), 2, profile=MEASURED)
        own = module(CASE)
        fit("rest", own, 4, profile=MEASURED)
        # The same module is then trained on its mesh alone.
        fit("off", own, 1, "off", profile="none")
    asked = [(each.args[0].digest, each.args[0].profile.name) for each in again.call_args_list]
    return {"records": records, "said": said, "chosen": chooses.call_count, "asked": asked}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("auto")
    return run_ranks(on_two_ranks, 2, folder, timeout=120, process_group=False)


def test_a_run_takes_what_its_first_steps_promise_and_says_the_figure(ranks) -> None:
    assert [rank["chosen"] for rank in ranks] == [1, 0]  # rank 0 alone, and once
    for rank in ranks:
        run, by, figure = rank["records"]["promised"], *rank["said"][:2]
        assert by == 'WLBStrategy: dynamic="auto", by the measured profile cpu:'
        assert figure.startswith("Dynamic strategies pay: simulated, 4 steps take")
        (strategy,) = run["pool"]
        taken = Counter(run["plans"][4:8])  # the half of the sample that the figure is of
        assert f"  {taken[()]} of 4 steps stay on the mesh." in figure
        assert f"  {taken[strategy]} take" in figure
        assert run["plans"][8:] == [strategy]


def test_a_run_that_is_resumed_makes_the_same_choice_and_the_same_steps(ranks) -> None:
    # By the profile that the steps are planned by.
    asked = ranks[0]["asked"]
    assert len(asked) == 3
    assert len({*asked}) == 1
    assert asked[0][1] == "of here"
    for rank in ranks:
        unbroken, half, rest = (rank["records"][name] for name in ("unbroken", "half", "rest"))
        assert {*unbroken["plans"]} == {(), APART, STAGES}
        assert rest["pool"] == half["pool"] == (APART, STAGES)
        # The monitor knows strategies that were chosen when the fit was set up.
        taken = Counter(((), APART, STAGES).index(each) for each in unbroken["plans"])
        assert unbroken["seen"] == taken
        assert half["plans"] + rest["plans"] == unbroken["plans"]
        assert half["losses"] + rest["losses"] == unbroken["losses"]
        for name, value in unbroken["parameters"].items():
            assert np.array_equal(rest["parameters"][name], value), name


def test_a_module_that_has_left_its_mesh_goes_on_there(ranks) -> None:
    for rank in ranks:
        run = rank["records"]["off"]
        assert (run["plans"], run["pool"], run["seen"]) == ([()], (), {})


class Stray(LanguageModule):
    """A model with a parameter that belongs to no layer."""

    def build_model(self) -> Transformer:
        model = Transformer(self.config)
        model.stray = nn.Parameter(torch.ones(1))
        return model


@pytest.mark.parametrize(
    ("mesh", "packing", "kind", "said"),
    [
        (Mesh(), "slim", LanguageModule, "there is only one rank."),
        (Mesh(2, 2, virtual_stages=2), "slim", LanguageModule, 'Give schedule="1f1b".'),
        (Mesh(2), "wlb", LanguageModule, "Use packing='auto', 'slim' or 'hydraulis'."),
        (Mesh(2), "slim", Stray, "mesh: stray is in none of embed, layers and head"),
    ],
)
def test_what_keeps_all_steps_on_the_mesh_is_said(mesh, packing, kind, said) -> None:
    own, runner = kind(module(CASE).config), trainer("auto", 1)
    own.trainer = runner
    own.configure_model()
    packer = data(CASE, packing=packing).settings.packer
    with mock.patch.object(setup, "rank_zero_info") as tell:
        assert setup.agreed_pool(mock.Mock(), mesh, packer, own, Profile.load("cpu")) == ()
    (line,) = tell.call_args.args
    assert line.startswith('WLBStrategy: dynamic="auto" leaves all steps on the mesh: ')
    assert said in line
