"""verl's two balancing functions, with the same signatures but this package's planner.

``verl.utils.seqlen_balancing`` deals by Karmarkar and Karp's differencing on the work of a 7B model
(24,576 a token and one a pair), and adds micro-batches until the result keeps the cap. The
functions here can use any model's work, keep the cap while they deal, and are never less balanced.
Replace verl's functions like this::

    import verl.utils.seqlen_balancing as balancing
    from lightning_wlb.adapters import verl

    balancing.rearrange_micro_batches = verl.rearrange_micro_batches
    balancing.get_seqlen_balanced_partitions = verl.get_seqlen_balanced_partitions

Modules that have imported the names earlier keep verl's functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_wlb.adapters.plan_step import WorkOf, plan_step, shape_of
from lightning_wlb.argument_checks import whole


def work_of_verl(tokens: Any) -> Any:
    """The work of a sequence as verl estimates it, in the proportions of a 7B model."""
    return 24576 * tokens + tokens**2


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Divide items into ``k_partitions`` of nearly equal sums, none empty, each ascending.

    Args:
        seqlen_list: the value of each item: its length, or its work.
        k_partitions: number of parts.
        equal_size: whether all parts have equally many items.

    Raises:
        ValueError: fewer items than parts, or a number of items that does not divide.
    """
    if len(seqlen_list) < k_partitions:
        raise ValueError(f"{len(seqlen_list)} items for k_partitions={k_partitions}: give fewer.")
    values = [int(value) for value in seqlen_list]
    step = plan_step([1] * len(values), ranks=k_partitions, work=values, equal_sizes=equal_size)
    return [sorted(rank[0]) for rank in step.micro_batches]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
    *,
    model: Any = None,
    work: WorkOf = work_of_verl,
) -> tuple[list[Any], list[list[int]]]:
    """Split a rank's batch into micro-batches of equal work under a cap of tokens.

    Args:
        batch: a TensorDict with ``input_ids``, nested or with an ``attention_mask``.
        max_token_len: most tokens of a micro-batch.
        dp_group: data-parallel process group.
        num_batches_divided_by: the number of micro-batches is a multiple of this.
        same_micro_num_in_dp: whether all ranks of ``dp_group`` get equally many micro-batches.
        min_num_micro_batch: least number of micro-batches.
        use_dynamic_bsz_balance: whether the lightest micro-batches run first and last, which makes
            a pipeline fill and drain faster.
        force_group_size: number of neighbouring rows that stay in one micro-batch.
        model: as for :func:`.plan_step`, in place of ``work``.
        work: as for :func:`.plan_step`.

    Returns:
        The micro-batches, and the rows of each.

    Raises:
        ValueError: on all ranks if one has a group above the cap, an empty row, or too few groups.
    """
    from verl.utils import tensordict_utils  # verl's own selection, of nested tensors too

    ids = batch["input_ids"]
    counted = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    lengths, size = counted.tolist(), whole("force_group_size", force_group_size, 1)
    groups = [list(range(at, min(at + size, len(lengths)))) for at in range(0, len(lengths), size)]
    together = dist.is_initialized() and same_micro_num_in_dp and dp_group is not None
    agreed = partial(_largest, group=dp_group if together else None, device=counted.device)
    # If only one rank raised, the others would wait for it.
    longest, uneven, *negated = agreed(
        max((sum(lengths[i] for i in group) for group in groups), default=0),
        len(lengths) % size,
        -len(groups),
        -min(lengths, default=0),
    )
    fewest, shortest = (-each for each in negated)
    if longest > max_token_len or uneven or shortest == 0:
        raise ValueError(
            f"A group of {size} has {longest} tokens, more than max_token_len={max_token_len}, or"
            f" some rank has no rows, a row without tokens, or rows that do not divide by {size}."
            " Raise the cap, or shorten or leave out rows."
        )
    given = {"model": shape_of(model)} if model is not None else {"work": work}
    pairs = groups if size > 1 else ()
    divisor = whole("num_batches_divided_by", num_batches_divided_by or 1, 1)
    # The ranks agree on a number until no rank needs more.
    (wanted,), count = agreed(whole("min_num_micro_batch", min_num_micro_batch or 1, 1)), 0
    while count != wanted:
        count = -(-wanted // divisor) * divisor
        if count > fewest:
            raise ValueError(
                f"{count} micro-batches are needed, but a rank has only {fewest} groups of rows."
                " Raise max_token_len, or give more rows."
            )
        step = plan_step(
            lengths, max_tokens=max_token_len, micro_batches=count, pairs=pairs, **given
        )
        (wanted,) = agreed(len(step.micro_batches[0]))
    rows = step.micro_batches[0]  # the heaviest first
    if use_dynamic_bsz_balance:
        rows = rows[::2][::-1] + rows[1::2]
    return [tensordict_utils.index_select_tensor_dict(batch, each) for each in rows], rows


def _largest(*values: int, group: Any, device: torch.device) -> list[int]:
    """The largest of each value over the ranks of a group."""
    shared = torch.tensor(values, device=device)
    if group is not None:
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return list(shared.tolist())
