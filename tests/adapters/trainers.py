"""Training with transformers' Trainer on two ranks, for the tests of its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_wlb.adapters.torch_sampler import BalancedBatchSampler
from tests.models.huggingface.support import KeepDouble

EACH, ACCUMULATED, RANKS, STEPS, SEED = 3, 2, 2, 4, 7
LEARNING_RATE = 0.2


def sequences() -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(3)
    lengths = np.clip(np.exp(generator.normal(2.5, 1.0, 30)), 2, 90).astype(int)
    return [{"input_ids": generator.integers(0, 50, length).tolist()} for length in lengths]


def tiny_llama(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        use_cache=False,
    )
    return LlamaForCausalLM(config).double()


def train(
    rank: int, folder: str, kind: str, attention: str, steps: int, resume: str | None
) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the parameters after the last."""
    import lightning_wlb.adapters.transformers_trainer as adapter

    given: dict[str, Any] = {
        "output_dir": str(Path(folder)),
        "per_device_train_batch_size": EACH,
        "gradient_accumulation_steps": ACCUMULATED,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_steps": 2 if resume else 1,
        "seed": SEED,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
    }
    if kind == "trl":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        class Balanced(adapter.BalancedTraining, SFTTrainer):
            pass

        config = SFTConfig(
            **given,
            padding_free=True,
            packing=False,
            max_length=None,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            eos_token=None,
        )
        trainer = Balanced(
            tiny_llama(attention),
            config,
            train_dataset=Dataset.from_list(sequences()),
            processing_class=tokenizer(),
            compute_loss_func=loss_of_step,  # TRL's own kernel computes in float32
        )
    else:
        from transformers import Trainer, TrainingArguments

        class Plain(adapter.BalancedTraining, Trainer):
            max_tokens = 200

        trainer = Plain(
            tiny_llama(attention),
            TrainingArguments(**given),
            train_dataset=sequences(),
            data_collator=adapter.packed_collator(),
        )
    with KeepDouble():
        trainer.train(resume_from_checkpoint=resume)
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    model = trainer.accelerator.unwrap_model(trainer.model)
    return losses, {name: each.detach().clone() for name, each in model.state_dict().items()}


def train_and_resume(
    rank: int, folder: str, kind: str, attention: str, steps: int
) -> list[tuple[list[float], dict[str, Tensor]]]:
    """A run, and of transformers' Trainer one more from inside each of its two epochs."""
    steps_of = (1, 3) if kind == "transformers" else ()
    runs = [None, *(str(Path(folder) / f"checkpoint-{step}") for step in steps_of)]
    return [train(rank, folder, kind, attention, steps, resume) for resume in runs]


def loss_of_step(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return loss / num_items_in_batch


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(48)} | {"<pad>": 48, "<eos>": 49}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def document_by_document(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps by one process, without packing, accelerate or Trainer."""
    model, documents = tiny_llama("eager"), [each["input_ids"] for each in sequences()]
    sampler = BalancedBatchSampler(
        [len(each) for each in documents],
        sequences=EACH * ACCUMULATED * RANKS,
        ranks=RANKS,
        micro_batches=ACCUMULATED,
        seed=SEED,
        model=model.config,
    )
    losses: list[float] = []
    while len(losses) < steps:
        for step in sampler.steps():
            taken = [i for rank in step for each in rank for i in each]
            targets = sum(len(documents[i]) - 1 for i in taken)
            loss = torch.zeros((), dtype=torch.float64)
            for i in taken:
                ids = torch.tensor([documents[i]])
                with KeepDouble():
                    logits = model(input_ids=ids).logits[0, :-1]
                loss = loss + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            loss = loss / targets
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= LEARNING_RATE * each.grad
            losses.append(loss.item())
            if len(losses) == steps:
                break
        sampler.set_epoch(sampler.epoch + 1)
    return losses, {name: each.detach() for name, each in model.state_dict().items()}
