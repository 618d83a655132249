import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.activation_count import ActivationCount
from lightning_wlb.models import loss as module
from lightning_wlb.models.loss import (
    token_loss,
)
from tests.oracle import relative_error
from tests.ranks import run_ranks


def example(rows=301, dim=12, words=40, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, dim, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(words, dim, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, words, (rows,), generator=generator)
    labels[::5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def dense(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.T, labels, reduction="sum", ignore_index=-100)


@pytest.fixture
def function(monkeypatch):
    monkeypatch.setattr(module, "chunk_rows", lambda words, accelerator: 64)
    return token_loss


@pytest.mark.parametrize("scale", [1.0, 500.0])
def test_equals_dense_cross_entropy(function, scale):
    hidden, weight, labels = example(scale=scale)
    wanted = dense(hidden, weight, labels)
    wanted_gradients = torch.autograd.grad(wanted * 0.3, (hidden, weight))
    loss = function(hidden, weight, labels)
    gradients = torch.autograd.grad(loss * 0.3, (hidden, weight))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    for value, reference in zip(gradients, wanted_gradients, strict=True):
        assert relative_error(value, reference) <= 1e-12


@pytest.mark.parametrize("rows", [0, 1, 100])
def test_without_targets_zero_loss_and_zero_gradients(function, rows):
    hidden, weight, labels = example(rows=rows)
    loss = function(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_one_backward_over_several_micro_batches(function):
    hidden, weight, labels = example()
    parts = [slice(0, 100), slice(100, 101), slice(101, 301)]
    loss = sum(function(hidden[part], weight, labels[part]) for part in parts)
    # A second backward through the same graph must find what the first found.
    first = torch.autograd.grad(loss / 7, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss / 7, (hidden, weight))
    wanted = torch.autograd.grad(dense(hidden, weight, labels) / 7, (hidden, weight))
    for one, two, reference in zip(first, second, wanted, strict=True):
        assert torch.equal(one, two)
        assert relative_error(one, reference) <= 1e-12


def test_half_precision_returns_float32_and_accumulates_in_it(function):
    hidden, weight, labels = example(rows=2000, dtype=torch.bfloat16)
    loss = function(hidden, weight, labels)
    assert loss.dtype == torch.float32
    loss.backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    wanted = dense(exact_hidden, exact_weight, labels)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-3)
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert relative_error(weight.grad.double(), exact_weight.grad) <= 4e-3


def test_the_logits_of_one_chunk_are_gone_before_those_of_the_next(monkeypatch):
    chunk, words = 64, 1000
    monkeypatch.setattr(module, "chunk_rows", lambda words, accelerator: chunk)

    class Held(ActivationCount):
        def __torch_dispatch__(self, *args, **options):
            result = super().__torch_dispatch__(*args, **options)
            self.sample()
            return result

    hidden, weight, labels = example(rows=3 * chunk, dim=4, words=words, dtype=torch.float32)
    with Held() as held:
        token_loss(hidden, weight, labels).backward()
    logits, gradient = 4 * chunk * words, 4 * words * weight.shape[1]
    assert logits < max(held.held_bytes) < 1.1 * logits + gradient


def test_products_of_half_types_add_up_in_float32_in_place(monkeypatch):
    """CUDA's operators that multiply half types into float32, by stand-ins of the same meaning."""
    mm, calls = torch.mm, []

    def wide_mm(a, b, out_dtype):
        assert a.dtype == b.dtype == torch.bfloat16
        assert out_dtype == torch.float32
        return mm(a.to(out_dtype), b.to(out_dtype))

    def wide_addmm(total, a, b, out_dtype, out):
        assert total is out
        assert total.dtype == torch.float32
        calls.append(len(b))
        return total.add_(wide_mm(a, b, out_dtype))

    monkeypatch.setattr(module, "chunk_rows", lambda words, accelerator: 64)
    monkeypatch.setattr(module, "_has_wide_products", lambda a: True)
    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)
    hidden, weight, labels = example(dtype=torch.bfloat16)
    loss = token_loss(hidden, weight, labels)
    loss.backward()
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    wanted = dense(*exact, labels)
    wanted.backward()
    assert calls == [64] * 4 + [45]
    # The logits were never rounded.
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert relative_error(weight.grad.double(), exact[1].grad) <= 4e-3


def _vocabulary_parallel(rank, dtype):
    module.chunk_rows = lambda words, accelerator: 64
    hidden, weight, labels = example(dtype=dtype)
    size = dist.get_world_size()
    words = weight.shape[0] // size
    mine = weight.detach()[rank * words : (rank + 1) * words].clone().requires_grad_()
    loss = token_loss(hidden, mine, labels, dist.group.WORLD)
    (loss * 0.3).backward()
    # What the reduce-scatter behind gather_rows does.
    total = hidden.grad.clone()
    dist.all_reduce(total)
    return loss.item(), total, mine.grad


def test_vocabulary_parallel_equals_one_process():
    hidden, weight, labels = example()
    wanted = dense(hidden, weight, labels)
    (wanted * 0.3).backward()
    results = run_ranks(_vocabulary_parallel, 4, torch.float64)
    losses = {loss for loss, _, _ in results}
    assert len(losses) == 1, "every rank returns the same loss, bit for bit"
    assert losses.pop() == pytest.approx(wanted.item(), rel=1e-12)
    for _, hidden_gradient, _ in results:
        assert relative_error(hidden_gradient, hidden.grad) <= 1e-12
    assert relative_error(torch.cat([part for _, _, part in results]), weight.grad) <= 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bfloat16_on_a_gpu_is_near_float64(record_property):
    errors = bfloat16_errors("cuda")
    record_property("errors", errors)
    assert errors[0] <= 1e-3
    assert max(errors) <= 1e-2


def bfloat16_errors(device):
    """Relative errors of the loss and both gradients, of some thousand words and rows."""
    hidden, weight, labels = example(3000, 64, 4000, torch.bfloat16, 1 / 8)
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    wanted = dense(*wide, labels)
    leaves = [each.detach().to(device).requires_grad_() for each in (hidden, weight)]
    loss = token_loss(*leaves, labels.to(device))
    pairs = zip(
        (loss, *torch.autograd.grad(loss, leaves)),
        (wanted, *torch.autograd.grad(wanted, wide)),
        strict=True,
    )
    return [relative_error(value.detach().cpu().double(), reference) for value, reference in pairs]
