"""The processes of a run: how they start, find each other, and hear of each other's end.

Lightning's launcher runs the script again for each further device of a node, unless torchrun, Slurm
or another cluster environment has made the processes. They meet in one default process group, on
which the groups of the mesh are made later. From then on a thread of each rank watches the others
(:mod:`lightning_wlb.supervision.faults`), and signals are obeyed at the end of a step.

:class:`Launcher` differs from Lightning's in three ways. A rank dies with its launcher, even during
start-up, when no rank watches yet. If a rank fails, the launcher says which, and the others have
``GRACE`` seconds to end by themselves before they are killed. At Ctrl-C the launcher's rank gives
the others the same time before it kills them, since they may still save.

Cost: the start of the processes, one exchange of a few bytes, and a thread that checks on them
every five seconds, as in Lightning. Not for several devices in a notebook (:func:`.check_script`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _set_num_threads_if_needed,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only

from lightning_wlb.data.loader_workers import die_with, live_on_without_parent, safe_path
from lightning_wlb.strategy.checks import check_process_group, check_script, check_tasks
from lightning_wlb.supervision.faults import Faults
from lightning_wlb.supervision.signals import EndOnSignal, Signals, heed_requeue
from lightning_wlb.supervision.watchdog import GRACE, say
from lightning_wlb.training.cuda_settings import prepare_cuda

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others in training: longer than any wait for a loader or for work
of rank 0 alone. A rank whose process ends is noticed at once nevertheless."""

RENDEZVOUS = timedelta(minutes=30)
"""How long a rank waits for the others to start, since a node may come late."""

ANSWER_SECONDS = 15.0
"""Seconds in which rank 0's port must answer; else another program listens there."""

_LAUNCHER = "LIGHTNING_WLB_LAUNCHER"
_launchers: list[int] = []  # the pid of the process that has started this one, once it is known


class StepsBar(RichProgressBar):
    """Lightning's bar, but without "Epoch 0/-2" and step 45 of 1 if ``max_steps`` ends the run."""

    def _get_train_description(self, current_epoch: int) -> str:
        return super()._get_train_description(current_epoch).replace("/-2", "")

    def _initialize_train_progress_bar_id(self) -> None:
        # In a resumed epoch the bar counts all of its batches, Lightning's total only those left.
        super()._initialize_train_progress_bar_id()
        bar, trainer = self.train_progress_bar_id, self.trainer
        if bar is not None and self.progress is not None and trainer.max_steps > 0:
            done = trainer.fit_loop.epoch_loop.batch_idx + 1
            whole = trainer.max_steps - trainer.global_step + done
            self.progress.update(bar, total=min(whole, trainer.num_training_batches))


@dataclass(frozen=True, kw_only=True)
class RunDevices:
    """The devices of a run, and how it keeps and sends values on them.

    Args:
        parameter_dtype: the dtype in which a rank keeps parameters and optimizer state.
        reduce_dtype: the dtype in which tensor- and context-parallel ranks add up.
        overlap: whether models may compute while tensor-parallel messages travel.
    """

    device: torch.device
    count: int
    per_node: int
    parameter_dtype: str
    reduce_dtype: str
    overlap: bool

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.count // self.per_node


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
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_LAUNCHER] = str(os.getpid())
            try:
                with safe_path() if sys.flags.safe_path else nullcontext():
                    self._call_children_scripts()  # it starts them without -P
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
        # Removed: it is not for processes that this rank may start.
        _launchers.append(int(os.environ.pop(_LAUNCHER)))
    elif not _launchers and "TORCHELASTIC_RUN_ID" in os.environ:
        _launchers.append(os.getppid())
    if _launchers:
        die_with(_launchers[0])


