from __future__ import annotations

import os
import pickle
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch.overrides import TorchFunctionMode

from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.collate import make_step_batch
from lightning_wlb.data.documents import InMemoryDocuments
from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.planning import DataSettings, Planner


@pytest.fixture
def batch() -> StepBatch:
    """The second of two ranks that share documents of 8 and 3 tokens; the run's last step."""
    store = InMemoryDocuments([range(8), range(3)])
    mesh = Mesh(context=2)
    work = Work(PassWork(1, 0), PassWork(2, 0))
    plan = Planner(store.lengths, DataSettings(16, 1), work, mesh).next_step()
    assert plan is not None
    return make_step_batch(plan, store, Rank(mesh, context=1), {"a": 1}, 7, True)


def test_moving_a_batch_keeps_the_plan_and_moves_every_tensor(batch: StepBatch) -> None:
    moved = batch.to("meta")
    assert moved.plan is batch.plan
    assert (moved.state, moved.next_digest, moved.last) == ({"a": 1}, 7, True)
    micro_batch = moved.micro_batches[0]
    assert micro_batch.tokens is not None
    assert micro_batch.labels is not None
    devices = {
        micro_batch.tokens.device.type,
        micro_batch.labels.device.type,
        micro_batch.positions.device.type,
        micro_batch.attention.cu_seqlens_q.device.type,
    }
    assert devices == {"meta"}
    assert batch.micro_batches[0].positions.device.type == "cpu"
    assert batch.tokens == 11
    assert batch.target_tokens == 9
    assert repr(batch) == (
        "StepBatch(step 0, epoch 0, replica 0 of 1: micro-batches of [6] rows; the step has 11"
        " tokens, 9 targets, 2 pieces, last)"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts open files in /proc")
def test_a_batch_from_a_loader_worker_opens_no_files(batch: StepBatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sent = bytes(ForkingPickler.dumps(batch))
    assert len(os.listdir("/proc/self/fd")) == before
    arrived = pickle.loads(sent)
    assert repr(arrived) == repr(batch)
    assert (arrived.plan, arrived.units, arrived.state) == (batch.plan, batch.units, batch.state)
    ours, theirs = batch.micro_batches[0], arrived.micro_batches[0]
    for name in ("tokens", "labels", "positions"):
        assert torch.equal(getattr(theirs, name), getattr(ours, name))
    for name in ("cu_seqlens_q", "cu_seqlens_k", "key_index"):
        assert torch.equal(getattr(theirs.attention, name), getattr(ours.attention, name))


class Copies(TorchFunctionMode):
    """Answers every ``Tensor.to`` by the tensor itself, and keeps what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.to:
            self.asked.append((str(args[1]), bool((kwargs or {}).get("non_blocking"))))
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "queued"), [("cuda", True), ("cuda:1", True), ("cpu", False)])
def test_lightning_moves_a_batch_without_waiting_for_each_tensor(
    batch: StepBatch, device: str, queued: bool
) -> None:
    with Copies() as copies:
        move_data_to_device(batch, torch.device(device))
    assert len(copies.asked) >= 5 * len(batch.micro_batches)
    assert set(copies.asked) == {(device, queued)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
def test_pinned_memory(batch: StepBatch) -> None:
    (micro_batch,) = batch.pin_memory().micro_batches
    assert micro_batch.tokens is not None
    assert micro_batch.tokens.is_pinned()
    assert micro_batch.attention.cu_seqlens_q.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_page_locked_it_arrives_on_a_gpu_as_it_was(batch: StepBatch) -> None:
    """Moved as Lightning moves it, which does not wait for the copies."""
    arrived = move_data_to_device(batch.pin_memory(), torch.device("cuda", 0))
    torch.cuda.synchronize()
    for ours, theirs in zip(batch.micro_batches, arrived.micro_batches, strict=True):
        for name in ("tokens", "labels", "positions"):
            assert getattr(theirs, name).device.type == "cuda"
            assert torch.equal(getattr(theirs, name).cpu(), getattr(ours, name))
        for name in ("cu_seqlens_q", "cu_seqlens_k", "key_index"):
            assert torch.equal(getattr(theirs.attention, name).cpu(), getattr(ours.attention, name))
