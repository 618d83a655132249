"""Lightning's launcher of the ranks of a node, changed so that ranks end with it, and not too soon.

Three things differ. A rank dies with its launcher, also in start-up, when no rank watches yet. If a
rank ends with an error, the others have ``GRACE`` seconds to come out by themselves before they are
killed, and the launcher says which one it was. At Ctrl-C the launcher's rank waits as long for the
others before it kills them, since they may still save.

Cost: a thread that looks every five seconds, as in Lightning.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_wlb.data.loader_workers import die_with
from lightning_wlb.supervision.watchdog import GRACE, say

_LAUNCHER = "LIGHTNING_WLB_LAUNCHER"
_launchers: list[int] = []  # the number of the process that has started this one, once it is known


class Launcher(_SubprocessScriptLauncher):
    """Starts the other ranks of this node."""

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start the ranks, then call the function."""
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_LAUNCHER] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[_LAUNCHER]
            _Observer(os.getpid(), self.procs).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Kill the ranks that have not ended by themselves."""
        end = time.monotonic() + GRACE
        for process in self.procs:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0))
        super().kill(signum)


class _Observer(_ChildProcessObserver):
    def _terminate_all(self) -> None:
        for rank, process in enumerate(self._child_processes, 1):
            if process.returncode:
                say(0, f"the process of local rank {rank} has ended with {process.returncode}")
        time.sleep(GRACE)  # this thread ends with the process
        for process in self._child_processes:
            process.kill()
        os._exit(1)


def die_with_launcher() -> None:
    """End this rank with its parent: the launcher, or torchrun's agent."""
    if _LAUNCHER in os.environ:
        # Not for what this rank may start.
        _launchers.append(int(os.environ.pop(_LAUNCHER)))
    elif not _launchers and "TORCHELASTIC_RUN_ID" in os.environ:
        _launchers.append(os.getppid())
    if _launchers:
        die_with(_launchers[0])
