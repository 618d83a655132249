"""Context-parallel attention on real ranks against dense attention in one process."""

import math
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_wlb.attention import context_parallel
from lightning_wlb.attention.context_parallel import (
    context_parallel_attention,
    gather_rows,
    scatter_rows,
)
from lightning_wlb.attention.reference import dense_attention
from lightning_wlb.attention.sharding import SHARDINGS, layout, rank_indices
from lightning_wlb.attention.varlen import AttentionMetadata, VarlenAttention
from tests.ranks import run_ranks

MICRO_BATCHES = [
    [64],
    [1],  # one token: all ranks but one hold only padding
    [1, 2, 1],
    [3, 7, 5, 1, 13],  # shorter than 2·CP, odd, prime
    [97, 1, 31, 128, 2, 64, 11],
    [],
]


class Counter:
    starts = stops = 0

    def start(self) -> None:
        self.starts += 1

    def stop(self) -> None:
        self.stops += 1


def everything(
    lengths: list[int],
    dtype: torch.dtype,
    heads: tuple[int, ...] = (4, 2, 2, 4),
    head_dim: int = 8,
    sliding_window: int | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """The micro-batch's q, k, v and output gradient; then output and gradients by the reference.

    The reference computes in float64 from the rounded inputs.
    """
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    inputs = [
        torch.randn(tokens, count, head_dim, dtype=torch.float64, generator=generator).to(dtype)
        for count in heads
    ]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths).long())
    positions = torch.cat([torch.arange(length) for length in [*lengths, 0]])
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    if tokens:
        out = dense_attention(*leaves, documents, positions, sliding_window=sliding_window)
        wanted = [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].double())]
    else:
        wanted = [x.double() for x in (inputs[3], *inputs[:3])]
    return inputs, wanted, documents, positions


def check_micro_batch(
    rank: int,
    group: dist.ProcessGroup | None,
    size: int,
    sharding: str,
    lengths: list[int],
    tensor_parallel_size: int,
    dtype: torch.dtype = torch.float64,
    sliding_window: int | None = None,
) -> list[float]:
    """This rank's part of the relative errors of the output and of the gradients of q, k, v.

    Padding rows are checked here.
    """
    inputs, wanted, _, _ = everything(lengths, dtype, sliding_window=sliding_window)
    made = layout(sharding, lengths, size, tensor_parallel_size)
    indices = rank_indices(made, rank, sliding_window)
    metadata = AttentionMetadata.from_indices(indices, made.rows, size, sliding_window)
    first = torch.tensor([0, *lengths]).cumsum(0)
    tokens = first[torch.from_numpy(indices.document)] + torch.from_numpy(indices.offset)

    def local(x: Tensor) -> Tensor:
        rows = torch.full((made.rows, *x.shape[1:]), math.nan, dtype=dtype)
        rows[: metadata.queries] = x[tokens]
        return rows

    attention = VarlenAttention("cpu", sliding_window)
    attention.timer = Counter()
    leaves = [local(x).requires_grad_() for x in inputs[:3]]
    q, k, v = leaves
    out = context_parallel_attention(lambda: q, k, v, metadata, attention, group)
    got = [out.detach(), *torch.autograd.grad(out, leaves, local(inputs[3]))]
    kernels = int(metadata.queries > 0)
    assert (attention.timer.starts, attention.timer.stops) == (2 * kernels, 2 * kernels)
    errors = []
    for mine, whole in zip(got, wanted, strict=True):
        assert mine.shape[0] == made.rows
        assert mine.dtype == dtype
        assert torch.equal(mine[metadata.queries :], torch.zeros_like(mine[metadata.queries :]))
        whole = whole.detach()
        error = mine[: metadata.queries].double() - whole[tokens]
        errors.append(float(error.norm() / whole.norm().clamp(min=1)))
    assert not any(map(math.isnan, errors))
    return errors


def check_all(rank: int, size: int, sharding: str) -> float:
    return max(
        error
        for lengths in MICRO_BATCHES
        for tensor in (1, 8)
        for error in check_micro_batch(rank, dist.group.WORLD, size, sharding, lengths, tensor)
    )


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("size", [2, 4])
def test_equals_dense_attention(sharding: str, size: int) -> None:
    assert max(run_ranks(check_all, size, size, sharding)) <= 1e-12


def check_eight(rank: int) -> float:
    group = dist.group.WORLD
    return max(
        error
        for sharding in SHARDINGS
        for lengths in ([3, 7, 5, 1, 13], [97, 1, 31, 128, 2, 64, 11])
        for error in check_micro_batch(rank, group, 8, sharding, lengths, 1)
    )


