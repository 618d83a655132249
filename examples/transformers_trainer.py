"""Balanced steps in transformers' Trainer on two CPU ranks, and what they gain.

Run it by::

    torchrun --nproc-per-node 2 examples/transformers_trainer.py

Trains a small Llama on sequences of very different length, first as the Trainer deals them (in
random order, each rank's packed in one row), then dealt by work, the same sequences in an epoch.
Prints by how much longer the busier rank computes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lightning_wlb.adapters.transformers_trainer import BalancedTraining, packed_collator


class BalancedTrainer(BalancedTraining, Trainer):
    """The one line that changes."""


class Busier(TrainerCallback):
    """Keeps the processor time that the busier rank takes for each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        """A step begins."""
        self.started = time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        """A step has ended, on every rank once all have told their time."""
        own = torch.tensor(time.process_time() - self.started)
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        self.times.append(own.item())


def train(trainer_class: type[Trainer], longest: int, steps: int) -> float:
    """Processor seconds of the busier rank in an epoch of so many steps, all of its sequences."""
    generator = np.random.default_rng(0)
    lengths = np.clip(np.exp(generator.normal(5, 1.3, 8 * steps)), 16, longest).astype(int)
    rows = [{"input_ids": generator.integers(0, 500, length).tolist()} for length in lengths]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation="wlb_packed",
    )
    busier = Busier()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=steps,
            use_cpu=True,
            ddp_backend="gloo",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer_class(
            LlamaForCausalLM(config),
            arguments,
            train_dataset=rows,
            data_collator=packed_collator(),
            callbacks=[busier],
        ).train()
    return sum(busier.times)


def main() -> None:
    """Train both ways, and print the ratio."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--longest", type=int, default=4096, help="tokens of a sequence")
    options.add_argument("--steps", type=int, default=8)
    given = options.parse_args()
    torch.set_num_threads(1)
    dealt, balanced = (
        train(each, given.longest, given.steps) for each in (Trainer, BalancedTrainer)
    )
    if os.environ.get("RANK", "0") == "0":
        print(f"In random order {dealt / balanced:.2f} times as long as balanced ({dealt:.1f} s).")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
