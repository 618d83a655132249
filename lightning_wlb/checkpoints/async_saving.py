"""Saves that are written while training goes on: copies of tensors, and threads.

A save is staged, which copies this rank's tensors into memory of the CPU, and then written by a
thread; training waits for the copy only. Saves are written one at a time, in the order in which
they were submitted, since they exchange messages over one process group. Removals and links are
done in that order too, and a question whether a name is taken is answered as if all were done
(:class:`FilesAfterSaves`). So the same folders are left as by saves that block.

The threads are daemons, so that a process whose peers have died can end although its save waits for
them. The folder that such a save leaves is no checkpoint, and the next save removes it.

Cost: CPU memory for each unfinished save (this rank's parameters and optimizer state), kept for the
next unless torch frees it (:data:`SERVES_ONCE`). Not for a save after which the process may end.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lightning_wlb.checkpoints.writing import CheckpointContent

COPIES = 2
"""How many saves may be unfinished: ModelCheckpoint may make two at the end of a step."""

SERVES_ONCE = torch.__version__ < "2.13"
"""Whether torch's stager frees its memory after a copy and cannot make another one, as in 2.11."""


class Stager:
    """Copies checkpoints to CPU memory that is used again, pinned if they come from CUDA."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._options = StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
        self._stagers = [DefaultStager(self._options) for _ in range(COPIES)]
        self._used = 0

    def stage(self, content: CheckpointContent, busy: bool) -> CheckpointContent:
        """Copy a checkpoint's content; ``busy``: an unfinished save still reads the last copy."""
        self._used = (self._used + 1) % COPIES if busy else 0
        if SERVES_ONCE:
            self._stagers[self._used] = DefaultStager(self._options)
        state = self._stagers[self._used].stage(content.state)
        assert isinstance(state, dict)
        return CheckpointContent(state, copy.deepcopy(content.rest))


class _SaveJob(NamedTuple):
    path: Path  # the path that a thread saves, links or removes
    leaves: Path | None  # what path is afterwards: itself, a link to this, or nothing
    copies: int  # the copies that the job holds until it ends
    future: Future[None]


class BackgroundSaves:
    """Runs saves, links and removals in threads, one after the other."""

    def __init__(self) -> None:
        self._jobs: list[_SaveJob] = []

    @property
    def failed(self) -> bool:
        """Whether a job has ended with an error."""
        return any(
            each.future.done() and each.future.exception() is not None for each in self._jobs
        )

    @property
    def busy(self) -> bool:
        """Whether a job is not finished."""
        return any(not each.future.done() for each in self._jobs)

    @property
    def holds_copies(self) -> bool:
        """Whether an unfinished job holds a copy."""
        return any(each.copies and not each.future.done() for each in self._jobs)

    def exists(self, path: Path) -> bool:
        """Whether a path will be there once all jobs have succeeded."""
        place = _place(path)
        for each in reversed(self._jobs):
            if _place(each.path) == place and not each.future.done():
                if each.leaves is None or each.leaves == each.path:
                    return each.leaves is not None
                return self.exists(each.leaves)
        linked = Path(os.path.realpath(path))
        return path.exists() if linked == place else self.exists(linked)

    def submit(
        self, path: Path, do: Callable[[], None], copies: int = 0, leaves: Path | None = None
    ) -> None:
        """Run ``do`` when the jobs before it are finished.

        ``leaves`` is what ``path`` is then: a checkpoint (``path``), a link to another, or nothing.
        """
        before = [each.future for each in self._jobs]
        future: Future[None] = Future()
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0

        def run() -> None:
            wait(before)
            try:
                # A thread begins on the first device. There torch's writer would take memory for
                # the process of every rank.
                if torch.accelerator.is_available():
                    torch.accelerator.set_device_index(device)
                do()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        self._jobs.append(_SaveJob(path, leaves, copies, future))
        Thread(target=run, name=f"save {path.name}", daemon=True).start()

    def settle(
        self, copies: int = 0, seconds: float | None = None
    ) -> list[tuple[Path, BaseException]]:
        """Wait for the oldest jobs, until the others hold at most ``copies``; 0 waits for all jobs.

        Returns:
            Path and error of each failed job: TimeoutError if it has not ended within ``seconds``.
        """
        end = None if seconds is None else time.monotonic() + seconds
        failures: list[tuple[Path, BaseException]] = []
        unfinished = []
        while self._jobs and (not copies or sum(each.copies for each in self._jobs) > copies):
            job = self._jobs.pop(0)
            try:
                left = None if end is None else max(end - time.monotonic(), 0)
                error = job.future.exception(left)
            except TimeoutError:
                unfinished.append(job)
                error = TimeoutError(f"it was not written within {seconds:g} s")
            if error is not None:
                failures.append((job.path, error))
        self._jobs = unfinished + self._jobs
        return failures


class FilesAfterSaves:
    """A local file system for ModelCheckpoint's questions: as if every save were written already.

    Otherwise it would give two checkpoints the same name, and the second would replace the first.
    """

    def __init__(self, files: Any, jobs: BackgroundSaves) -> None:
        self.files = files
        self._jobs = jobs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def exists(self, path: str | Path) -> bool:
        """Whether a path will be there once all saves, links and removals are done."""
        return self._jobs.exists(Path(path).expanduser())


def _place(path: Path) -> Path:
    """A path with its folder resolved; if the path itself is a link, it is not followed."""
    return Path(os.path.realpath(path.parent), path.name)