def test_eight_ranks_equal_dense_attention() -> None:
    assert max(run_ranks(check_eight, 8)) <= 1e-12


def check_window(rank: int, size: int) -> float:
    """Shorter than a chunk, and across chunks of several ranks."""
    group = dist.group.WORLD
    return max(
        error
        for sharding in SHARDINGS
        for lengths in ([3, 7, 5, 1, 13], [97, 1, 31, 128, 2, 64, 11])
        for window in (1, 6, 40)
        for error in check_micro_batch(
            rank, group, size, sharding, lengths, 1, sliding_window=window
        )
    )


@pytest.mark.parametrize("size", [2, 4])
def test_a_sliding_window_equals_dense_attention(size: int) -> None:
    assert max(run_ranks(check_window, size, size)) <= 1e-12


def check_tiles(rank: int, size: int) -> float:
    """Long enough for cuts between tiles: by all-gather, by all-to-all, and without either."""
    group = dist.group.WORLD
    ways = set()
    worst = 0.0
    for lengths in ([1100, 9], [900, 400, 150, 40], [128] * 8):
        indices = rank_indices(layout("hybrid", lengths, size, 1), rank)
        ways.add((indices.gathered > 0, bool(indices.send_counts)))
        worst = max(worst, *check_micro_batch(rank, group, size, "hybrid", lengths, 1))
    assert ways == {(True, False), (False, True), (False, False)}
    return worst


def test_every_way_to_exchange_keys() -> None:
    assert max(run_ranks(check_tiles, 4, 4)) <= 1e-12


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("lengths", MICRO_BATCHES)
def test_one_rank_equals_dense_attention(sharding: str, lengths: list[int]) -> None:
    """Without a group; padding rows exist there too, for tensor parallelism."""
    for tensor in (1, 8):
        assert max(check_micro_batch(0, None, 1, sharding, lengths, tensor)) <= 1e-12


