"""Ranks of a launcher as forks that have everything imported; see :mod:`tests.soak.processes`."""

import atexit
import json
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only

from tests.soak import training
from tests.soak.training import Run


class Fork:
    """What Lightning's launcher uses of ``subprocess.Popen``: here the same script, forked."""

    def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _as_interpreter(lambda: _script(env))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None:
            time.sleep(0.05)
        return self.returncode or 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def begin(options: Run, environment: dict[str, str]) -> None:
    """Be rank 0, as if ``python -m tests.soak.training`` had been started; does not return."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [str(training.__file__), json.dumps(options.__dict__)]
    sys.modules["__main__"] = training
    subprocess_script.subprocess = SimpleNamespace(Popen=Fork)
    _as_interpreter(lambda: _script(environment))


def _script(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for only in (rank_zero_only, utils_rank_zero_only):
        only.rank = int(environment.get("RANK", environment.get("LOCAL_RANK", "0")))
    training.main()


def _as_interpreter(main: Callable[[], None]) -> None:
    """Run to the end of the process as the interpreter does: what it prints, exit code, order."""
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        multiprocessing.util._exit_function()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
