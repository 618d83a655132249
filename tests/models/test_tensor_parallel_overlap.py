"""Products with messages behind them: the values of plain ones, own rows held, equal bits again."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_wlb.distributed.process_groups import ProcessGroups
from lightning_wlb.models import tensor_parallel_overlap
from lightning_wlb.models.tensor_parallel_overlap import (
    GatheredRows,
    RowTravel,
    row_parts,
    summed_products,
)
from tests.ranks import run_ranks

DIM, COLUMNS = 6, (4, 3, 5)


@given(st.integers(0, 200), st.integers(1, 9))
def test_parts_cover_each_row_once_and_are_as_equal_as_can_be(rows: int, chunks: int) -> None:
    parts = row_parts(rows, chunks)
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    sizes = [part.stop - part.start for part in parts]
    assert len(parts) == min(rows, chunks)
    assert min(sizes, default=1) >= 1
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def half_layer(
    rows: int, chunks: int, travel_keys: bool, kept: bool, frozen: tuple[int, ...] = ()
) -> list[Tensor]:
    """The result of a half layer on this rank, and the gradients of its rows and weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = draw(rank, rows, DIM).requires_grad_()
    weights = [draw(100 + 10 * rank + n, each, DIM) for n, each in enumerate(COLUMNS)]
    weights.append(draw(190 + rank, DIM, sum(COLUMNS)))
    for number, each in enumerate(weights):
        each.requires_grad_(number not in frozen)
    travel = RowTravel(dist.group.WORLD, chunks, travel_keys)

    def half(x: Tensor) -> Tensor:
        gathered = GatheredRows(x.tanh(), weights[:-1], travel, kept)
        products = gathered.times(1, 2) + gathered.times(0)
        out = summed_products(torch.cat(products, 1).sigmoid(), weights[-1], travel)
        return x + out

    out = checkpoint(half, x, use_reentrant=False) if kept else half(x)
    trained = [each for each in weights if each.requires_grad]
    gradients = torch.autograd.grad(out, [x, *trained], draw(300 + rank, rows, DIM))
    assert out.shape == (rows, DIM)
    assert size * rows == 0 or all(bool(each.abs().sum() > 0) for each in gradients)
    return [out.detach(), *gradients]


def compared(rank: int) -> float:
    worst = 0.0
    for rows in (0, 1, 5, 8):
        for kept in (False, True):
            for frozen in ((), (0, 1, 2, 3), (1,)):
                plain = half_layer(rows, 0, False, kept, frozen)
                for chunks in (1, 2, 4):
                    found = half_layer(rows, chunks, False, kept, frozen)
                    again = half_layer(rows, chunks, False, kept, frozen)
                    for one, two, wanted in zip(found, again, plain, strict=True):
                        assert torch.equal(one, two), "the same bits on repetition"
                        if wanted.numel():
                            scale = wanted.abs().max().clamp(min=1e-30)
                            worst = max(worst, ((one - wanted).abs().max() / scale).item())
    return worst


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_are_as_exact_as_whole_products(ranks: int) -> None:
    """Also of rows that the parts do not divide, of none, and of frozen weights."""
    assert max(run_ranks(compared, ranks)) <= 1e-13


Drawn = tuple[int, int, bool, list[int]]


def compared_as_drawn(rank: int, drawn: list[Drawn]) -> float:
    worst = 0.0
    for rows, chunks, kept, frozen in drawn:
        plain, found = (half_layer(rows, each, False, kept, tuple(frozen)) for each in (0, chunks))
        for one, wanted in zip(found, plain, strict=True):
            if wanted.numel():
                scale = wanted.abs().max().clamp(min=1e-30)
                worst = max(worst, ((one - wanted).abs().max() / scale).item())
    return worst


@settings(max_examples=2, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.integers(1, 6),
            st.booleans(),
            st.lists(st.integers(0, 3), unique=True),
        ),
        min_size=12,
        max_size=12,
    )
)
def test_any_rows_in_any_parts_are_as_exact(drawn: list[Drawn]) -> None:
    assert max(run_ranks(compared_as_drawn, 3, drawn)) <= 1e-13


