"""Runs without sizes: every rank gets the same mesh, or the same error, and trains as any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.mesh import AXES, Mesh
from lightning_wlb.mesh_search.evaluate import evaluate
from lightning_wlb.mesh_search.request import MeshRequest
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import Scheme, StepPlan
from lightning_wlb.planning import DataSettings
from lightning_wlb.strategy import mesh_choice as searching
from lightning_wlb.strategy.launch import RunDevices
from lightning_wlb.strategy.mesh_choice import MeshOptions
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.ranks import run_ranks
from tests.strategy.harness import Case, Recorder, config, data, module, trainer
from tests.strategy.test_gradients import check_equal, expected

CASE = Case("auto", "adaptive")


def fit(made: LanguageModule, strategy: WLBStrategy, steps: int = 1, **options) -> dict:
    """What a run has recorded, and the mesh that it ran on."""
    recorder = Recorder()
    runner = trainer(strategy, 4, callbacks=[recorder], max_steps=steps)
    runner.fit(made, data(CASE, **options))
    return recorder.record() | {"mesh": strategy.mesh, "schedule": strategy.schedule}


def on_four_ranks(rank: int, cache: str) -> tuple[list[dict], list[str], list[int]]:
    with mock.patch("lightning_wlb.data.cache.user_cache_dir", return_value=cache):
        made = module(CASE)
        open_sizes = fit(made, WLBStrategy())
        # A further Trainer goes on with the mesh that the module is split for.
        again = WLBStrategy()
        held = data(CASE, validation_documents=4, context_window=16, profile="cpu")
        with mock.patch.object(searching, "mesh_request", side_effect=AssertionError):
            trainer(again, 4).validate(made, held, verbose=False)
        assert again.mesh == open_sizes["mesh"]
        # The profile was made on a node of two.
        one_replica = fit(module(CASE), WLBStrategy(data_parallel_size=1), steps=3, profile="cpu")
        errors = [refused(RuntimeError, documents=documents(40, 8 + rank // 2))]
        failing = mock.patch.object(searching, "choose_mesh", side_effect=ValueError(f"on {rank}"))
        with failing:
            errors.append(refused(ValueError, seed=1))
        with pytest.raises(ValueError, match="no tokens") as error:
            prepared(rank, per_node=True, fails=rank == 2)
        errors.append(str(error.value))
        own = WLBStrategy(data_parallel_size=4 if rank == 3 else "auto")
        errors.append(refused(MisconfigurationException, own))
        given = None if rank == 0 else "cpu"
        errors.append(refused(MisconfigurationException, profile=given))
        pairs = [(Scheme(0, (4,), 1, 2), Scheme(2, (2, 2)))]
        own = WLBStrategy(dynamic="off" if rank == 1 else pairs)
        errors.append(refused(MisconfigurationException, own))
    counts = [prepared(rank, per_node) for per_node in (True, False)]
    return [open_sizes, one_replica], errors, counts


def prepared(rank: int, per_node: bool, fails: bool = False) -> int:
    """How often a rank prepares documents, of two nodes with two ranks each."""
    documents = data(CASE)
    documents.prepare_data_per_node = per_node
    documents.prepare_data = mock.Mock(side_effect=ValueError("no tokens") if fails else None)
    searching._prepare(SimpleNamespace(local_rank=rank % 2, node_rank=rank // 2), documents)
    return documents.prepare_data.call_count


def refused(kind: type[Exception], strategy: WLBStrategy | None = None, **options) -> str:
    with pytest.raises(kind) as error:
        fit(module(CASE), strategy or WLBStrategy(), **options)
    return str(error.value)


def documents(*lengths: int) -> InMemoryDocuments:
    return InMemoryDocuments([[1] * n for n in lengths], vocab_size=64)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[tuple[list[dict], list[str], list[int]]]:
    cache = tmp_path_factory.mktemp("cache")
    return run_ranks(on_four_ranks, 4, str(cache), process_group=False)


def test_every_rank_gets_the_same_mesh_and_trains_as_one_process(ranks) -> None:
    for run in range(2):
        records = [records[run] for records, *_ in ranks]
        assert len({(str(each["mesh"]), each["schedule"]) for each in records}) == 1
        assert records[0]["mesh"].devices == 4
        loss = expected(CASE)["losses"][0]
        assert all(each["losses"][0] == pytest.approx(loss, rel=1e-12) for each in records)


def test_sizes_that_are_given_stay_and_gradients_are_those_of_one_process(ranks) -> None:
    records = [one_replica for (_, one_replica), *_ in ranks]
    assert all(each["mesh"].data == 1 for each in records)
    check_equal(records, CASE)


def test_the_steps_that_run_are_those_that_were_simulated(ranks) -> None:
    (_, run), *_ = ranks[0]
    asked = request(
        lengths=np.asarray(data(CASE).store.lengths),
        data=data(CASE).settings,
        devices=4,
        devices_per_node=4,
        fixed={"data": 1},
        rest_dtype="float64",
    )
    mesh = searching.choose_mesh(asked).best.mesh
    assert mesh == run["mesh"]
    simulated = [step.plan.replicas for step in evaluate(asked, mesh).steps]
    assert [StepPlan.from_json(plan).replicas for plan in run["plans"]] == simulated


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "The ranks hold different plans for step 0: digest "),
        (1, "on 0"),
        (3, "sizes: ('auto', 'auto', 'auto', 'auto') on ranks"),
        (3, "on ranks 0, 1, 2; (4, 'auto', 'auto', 'auto') on rank 3"),
        (4, "device profile: profile=None on rank 0; "),
        (5, "on ranks 0, 2, 3; off on rank 1"),
    ],
)
def test_ranks_that_are_given_other_things_all_end_with_the_same_error(ranks, number, said) -> None:
    (error,) = {errors[number] for _, errors, _ in ranks}
    assert said in error


def test_the_first_rank_of_each_node_prepares_the_documents(ranks) -> None:
    assert [counts for *_, counts in ranks] == [[1, 1], [0, 0], [1, 0], [0, 0]]
    (error,) = {errors[2] for _, errors, _ in ranks}
    assert error.startswith("rank 2 on ")
    assert error.endswith(": no tokens")


def request(**options) -> MeshRequest:
    asked = {
        "lengths": np.array([30, 20, 9, 31, 5, 5]),
        "shape": config(False).shape,
        "data": DataSettings(32, 2, packing="best_fit"),
        "profile": replace(Profile.load("cpu"), devices_per_node=2),
        "devices": 2,
    }
    return MeshRequest(**(asked | options))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of kept answers, empty."""
    monkeypatch.setattr("lightning_wlb.data.cache.user_cache_dir", lambda _: str(tmp_path))
    return tmp_path


