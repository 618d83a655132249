"""The processes of a run: how they start, find each other, and hear of each other's end.

Lightning's launcher runs the script again for each further device of a node, unless torchrun, Slurm
or another cluster environment has made the processes. They meet in one default process group, on
which the groups of the mesh are made later. From then on a thread of each rank watches the others
(:mod:`lightning_wlb.supervision.faults`), and signals are heeded at the end of a step.

Cost: the start of the processes, and one exchange of a few bytes. Not for a notebook with several
devices: there is no script that could be run again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _set_num_threads_if_needed,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only

from lightning_wlb.data.loader_workers import live_on_without_parent
from lightning_wlb.strategy.checks import check_process_group, check_script, check_tasks
from lightning_wlb.supervision.faults import Faults
from lightning_wlb.supervision.launcher import Launcher, die_with_launcher
from lightning_wlb.supervision.signals import EndOnSignal, Signals, heed_requeue
from lightning_wlb.training.cuda_settings import prepare_cuda

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others in training: longer than the longest wait for a loader, and
than what rank 0 does alone. A rank whose process ends is noticed at once, whatever this is."""

RENDEZVOUS = timedelta(minutes=30)
"""How long a rank waits for the others to start, where a node may come late."""


@dataclass(frozen=True, kw_only=True)
class RunDevices:
    """The devices that a run has, and what it computes in on them.

    Args:
        compute_dtype: the dtype of activations.
        parameter_dtype: the dtype in which a rank keeps parameters and optimizer state.
        reduce_dtype: the dtype in which tensor- and context-parallel ranks add up.
    """

    device: torch.device
    count: int
    per_node: int
    compute_dtype: torch.dtype
    parameter_dtype: str
    reduce_dtype: str

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.count // self.per_node


class InPlace(_Launcher):
    """Runs in the process that is there: torchrun or Slurm has made it, or it is the only one."""

    @property
    def is_interactive_compatible(self) -> bool:
        """True: no process is started."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function, which knows its Trainer."""
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
        MisconfigurationException: for a backend that torch does not know, or a timeout that is no
            ``timedelta`` above zero.
    """

    def __init__(self, *, process_group_backend: str | None, timeout: timedelta | None) -> None:
        check_process_group(process_group_backend, timeout)
        self.timeout = TIMEOUT if timeout is None else timeout
        self._backend = process_group_backend
        self._faults = Faults()

    def launcher(
        self, environment: ClusterEnvironment, devices: Sequence[torch.device], nodes: int
    ) -> _Launcher:
        """What starts the processes of this node, one for each of its devices."""
        die_with_launcher()
        heed_requeue(environment)
        if any(device.type == "cuda" for device in devices):
            prepare_cuda(len(devices) * nodes)
        if environment.creates_processes_externally:
            return InPlace()
        check_tasks()
        # One process needs no launcher: so it runs where no script could be run again.
        if len(devices) * nodes == 1:
            return InPlace()
        check_script(len(devices))
        return Launcher(environment, len(devices), nodes)

    def listen(self, trainer: pl.Trainer) -> None:
        """Take signals and exceptions of a run over from Lightning."""
        die_with_launcher()
        if not isinstance(trainer._signal_connector, Signals):
            trainer._signal_connector = Signals(trainer)
        # The Trainer orders its callbacks for every run.
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [each for each in callbacks if not isinstance(each, (Faults, EndOnSignal))]
        callbacks[:] = [self._faults, *others, EndOnSignal()]

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
        _init_dist_connection(
            environment,
            backend,
            timeout=max(self.timeout, RENDEZVOUS),
            device_id=bound_device(backend, device),
            **_store_of_restart(),
        )
        self._faults.begin(rank, environment.world_size(), device, self.timeout)

    @property
    def alone(self) -> str | None:
        """Why this rank may wait for no other rank any more; None: it may.

        After an exception that a rank has by itself the others would never answer.
        """
        return self._faults.alone

    @property
    def may_wait(self) -> bool:
        """Whether collectives of all ranks are possible."""
        return dist.is_initialized() and self.alone is None

    def barrier(self, device: torch.device) -> None:
        """Wait for all ranks, where that is possible."""
        if not self.may_wait:
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[device.index])
        else:
            dist.barrier()

    def broadcast(self, item: Any, source: int) -> Any:
        """An object of rank ``source`` on every rank, where that is possible."""
        if not self.may_wait:
            return item
        box = [item]
        dist.broadcast_object_list(box, source)
        return box[0]

    def reduce(self, item: Any, group: Any, operation: Any) -> Any:
        """Reduce a tensor over the ranks of a group, where that is possible; else nothing."""
        if isinstance(item, torch.Tensor) and self.may_wait:
            return _sync_ddp_if_available(item, group, reduce_op=operation)
        return item

    def end(self) -> None:
        """End the watch; the process group stays for a further run."""
        self._faults.end()
        live_on_without_parent()


def tell_rank(environment: ClusterEnvironment, rank: int, world_size: int) -> None:
    """Tell the cluster environment and the rank-zero helpers of Lightning who this process is."""
    environment.set_global_rank(rank)
    environment.set_world_size(world_size)
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    utils_rank_zero_only.rank = rank  # type: ignore[attr-defined]


def bound_device(backend: str, device: torch.device) -> torch.device | None:
    """The device that torch binds the process group to, where NCCL serves it; else None.

    NCCL then connects at once, and splits further groups off this one. Bound to gloo, torch would
    split groups too, by calls that only NCCL has (read in 2.13).
    """
    parts = dict(part.rpartition(":")[::2] for part in backend.lower().split(","))
    return device if parts.get(device.type, parts.get("")) == "nccl" else None


def _store_of_restart() -> dict[str, Any]:
    """Where ranks find each other when torchrun has started them again on this node.

    Its agent keeps one store, in which they would find the addresses of ranks that have died (torch
    2.13, found; pytorch's issue 135712). On several nodes the agents may not count restarts alike:
    docs/guide.md has the remedy.
    """
    given = os.environ
    restarts = given.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts == "0" or not shared or given["LOCAL_WORLD_SIZE"] != given["WORLD_SIZE"]:
        return {}
    store = dist.TCPStore(given["MASTER_ADDR"], int(given["MASTER_PORT"]), timeout=RENDEZVOUS)
    return {"store": dist.PrefixStore(f"restart {restarts}", store)}
