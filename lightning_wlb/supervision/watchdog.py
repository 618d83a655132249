"""A thread of each rank that watches the run, so that no rank waits for ever for one that is gone.

It sends the heartbeats of its rank, which say how far the main thread is (:mod:`.progress`), and
listens to what rank 0 says of all ranks (:mod:`.heartbeat`). Once the ranks can no longer go on
together, the main thread has ``GRACE`` seconds to come out of its wait; then the watchdog ends the
process, with exit code 1 and the cause in its last line. Under gloo the main thread does come out,
since the other end of its connections closes; under NCCL it may wait for its time-out.

No Python thread runs while the main thread is in native code that holds Python's lock. So with
every heartbeat the watchdog arms faulthandler's timer, which runs in C, anew. This dead-man switch
ends the process and prints the stacks of all threads: ``LOCKED`` seconds after the watchdog should
have ended it, or after the time-out of the process groups if nothing else is wrong. A process has
only one such timer: a timer that the program has armed itself is lost.

A rank that gives no sign of life is only reported: it may come back within the time-out of the
process groups; else the time-out ends the run. The watchdog also ends a process after a second
Ctrl-C if its main thread cannot obey the first.

Cost: the heartbeats, and a thread of C for each of them, some 50 µs.
"""

from __future__ import annotations

import faulthandler
import os
import selectors
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from lightning_wlb.file_checks import printable
from lightning_wlb.supervision.heartbeat import (
    AGREED_PATIENCE,
    PATIENCE,
    Connection,
    heartbeat_seconds,
)
from lightning_wlb.supervision.progress import PROGRESS
from lightning_wlb.supervision.signals import NOTICES, heeds_interrupts

GRACE = 20.0
"""Seconds that the main thread has to come out of its wait when the ranks cannot go on together."""

LOCKED = 5.0
"""Seconds after which the timer ends the process if this thread has failed to end it."""

READ_SECONDS = 2.0
"""How long a line waits for a full pipe, whose reader has stopped, before it is given up."""

_WAITING = f"{os.path.dirname(dist.__file__)}/", f"{Path(__file__).parents[1]}/"
"""Folders of code that waits for other ranks."""

FRAMES = 8
"""How many innermost frames of its main thread a rank shows."""

_watching: list[Watchdog] = []  # the watchdog of this process, while it watches


def _at_fork(arm: bool) -> None:
    """Stop the timer for a fork: the child would wait for the timer's thread when it ends."""
    for each in _watching:
        each._arm() if arm else faulthandler.cancel_dump_traceback_later()


os.register_at_fork(before=partial(_at_fork, False), after_in_parent=partial(_at_fork, True))


