"""Lengths in, micro-batches by rank out: the one function that every adapter calls.

It needs only numpy, unless ``model`` is a Hugging Face config.
:mod:`lightning_wlb.planning.balanced_step` has the algorithm, and says when not to use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_wlb.argument_checks import flag, whole
from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.models.config import PRESETS, as_config
from lightning_wlb.planning.balanced_step import (
    Balance,
    BalancedStep,
    Items,
    as_integers,
    deal_step,
    lockstep_work,
)

MOST_TOKENS = 1 << 40
"""Most tokens of a sequence or a document: sums of more would leave 64 bits."""

WorkOf = PassWork | Callable[[NDArray[np.float64]], ArrayLike] | Sequence[float]


def plan_step(
    lengths: Sequence[int] | NDArray[np.integer[Any]],
    *,
    ranks: int = 1,
    max_tokens: int | None = None,
    model: Any = None,
    work: WorkOf | None = None,
    micro_batches: int = 1,
    equal_sizes: bool = False,
    lockstep: bool = False,
    no_empty: bool = False,
    pairs: Sequence[Sequence[int]] = (),
) -> BalancedStep:
    """Give one step's sequences to ranks and micro-batches of equal work.

    Args:
        lengths: tokens of each sequence.
        ranks: data-parallel ranks.
        max_tokens: most tokens of a micro-batch; None: no cap.
        model: the model that the sequences run through: a preset (``"7b"``), a ``ModelShape`` or an
            object that has one as ``.shape``, or a Hugging Face config, its folder or hub name.
        work: the cost of sequences, in place of a model: a function of an array of lengths, such as
            ``lambda tokens: 24576 * tokens + tokens**2``, or one number for each sequence.
        micro_batches: least number of micro-batches of each rank; the cap may require more.
        equal_sizes: whether all ranks get equally many sequences (or groups of ``pairs``).
        lockstep: whether ranks wait for each other in every micro-batch (ZeRO-3, FSDP that gathers
            parameters again), and not only at the end of the step.
        no_empty: whether micro-batches may not be empty if there are enough sequences: a rank with
            few long sequences then gets some of the shortest.
        pairs: groups of sequences, by number, that stay in one micro-batch (chosen and rejected).

    Returns:
        Plain lists, which print well. All ranks have as many micro-batches as the rank that needs
        most: if each micro-batch has a collective, ranks with different numbers would deadlock. The
        same arguments give the same answer on every machine.

    Raises:
        ValueError: an argument out of range, neither ``model`` nor ``work``, a sequence or a group
            above the cap, or numbers that do not divide; the message names the argument.
    """
    tokens = _checked_lengths(lengths)
    ranks, least = whole("ranks", ranks, 1), whole("micro_batches", micro_batches, 1)
    cap = None if max_tokens is None else whole("max_tokens", max_tokens, 1)
    given = {"equal_sizes": equal_sizes, "lockstep": lockstep, "no_empty": no_empty}
    given = {name: flag(name, value) for name, value in given.items()}
    if (model is None) == (work is None):
        raise ValueError(
            "plan_step needs either model=, such as '7b' or a Hugging Face config, or work=, such"
            " as lambda tokens: 24576 * tokens + tokens**2, to know what a sequence costs."
        )
    costs = _work_of(tokens, work if model is None else Work.of(shape_of(model)).total)
    items = _items(tokens, as_integers(costs), pairs)
    over = int(items.tokens.argmax())
    if cap is not None and items.tokens[over] > cap:
        raise ValueError(
            f"Sequence {' with '.join(map(str, items.members[over]))} has {items.tokens[over]}"
            f" tokens, more than max_tokens={cap}. Raise the cap, or cut or leave out the sequence."
        )
    if equal_sizes and (
        len(items.members) % ranks or len({len(each) for each in items.members}) > 1
    ):
        raise ValueError(
            f"equal_sizes=True: {len(items.members)} sequences (or groups, which must be of one"
            f" size) do not divide by ranks={ranks}."
        )
    dealt = deal_step(items, ranks, cap, least=least, **given)
    # Without pairs the items are the sequences.
    together = len(items.members) < len(tokens)
    parts = [
        [
            sorted(i for item in each for i in items.members[item]) if together else each
            for each in r
        ]
        for r in dealt
    ]
    length = tokens.tolist()
    held = [[sum(length[i] for i in each) for each in rank] for rank in parts]
    return BalancedStep(parts, held, _balance(costs, items, dealt, ranks), cap)


def _checked_lengths(lengths: Any) -> NDArray[np.int64]:
    tokens = np.asarray(lengths)
    if (
        tokens.ndim != 1
        or tokens.dtype.kind not in "iu"
        or len(tokens) == 0
        or not 1 <= tokens.min() <= tokens.max() <= MOST_TOKENS
    ):
        raise ValueError(
            f"lengths={lengths!r:.80} must be a sequence of whole numbers of at least 1 and at"
            f" most {MOST_TOKENS:,}, and not empty: the tokens of each sequence."
        )
    return tokens.astype(np.int64)


def shape_of(model: Any) -> ModelShape:
    """The sizes of a model, given as in :func:`plan_step`.

    Raises:
        ValueError: no such preset or config, or a Hugging Face config without transformers.
    """
    model = getattr(model, "shape", model)
    if isinstance(model, ModelShape):
        return model
    if (isinstance(model, str) and model in PRESETS) or (
        isinstance(model, Mapping) and "model_type" not in model
    ):
        return as_config(model).shape
    try:
        from lightning_wlb.models.huggingface.config_and_shape import read_config
        from lightning_wlb.models.huggingface.config_and_shape import shape_of as shape_of_config
    except ImportError as error:
        raise ValueError(
            f"model={model!r:.80} is none of {', '.join(PRESETS)}. A Hugging Face config needs"
            f" {error.name}: pip install 'lightning-wlb[hf]'. Or give work=."
        ) from error
    return shape_of_config(read_config(model))


def _work_of(tokens: NDArray[np.int64], work: Any) -> NDArray[np.float64]:
    if isinstance(work, PassWork):
        return work.of_lengths(tokens)
    costs = np.asarray(work(tokens.astype(np.float64)) if callable(work) else work, np.float64)
    if costs.shape != tokens.shape or not np.isfinite(costs).all() or costs.min() < 0:
        raise ValueError(
            f"work= gives {costs.shape} numbers for {len(tokens)} sequences, or some that are"
            " negative or not finite: give one of at least 0 for each sequence."
        )
    return costs if costs.any() else costs + 1


def _items(tokens: NDArray[np.int64], works: NDArray[np.int64], pairs: Any) -> Items:
    if len(pairs) == 0:
        return Items(works, tokens, [[number] for number in range(len(tokens))])
    groups = [[whole("pairs: a sequence", each, 0) for each in group] for group in pairs]
    named = [each for group in groups for each in group]
    if not all(groups) or len(set(named)) < len(named) or max(named) >= len(tokens):
        raise ValueError(
            f"pairs name sequences {sorted(named)[:8]}..., but each of 0 to {len(tokens) - 1} may"
            " stand in one group only, and no group may be empty."
        )
    rest = set(range(len(tokens))).difference(named)
    members = sorted([*map(sorted, groups), *([number] for number in rest)])
    sums = [
        np.array([sum(each[i] for i in group) for group in members], np.int64)
        for each in (works.tolist(), tokens.tolist())
    ]
    return Items(sums[0], sums[1], members)


def _balance(
    costs: NDArray[np.float64], items: Items, dealt: list[list[list[int]]], ranks: int
) -> Balance:
    mean = float(costs.sum()) / ranks
    before = np.bincount(np.arange(len(costs)) % ranks, weights=costs, minlength=ranks)
    works = items.works.tolist()
    most = max(sum(works[item] for each in rank for item in each) for rank in dealt)
    even = sum(works) / ranks
    return Balance(float(before.max()) / mean, most / even, lockstep_work(items, dealt) / even)
