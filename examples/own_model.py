"""A model of one's own: the reference decoder with another feed-forward network.

    python examples/own_model.py

Two CPU ranks train it for a few steps, on the mesh that is predicted to be fastest, in well under a
minute. What a model of one's own must offer is in docs/guide/own_model.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import lightning_wlb as wlb
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.models.tensor_parallel import gather_rows, local, scatter_rows


class SquaredReLU(nn.Module):
    """w2 relu(w1 x)², two matrices in place of SwiGLU's three.

    Its matrices are called ``w1`` and ``w2``, so that the patterns of ``tensor_parallel_plan`` and
    the rule for initial values hold for them as they are. What tensor parallelism asks for is to
    gather and scatter rows over its process group, and to compute on ``local`` shards; without
    tensor parallelism the group is None and all three do nothing.
    """

    def __init__(self, config: wlb.TransformerConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.ffn_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.dim, config.ffn_dim))

    def forward(self, hidden: Tensor, group: ProcessGroup | None) -> Tensor:
        """[rows / tensor-parallel size, dim] -> the same."""
        hidden = gather_rows(hidden, group)
        wide = F.relu(F.linear(hidden, local(self.w1))).square()
        return scatter_rows(F.linear(wide, local(self.w2)), group)


class OwnDecoder(wlb.Transformer):
    """The reference decoder with that network in each layer."""

    def __init__(self, config: wlb.TransformerConfig) -> None:
        super().__init__(config)
        for layer in self.layers.values():
            layer.feed_forward = SquaredReLU(config)


class OwnModule(wlb.LanguageModule):
    """Trains an ``OwnDecoder``; loss, optimizer, schedule and checkpoints are LanguageModule's."""

    @property
    def model_shape(self) -> ModelShape:
        """What the packer weighs documents by: the cost model counts three matrices of ffn_dim."""
        return replace(self.config.shape, ffn_dim=self.config.ffn_dim * 2 // 3)

    def build_model(self) -> wlb.Decoder:
        """The whole model; the strategy splits it and gives it memory and values."""
        return OwnDecoder(self.config)


class Losses(L.Callback):
    """Prints the loss of every step."""

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: object,
        batch_idx: int,
    ) -> None:
        """The loss is the same on every rank; one prints it."""
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}: loss {outputs['loss']:.3f}")


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    config = wlb.TransformerConfig(
        dim=64, layers=4, heads=2, kv_heads=1, ffn_dim=240, vocab_size=256
    )
    trainer = L.Trainer(
        strategy="wlb",
        accelerator="cpu",
        devices=2,
        max_steps=arguments.steps,
        gradient_clip_val=1.0,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        OwnModule(config, learning_rate=3e-3),
        wlb.WLBDataModule("stdlib", context_window=1024, micro_batches=4),
    )


if __name__ == "__main__":
    main()