class InPlace(_Launcher):
    """Runs in the current process: torchrun or Slurm has started it, or it is the only one."""

    @property
    def is_interactive_compatible(self) -> bool:
        """True: no process is started."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function, which has its Trainer already."""
        kwargs.pop("trainer", None)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Do nothing: no process was started here."""


class Processes:
    """Starts the processes of a run, connects them, and has them watch each other.

    Args:
        process_group_backend: a backend of ``torch.distributed``; None: the device's own.
        timeout: how long a collective may wait for a rank; None: ``TIMEOUT``.

    Raises:
        MisconfigurationException: torch does not know the backend, or a timeout is not above zero.
    """

    def __init__(self, *, process_group_backend: str | None, timeout: timedelta | None) -> None:
        check_process_group(process_group_backend, timeout)
        self.timeout = TIMEOUT if timeout is None else timeout
        self._backend = process_group_backend
        self.faults = Faults()

    def launcher(
        self, environment: ClusterEnvironment, devices: Sequence[torch.device], nodes: int
    ) -> _Launcher:
        """The launcher that starts this node's processes, one for each of its devices."""
        die_with_launcher()
        heed_requeue(environment)
        if any(device.type == "cuda" for device in devices):
            prepare_cuda(len(devices) * nodes)
        if environment.creates_processes_externally:
            return InPlace()
        check_tasks()
        # One process needs no launcher, so it may run where there is no script to run again.
        if len(devices) * nodes == 1:
            return InPlace()
        check_script(len(devices))
        return Launcher(environment, len(devices), nodes)

    def listen(self, trainer: pl.Trainer) -> None:
        """Take over from Lightning the handling of a run's signals and exceptions."""
        die_with_launcher()
        trainer._signal_connector = Signals(trainer)  # new, without an earlier run's signals
        # The Trainer orders its callbacks for every run.
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [each for each in callbacks if not isinstance(each, (Faults, EndOnSignal))]
        callbacks[:] = [self.faults, *others, EndOnSignal()]
        for each in others:
            if type(each) is RichProgressBar:
                each.__class__ = StepsBar

    def connect(
        self, environment: ClusterEnvironment, device: torch.device, rank: int, per_node: int
    ) -> None:
        """Initialise the default process group; collective over all ranks."""
        reset_seed()
        backend = self._backend or _get_default_process_group_backend_for_device(device)
        if isinstance(environment, LightningEnvironment):
            # Its launcher limits threads in the first process only. The other ranks would have a
            # thread per core each, and crowd each other out.
            _set_num_threads_if_needed(per_node)
        where = environment.main_address, environment.main_port
        if rank > 0 and "TORCHELASTIC_RUN_ID" not in os.environ and not dist.is_initialized():
            _find_rank_0(*where)
        given = {"device_id": bound_device(backend, device), **_store_of_restart()}
        try:
            _init_dist_connection(
                environment, backend, timeout=max(self.timeout, RENDEZVOUS), **given
            )
        except dist.DistNetworkError as error:
            if rank > 0 or "EADDRINUSE" not in str(error):
                raise
            raise _no_rank_0(*where) from error
        self.faults.begin(rank, environment.world_size(), self.timeout)

    def check_connected(self, world_size: int) -> None:
        """Raise RuntimeError if the run's process group was destroyed or replaced."""
        if world_size > 1 and not (dist.is_initialized() and dist.get_world_size() == world_size):
            raise RuntimeError(
                f"One of this run's {world_size} ranks has destroyed their process group, and would"
                " save its own part as a whole checkpoint. Nothing is saved. Call"
                " torch.distributed.destroy_process_group after the last save only."
            )

    @property
    def may_wait(self) -> bool:
        """Whether collectives of all ranks are possible."""
        return dist.is_initialized() and self.faults.alone is None

    def barrier(self, device: torch.device) -> None:
        """Wait for all ranks, if they can still wait for each other."""
        if self.may_wait:
            dist.barrier(device_ids=[device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, item: Any, source: int) -> Any:
        """An object of rank ``source`` on every rank, if ranks can wait for each other."""
        if not self.may_wait:
            return item
        box = [item]
        dist.broadcast_object_list(box, source)
        return box[0]

    def reduce(self, item: Any, group: Any, operation: Any) -> Any:
        """Reduce a tensor over the ranks of a group, if ranks can wait for each other."""
        if isinstance(item, torch.Tensor) and self.may_wait:
            return _sync_ddp_if_available(item, group, reduce_op=operation)
        return item

    def end(self) -> None:
        """End the watch; the process group stays for a further run."""
        self.faults.end()
        live_on_without_parent()


def tell_rank(environment: ClusterEnvironment, rank: int, world_size: int) -> None:
    """Tell the cluster environment and the rank-zero helpers of Lightning who this process is."""
    environment.set_global_rank(rank)
    environment.set_world_size(world_size)
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    utils_rank_zero_only.rank = rank  # type: ignore[attr-defined]


def bound_device(backend: str, device: torch.device) -> torch.device | None:
    """The device to which torch binds the process group, if NCCL serves it; else None.

    NCCL then connects at once, and splits further groups off this one. If the group were bound
    under gloo, torch would split it too, by calls that only NCCL has (read in torch 2.13).
    """
    parts = dict(part.rpartition(":")[::2] for part in backend.lower().split(","))
    return device if parts.get(device.type, parts.get("")) == "nccl" else None


def _find_rank_0(host: str, port: int) -> None:
    """Wait until rank 0 answers, which may be late; refuse another program on its port.

    Raises:
        MisconfigurationException: another program listens there, or none did for ``RENDEZVOUS``.
    """
    answered = threading.Event()

    def ask() -> None:
        with suppress(RuntimeError):
            dist.TCPStore(host, port, timeout=RENDEZVOUS)
            answered.set()

    # In a thread: torch has no timeout for a program that accepts a connection and never answers.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while asking.is_alive() and not answered.wait(ANSWER_SECONDS):
        with suppress(OSError):
            socket.create_connection((host, port), ANSWER_SECONDS).close()
            asking.join(ANSWER_SECONDS)  # rank 0 may have come between the two attempts
            break
    if not answered.is_set():
        raise _no_rank_0(host, port)


def _no_rank_0(host: str, port: int) -> MisconfigurationException:
    return MisconfigurationException(
        f"Rank 0 does not answer on port {port} of {host}, where ranks meet: another program has"
        " the port, or rank 0 has not started. Set MASTER_PORT to one free port for all ranks."
    )


def _store_of_restart() -> dict[str, Any]:
    """A store in which ranks find each other after torchrun has restarted them on this node.

    torchrun's agent keeps one store, which still has the addresses of ranks that have died (found
    in torch 2.13; pytorch's issue 135712). For several nodes see docs/guide/clusters.md.
    """
    given = os.environ
    restarts = given.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts == "0" or not shared or given["LOCAL_WORLD_SIZE"] != given["WORLD_SIZE"]:
        return {}
    store = dist.TCPStore(given["MASTER_ADDR"], int(given["MASTER_PORT"]), timeout=RENDEZVOUS)
    return {"store": dist.PrefixStore(f"restart {restarts}", store)}