@cache
def everything_once(lengths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    return everything(list(lengths), torch.float64, heads=(2, 1, 1, 2))


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize(
    "lengths",
    [(3, 1, 4, 2, 1) * 100, (1499,), (640, 300, 1, 127, 129)],
    ids=["500 documents", "one document", "tiles"],
)
def test_every_rank_in_turn_equals_dense_attention(
    sharding: str, size: int, lengths: tuple[int, ...]
) -> None:
    inputs, wanted, _, _ = everything_once(lengths)
    assert max(in_turn(sharding, size, lengths, inputs, wanted)) <= 1e-12


def in_turn(
    sharding: str,
    size: int,
    lengths: tuple[int, ...],
    inputs: list[Tensor],
    wanted: list[Tensor],
    backend: str = "cpu",
) -> list[float]:
    """All ranks in one process: the exchange is an index, and autograd sums over the ranks.

    Returns the relative errors of the output and of the gradients of q, k, v.
    """
    device = inputs[0].device
    made = layout(sharding, lengths, size, 1)
    every = [rank_indices(made, rank) for rank in range(size)]
    first = torch.tensor([0, *lengths]).cumsum(0)
    tokens = [first[torch.from_numpy(x.document)] + torch.from_numpy(x.offset) for x in every]
    padded = [torch.cat((rows, rows.new_zeros(made.rows - len(rows)))) for rows in tokens]
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = torch.empty_like(inputs[3])
    attention = VarlenAttention(backend)
    for rank, indices in enumerate(every):
        arriving = [rows[: indices.gathered] for rows in padded]
        if indices.send_counts:
            arriving = [
                rows[torch.from_numpy(each.send_index)].split(each.send_counts)[rank]
                for rows, each in zip(padded, every, strict=True)
            ]
        buffer = torch.cat((*arriving, padded[rank]))
        own = tokens[rank].to(device)
        # With one rank the keys are the local rows, and there is no index.
        keys = buffer[torch.from_numpy(indices.key_index)].to(device) if size > 1 else own
        metadata = AttentionMetadata.from_indices(indices, made.rows, size).to(device)
        part = attention(leaves[0][own], leaves[1][keys], leaves[2][keys], metadata)
        out = out.index_copy(0, own, part)
    got = [out, *torch.autograd.grad(out, leaves, inputs[3])]
    return [
        float((mine.detach().double().cpu() - whole).norm() / whole.norm())
        for mine, whole in zip(got, wanted, strict=True)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_gpu_every_rank_in_turn_within_twice_the_error_of_one(sharding: str, size: int) -> None:
    lengths = (1300, 640, 300, 129, 128, 127, 1)
    inputs, wanted, _, _ = everything(list(lengths), torch.bfloat16, (8, 2, 2, 8), head_dim=64)
    inputs = [x.cuda() for x in inputs]
    alone = in_turn("per_document", 1, lengths, inputs, wanted, "auto")
    assert max(alone) <= 2e-2
    spread = in_turn(sharding, size, lengths, inputs, wanted, "auto")
    assert all(error <= 2 * own for error, own in zip(spread, alone, strict=True))


HALF = [97, 1, 31, 300]


def check_half(rank: int) -> list[list[float]]:
    group = dist.group.WORLD
    return [
        check_micro_batch(rank, group, 2, sharding, HALF, 8, torch.bfloat16)
        for sharding in SHARDINGS
    ]


def test_bfloat16_within_twice_the_error_of_one_rank() -> None:
    alone = check_micro_batch(0, None, 1, "hybrid", HALF, 8, torch.bfloat16)
    assert max(alone) <= 1e-2
    for ranks in zip(*run_ranks(check_half, 2), strict=True):
        for error, own in zip(zip(*ranks, strict=True), alone, strict=True):
            assert math.hypot(*error) <= 2 * own


def exchange(rank: int) -> dict[str, list[float]]:
    """gather_rows and scatter_rows forward and backward, on values that tell ranks apart."""
    group = dist.group.WORLD
    x = torch.tensor([10.0 * rank, 10.0 * rank + 1], dtype=torch.float64, requires_grad=True)
    gathered = gather_rows(x, group)
    # Rank r weighs gathered row i by (r + 1) · (i + 1), so the gradient of row i is 6 · (i + 1).
    weights = (rank + 1) * torch.arange(1.0, 7.0, dtype=torch.float64)
    (gather_gradient,) = torch.autograd.grad(gathered, x, weights)

    y = ((rank + 1) * torch.arange(6.0, dtype=torch.float64)).requires_grad_()
    scattered = scatter_rows(y, group)
    (scatter_gradient,) = torch.autograd.grad(
        scattered, y, torch.tensor([rank, rank + 0.5], dtype=torch.float64)
    )

    # In bfloat16 256 + 1 is 256; summed in float32 it is 258, which bfloat16 can hold.
    half = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    share = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)[rank]
    (half_gradient,) = torch.autograd.grad(gather_rows(half, group), half, share.repeat(3))
    half_sum = scatter_rows(share.repeat(3), group)
    assert half_gradient.dtype == half_sum.dtype == torch.bfloat16

    empty = torch.empty(0, 3, requires_grad=True)
    assert gather_rows(empty, group).shape == scatter_rows(empty, group).shape == (0, 3)
    with pytest.raises(ValueError, match="4 rows cannot be scattered over 3 ranks"):
        scatter_rows(torch.zeros(4), group)
    return {
        "gathered": gathered.tolist(),
        "gather_gradient": gather_gradient.tolist(),
        "scattered": scattered.tolist(),
        "scatter_gradient": scatter_gradient.tolist(),
        "half": [*half_gradient.tolist(), *half_sum.tolist()],
    }


def test_gather_and_scatter_rows() -> None:
    ranks = run_ranks(exchange, 3)
    for rank, got in enumerate(ranks):
        assert got["gathered"] == [0, 1, 10, 11, 20, 21]
        assert got["gather_gradient"] == [6 * (2 * rank + 1), 6 * (2 * rank + 2)]
        assert got["scattered"] == [6 * 2 * rank, 6 * (2 * rank + 1)]
        assert got["scatter_gradient"] == [0, 0.5, 1, 1.5, 2, 2.5]
        assert got["half"] == [258, 258]


def test_without_a_group_gather_and_scatter_are_the_identity() -> None:
    x = torch.zeros(3, 2)
    assert gather_rows(x, None) is x
    assert scatter_rows(x, None) is x


def key_gradient(rank: int) -> float:
    """A key read by two segments: its two gradients, 256 and 1, and rank 1's 1 make 258."""
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
    out = context_parallel_attention(lambda: q, k, v, metadata, attention, dist.group.WORLD)
    share = [[256.0, 1.0], [1.0, 0.0]][rank]
    (gradient,) = torch.autograd.grad(out, v, torch.tensor(share).reshape(2, 1, 1).bfloat16())
    return float(gradient[0])


def test_key_gradients_are_summed_in_float32() -> None:
    assert run_ranks(key_gradient, 2) == [258, 0]


def kept_keys(rank: int, recomputed: bool) -> list[bool]:
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
    out = context_parallel_attention(lambda: q, k, v, metadata, attention, dist.group.WORLD)
    kept = [not torch.UntypedStorage._expired(each) for each in storages]
    gather = context_parallel._all_gather
    context_parallel._all_gather = lambda *a, **k: [events.append("gather"), gather(*a, **k)][1]
    out.sum().backward()
    context_parallel._all_gather = gather
    # Keys travel before attention is timed.
    assert events == ["start", "stop"] + ["gather"] * (not recomputed) + ["start", "stop"]
    return kept


class Recorder:
    def __init__(self, events: list[str]) -> None:
        self.start = lambda: events.append("start")
        self.stop = lambda: events.append("stop")


@pytest.mark.parametrize("recomputed", [False, True])
def test_gathered_keys_are_not_kept_for_backward(recomputed: bool) -> None:
    assert run_ranks(kept_keys, 2, recomputed) == [[recomputed] * 2] * 2


def order_of(rank: int, lengths: list[int], sharding: str, recomputed: bool) -> list[str]:
    """What happens in which order, forward and backward; without what the kernel does."""
    made = layout(sharding, lengths, 2, 1)
    metadata = AttentionMetadata.from_indices(rank_indices(made, rank), made.rows, 2)
    metadata = metadata.for_layer(0, recomputed)
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
            events.append(name.strip("_"))
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

    hidden, k, v = (torch.randn(made.rows, 2, 8, requires_grad=True) for _ in range(3))
    with (
        logged(context_parallel, "_all_gather"),
        logged(context_parallel, "_reduce_scatter"),
        logged(dist, "all_to_all_single"),
    ):
        out = context_parallel_attention(
            lambda: Project.apply(hidden, "queries"),
            k,
            v,
            metadata,
            VarlenAttention("cpu"),
            dist.group.WORLD,
        )
        out = Project.apply(out, "output")
        metadata.read_ahead(out)
        events.append("|")
        out.sum().backward()
    return events


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("lengths", "sharding", "posted"),
    [
        ([64, 40], "per_document", ("all_gather", "reduce_scatter")),
        ([64, 40], "per_sequence", ("all_to_all_single", "all_to_all_single")),
        ([128] * 4, "hybrid", None),  # every piece whole on a rank
    ],
)
def test_projections_run_while_keys_travel(
    lengths: list[int], sharding: str, posted: tuple[str, str] | None, recomputed: bool
) -> None:
    forward, backward, again = ["queries"], ["queries"], ["output"]
    if posted is not None:
        forward, backward = ([post, "queries", "wait"] for post in posted)
        if not recomputed:
            again = [posted[0], "output", "wait"]
    events = [*forward, "output", "|", *again, *backward]
    assert run_ranks(order_of, 2, lengths, sharding, recomputed) == [events] * 2


