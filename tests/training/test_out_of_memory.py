"""A step that runs out of memory says what ran, and what would take less, by the memory model."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.memory_model import MemoryModel, StageParts
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.plan import ActivationCheckpointing
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.schedule.actions import Action
from lightning_wlb.training.out_of_memory import note
from lightning_wlb.training.pipeline_messages import PipelineRank
from tests.ranks import run_ranks
from tests.strategy.harness import SMALL, data, module, trainer

SHAPE = TransformerConfig.preset("7b").shape
MESH = Mesh(data=2, pipeline=2)
LENGTHS = [8000, 6000, *[500] * 60]


def told(
    model: MemoryModel,
    number: int,
    action: Action | None,
    recompute: ActivationCheckpointing,
    device: str = "cpu",
) -> tuple[str, StepBatch]:
    """The note of a rank of that number in a step of two replicas, and the step."""
    settings = DataSettings(
        8192, 4, packing={"method": "wlb", "queues": 0}, cap=12288, shuffle=False
    )
    plan = Planner(
        LENGTHS, settings, Work.of(SHAPE), MESH, activation_checkpointing=recompute
    ).next_step()
    assert plan is not None
    batch = StepBatch(plan, 0, plan.replicas, [], {}, 0, False)
    half = SHAPE.layers // 2
    stages = range(half), range(half, SHAPE.layers)
    rank, on = MESH.coordinate(number), torch.device(device)
    pipeline = PipelineRank(rank, stages, "1f1b", {}, SHAPE.dim, torch.bfloat16, on)
    return note(action, batch, pipeline, model), batch


def test_a_note_says_what_ran_and_what_takes_less() -> None:
    model = MemoryModel(SHAPE, MESH)
    text, batch = told(model, 0, Action(0, "B", 0), "auto")
    forward = batch.own_plan.forward
    rows = max(each.rows for each in forward)
    assert "\n" not in text
    first = batch.own_plan.slices_of(forward[0])
    assert f"in step 0, action 0B0: micro-batch 0 of {forward[0].rows} tokens" in text
    assert f"rows on this rank, {' '.join(map(str, first))}." in text

    parts = StageParts((SHAPE.layers // 2,), embedding=True)
    count, micro_batches = min(2, len(forward)), len(forward)
    most = model.rank_bytes(parts, count, rows, micro_batches)
    assert f"needs {most / 1e6:,.1f} MB" in text
    assert f"{count} open micro-batches of {rows} rows" in text

    assert 8192 < rows <= 12288, "the cap is what makes it long"
    wanted = {
        "activation_checkpointing='selective'": model.rank_bytes(
            parts, count, rows, micro_batches, "selective"
        ),
        "activation_checkpointing='full'": model.rank_bytes(
            parts, count, rows, micro_batches, "full"
        ),
        "cap=8192": model.rank_bytes(parts, count, 8192, micro_batches),
    }
    listed = re.findall(r"(\w+=\S+): ([\d,.]+) MB less", text.partition("takes less: ")[2])
    assert {name: f"{(most - each) / 1e6:,.1f}" for name, each in wanted.items()} == dict(listed)
    saved = [float(each.replace(",", "")) for _, each in listed]
    assert saved == sorted(saved, reverse=True)


def test_what_is_on_already_is_not_advised() -> None:
    text, _ = told(MemoryModel(SHAPE, MESH), 1, None, "full")
    assert "activation_checkpointing" not in text
    assert "; a mesh of more ranks for each replica, of which lightning-wlb plan --mesh " in text
    assert "action" not in text.partition(".")[0]


@pytest.mark.parametrize(
    ("device", "settings", "advised"),
    [("cuda", "", True), ("cuda", "expandable_segments:True", False), ("cpu", "", False)],
)
def test_segments_that_grow_are_advised_on_a_gpu_without_them(
    monkeypatch: pytest.MonkeyPatch, device: str, settings: str, advised: bool
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    text, _ = told(MemoryModel(SHAPE, MESH), 0, None, "auto", device)
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True leaves fewer gaps" in text) is advised


def runs_out(rank: int) -> list[tuple[str, list[str]]]:
    """Messages and notes of fits that fail in the second step: in a forward, in the optimizer."""
    out = torch.OutOfMemoryError
    return [failed(out), failed(ValueError), failed(out, in_optimizer=True)]


def failed(kind: type[Exception], in_optimizer: bool = False) -> tuple[str, list[str]]:
    made = module(SMALL)
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == (2 if in_optimizer else 5):
            raise kind("Tried to allocate 2.00 GiB")

    def build():
        model = type(made).build_model(made)
        if not in_optimizer:
            model.register_forward_pre_hook(fail)
        return model

    def optimizers():
        made_too = type(made).configure_optimizers(made)
        if in_optimizer:
            made_too.register_step_pre_hook(fail)
        return made_too

    made.configure_optimizers = optimizers
    made.build_model = build
    with pytest.raises(kind) as info:
        trainer("wlb", 1).fit(made, data(SMALL))
    return str(info.value), getattr(info.value, "__notes__", [])


def test_the_error_of_a_step_keeps_its_type_and_gets_a_note() -> None:
    ((forward, (_, others), (_, last)),) = run_ranks(runs_out, 1, process_group=False)
    message, notes = forward
    assert message == "Tried to allocate 2.00 GiB"
    (text,) = notes
    assert text.startswith("WLBStrategy: out of memory in step 1, action 0F1: micro-batch 1 of ")
    assert "activation_checkpointing='full'" in text
    assert others == []
    assert last[0].startswith("WLBStrategy: out of memory in step 1. By the memory model ")
