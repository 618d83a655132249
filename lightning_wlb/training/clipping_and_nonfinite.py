"""Clips gradients, and handles a loss or gradients that are not finite, on all ranks alike.

A single optimizer step with such gradients makes every parameter NaN. So before it
:class:`StepGuard` checks the losses of all ranks, which the exchange at the end of the step has
brought, and the norm of all gradients. If one of them is NaN or infinite, all ranks raise, or all
skip the optimizer's step. After a skip parameters and optimizer state are bit for bit as before,
the position in the documents has moved on, and the step counts as taken. If a parameter itself is
not finite no step can be right: without ``"ignore"`` all ranks raise, and nothing is saved.

Cost: one pass over the rank's own gradients, one all-reduce of a number, and one wait for the
device before the optimizer's step; clipping by norm uses the same norm. ``"ignore"`` costs nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_wlb.argument_checks import choice
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.distributed.collective_errors import names_of_ranks
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.tensor_parallel import held
from lightning_wlb.supervision.faults import StateLost
from lightning_wlb.supervision.progress import OPTIMISING, PROGRESS

OnNonfinite = Literal["raise", "skip", "ignore"]

MOST_SKIPPED = 10
"""Steps in a row after which a run that skips is ended: it would not recover."""

_SHOWN = 4
"""Names of parameters and documents in a message."""


class StepGuard:
    """Clips the gradients of a step, and says whether the optimizer may take it.

    Attributes:
        skipped: steps that were skipped since the strategy was made.

    Raises:
        ValueError: ``on_nonfinite`` has another value.
    """

    def __init__(self, on_nonfinite: OnNonfinite) -> None:
        self.on_nonfinite = choice("on_nonfinite", on_nonfinite, get_args(OnNonfinite))
        self.skipped = 0
        self._in_a_row = 0
        self._finite: bool | None = None
        self._losses: list[float] = []

    def attach(
        self,
        model: nn.Module,
        mesh: Mesh,
        device: torch.device,
        copies: list[nn.Parameter],
        name_of: Callable[[int], str],
    ) -> None:
        """Guard the rank's stages; the norm counts tied ``copies`` on the other stage only."""
        self._model, self._mesh, self._device = model, mesh, device
        self._copies, self._name_of = copies, name_of

    def ran(self, batch: StepBatch, losses: list[float]) -> None:
        """Note that a step's backwards have run, with these losses on the ranks."""
        self._batch, self._losses, self._finite = batch, losses, None

    def clip_by_norm(self, parameters: list[nn.Parameter], most: float) -> None:
        """Scale the gradients in place so that their global 2-norm is at most ``most``."""
        norm = self._norm_of(parameters)
        # Scaling by a norm that is not finite makes all gradients NaN. Then the report could not
        # name the parameters whose gradients were not finite before.
        if self._finite or self.on_nonfinite == "ignore":
            scale = (most / (norm + 1e-6)).clamp(max=1.0)
            # The rank's shards: DTensor would look up a sharding rule for every shape.
            gradients = [held(each.grad) for each in parameters if each.grad is not None]
            if gradients:  # a frozen stage has none
                torch._foreach_mul_(gradients, scale)

    def clip_by_value(self, parameters: list[nn.Parameter], most: float) -> None:
        """Bound every gradient to ``[-most, most]``."""
        # Clipping makes an infinite gradient finite, and nothing would be reported.
        if self.on_nonfinite == "ignore" or self._norm_of(parameters).isfinite():
            torch.nn.utils.clip_grad_value_(parameters, most)

    def accepts(self, parameters: list[nn.Parameter]) -> bool:
        """Whether the optimizer may take the step; collective, the same on every rank.

        Raises:
            RuntimeError: ``"raise"``, or ``"skip"`` in :data:`MOST_SKIPPED` steps in a row.
            StateLost: parameters are not finite.
        """
        ignores = self.on_nonfinite == "ignore"
        if self._finite is None and not ignores:
            self._norm_of(parameters)
        ranks = [rank for rank, loss in enumerate(self._losses) if not math.isfinite(loss)]
        if ignores or (self._finite and not ranks):
            self._in_a_row = 0
            PROGRESS.note(OPTIMISING, "its optimiser")
            return True
        report = self._report(ranks)
        if lost := self._anywhere(self._model.named_parameters()):
            raise StateLost(
                f"{report} The weights themselves are not finite: {_some(lost)}. Nothing is saved."
                " Resume from an earlier checkpoint with a lower learning rate."
            )
        if self.on_nonfinite == "raise":
            raise RuntimeError(
                f"{report} Look at these documents, lower the learning rate or clip gradients"
                " (Trainer(gradient_clip_val=1)); WLBStrategy(on_nonfinite='skip') skips the step."
            )
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST_SKIPPED:
            raise RuntimeError(
                f"{report} This is so in {self._in_a_row} steps in a row: the run does not recover."
                " Resume from an earlier checkpoint with a lower learning rate."
            )
        rank_zero_warn(
            f"{report} The step is skipped (on_nonfinite='skip'), {self.skipped} so far."
        )
        return False

    def _norm_of(self, parameters: list[nn.Parameter]) -> Tensor:
        norm = gradient_norm(parameters, self._device, self._copies)
        if self.on_nonfinite != "ignore":  # reading it waits for the device
            self._finite = bool(norm.isfinite())
        return norm

    def _report(self, ranks: list[int]) -> str:
        """What is not finite, and where; collective."""
        plan = self._batch.plan
        what = []
        if ranks:
            losses = sorted({str(self._losses[rank]) for rank in ranks})
            what.append(f"the loss is {' or '.join(losses)} on {names_of_ranks(ranks)}")
        named = self._model.named_parameters()
        gradients = ((name, each.grad) for name, each in named if each.grad is not None)
        if parameters := self._anywhere(gradients):
            what.append(f"gradients are not finite of {_some(parameters)}")
        elif not self._finite:
            what.append("the norm of the gradients overflows")
        concerned = [plan.place(self._mesh.coordinate(rank)).data for rank in ranks]
        documents = dict.fromkeys(
            part.document
            for data in sorted(set(concerned or range(len(plan.replicas))))
            for part in plan.replicas[data].slices
        )
        of = "these ranks" if ranks else "the step"
        return (
            f"Step {plan.step}: {', and '.join(what)}. Documents of {of}:"
            f" {_some([self._name_of(each) for each in documents])}."
        )

    def _anywhere(self, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """The names of tensors that are not finite, the first few of each rank; collective."""
        own = [name for name, each in tensors if not bool(held(each).isfinite().all())]
        everyone: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, own[: _SHOWN + 1])
        return list(dict.fromkeys(name for names in everyone for name in names))


def _some(names: list[str]) -> str:
    """The first names, and whether there are more."""
    return ", ".join(names[:_SHOWN]) + (" and others" if len(names) > _SHOWN else "")


def gradient_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, copies: Collection[nn.Parameter] = ()
) -> Tensor:
    """The 2-norm of the gradients of all parameters of all stages; collective over all ranks.

    Each rank sums the squares of its shards. If n tensor-parallel ranks hold a shard, each adds 1/n
    of its square. The sums are added over all ranks. Gradients are reduced already; another stage
    counts those of ``copies``. The norm is 0-dim float64, and not finite if any gradient is not.
    """
    left_out = {id(parameter) for parameter in copies}
    # Number of ranks that hold the same part -> gradients; each rank adds its share of the square.
    by_ranks: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or id(parameter) in left_out:
            continue
        ranks = 1
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            ranks = math.prod(
                mesh.size(dim)
                for dim, each in enumerate(gradient.placements)
                if each.is_replicate()
            )
            gradient = gradient.to_local()
        by_ranks[ranks].append(gradient)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for ranks, gradients in by_ranks.items():
        squares += torch.nn.utils.get_total_norm(gradients).double() ** 2 / ranks
    dist.all_reduce(squares)
    return squares.sqrt()