def mismatch(rank: int) -> None:
    q = torch.zeros(4, 1, 2)
    metadata = AttentionMetadata.from_indices(
        rank_indices(layout("per_document", [4], 1, 1), 0), 4, 1
    )
    attention = VarlenAttention("cpu")
    with pytest.raises(ValueError, match=r"has 2 rank\(s\).*made without context parallelism"):
        context_parallel_attention(lambda: q, q, q, metadata, attention, dist.group.WORLD)


def test_metadata_of_another_mesh_is_refused() -> None:
    run_ranks(mismatch, 2)
    q = torch.zeros(4, 1, 2)
    made = layout("per_document", [8], 2, 1)
    metadata = AttentionMetadata.from_indices(rank_indices(made, 0), made.rows, 2)
    attention = VarlenAttention("cpu")
    with pytest.raises(ValueError, match=r"has 1 rank\(s\).*made for context parallelism"):
        context_parallel_attention(lambda: q, q, q, metadata, attention, None)
    with pytest.raises(ValueError, match=r"k has 5 rows.*describes 4 rows"):
        context_parallel_attention(lambda: q, q.repeat(5, 1, 1)[:5], q, metadata, attention, None)
    alone = layout("per_document", [4], 1, 1)
    metadata = AttentionMetadata.from_indices(rank_indices(alone, 0), 4, 1)
    with pytest.raises(ValueError, match=r"q has 3 rows.*describes 4 rows"):
        context_parallel_attention(lambda: q[:3], q, q, metadata, attention, None)
