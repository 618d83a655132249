"""Balanced steps in transformers' ``Trainer`` and TRL's ``SFTTrainer``, without padding.

::

    class MyTrainer(BalancedTraining, Trainer): ...

    trainer = MyTrainer(model, args, train_dataset=dataset, data_collator=packed_collator())

An optimiser step has as many sequences as the batch size says, in an order given by the run's seed;
their work decides which rank runs which sequences, and when. A micro-batch is one row without
padding. The ``Trainer`` divides the loss by the targets of the whole step, so loss and gradient do
not depend on the plan. The ``Trainer`` resumes as usual.

``SFTTrainer`` has its own, with ``SFTConfig(padding_free=True, packing=False, max_length=None)``.

Without flash-attention choose ``attn_implementation="wlb_packed"``, which calls torch's attention
for each sequence. Dense masks would cost as much as one sequence of the row's length.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader
from transformers import AttentionInterface, DataCollatorWithFlattening
from transformers.masking_utils import AttentionMaskInterface
from transformers.trainer_utils import seed_worker

from lightning_wlb.adapters.plan_step import WorkOf
from lightning_wlb.adapters.torch_sampler import BalancedBatchSampler


def packed_collator() -> DataCollatorWithFlattening:
    """Transformers' collator into one row, with positions, ``cu_seq_lens_q``, ``max_length_q``."""
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)


class BalancedTraining:
    """Put before ``Trainer`` or a subclass: its training loader deals sequences by their work.

    Attributes:
        max_tokens: most tokens of a micro-batch; None: no cap.
        work: measured cost of sequences, as for :func:`.plan_step`; None: the model's FLOPs.
        lockstep: whether ranks wait for each other in every micro-batch (FSDP, DeepSpeed ZeRO-3).

    Raises:
        ValueError: when training begins, for a data set without length, split batches, a loss that
            is a mean over each micro-batch, or a step that does not fit.
    """

    max_tokens: int | None = None
    work: WorkOf | None = None
    lockstep: bool = False

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        """The loader of the Trainer's data set, with balanced batches."""
        args, dataset = self.args, self.train_dataset
        if not hasattr(dataset, "__len__") or self.accelerator.split_batches:
            raise ValueError(
                "BalancedTraining needs a data set with a length, and split_batches=False: it gives"
                " a batch to each process."
            )
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func) or not (
            args.average_tokens_across_devices or args.world_size == 1
        ):
            raise ValueError(
                "BalancedTraining needs a loss that the Trainer divides by the targets of the whole"
                " step, since micro-batches differ in them: a model that takes num_items_in_batch,"
                " or compute_loss_func, and average_tokens_across_devices=True."
            )
        each = args.train_batch_size * args.gradient_accumulation_steps
        if left := len(dataset) % (each * args.world_size):
            rows = f"{left} of {len(dataset)} rows make no whole step and are left out each epoch"
            warnings.warn(f"{rows}, as by dataloader_drop_last=True.", stacklevel=2)
        sampler = _FromTrainer(
            sequence_lengths(dataset),
            sequences=each * args.world_size,
            ranks=args.world_size,
            micro_batches=args.gradient_accumulation_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            model=self.model.config if self.work is None else None,
            work=self.work,
            max_tokens=self.max_tokens,
            lockstep=self.lockstep,
        )
        sampler.trainer = self
        workers = args.dataloader_num_workers
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "training"),
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=args.process_index),
        )
        return self.accelerator.prepare(loader)


class _FromTrainer(BalancedBatchSampler):
    """A sampler that reads its epoch from the Trainer, since a resumed loader does not set it.

    On several processes Accelerate's loader that skips batches does not pass the epoch on.
    """

    trainer: Any

    def __iter__(self) -> Iterator[list[int]]:
        # If a callback ended an epoch early, this is less than the epoch that set_epoch has named.
        if (epoch := int(self.trainer.state.epoch or 0)) >= self.epoch:
            self.set_epoch(epoch)
        return super().__iter__()


def sequence_lengths(dataset: Any) -> NDArray[np.int64]:
    """Tokens of each row, int64 [rows]; for a Hugging Face data set without reading the tokens."""
    if hasattr(dataset, "with_format"):
        import pyarrow.compute as pc

        column = dataset.with_format("arrow")[:]["input_ids"]
        return pc.list_value_length(column).to_numpy().astype(np.int64)
    return np.array([len(row["input_ids"]) for row in dataset], np.int64)


def attend_by_sequence(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each sequence of one row: [1, heads, tokens, width] -> [1, tokens, ...].

    Raises:
        ValueError: options that are not computed, or nothing that says where sequences begin.
    """
    beyond = [sliding_window, *(others.get(name) for name in ("softcap", "s_aux"))]
    packed = cu_seq_lens_q is not None or position_ids is not None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if len(query) != 1 or not (packed and causal) or any(each is not None for each in beyond):
        raise _not_packed()
    if cu_seq_lens_q is not None:
        sizes = cu_seq_lens_q.diff().tolist()
    elif position_ids is not None:
        starts = torch.nonzero(position_ids[0] == 0).flatten().tolist()
        sizes = np.diff([*starts, query.shape[2]]).tolist()
    given: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": True}
    attend = partial(scaled_dot_product_attention, is_causal=True, **given)
    parts = list(map(attend, *(each.split(sizes, dim=2) for each in (query, key, value))))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _without_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """No mask; raises ValueError if ``local_size`` asks for a window or chunks, which need one."""
    if local_size is not None:
        raise _not_packed()


def _not_packed() -> ValueError:
    return ValueError(
        "attn_implementation='wlb_packed' needs one row of packed sequences, with position_ids or"
        " cu_seq_lens_q, and knows no attention to later tokens (is_causal,"
        " use_bidirectional_attention), sliding window, chunks, attention sinks or capped scores."
        " Use 'sdpa' or 'eager' for anything else."
    )


AttentionInterface.register("wlb_packed", attend_by_sequence)
AttentionMaskInterface.register("wlb_packed", _without_mask)
