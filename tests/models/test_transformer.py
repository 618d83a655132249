from dataclasses import replace

import pytest
import torch

from lightning_wlb.models.compiled_functions import rotary_frequencies, rotate, rotate_real
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.tensor_parallel_overlap import RowTravel
from lightning_wlb.models.transformer import Transformer
from tests.device import DEVICE
from tests.models.steps import (
    PIECES,
    config,
    documents,
    loss_masks,
    spread,
    stage,
    step_batch,
)
from tests.oracle import count_targets, oracle, relative_error


def build(dtype=torch.float64, **overrides):
    return spread(Transformer(config(**overrides)).to(dtype))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied_embeddings": True},
        {"kv_heads": 4},
        {"kv_heads": 1, "head_dim": 6},
        {"recompute": ("selective",)},
        {"recompute": ("full", "none", "selective"), "tied_embeddings": True},
    ],
    ids=str,
)
def test_gradients_of_packed_micro_batches_equal_dense_attention(options, masked):
    texts, masks = documents(), loss_masks() if masked else None
    options = dict(options)
    recompute = options.pop("recompute", ("none",))
    model = build(**options).to(DEVICE)
    loss, wanted = oracle(model, texts, PIECES, masks)
    batch = step_batch(texts, masks=masks, recompute=recompute).to(DEVICE)
    assert batch.target_tokens == count_targets(texts, PIECES, masks)

    total = sum(model(micro_batch) for micro_batch in batch.micro_batches)
    total.backward()

    assert total.item() == pytest.approx(loss, rel=1e-13)
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, wanted[name]) <= 1e-10, name


def test_stages_pass_hidden_states_on():
    texts = documents()
    whole = build()
    first = stage(build(), [0], embed=True)
    last = stage(build(), [1], head=True)
    assert set(first.state_dict()) | set(last.state_dict()) == set(whole.state_dict())
    for micro_batch in step_batch(texts).micro_batches:
        assert last(micro_batch, first(micro_batch)).item() == whole(micro_batch).item()


def test_layers_run_in_numeric_order():
    model = stage(Transformer(config(layers=12)), [10, 9, 2])
    model.layers = torch.nn.ModuleDict({name: model.layers[name] for name in ("10", "9", "2")})
    ran = []
    for number, layer in model.layers.items():
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    with torch.no_grad():
        model(step_batch(documents()).micro_batches[0], torch.zeros(32, 16))
    assert ran == ["2", "9", "10"]


def test_without_labels_logits():
    model = build()
    micro_batch = step_batch(documents()).micro_batches[1]
    loss = model(micro_batch)
    logits = model(replace(micro_batch, labels=None))
    assert logits.shape == (31, 24)
    dense = torch.nn.functional.cross_entropy(logits, micro_batch.labels, reduction="sum")
    assert loss.item() == pytest.approx(dense.item(), rel=1e-13)


def test_an_empty_micro_batch_has_zero_loss_and_gradients():
    model = build()
    (micro_batch,) = step_batch(documents(), micro_batches=[[]]).micro_batches
    loss = model(micro_batch)
    loss.backward()
    assert loss.item() == 0
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.norm() == 0


def test_rotation_depends_on_distance_only_and_is_exact_far_out():
    sizes = config(head_dim=8)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def score(at, other):
        freqs = rotary_frequencies(torch.tensor([at, other]), sizes, torch.float64)
        table = torch.view_as_real(freqs)
        return (rotate(q, table[:1]) * rotate(k, table[1:])).sum().item()

    assert score(5, 2) == pytest.approx(score(1_000_005, 1_000_002), abs=1e-8)
    assert score(5, 2) != pytest.approx(score(2, 5), abs=1e-3)
    freqs = rotary_frequencies(torch.tensor([1_000_003]), sizes, torch.float32)
    assert freqs.dtype == torch.complex64
    # The fastest pair freqs by 1 rad per position: cos(1000003) is -0.8779865.
    assert freqs[0, 0].real.item() == pytest.approx(-0.8779865, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rotation_in_real_numbers_is_the_complex_one(dtype):
    freqs = rotary_frequencies(torch.arange(5, 12), config(head_dim=8), dtype)
    heads = torch.randn(7, 3, 8).to(dtype)
    table = torch.view_as_real(freqs)
    wanted, real = rotate(heads, table), rotate_real(heads, table)
    assert real.dtype == wanted.dtype == dtype
    torch.testing.assert_close(real, wanted, rtol=0, atol=1e-15 if dtype == torch.float64 else 0.02)


def test_bfloat16_rows_keep_their_type():
    model = build(dtype=torch.bfloat16)
    micro_batch = step_batch(documents()).micro_batches[0]
    loss = model(micro_batch)
    assert loss.dtype == torch.float32
    exact = build()(micro_batch)
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


def test_tied_embeddings_are_one_parameter_on_one_stage():
    model = build(tied_embeddings=True)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    # On another stage the head alone begins with the embedding's values.
    last = spread(stage(Transformer(config(tied_embeddings=True)).double(), [1], head=True))
    assert torch.equal(last.head.weight, model.embed.weight)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tiny", 217_664),
        ("550m", 551_339_520),
        ("7b", 6_738_415_616),
        ("30b", 32_528_943_616),
        ("70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
    ],
)
def test_presets_have_the_published_sizes(name, parameters):
    with torch.device("meta"):
        model = Transformer(TransformerConfig.preset(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layers": 10**9}, "layers=1,000,000,000: building more than 2,000"),
        ({"heads": 4, "kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"dim": 18, "heads": 4}, "dim=18 does not divide by heads=4"),
        ({"dim": 12, "heads": 4}, "head_dim=3 is odd"),
        ({"layers": 0}, "layers=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        config(**overrides)


@pytest.mark.parametrize(
    ("overrides", "size", "message"),
    [
        ({}, 8, "tensor_parallel_size=8 does not divide heads=4"),
        ({"vocab_size": 23}, 2, "vocab_size=23. Pad the vocabulary to vocab_size=24"),
        ({"ffn_dim": 25}, 2, "ffn_dim=25"),
        ({"heads": 12, "kv_heads": 4, "dim": 24}, 6, "kv_heads=4 do not divide each other"),
    ],
)
def test_tensor_parallel_sizes_that_do_not_fit_are_refused(overrides, size, message):
    with pytest.raises(ValueError, match=message):
        config(**overrides).shape.check_tensor_parallel(size)


class Noisy(torch.nn.Module):
    """A feed-forward network that draws random numbers, which no check of modules can see."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden, group):
        return torch.nn.functional.dropout(self.inner(hidden, RowTravel(group), True), 0.5)


def random_gradients(mode: str) -> list[torch.Tensor]:
    """Of forwards and backwards in the order of a pipeline: a recomputation is between draws."""
    model = build()
    for layer in model.layers.values():
        layer.feed_forward = Noisy(layer.feed_forward)
    torch.manual_seed(5)
    # Document 4 is in two of them, which do not share keys here.
    first, second, third = step_batch(documents(), recompute=(mode,)).micro_batches
    losses = [model(first), model(second)]
    losses[0].backward()
    losses.append(model(third))
    losses[1].backward()
    losses[2].backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_backward_recomputes_with_the_random_numbers_of_forward(mode):
    for got, wanted in zip(random_gradients(mode), random_gradients("none"), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)