class Watchdog(threading.Thread):
    """One rank's end of a connection to the heartbeat server.

    ``stalled_after`` seconds without a message from rank 0 are reported. The main thread may hold
    Python's lock for ``timeout`` seconds, the time-out of collectives, and at least ``GRACE``.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        link: Connection,
        token: str,
        stalled_after: float,
        timeout: float,
    ) -> None:
        super().__init__(name="wlb-watchdog", daemon=True)
        self._rank, self._link, self._stalled_after = rank, link, stalled_after
        self._timeout = min(max(timeout, GRACE), 1e8)
        self._stderr = _stderr_that_never_blocks()
        self._interval = heartbeat_seconds(world_size)
        self._verdict = ""
        self._cause = ""
        self._came_out = False
        self._answered = threading.Event()
        self._over = self._ended = False
        self._connected = True  # to rank 0
        self._heard = time.monotonic()
        self._end_at = float("inf")
        self._interrupts = NOTICES.repeated
        self._interrupted_at = 0.0
        # Also woken by signals, at once, whatever the main thread waits for.
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._wakeup_before: int | None = None
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(
                self._waker.fileno(), warn_on_full_buffer=False
            )
        link.send(rank=rank, token=token)
        _watching.append(self)
        self._arm()

    def agree(self, place: str, text: str, agreed: bool) -> tuple[bool, str]:
        """Ask, from the main thread, whether all ranks have its exception; takes some seconds.

        If they have, ``place`` is the same on every rank; ``text`` tells others what has happened;
        ``agreed``: all have agreed to come here. Returns whether to go on together, else the cause.
        """
        self._came_out = True
        self._end_at = float("inf")
        self._arm()
        if not self._verdict:
            self._link.send(place=place, text=text, agreed=agreed)
            self._answered.wait((AGREED_PATIENCE if agreed else PATIENCE) + 3)
        if not self._answered.is_set():
            self._alone("rank 0, which would know of the others, does not answer")
        return self._verdict == "together", self._cause

    def stop(self) -> None:
        """End the watch: the run of this rank is over."""
        if self._wakeup_before is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._wakeup_before = None
        self._over = True
        self._link.send(ended=True)
        with suppress(OSError):
            self._waker.send(b"\0")
        self.join(2.0)
        _watching.clear()
        faulthandler.cancel_dump_traceback_later()
        if self._stderr != 2:
            os.close(self._stderr)
        for end in (self._link.connection, self._woken, self._waker):
            end.close()

    def run(self) -> None:
        """Watch until :meth:`stop`."""
        try:
            self._watch()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._link.connection, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        due = 0.0
        while not self._over:
            for key, _ in selector.select(0.5):
                if key.fileobj is self._woken:
                    self._count_interrupts()
                elif not self._read():
                    selector.unregister(self._link.connection)
                    self._connected = False
            now = time.monotonic()
            if now >= due:
                due = now + self._interval
                self._arm()
                self._link.send(
                    progress=PROGRESS.progress(),
                    doing=str(PROGRESS),
                    seconds=round(PROGRESS.seconds(), 1),
                    waits=_waits_for_ranks(),
                )
            if now >= self._end_at:
                self._end()
            if self._connected and not self._ended and now - self._heard > self._stalled_after:
                self._heard = float("inf")  # said once; until it is heard again
                silent = f"no sign of life from rank 0 for {self._stalled_after:.0f} s"
                say(self._rank, f"{silent}. I am at {PROGRESS}.")
        selector.close()

    def _read(self) -> bool:
        """Read what rank 0 has said; False where the connection is closed."""
        messages = self._link.receive()
        if messages is None:
            if not self._ended and self._verdict != "alone":
                say(self._rank, "rank 0 has died without a word")
                self._alone("rank 0 has died without a word")
            return False
        self._heard = time.monotonic()
        for message in messages:
            if "together" in message:
                self._verdict = "together"
                self._answered.set()
            elif "alone" in message:
                self._alone(message["alone"])
            elif "ended" in message:
                self._ended = True
                if not self._verdict:
                    self._verdict, self._cause = "alone", "the run of rank 0 is over"
                    self._answered.set()
            elif "stack" in message:
                _print_stack(self._rank)
        return True

    def _alone(self, cause: str) -> None:
        # If all had failed together, the main thread is still in collectives with them (a save).
        if not self._came_out or self._verdict == "together":
            self._end_in(GRACE)
        self._verdict, self._cause = "alone", cause
        self._answered.set()

    def _count_interrupts(self) -> None:
        now = time.monotonic()
        # A forked child reports the same Ctrl-C again, over the same descriptor.
        if signal.SIGINT not in self._woken.recv(64) or now - self._interrupted_at < 0.25:
            return
        self._interrupts, self._interrupted_at = self._interrupts + 1, now
        if self._interrupts - NOTICES.repeated > 1 and heeds_interrupts():
            self._cause = self._cause or "it was interrupted twice"
            self._end_in(2.0)

    def _end_in(self, seconds: float) -> None:
        self._end_at = min(self._end_at, time.monotonic() + seconds)
        self._arm()

    def _arm(self) -> None:
        """Arm the timer that ends the process if this thread cannot end it in time."""
        left = min(max(self._end_at - time.monotonic(), 0.0), self._timeout)
        if not self._over:
            faulthandler.dump_traceback_later(left + LOCKED, exit=True, file=self._stderr)

    def _end(self) -> NoReturn:
        say(self._rank, f"this process ends, since {self._cause}. It was at {PROGRESS}.")
        _briefly(partial(print, end="", flush=True))
        os._exit(1)


def say(rank: int, text: str) -> None:
    """Print a line of a rank to stderr, if it can still be written to."""
    line = f"[rank {rank}] WLBStrategy: {printable(text)}"
    _briefly(partial(print, line, file=sys.stderr, flush=True))


def _briefly(write: Callable[[], object]) -> None:
    """Write in a thread, and wait ``READ_SECONDS`` at most: the reader may have stopped."""

    def attempt() -> None:
        with suppress(OSError, ValueError):
            write()

    thread = threading.Thread(target=attempt, daemon=True)
    with suppress(RuntimeError):  # an interpreter that ends starts no thread
        thread.start()
        thread.join(READ_SECONDS)


def _stderr_that_never_blocks() -> int:
    """A descriptor of stderr for the timer, which would otherwise wait for a full pipe's reader."""
    with suppress(OSError):
        if not stat.S_ISREG(os.fstat(2).st_mode):  # ranks write to a file at one shared offset
            return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    return 2


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _waits_for_ranks() -> bool:
    """Whether the main thread may be waiting for other ranks: in torch.distributed, or our code.

    Judged by file names alone: reading lines of source could wait for a disk.
    """
    frame = _main_frame()
    return frame is not None and frame.f_code.co_filename.startswith(_WAITING)


def _print_stack(rank: int) -> None:
    frame = _main_frame()
    # A compiler that waits for its lock has hundreds of frames.
    stack = "".join(traceback.format_stack(frame, FRAMES)) if frame is not None else ""
    say(rank, f"is behind, at {PROGRESS}:\n{stack}")
