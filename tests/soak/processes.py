"""Runs of real processes that are started, broken and watched from outside.

A run is :mod:`tests.soak.training` under Lightning's launcher. Everything that it starts stays in
one session of the operating system, by which whatever it leaves behind is found in ``/proc``.

To start four interpreters that import torch takes ten seconds of two cores. So rank 0 is forked by
multiprocessing's fork server, which has everything imported, and where Lightning's launcher
would start the interpreters of ranks 1 to 3, rank 0 forks them: its children as before, with the
environment that the launcher gives them, and the script from its beginning. ``interpreters=True``
starts real ones.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ranks
from tests.soak import training
from tests.soak.plants import session
from tests.soak.training import Run

ROOT = Path(__file__).parents[2]
START_WITHIN = 90.0
"""Seconds until a fault has to have acted."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*ranks.PRELOADED, "pytest", "tests.soak.forked"])


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        code: exit code of rank 0; None: it had to be killed.
        seconds: from when the fault was planted, or from the start, until nothing was left.
        left: processes that were still there at the time limit, as ``name (state)``.
    """

    code: int | None
    seconds: float
    left: tuple[str, ...]


def run(
    options: Run,
    within: float,
    interpreters: bool = False,
    meanwhile: Callable[[int], None] | None = None,
) -> Ending:
    """Start a run, and wait until none of its processes is left.

    Args:
        options: of the run.
        within: seconds that it may take from when the fault acts; without a fault, from the start.
        interpreters: start an interpreter for each rank, as ``python script.py`` would.
        meanwhile: called every 50 ms with the number of the run's session.
    """
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for mark in folder.glob("fired-[0-9]"):
        mark.unlink()
    begin = time.monotonic()
    started = _start_interpreter if interpreters else _Forked
    leader = started(options)
    try:
        while True:
            fired = _fired(folder) if options.fault else begin
            now = time.monotonic()
            left = tuple(_living(leader.pid))
            over = not left and leader.poll() is not None
            if over or now > (begin + START_WITHIN if fired is None else fired + within):
                break
            if meanwhile is not None:
                meanwhile(leader.pid)
            time.sleep(0.05)
    finally:
        for pid in session(leader.pid):
            kill(pid)
    code = leader.wait(10)
    return Ending(code if over else None, now - (fired or begin), left)


class _Forked:
    """What this file needs of a rank 0 that the fork server has started."""

    def __init__(self, options: Run) -> None:
        from tests.soak import forked

        self._process = _context.Process(target=forked.begin, args=(options, _environment()))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode


def _start_interpreter(options: Run) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", training.__name__, json.dumps(options.__dict__)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(),
        start_new_session=True,
        # A shell that runs the tests in the background ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _fired(folder: Path) -> float | None:
    """When the fault acted first, by the system's monotonic clock."""
    times = [float(mark.read_text() or "inf") for mark in folder.glob("fired-[0-9]")]
    return min(times, default=None)


def _living(number: int) -> Iterator[str]:
    for pid in session(number):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        state = fields.rpartition(")")[2].split()[0]
        if state != "Z":
            yield f"{pid} {b' '.join(command[:3]).decode()} ({state})"


def kill(pid: int) -> None:
    """Kill -9 of a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a rank's output."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def losses(folder: Path) -> dict[int, Any]:
    """The loss of every step, as hexadecimal digits; of a step that was trained twice the last."""
    lines = (folder / "losses").read_text().split("\n")[:-1]
    return {int(step): loss for step, loss in (line.split() for line in lines)}


def states(folder: Path) -> list[str]:
    """Digests of the parameters and optimizer state that the ranks ended with, in rank order."""
    return [path.read_text() for path in sorted(folder.glob("state-*"))]
