"""The processes of a run and the mesh that they form: the half of a strategy without a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _set_num_threads_if_needed,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor

from lightning_wlb.data.loader_workers import live_on_without_parent
from lightning_wlb.distributed.device_mesh import Size, checked_sizes, resolve_mesh
from lightning_wlb.distributed.process_groups import MeshGroups, mesh_groups
from lightning_wlb.mesh import Mesh, Rank
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


class MeshStrategy(ParallelStrategy):
    """Launches one process per device and gives them a four-axis mesh.

    Args:
        sizes: of the axes, in mesh order.
        virtual_stages: stages of each pipeline rank.
        process_group_backend: None for the device's own.
        timeout: how long a collective may wait for a rank; None: ``TIMEOUT``.

    Raises:
        MisconfigurationException: for a size, a backend or a timeout that is none.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        virtual_stages: int,
        process_group_backend: str | None,
        timeout: timedelta | None,
    ) -> None:
        super().__init__()
        self._asked = checked_sizes(*sizes)
        self._virtual_stages = virtual_stages
        check_process_group(process_group_backend, timeout)
        self._process_group_backend = process_group_backend
        self._timeout = TIMEOUT if timeout is None else timeout
        self._faults = Faults()
        self._rank: Rank | None = None
        self._mesh_groups: MeshGroups | None = None
        self.num_nodes = 1

    @property
    def mesh_groups(self) -> MeshGroups:
        """The process groups of this rank, and the DeviceMesh with those of the axes."""
        if self._mesh_groups is None:
            raise RuntimeError("The device mesh exists once the processes have been launched.")
        return self._mesh_groups

    @property
    def mesh(self) -> Mesh:
        """Ranks along each axis, resolved, and stages of a pipeline rank."""
        return self.rank.mesh

    @property
    def rank(self) -> Rank:
        """Where this rank stands in the mesh."""
        if self._rank is None:
            raise RuntimeError("The mesh sizes are known once the processes have been launched.")
        return self._rank

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """True. Lightning asks, and where nothing answers ignores ``self.log(sync_dist=True)``."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For loaders that are not the data module's own: a sampler over the replicas."""
        return {"num_replicas": self.mesh.data, "rank": self.rank.data}

    def _configure_launcher(self) -> None:
        # The Trainer calls this when it is made, the first that this strategy hears of a run.
        assert self.cluster_environment is not None
        die_with_launcher()
        heed_requeue(self.cluster_environment)
        if any(device.type == "cuda" for device in self.parallel_devices or ()):
            prepare_cuda(self.num_processes * self.num_nodes)
        if self.cluster_environment.creates_processes_externally:
            return
        check_tasks()
        # One process needs none: so it runs where no script could be run again, in a notebook.
        if self.num_processes * self.num_nodes > 1:
            check_script(self.num_processes)
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        utils_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Initialise the default process group, and the mesh with its process groups."""
        assert self.cluster_environment is not None
        # Only Lightning's own launcher would compare these with what Slurm or torchrun has started.
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        super().setup_environment()
        die_with_launcher()
        self._listen()
        reset_seed()
        self.set_world_ranks()
        # Before any process waits for another: a wrong size is answered at once, on every rank.
        mesh = resolve_mesh(self.world_size, *self._asked, virtual_stages=self._virtual_stages)
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        if isinstance(self.cluster_environment, LightningEnvironment):
            # Its launcher limits threads in the first process only. The other ranks would have a
            # thread per core each, and crowd each other out.
            _set_num_threads_if_needed(self.num_processes)
        _init_dist_connection(
            self.cluster_environment,
            backend,
            timeout=max(self._timeout, RENDEZVOUS),
            device_id=_bound_device(backend, self.root_device),
            **_store_of_restart(),
        )
        self._faults.begin(self.global_rank, self.world_size, self.root_device, self._timeout)
        mesh = self._chosen(mesh)
        self._rank = mesh.coordinate(self.global_rank)
        self._mesh_groups = mesh_groups(self._rank, self.root_device, self._timeout)

    def _chosen(self, mesh: Mesh) -> Mesh:
        """The mesh of this run, where ``mesh`` is what sizes that are left open come to unasked.

        Collective over all ranks, before there are process groups of the mesh.
        """
        rank_zero_info(f"WLBStrategy: mesh {mesh}")
        return mesh

    def _listen(self) -> None:
        """Take signals and exceptions of the run over from Lightning."""
        if self._lightning_module is None:
            return
        trainer: Any = self._lightning_module.trainer
        if not isinstance(trainer._signal_connector, Signals):
            trainer._signal_connector = Signals(trainer)
        # The Trainer orders its callbacks for every run.
        ours = (Faults, EndOnSignal)
        others = [each for each in trainer.callbacks if not isinstance(each, ours)]
        trainer.callbacks[:] = [self._faults, *others, EndOnSignal()]

    @property
    def together(self) -> bool:
        """False from an exception on that this rank has alone: it may wait for no other rank."""
        return self._faults.alone is None

    @property
    def _collective(self) -> bool:
        return dist.is_initialized() and self.together

    def teardown(self) -> None:
        """The run is over, the process group stays for a further one."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._faults.end()
        live_on_without_parent()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not self._collective:
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of rank ``src`` on every rank."""
        if not self._collective:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean"
    ) -> Any:
        """Reduce a tensor over all ranks."""
        if isinstance(tensor, Tensor) and self._collective:
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor


def _bound_device(backend: str, device: torch.device) -> torch.device | None:
    """The device that torch binds the process group to: one that travels by NCCL.

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
