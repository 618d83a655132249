"""Balanced rows for torchtitan's data loader: steps of equal work over its data-parallel ranks.

torchtitan trains on rows of ``seq_len`` tokens and takes ``gradient_accumulation_steps`` rows in
each step. :class:`BalancedRows` is a data set of such rows for one rank: whole documents, packed so
that rows that ranks run at the same time have equal work, and padded to ``seq_len``, since
torchtitan's compiled steps have one shape. Positions restart in every document, by which
torchtitan's ``block_causal`` attention separates documents::

    rows = BalancedRows(documents, dp_rank, dp_world_size, seq_len=8192, documents_per_step=64,
                        accumulation_steps=2, model="llama3-8b")
    loader = ParallelAwareDataloader(rows, dp_rank, dp_world_size, batch_size=1)

Padding costs matrix products: choose a number of documents in a step that nearly fills its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lightning_wlb.adapters.torch_sampler import BalancedBatchSampler
from lightning_wlb.argument_checks import whole

IGNORE_INDEX = -100
"""torchtitan's label of a token without a target."""


class BalancedRows(IterableDataset[tuple[dict[str, Tensor], Tensor]]):
    """Endless rows of one data-parallel rank: ``{"input", "positions"}`` and labels, [seq_len].

    Args:
        documents: token numbers of each document, at least two; the last token is only a target.
        dp_rank: number of the data-parallel rank.
        dp_world_size: number of these ranks.
        seq_len: tokens of a row.
        documents_per_step: documents in a step, over all ranks and rows.
        accumulation_steps: rows of each rank in a step.
        seed: gives the order of documents, which is new in each epoch.
        options: ``model`` or ``work`` of :func:`.plan_step`.

    Raises:
        ValueError: as :class:`.BalancedBatchSampler`, such as for a step that needs more rows; or a
            loader with several workers, each of which would yield every row.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        dp_rank: int,
        dp_world_size: int,
        *,
        seq_len: int,
        documents_per_step: int,
        accumulation_steps: int = 1,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.documents, self.seq_len = documents, whole("seq_len", seq_len, 1)
        self.sampler = BalancedBatchSampler(
            [len(document) - 1 for document in documents],
            sequences=documents_per_step,
            ranks=dp_world_size,
            rank=dp_rank,
            micro_batches=accumulation_steps,
            seed=seed,
            max_tokens=seq_len,
            lockstep=True,
            **options,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        if (worker := get_worker_info()) is not None and worker.num_workers > 1:
            raise ValueError(
                f"{worker.num_workers} workers would each yield every row: give num_workers=1 or 0"
            )
        while True:
            yield from map(self._row, self.sampler)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last yielded row; torchtitan saves it with the loader's state."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.sampler.load_state_dict(state)

    def _row(self, numbers: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        row = torch.zeros(self.seq_len, dtype=torch.int64)
        positions, labels = torch.zeros_like(row), torch.full_like(row, IGNORE_INDEX)
        at = 0
        for number in numbers:
            tokens = torch.as_tensor(self.documents[number], dtype=torch.int64)
            stop = at + len(tokens) - 1
            row[at:stop], labels[at:stop] = tokens[:-1], tokens[1:]
            positions[at:stop] = torch.arange(stop - at)
            at = stop
        positions[at:] = torch.arange(self.seq_len - at)  # padding is a document of its own
        return {"input": row, "positions": positions}, labels