def test_an_answer_is_kept_for_the_same_request_and_the_same_code(cache, monkeypatch) -> None:
    searched = mock.Mock(side_effect=searching.choose_mesh)
    monkeypatch.setattr(searching, "choose_mesh", searched)
    first = searching._answer(request())
    assert searching._answer(request()) == first
    assert searched.call_count == 1
    searching._answer(request(fixed={"data": 1}))
    assert searched.call_count == 2
    monkeypatch.setattr("lightning_wlb.data.cache.fingerprint", lambda *_: "another version")
    searching._answer(request())
    assert searched.call_count == 3
    for kept in cache.glob("*/answer.json"):  # one that cannot be read is searched again
        kept.write_text("")
    assert searching._answer(request()) == first


def test_the_log_says_what_was_chosen_what_comes_next_and_what_bounds_it(
    cache, monkeypatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(searching, "rank_zero_info", lines.append)
    mesh, schedule = searching._answer(request())
    chosen, runner_up, bound = lines
    assert f"chose mesh {mesh}, " in chosen
    assert ", 0% of the tokens recomputed" in chosen
    assert "simulated with the measured profile cpu." in chosen
    assert "runner-up mesh" in runner_up
    assert str(mesh) not in runner_up
    assert f"WLBStrategy({', '.join(map(str, mesh.shape))}, schedule='{schedule}'" in bound


class NoTensorParallel(Decoder):
    pass


def test_a_model_without_a_plan_for_tensor_parallelism_gets_none() -> None:
    assert not searching.can_split(NoTensorParallel())
    assert searching.can_split(module(CASE).build_model())


@pytest.mark.parametrize(
    ("asked", "usual"),
    [
        (("auto", None), ("1f1b", 1)),
        (("auto", 1), ("1f1b", 1)),
        (("auto", 3), ("interleaved", 3)),
        (("interleaved", None), ("interleaved", 2)),
    ],
)
def test_what_a_schedule_comes_to_where_nothing_is_chosen(asked, usual) -> None:
    schedule, stages = asked
    assert MeshOptions(schedule=schedule, virtual_stages=stages).usual == usual


@pytest.mark.parametrize(
    ("options", "goes_on"),
    [
        ({}, True),
        ({"sizes": ("auto", 2, "auto", "auto")}, True),
        ({"sizes": (2, *["auto"] * 3), "schedule": "interleaved", "virtual_stages": 2}, True),
        ({"sizes": ("auto", 4, "auto", "auto")}, False),
        ({"schedule": "1f1b"}, False),
        ({"virtual_stages": 4}, False),
    ],
)
def test_a_mesh_is_gone_on_with_where_it_has_what_is_given(options, goes_on) -> None:
    assert MeshOptions(**options).allow(Mesh(2, 2, virtual_stages=2), "interleaved", 4) == goes_on
    assert not MeshOptions(**options).allow(Mesh(2, 2, virtual_stages=2), "interleaved", 8)


@pytest.mark.parametrize(
    ("world_size", "asked", "expected"),
    [
        (8, ("auto", 2, 1, 2), (2, 2, 1, 2)),
        (8, (2, 2, 1, 2), (2, 2, 1, 2)),
        (8, (1, 1, 2, "auto"), (1, 1, 2, 4)),
        # Only the first "auto" takes what is left.
        (8, ("auto", "auto", 2, "auto"), (4, 1, 2, 1)),
    ],
)
def test_the_first_auto_takes_the_ranks_that_are_left(world_size, asked, expected):
    assert MeshOptions(sizes=asked).usual_mesh(world_size) == Mesh(*expected)


@pytest.mark.parametrize(
    ("world_size", "asked", "needs"),
    [
        (8, (2, 2, 1, 1), "a multiple of 4 ranks and exactly that many"),
        (8, ("auto", 3, 1, 1), "a multiple of 3 ranks"),
    ],
)
def test_a_product_that_is_not_the_world_size_is_answered(world_size, asked, needs):
    with pytest.raises(MisconfigurationException) as error:
        MeshOptions(sizes=asked).usual_mesh(world_size)
    text = str(error.value)
    shown = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, asked, strict=True))
    assert f"The mesh {shown} needs {needs}, but the Trainer runs {world_size}" in text
    assert "Change devices or num_nodes" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("world_size", "asked", "settled"),
    [
        (1, ("auto",) * 4, True),
        (2, ("auto",) * 4, False),
        (4, ("auto", 4, "auto", "auto"), True),  # nothing is left
        (4, ("auto", 2, "auto", 1), False),
        (4, ("auto", 1, 1, 1), True),  # nor any choice
        (8, (2, 2, 2, 1), True),
    ],
)
def test_there_is_nothing_to_choose_where_one_mesh_alone_is_as_asked(world_size, asked, settled):
    assert MeshOptions(sizes=asked).settles(world_size) == settled


