"""What several ranks do together ends for all of them in the same way.

A rank that raises while others wait in a collective would leave them there until the time-out. So
what may fail runs inside :meth:`Ranks.every`: each rank says how it went, and where one has failed
all raise, with the words of the first. Cost: one small all-gather. Not for a rank that is killed:
the others find out by the process group's own means.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_wlb.checkpoints.manifest import Damaged

T = TypeVar("T")
# As which of these an error is raised on the ranks that it did not happen on.
_KINDS = (Damaged, ValueError, FileNotFoundError, OSError)


class Ranks:
    """The ranks of a process group, or this process alone where there is none.

    Args:
        group: a process group; None means the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        there = dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if there else 0
        self.size = dist.get_world_size(group) if there else 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def every(self, do: Callable[[], T]) -> list[T]:
        """Run on each rank; collective.

        Returns:
            The results of all ranks, which must be picklable.

        Raises:
            ValueError, OSError or RuntimeError: where any rank raised, with the message of the
                first one. An exception that is none (KeyboardInterrupt) goes on where it came up.
        """
        result, raised, said = None, None, None
        try:
            result = do()
        except BaseException as error:
            raised, said = error, _said(error)
        outcomes: list[Any] = [(result, said)]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (result, said), group=self.group)
        failures = [(rank, each) for rank, (_, each) in enumerate(outcomes) if each is not None]
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        if failures:
            rank, (kind, text, host) = failures[0]
            where = f"Rank {rank} of {self.size} on {host}: " if self.size > 1 and rank > 0 else ""
            raise kind(where + text) from raised
        return [each for each, _ in outcomes]

    def lead(self, do: Callable[[], T]) -> T:
        """Run on rank 0 and give all ranks its result; collective. Raises as :meth:`every`."""
        result: T = self.every(do if self.leads else lambda: None)[0]  # type: ignore[assignment]
        return result


def _said(error: BaseException) -> tuple[type[Exception], str, str]:
    kind = next((each for each in _KINDS if isinstance(error, each)), RuntimeError)
    text = str(error) if isinstance(error, _KINDS) else f"{type(error).__name__}: {error}"
    return kind, text, socket.gethostname()
