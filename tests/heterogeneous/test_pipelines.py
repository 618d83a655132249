"""A rank's stage in the steps of a strategy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_wlb.heterogeneous import pipelines
from lightning_wlb.heterogeneous.pipelines import (
    HeterogeneousStage,
    exchange_group,
)
from lightning_wlb.heterogeneous.planning.exchanges import Redistribution
from lightning_wlb.heterogeneous.setup import weights_of
from lightning_wlb.mesh import Rank
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Scheme
from lightning_wlb.training.pipeline_messages import PipelineRank


def stage_of(link: Redistribution, build, device: torch.device) -> HeterogeneousStage:
    pipeline = PipelineRank(Rank(), (), "1f1b", {}, 8, torch.float32, device)
    return HeterogeneousStage(link, build, pipeline)


def test_buffers_of_a_stage_are_on_the_device_of_the_rank() -> None:
    """Parameters come later; a rotary table of a Hugging Face family is made on the host."""

    def build() -> Transformer:
        with torch.device("meta"):
            model = Transformer(TransformerConfig.preset("tiny"))
        model.layers["0"].register_buffer("table", torch.ones(2), persistent=False)
        return model

    # A stand-in for a GPU: any device but the host.
    device = torch.device("meta")
    one = (Scheme(0, (TransformerConfig.preset("tiny").layers,)),)
    link = Redistribution(weights_of(build(), (1,)), one, one, 0)
    own = stage_of(link, build, device)
    assert own.model.layers["0"].table.device == device
    assert all(parameter.is_meta for parameter in own.model.parameters())


def calls_of(rank: int, patch: pytest.MonkeyPatch) -> tuple[list, list]:
    """The process groups that a rank splits off that of all ranks, and its first messages."""
    split: list[list[list[int]]] = []
    messages: list[tuple[str, list[int], int]] = []

    def split_group(split_ranks, timeout):
        split.append(split_ranks)
        return next((own for own in split_ranks if rank in own), None)

    nccl = SimpleNamespace(supports_splitting=True, name=lambda: "nccl")
    world = SimpleNamespace(bound_device_id=torch.device("cpu"), _get_backend=lambda _: nccl)
    patch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    patch.setattr(dist, "split_group", split_group)
    patch.setattr(dist, "new_group", None)
    for name in ("send", "recv"):
        patch.setattr(
            dist, name, lambda _, peer, group, name=name: messages.append((name, group, peer))
        )
    strategy = (Scheme(0, (4,), tensor=2), Scheme(2, (2, 2)))

    def build() -> Transformer:
        with torch.device("meta"):
            return Transformer(TransformerConfig.preset("tiny"))

    link = Redistribution(weights_of(build(), (1, 2)), strategy, strategy, rank)
    own = stage_of(link, build, torch.device("cpu"))
    assert len(own.pipeline.groups) == (2 if rank > 1 else 0)
    return split, messages


def test_ranks_in_no_set_split_too_and_neighbours_have_met_before_a_step(monkeypatch) -> None:
    """Where groups are split off that of all ranks, as under NCCL, each of them waits for all."""
    found = [calls_of(rank, monkeypatch) for rank in range(4)]
    stages, tensor = [[2, 3]], [[0, 1]]
    assert [split for split, _ in found] == [[stages, stages, tensor]] * 4
    assert [messages for _, messages in found] == [
        [],
        [],
        [("send", [2, 3], 3), ("recv", [2, 3], 3)],
        [("recv", [2, 3], 2), ("send", [2, 3], 2)],
    ]


def test_all_who_exchange_have_met_before_a_step(monkeypatch) -> None:
    """NCCL connects two ranks when something first travels between them, and holds both up."""
    met = []

    def meet(into, out, counts, of, *, group):
        assert into.shape == out.shape
        met.append((counts, of, group))

    monkeypatch.setattr(pipelines, "own_group", lambda sets, rank: tuple(sets[0]))
    monkeypatch.setattr(dist, "all_to_all_single", meet)
    assert exchange_group(5, 8, torch.device("cpu")) == tuple(range(8))
    assert met == [([1] * 8, [1] * 8, tuple(range(8)))]
