"""What fails on one rank fails alike on all."""

from __future__ import annotations

import errno
import socket

import pytest

from lightning_wlb.checkpoints.manifest import Damaged
from lightning_wlb.distributed.collective_errors import Ranks
from tests.ranks import run_ranks


def outcomes(rank: int) -> list[str]:
    ranks, found = Ranks(), []

    def fail(error: BaseException, where: int) -> None:
        if rank == where:
            raise error

    for error, where in (
        (Damaged("broken"), 1),
        (FileNotFoundError("gone"), 0),
        (OSError(errno.ENOSPC, "full", "file"), 1),
        (ZeroDivisionError("why"), 1),
        (KeyboardInterrupt(), 1),
    ):
        with pytest.raises(BaseException) as info:  # noqa: PT011 what it is, is asserted below
            ranks.each(lambda error=error, where=where: fail(error, where))
        said = str(info.value).replace(f"on {socket.gethostname()}:", "on HOST:")
        found.append(f"{info.type.__name__}: {said}")
    found.append(str(ranks.every(lambda: rank * 10)))
    found.append(str(ranks.lead(lambda: rank + 7)))
    found.append(str(Ranks(alone=True).every(lambda: rank)))
    return found


def test_all_ranks_raise_the_error_of_the_first():
    zero, one = run_ranks(outcomes, 2)
    assert zero == [
        "Damaged: rank 1 on HOST: broken",
        "FileNotFoundError: gone",
        "OSError: [Errno 28] rank 1 on HOST: full: file",
        "RuntimeError: rank 1 on HOST: ZeroDivisionError: why",
        "RuntimeError: rank 1 on HOST: KeyboardInterrupt: ",
        "[0, 10]",
        "7",
        "[0]",
    ]
    assert one == [*zero[:4], "KeyboardInterrupt: ", *zero[5:7], "[1]"]