def saved(rank: int, kept: bool, chunks: int) -> set[tuple[int, ...]]:
    """Shapes of what autograd saves of a gathering, weights left out."""
    x = draw(rank, 8, DIM).requires_grad_()
    weights = [draw(n, 64 + n, DIM).requires_grad_() for n in range(2)]
    shapes = set()

    def note(tensor: Tensor) -> Tensor:
        shapes.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        rows = GatheredRows(x, weights, RowTravel(dist.group.WORLD, chunks), kept)
        rows.times(0, 1)
    assert all(each is None for each in (rows._own, rows._arriving)), "nothing beside them"
    return shapes - {tuple(each.shape) for each in weights}


def own_rows(rank: int) -> list[set[tuple[int, ...]]]:
    return [saved(rank, kept, chunks) for kept in (False, True) for chunks in (1, 3)]


def test_own_rows_alone_are_saved() -> None:
    for own, parted, kept, kept_parted in run_ranks(own_rows, 2):
        assert own == parted == {(8, DIM)}
        assert kept == kept_parted == {(2, 8, DIM)}


def posted(rank: int) -> dict[str, list[str]]:
    """What a half layer posts and waits for, in order, and its products."""
    log: list[str] = []

    def noting(name: str, function):  # type: ignore[no-untyped-def]
        def call(*args, **options):  # type: ignore[no-untyped-def]
            log.append(name)
            work = function(*args, **options)
            if "async_op" not in options:
                return work
            return mock.Mock(wait=lambda: (log.append(f"{name} there"), work.wait()))

        return call

    result = {}
    for kept in (False, True):
        log.clear()
        with (
            mock.patch.object(dist, "all_gather", noting("gather", dist.all_gather)),
            mock.patch.object(
                tensor_parallel_overlap,
                "all_gather_into",
                noting("gather", tensor_parallel_overlap.all_gather_into),
            ),
            mock.patch.object(
                tensor_parallel_overlap,
                "reduce_scatter_into",
                noting("sum", tensor_parallel_overlap.reduce_scatter_into),
            ),
            mock.patch.object(
                tensor_parallel_overlap, "_times", noting("product", tensor_parallel_overlap._times)
            ),
        ):
            half_layer(6, 2, True, kept)
        result[str(kept)] = list(log)
    return result


def test_messages_are_behind_products_and_a_recomputed_half_gathers_once() -> None:
    forward = [
        *("gather", "gather", "gather there", "product", "product", "product"),
        *("gather there", "product", "product"),
        "product",  # the last part of what is asked for later
    ]
    sums = ["product", "sum", "product", "sum", "sum there", "sum there"]
    of_sums = ["gather", "gather", "gather there", "product", "gather there", "product"]
    of_rows = ["gather", "sum", "gather there", "sum there"]
    for logs in run_ranks(posted, 2):
        assert logs["False"] == [*forward, *sums, *of_sums, *of_rows]
        # Recomputed up to what backward needs: the product with the last matrix is not.
        assert logs["True"] == [*forward, *sums, *forward, *of_sums, "sum", "sum there"]


def halves(rank: int) -> list[list[float]]:
    """Sums of bfloat16 over the ranks are in float32: 256 + 1 + 1 is 258."""
    share = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)[rank]
    y, weight = share.expand(12, 1), torch.ones(1, 1, dtype=torch.bfloat16)
    return [
        summed_products(y, weight, RowTravel(dist.group.WORLD, chunks)).flatten().tolist()
        for chunks in (0, 1, 3)
    ]


def test_sums_of_half_types_are_wide() -> None:
    assert run_ranks(halves, 3) == [[[258.0] * 4] * 3] * 3


def test_a_rank_alone_and_groups_without_a_rule_wait_for_nothing() -> None:
    assert RowTravel.of(ProcessGroups(chunks=lambda rows, ranks: 4), 100) == RowTravel()
    x, weight = draw(0, 5, DIM), draw(1, 3, DIM)
    (product,) = GatheredRows(x, [weight], RowTravel(chunks=4)).times(0)
    assert torch.equal(product, x @ weight.t())
    assert torch.equal(summed_products(x, weight, RowTravel(chunks=4)), x @ weight.t())
