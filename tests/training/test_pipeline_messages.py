"""Tensors of a GPU go by the host where gloo carries messages between pipeline stages.

There is no GPU here: a tensor on the device is one of :class:`OnDevice`, which becomes a plain one
when it is copied to the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_wlb.distributed.process_groups import message_device, pipeline_groups
from lightning_wlb.mesh import Mesh
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from lightning_wlb.strategy.launch import bound_device
from lightning_wlb.training import parallelize as gradients
from lightning_wlb.training import pipeline_messages as messages
from lightning_wlb.training.parallelize import add_tied_gradients
from lightning_wlb.training.pipeline_messages import Messages, PipelineRank
from tests.ranks import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class OnDevice(Tensor):
    """Not for a socket."""

    def to(self, device: Any) -> Tensor:  # type: ignore[override]
        assert device == CPU
        return self.as_subclass(Tensor).clone()


def on_device(values: list[float]) -> Tensor:
    return torch.tensor(values).as_subclass(OnDevice)


def crossing(rank: int) -> tuple[list[float], list[float], list[type]]:
    """What arrives of a message to the other stage, of a tied gradient, and what was sent."""
    sent: list[type] = []
    isend = dist.isend

    def noting(tensor: Tensor, *args: Any, **rest: Any) -> Any:
        sent.append(type(tensor))
        return isend(tensor, *args, **rest)

    place = Mesh(pipeline=2).coordinate(rank)
    channels = pipeline_groups(place)
    pipeline = PipelineRank(place, (range(1), range(1, 2)), "1f1b", channels, 2, torch.float32, CPU)
    travelling = Messages(pipeline, {})
    weight = nn.Parameter(torch.zeros(2))
    with (
        mock.patch.object(messages, "message_device", return_value=CPU),
        mock.patch.object(gradients, "message_device", return_value=CPU),
        mock.patch.object(dist, "isend", noting),
        mock.patch.object(dist.distributed_c10d, "isend", noting),  # of batch_isend_irecv
    ):
        if rank == 0:
            travelling.send(Action(0, FORWARD, 0), 1, on_device([1.0, 2.0]))
            arrived = travelling.receive(Action(0, BACKWARD, 0), 1, (1, 2))
        else:
            arrived = travelling.receive(Action(1, FORWARD, 0), 0, (1, 2))
            travelling.send(Action(1, BACKWARD, 0), 0, on_device([3.0, 4.0]))
        travelling.finish()
        model = nn.Module()
        model.embed, model.tied = weight, {"head": "embed"}
        weight.grad = on_device([5.0 + rank, 6.0])
        add_tied_gradients(model, place, next(iter(channels.values())))
    return arrived.flatten().tolist(), weight.grad.tolist(), sent


def test_nothing_on_the_device_is_handed_to_gloo() -> None:
    first, second = run_ranks(crossing, 2)
    assert first == ([3, 4], [11, 12], [Tensor, Tensor])
    assert second == ([1, 2], [11, 12], [Tensor, Tensor])


@pytest.mark.parametrize(
    ("backend", "device", "place"),
    [("gloo", CUDA, CPU), ("nccl", CUDA, CUDA), ("gloo", CPU, CPU)],
)
def test_only_gloo_and_only_a_gpu_need_the_host(backend: str, device: Any, place: Any) -> None:
    group: Any = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(name=lambda: backend))
    assert message_device(device, group) == place


@pytest.mark.parametrize(
    ("backend", "bound"),
    [("nccl", True), ("cpu:gloo,cuda:nccl", True), ("gloo", False), ("cuda:gloo", False)],
)
def test_the_process_group_is_bound_to_a_device_of_nccl(backend: str, bound: bool) -> None:
    assert bound_device(backend, CUDA) == (CUDA if bound else None)
    assert bound_device(backend, CPU) is None or backend == "nccl"
