"""Work of several ranks that fails on all of them if it fails on one, with the same error.

A rank that raises while others wait in a collective would leave them there until the time-out. So
work that may fail runs inside :meth:`Ranks.every`: each rank says how it went, and if one has
failed, all raise the error of the first. Cost: one small all-gather. It does not help if a rank is
killed; the supervision of the run tells the others.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

_T = TypeVar("_T")
# An error is raised on the other ranks as the first of these that it is an instance of; this
# package's own kinds of ValueError keep their class.
_KINDS = (ValueError, FileNotFoundError, OSError, MisconfigurationException)


class Ranks:
    """The ranks of a process group (None: the default one), or this process by itself."""

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
        """Run on each rank, and return the picklable results of all ranks; collective.

        Raises:
            ValueError, OSError or RuntimeError: a rank raised; the message is the first such
                rank's. A rank re-raises its own KeyboardInterrupt and the like as it is.
        """
        raised, said, result = None, None, None
        try:
            result = do()
        except BaseException as error:
            raised, said = error, _picklable(error, self.rank)
        outcomes: list[Any] = [(result, said)]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (result, said), group=self.group)
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        for _, failure in outcomes:
            if failure is not None:
                kind, arguments = failure
                raise kind(*arguments) from raised
        return [each for each, _ in outcomes]

    def each(self, do: Callable[[], _T]) -> _T:
        """Run on each rank and return its own result, which need not be picklable; collective."""
        kept: list[_T] = []
        self.every(lambda: kept.append(do()))
        return kept[0]

    def lead(self, do: Callable[[], _T]) -> _T:
        """Run on rank 0 and return its result on all ranks; collective."""
        return self.every(do if self.leads else lambda: None)[0]  # type: ignore[return-value]


@contextmanager
def patient_ranks() -> Iterator[Ranks]:
    """All ranks, in a group in which they wait for the work of one rank as long as it takes.

    Tokenising documents, for example, may take hours. Collective at both ends.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(days=100))
    try:
        yield Ranks(group)
    finally:
        dist.destroy_process_group(group)


def names_of_ranks(ranks: Sequence[int]) -> str:
    """A text that names the first eight ranks."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def differences(everyone: Iterable[Mapping[str, str]]) -> list[str]:
    """A sentence for each name whose text differs between ranks: each text, and its ranks.

    ``everyone`` has each rank's texts by name. A rank may lack a name, which is no difference.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for rank, texts in enumerate(everyone):
        for name, text in texts.items():
            found.setdefault(name, {}).setdefault(text, []).append(rank)
    return [
        f"{name}: {'; '.join(f'{text} on {names_of_ranks(who)}' for text, who in values.items())}."
        for name, values in found.items()
        if len(values) > 1
    ]


def text_of(error: BaseException) -> str:
    """The text of an error, even if making the text raises."""
    try:
        return str(error)
    except Exception as other:
        return f"its text cannot be made ({type(other).__name__})"


def _picklable(error: BaseException, rank: int) -> tuple[type[Exception], tuple[Any, ...]]:
    """The class and the arguments of an error of one rank, in a form that others can raise."""
    kind: type[Exception] = next((each for each in _KINDS if isinstance(error, each)), RuntimeError)
    if isinstance(error, ValueError) and type(error).__module__.startswith("lightning_wlb."):
        kind = type(error)
    text, code = text_of(error), []
    if kind is RuntimeError:
        text = f"{type(error).__name__}: {text}"
    elif isinstance(error, OSError) and error.errno is not None:
        kind, code, text = OSError, [error.errno], f"{error.strerror}: {error.filename}"
    if rank > 0:
        text = f"rank {rank} on {socket.gethostname()}: {text}"
    return kind, (*code, text)
