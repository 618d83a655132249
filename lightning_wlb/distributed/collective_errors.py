"""What several ranks do together ends for all of them in the same way.

A rank that raises while others wait in a collective would leave them there until the time-out. So
what may fail runs inside :meth:`Ranks.every`: each rank says how it went, and where one has failed
all raise, with the words of the first. Cost: one small all-gather. Not for a rank that is killed:
the others find out by the process group's own means.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

_T = TypeVar("_T")
# An error is raised on the other ranks as the first of these that it is an instance of; this
# package's own kinds of ValueError keep their class.
_KINDS = (ValueError, FileNotFoundError, OSError, MisconfigurationException)


class Ranks:
    """The ranks of a process group, or this process by itself.

    Args:
        group: a process group; None means the default one.
        alone: by itself, even where there is a process group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self.alone = alone or not dist.is_initialized()
        self.group = group
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def every(self, do: Callable[[], _T]) -> list[_T]:
        """Run on each rank; collective.

        Returns:
            The results of all ranks, which must be picklable.

        Raises:
            ValueError, OSError or RuntimeError: where any rank raised, with the message of the
                first one. An exception that is none (KeyboardInterrupt) goes on where it came up.
        """
        raised, said, result = None, None, None
        try:
            result = do()
        except BaseException as error:
            raised, said = error, _Said.of(error, self.rank)
        outcomes: list[Any] = [(result, said)]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (result, said), group=self.group)
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        for _, failure in outcomes:
            if failure is not None:
                raise failure.as_error() from raised
        return [each for each, _ in outcomes]

    def each(self, do: Callable[[], _T]) -> _T:
        """Run on each rank and keep the result, picklable or not; collective, raises alike."""
        kept: list[_T] = []
        self.every(lambda: kept.append(do()))
        return kept[0]

    def lead(self, do: Callable[[], _T]) -> _T:
        """Run on rank 0 and give all ranks its result; collective, raises alike."""
        result: _T = self.every(do if self.leads else lambda: None)[0]  # type: ignore[assignment]
        return result


@contextmanager
def patient_ranks() -> Iterator[Ranks]:
    """All ranks, which wait as long as it takes for what one of them does alone.

    Such work is tokenising documents for hours, or a search. Collective at both ends.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(days=100))
    try:
        yield Ranks(group)
    finally:
        dist.destroy_process_group(group)


@dataclass(frozen=True)
class _Said:
    """What went wrong on a rank, for the others to raise."""

    kind: type[Exception]
    code: int | None
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> _Said:
        kind: type[Exception] = next((a for a in _KINDS if isinstance(error, a)), RuntimeError)
        if isinstance(error, ValueError) and type(error).__module__.startswith("lightning_wlb."):
            kind = type(error)
        text, code = str(error), None
        if kind is RuntimeError:
            text = f"{type(error).__name__}: {text}"
        elif isinstance(error, OSError) and error.errno is not None:
            code, text = error.errno, f"{error.strerror}: {error.filename}"
        if rank > 0:
            text = f"rank {rank} on {socket.gethostname()}: {text}"
        return cls(kind, code, text)

    def as_error(self) -> Exception:
        return self.kind(self.text) if self.code is None else OSError(self.code, self.text)