def test_virtual_stages_go_into_the_mesh_and_take_no_ranks():
    options = MeshOptions(sizes=("auto", 4, 1, 1), schedule="interleaved", virtual_stages=3)
    assert options.usual_mesh(8) == Mesh(2, 4, virtual_stages=3)


def known(device: str, searched: bool, profile: Profile | str | None = None, nodes: int = 1):
    """The profile of a run on so many nodes of four devices."""
    devices = RunDevices(
        device=torch.device(device),
        count=4 * nodes,
        per_node=4,
        parameter_dtype="float32",
        reduce_dtype="float32",
        overlap=True,
    )
    shipped = Profile.load("cpu" if device == "cpu" else "h100")
    with mock.patch.object(searching, "shipped_profile", return_value=shipped):
        given = data(CASE, profile=profile)
        return searching.run_profile(devices, "auto", given, searched=searched)


def test_runs_on_gpus_and_those_that_search_plan_by_a_profile() -> None:
    cpu, h100, four = Profile.load("cpu"), Profile.load("h100"), {"devices_per_node": 4}
    assert known("cpu", searched=False) is None
    assert known("cuda", searched=False) == replace(h100, **four)
    assert known("cuda", searched=False, profile="none") is None
    for given in (None, "none"):  # a search needs one, and its steps are planned by the same
        assert known("cpu", searched=True, profile=given) == replace(cpu, **four)
        assert known("cuda", searched=True, profile=given, nodes=2) == replace(h100, **four)
    # Of the data module's all holds but the size of a node, which the run knows: so a mesh that
    # can be chosen by it can be given, too.
    for device, own in (("cuda", replace(h100, name="own", devices_per_node=2)), ("cpu", cpu)):
        for searched in (False, True):
            assert known(device, searched=searched, profile=own) == replace(own, **four)
    # Nothing is known of what lies between nodes of CPUs.
    assert known("cpu", searched=True, nodes=2) is None


def test_a_profile_of_another_kind_of_device_is_said() -> None:
    with mock.patch.object(searching, "rank_zero_info") as told:
        for device, name in (("cpu", "cpu"), ("cuda", "h100")):
            known(device, searched=False, profile=Profile.load(name))
        assert not told.called
        known("cuda", searched=False, profile=Profile.load("cpu"))
    assert "run on cuda, but are planned by the profile 'cpu' of" in told.call_args[0][0]
