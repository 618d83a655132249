"""The exchange of keys between ranks: its order, its dtype, and what is kept for backward."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.attention import key_exchange
from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions
from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.attention.packed import packed_attention
from lightning_wlb.distributed.collectives import reducing_in
from lightning_wlb.distributed.process_groups import NO_GROUPS, ProcessGroups
from lightning_wlb.sharding import layout, rank_indices
from tests.attention.support import as_it_is
from tests.attention.test_packed import slices_of
from tests.ranks import run_ranks


def key_gradient(rank: int, dtype: torch.dtype) -> float:
    """A key read by two segments: its two gradients, 256 and 1, and rank 1's 1 make 258.

    In bfloat16 257 is 256, and so is what 1 makes of it.
    """
    metadata = AttentionMetadata(
        rows=2,
        queries=2,
        cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 1, 2], dtype=torch.int32),
        max_seqlen_q=1,
        max_seqlen_k=1,
        key_index=torch.tensor([0, 0]),
        gathered=2,
    )
    q, k = torch.zeros(2, 1, 1, dtype=torch.bfloat16), torch.zeros(2, 1, 1, dtype=torch.bfloat16)
    v = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    attention = VarlenAttention("cpu")
    out = packed_attention(
        lambda: q, k, v, as_it_is, metadata, attention, ProcessGroups(context=dist.group.WORLD)
    )
    share = [[256.0, 1.0], [1.0, 0.0]][rank]
    with reducing_in(dtype):
        (gradient,) = torch.autograd.grad(out, v, torch.tensor(share).reshape(2, 1, 1).bfloat16())
    return float(gradient[0])


@pytest.mark.parametrize(("dtype", "total"), [(torch.float32, 258), (torch.bfloat16, 256)])
def test_key_gradients_are_summed_in_the_dtype_of_reduction(dtype, total) -> None:
    assert run_ranks(key_gradient, 2, dtype) == [total, 0]


def kept_keys(rank: int, recomputed: bool, options: AttentionOptions) -> list[bool]:
    """Whether the keys and values that the kernel read are still there after forward."""
    made = layout("per_document", [64, 40], 2, 1)
    metadata = AttentionMetadata.from_indices(rank_indices(made, rank), made.rows, 2)
    metadata = metadata.for_layer(0, recomputed)
    storages = []

    class Attention(VarlenAttention):
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, *arguments: object) -> Tensor:
            storages.extend(each.untyped_storage()._weak_ref() for each in (k, v))
            return super().__call__(q, k, v, *arguments)  # type: ignore[arg-type]

    inputs = [torch.randn(made.rows, 2, 8, requires_grad=True) for _ in range(3)]
    attention = Attention("cpu")
    events: list[str] = []
    attention.timer = Recorder(events)
    q, k, v = inputs
    out = packed_attention(
        lambda: q,
        k,
        v,
        as_it_is,
        metadata,
        attention,
        ProcessGroups(context=dist.group.WORLD),
        options,
    )
    kept = [not torch.UntypedStorage._expired(each) for each in storages]
    gather = key_exchange.all_gather_into
    key_exchange.all_gather_into = lambda *a, **k: [events.append("gather"), gather(*a, **k)][1]
    out.sum().backward()
    key_exchange.all_gather_into = gather
    # Keys are exchanged before attention is timed.
    assert events == ["start", "stop"] + ["gather"] * (not recomputed) + ["start", "stop"]
    return kept


class Recorder:
    def __init__(self, events: list[str]) -> None:
        self.start = lambda: events.append("start")
        self.stop = lambda: events.append("stop")


def kept_keys_both(rank: int) -> list[list[bool]]:
    capped = AttentionOptions(softcap=2.0, sinks=torch.zeros(2))
    return [
        kept_keys(rank, recomputed, options)
        for options in (PLAIN, capped)
        for recomputed in (False, True)
    ]


def test_gathered_keys_are_not_kept_for_backward() -> None:
    assert run_ranks(kept_keys_both, 2) == [[[False] * 2, [True] * 2] * 2] * 2


def order_of(
    rank: int, lengths: list[int], sharding: str, recomputed: bool, inside: bool
) -> list[str]:
    """What happens in which order, forward and backward; without what the kernel does.

    ``inside`` says whether attention is given the two projections or what is between them.
    """
    size = dist.get_world_size()
    made = layout(sharding, lengths, size, 1)
    metadata = AttentionMetadata.from_indices(rank_indices(made, rank), made.rows, size)
    return order_with(metadata.for_layer(0, recomputed), inside)


def order_with(metadata: AttentionMetadata, inside: bool) -> list[str]:
    events: list[str] = []

    class Work:
        def __init__(self, work: dist.Work) -> None:
            self.work = work

        def wait(self) -> None:
            events.append("wait")
            self.work.wait()

    def logged(holder: Any, name: str) -> Any:
        collective = getattr(holder, name)

        def call(*arguments: Any, **named: Any) -> Any:
            assert named["async_op"]
            events.append(name)
            return Work(collective(*arguments, **named))

        return mock.patch.object(holder, name, call)

    class Project(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            events.append(name)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            events.append(ctx.name)
            return 2 * gradient, None

    hidden, k, v = (torch.randn(metadata.rows, 2, 8, requires_grad=True) for _ in range(3))
    with (
        logged(key_exchange, "all_gather_into"),
        logged(key_exchange, "reduce_scatter_into"),
        logged(dist, "all_to_all_single"),
    ):
        rest = metadata, VarlenAttention("cpu"), ProcessGroups(context=dist.group.WORLD)
        if inside:
            out = packed_attention(
                lambda: Project.apply(hidden, "queries"),
                k,
                v,
                lambda out: Project.apply(out, "output"),
                *rest,
            )
        else:
            q = Project.apply(hidden, "queries")
            out = packed_attention(lambda: q, k, v, as_it_is, *rest)
            out = Project.apply(out, "output")
        events.append("|")
        out.sum().backward()
    return events


# (lengths, sharding, what is posted in forward and in backward)
EXCHANGES: list[tuple[list[int], str, tuple[str, str] | None]] = [
    ([64, 40], "per_document", ("all_gather_into", "reduce_scatter_into")),
    ([64, 40], "per_sequence", ("all_to_all_single", "all_to_all_single")),
    ([128] * 4, "hybrid", None),  # every piece whole on a rank
    ([1], "per_document", None),
]


def orders(rank: int) -> list[list[str]]:
    return [
        order_of(rank, lengths, sharding, recomputed, inside)
        for lengths, sharding, _ in EXCHANGES
        for recomputed in (False, True)
        for inside in (True, False)
    ]


def test_projections_run_during_the_exchange_where_attention_is_given_them() -> None:
    """Else nothing is hidden, but what one rank posts all post, and wait for."""
    wanted = []
    for _, _, posted in EXCHANGES:
        for recomputed in (False, True):
            forward, backward, refetch = ["queries"], ["queries"], ["output"]
            if posted is not None:
                forward, backward = ([post, "queries", "wait"] for post in posted)
                if not recomputed:
                    refetch = [posted[0], "output", "wait"]
            wanted.append([*forward, "output", "|", *refetch, *backward])
            send, back = ([post, "wait"] for post in posted) if posted else ([], [])
            again = [] if recomputed else send
            wanted.append(["queries", *send, "output", "|", "output", *again, *back, "queries"])
    assert run_ranks(orders, 2) == [wanted] * 2


def order_of_a_slice(rank: int) -> list[str]:
    first, second = (each.for_layer(0) for each, _ in slices_of([0, 64, 105], rank, 2))
    assert second.slices is not None
    assert second.slices.cache is not None
    second.slices.cache.put(0, 0, *(torch.randn(first.rows, 2, 8) for _ in range(2)))
    return order_with(second, True)


def test_projections_run_during_the_exchange_of_slices_too() -> None:
    for order in run_ranks(order_of_a_slice, 2):
        forward, backward = order[:4], order[5:]
        assert forward == ["all_gather_into", "queries", "wait", "output"]
        assert backward[:3] == ["all_gather_into", "output", "wait"]
        assert backward[3:] == ["reduce_scatter_into", "queries", "wait"]


def orders_of_three_tokens(rank: int) -> tuple[bool, list[list[str]]]:
    """On four ranks; whether this one has any of them, and the orders."""
    any_of_them = len(rank_indices(layout("per_document", [3], 4, 1), rank).offset) > 0
    return any_of_them, [
        order_of(rank, [3], "per_document", False, inside) for inside in (False, True)
    ]


def test_a_rank_without_queries_exchanges_in_the_order_of_the_others() -> None:
    some, every = zip(*run_ranks(orders_of_three_tokens, 4), strict=True)
    assert set(some) == {True, False}
    assert all(orders == every[0] for orders in every)
    for events in every[0]:
        assert events.count("wait") == 3


def mismatch(rank: int) -> None:
    q = torch.zeros(4, 1, 2)
    metadata = AttentionMetadata.from_indices(
        rank_indices(layout("per_document", [4], 1, 1), 0), 4, 1
    )
    attention = VarlenAttention("cpu")
    with pytest.raises(ValueError, match=r"has 2 rank\(s\).*made without context parallelism"):
        packed_attention(
            lambda: q, q, q, as_it_is, metadata, attention, ProcessGroups(context=dist.group.WORLD)
        )


def test_metadata_of_another_mesh_is_refused() -> None:
    run_ranks(mismatch, 2)
    q = torch.zeros(4, 1, 2)
    made = layout("per_document", [8], 2, 1)
    metadata = AttentionMetadata.from_indices(rank_indices(made, 0), made.rows, 2)
    attention = VarlenAttention("cpu")
    with pytest.raises(ValueError, match=r"has 1 rank\(s\).*made for context parallelism"):
        packed_attention(lambda: q, q, q, as_it_is, metadata, attention, NO_GROUPS)
    with pytest.raises(ValueError, match="k has 5 rows, the metadata 4,"):
        packed_attention(
            lambda: q, q.repeat(5, 1, 1)[:5], q, as_it_is, metadata, attention, NO_GROUPS
        )
    alone = layout("per_document", [4], 1, 1)
    metadata = AttentionMetadata.from_indices(rank_indices(alone, 0), 4, 1)
    with pytest.raises(ValueError, match="q has 3 rows, the metadata 4,"):
        packed_attention(lambda: q[:3], q, q, as_it_is, metadata, attention, NO_GROUPS)
