"""Heads, initial values and attention of families, without the package's strategy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from lightning.fabric.plugins.precision.utils import _DtypeContextManager

from benchmarks.activation_count import ActivationCount
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.distributed.process_groups import NO_GROUPS
from lightning_wlb.models import loss
from lightning_wlb.models.huggingface.attention import Running, during
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule
from tests.models.huggingface.configs import tiny
from tests.models.steps import documents, trainer


@pytest.mark.parametrize(
    ("family", "fields", "plain"),
    [
        ("llama", {}, True),
        ("granite", {"logits_scaling": 1.0}, True),
        ("granite", {"logits_scaling": 8.0}, False),
        ("cohere", {"logit_scale": 0.0625}, False),
        ("gemma2", {"final_logit_softcapping": 30.0}, False),
        ("gemma2", {"final_logit_softcapping": None}, True),
        ("phi", {}, False),  # a bias
    ],
)
def test_plain_heads(family, fields, plain):
    assert HuggingFaceDecoder(tiny(family, **fields)).head.plain is plain


class Held(ActivationCount):
    """What is held after every operation."""

    def __torch_dispatch__(self, *args, **options):
        result = super().__torch_dispatch__(*args, **options)
        self.sample()
        return result


def test_a_head_that_is_not_plain_takes_the_memory_that_is_counted(monkeypatch):
    rows, chunk, words = 256, 64, 4000
    monkeypatch.setattr(loss, "chunk_rows", lambda words, accelerator: chunk)
    capped = tiny("gemma2", final_logit_softcapping=30.0, vocab_size=words)
    decoder = HuggingFaceDecoder(capped).bfloat16()
    hidden = torch.randn(rows, capped.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.int64)
    micro_batch = SimpleNamespace(recompute="none")
    with during(Running(micro_batch, NO_GROUPS, decoder.attention_kernel)), Held() as held:
        decoder.head(hidden, labels, None).backward()
    # In float32 and, rounded, once more: as MemoryModel has it.
    counted = (4 + 2) * words * (chunk + capped.hidden_size)
    assert counted / 2 < max(held.held_bytes) < 1.1 * counted


def test_initial_values_do_not_depend_on_the_dtype_that_lightning_builds_in():
    """Nor on what was drawn before, as a router's, for which the rule of its block is needed."""
    values = []
    for dtype in (torch.float32, torch.float64):
        module = HuggingFaceModule(tiny("qwen3_next", initializer_range=0.5), seed=3)
        with _DtypeContextManager(dtype):
            module.configure_model()
        values.append(dict(module.named_parameters()))
    assert 0.4 < float(values[0]["model.layers.1.mlp.gate.weight"].std()) < 0.6
    for name, value in values[0].items():
        assert torch.equal(value.double(), values[1][name].double()), name


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_under_autocast_attention_has_one_dtype(tmp_path, family):
    """Lightning's own strategies cast by autocast, which leaves rotated queries in float32."""
    losses = []
    for precision in ("32-true", "bf16-mixed"):
        module = HuggingFaceModule(tiny(family), seed=3)
        data = WLBDataModule(documents(), context_window=32, micro_batches=1, num_workers=0)
        runner = trainer(tmp_path, max_steps=1, precision=precision)
        runner.fit(module, data)
        losses.append(float(runner.callback_metrics["train_loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
