"""WLBStrategy: data × pipeline × context × tensor parallelism driven by step plans.

A thin Lightning adapter. What it does around a step is done by its members:

* ``processes`` starts and connects the ranks (launch.py);
* ``options`` has the given sizes of the mesh; mesh_choice.py chooses the rest;
* ``planning`` says what steps are planned for, and tells the data module (run_planning.py);
* ``split`` is the model on this rank, ``steps`` runs its steps (split_model.py), and ``guard``
  handles steps whose loss or gradients are not finite;
* ``checkpoints`` saves and loads (checkpointing.py).

All forwards and backwards of a plan run inside ``training_step``, and ``backward`` waits for the
gradients and sets ``.grad``, because Lightning calls training_step, zero_grad, backward, clip, step
in this order. Only for subclasses of :class:`.LanguageModule`, without manual optimisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_wlb.argument_checks import choice
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.planning_context import PlanningContext
from lightning_wlb.distributed.process_groups import MeshGroups, mesh_groups
from lightning_wlb.heterogeneous.setup import Dynamic
from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy import checks
from lightning_wlb.strategy.checkpointing import END_SECONDS, Checkpointer
from lightning_wlb.strategy.launch import Processes, RunDevices, tell_rank
from lightning_wlb.strategy.mesh_choice import MeshOptions, Size, choose_run_mesh
from lightning_wlb.strategy.run_planning import RunPlanning
from lightning_wlb.strategy.split_model import SplitModel, StepRunner, describe_model
from lightning_wlb.supervision.faults import without_hiding_cause
from lightning_wlb.supervision.watchdog import say
from lightning_wlb.training.clipping_and_nonfinite import OnNonfinite, StepGuard
from lightning_wlb.training.executor import Executor
from lightning_wlb.training.out_of_memory import noting_out_of_memory
from lightning_wlb.training.precision import WLBPrecision, name_of


class WLBStrategy(ParallelStrategy):
    """Workload-balanced 4D parallelism: ``Trainer(strategy="wlb")`` or with sizes of your own.

    The product of the four sizes is the number of devices over all nodes. Given sizes are kept. If
    the sizes leave a choice, as ``strategy="wlb"`` alone does, the strategy takes the mesh that is
    predicted to be fastest for the model and the documents (:mod:`.mesh_choice`). If the model, the
    documents or the device are not known, the first ``"auto"``, in the order of the arguments,
    takes the devices that the other sizes leave, and any further ``"auto"`` is 1.

    Args:
        data_parallel_size: replicas that train on different documents, and share the parameters.
        pipeline_parallel_size: stages that the layers are split into, by cost.
        context_parallel_size: ranks that share the tokens of each micro-batch.
        tensor_parallel_size: ranks that share each weight, with sequence parallelism.
        schedule: order of the pipeline's actions: ``"1f1b"`` or ``"interleaved"``.
            ``"auto"`` is chosen with the mesh; if no mesh is searched for, it is ``"1f1b"``, or
            ``"interleaved"`` with several stages per rank.
        virtual_pipeline_size: stages per pipeline rank. None: chosen with the mesh; without a
            search 2 for ``"interleaved"`` (1 would be ``"1f1b"``) and 1 for ``"1f1b"``.
        process_group_backend: ``"nccl"`` on CUDA and ``"gloo"`` on CPU by default.
        timeout: how long a collective may wait for a rank that has not ended; None: ten minutes.
        on_nonfinite: what to do in a step whose loss or gradients are NaN or infinite:
            ``"raise"`` names step, ranks, parameters and documents; ``"skip"`` leaves out the
            optimizer's step, warns, and raises after ten in a row; ``"ignore"`` trains on.
        async_save: write checkpoints in the background; training waits only while tensors are
            copied. Takes CPU memory for a copy of each rank's parameters and optimizer state, for
            two copies if two checkpoints are saved at the end of a step.
        reduce_dtype: dtype in which tensor- and context-parallel ranks send and sum values:
            ``"float32"`` or, if the precision computes in it, ``"bfloat16"``, which halves the
            bytes and rounds sums. None: float32 or wider, always used for parameters' gradients.
        overlap: ``"auto"``: layers compute while tensor-parallel messages travel, in as many chunks
            as the device profile says, and keep less for backward (blocks of Hugging Face families
            overlap in backward only, see docs/families.md). ``"off"``: they wait for each message.
        dynamic: sets of heterogeneous pipelines, each a sequence of :class:`.Scheme`. A training
            step runs on the set, or the mesh, with the shortest simulated step, for which a device
            profile is needed; parameters and optimizer state stay sharded as on the mesh.
            ``"auto"``: up to four sets that make the run's first steps more than 2 % faster in the
            simulation, or none; the log has the figure. ``"off"``: the mesh alone.

    Raises:
        MisconfigurationException: a size is neither ``"auto"`` nor a whole number, or (when a run
            begins) the sizes do not fit the number of devices.
        ValueError: an argument is none of these, or a schedule cannot run so many stages per rank.
    """

    strategy_name = "wlb"
    # Tells LanguageModule.configure_model to build on the meta device.
    defers_initialisation = True
    # Without this Lightning ignores ``self.log(sync_dist=True)``.
    is_distributed = True
    # Checkpoints are loaded into shards and into optimizers, which must exist before.
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    # Known once the processes are connected: the mesh, this rank's place and process groups; and
    # once the model is split: the model on this rank, what runs its steps, and the module.
    _devices: RunDevices
    _searched: bool
    rank: Rank
    mesh_groups: MeshGroups
    split: SplitModel
    executor: Executor
    steps: StepRunner
    _module: LanguageModule

    def __init__(
        self,
        data_parallel_size: Size = "auto",
        pipeline_parallel_size: Size = "auto",
        context_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        schedule: str = "auto",
        virtual_pipeline_size: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        on_nonfinite: OnNonfinite = "raise",
        async_save: bool = False,
        reduce_dtype: str | None = None,
        dynamic: Dynamic = "off",
        overlap: Literal["auto", "off", False] = "auto",
    ) -> None:
        super().__init__()
        sizes = data_parallel_size, pipeline_parallel_size, context_parallel_size
        self.options = MeshOptions(
            sizes=(*sizes, tensor_parallel_size),
            schedule=schedule,
            virtual_stages=virtual_pipeline_size,
        )
        if reduce_dtype is not None:
            choice("reduce_dtype", reduce_dtype, ("float32", "bfloat16"))
        self._asked_reduce_dtype = reduce_dtype
        # YAML reads off without quotes as False.
        self.overlap = choice("overlap", "off" if overlap is False else overlap, ("auto", "off"))
        self.processes = Processes(process_group_backend=process_group_backend, timeout=timeout)
        self.checkpoints = Checkpointer(async_save=async_save)
        self.planning = RunPlanning(dynamic)
        self.guard = StepGuard(on_nonfinite)
        self.num_nodes = 1  # Lightning sets it.
        self.schedule, _ = self.options.usual

    def __repr__(self) -> str:
        # pytorch_lightning shows it when it refuses a strategy that is not its own.
        shown = ", ".join(map(repr, self.options.sizes))
        return f"WLBStrategy({shown}) for lightning.pytorch.Trainer, not pytorch_lightning.Trainer"

    @property
    def mesh(self) -> Mesh:
        """Ranks along each axis, resolved, and stages of a pipeline rank."""
        return self.rank.mesh

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For loaders that are not the data module's own: a sampler over the replicas."""
        return {"num_replicas": self.mesh.data, "rank": self.rank.data}

    @property
    def precision_plugin(self) -> WLBPrecision:
        """Always a :class:`.WLBPrecision`, made from the Trainer's ``precision``."""
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, WLBPrecision) else WLBPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # None must stay None: the Trainer would take a plugin set before it is made for the user's.
        if plugin is not None and not isinstance(plugin, WLBPrecision):
            checks.check_precision(plugin)
            plugin = WLBPrecision(str(plugin.precision))
        self._precision_plugin = plugin

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which tensor- and context-parallel ranks add up."""
        asked: torch.dtype = getattr(torch, self._asked_reduce_dtype or "float32")
        return torch.promote_types(asked, self.precision_plugin.compute_dtype)

    # Processes

    def _configure_launcher(self) -> None:
        # The Trainer's constructor calls this: it is the first sign of a run.
        assert self.cluster_environment is not None
        devices = self.parallel_devices or []
        launcher = self.processes.launcher(self.cluster_environment, devices, self.num_nodes)
        self._launcher = self.checkpoints.noting(launcher)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning who this process is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            tell_rank(self.cluster_environment, rank, self.num_nodes * self.num_processes)

    def setup_environment(self) -> None:
        """Connect the ranks, choose the mesh, and make its process groups."""
        assert self.cluster_environment is not None
        assert self.lightning_module is not None
        trainer, precision = self.lightning_module.trainer, self.precision_plugin
        checks.check_trainer(trainer)
        computed = precision.compute_dtype, str(precision.precision)
        checks.check_reduce_dtype(self._asked_reduce_dtype, *computed)
        # Lightning does this in its own launcher only: compare with Slurm's or torchrun's sizes.
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        super().setup_environment()
        self.processes.listen(trainer)
        self.set_world_ranks()
        # Before any process waits for another: every rank refuses a wrong size at once.
        self.options.usual_mesh(self.world_size)
        own = self.root_device, self.global_rank, self.num_processes
        self.processes.connect(self.cluster_environment, *own)
        self.checkpoints.compare_start()
        devices = self._devices = RunDevices(
            device=self.root_device,
            count=self.world_size,
            per_node=self.num_processes,
            parameter_dtype=name_of(precision.parameter_dtype),
            reduce_dtype=name_of(self.reduce_dtype),
            overlap=self.overlap == "auto",
        )
        mesh, self.schedule, self._searched, profile = choose_run_mesh(
            self.options, devices, trainer
        )
        self.planning.begin(profile)
        self.rank = mesh.coordinate(self.global_rank)
        self.mesh_groups = mesh_groups(self.rank, self.root_device, self.processes.timeout)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self.processes.barrier(self.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of rank ``src`` on every rank."""
        return self.processes.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks."""
        return self.processes.reduce(tensor, group, reduce_op)

    def teardown(self) -> None:
        """Release the module; the process group stays for a further run."""
        module = self.lightning_module
        failed = self.checkpoints.run_failed
        with without_hiding_cause(failed), ExitStack() as ends:
            for each in (self.accelerator, self.precision_plugin, self.cluster_environment):
                ends.callback(each.teardown)  # type: ignore[union-attr]
            ends.callback(self.processes.end)
            if isinstance(module, LanguageModule):
                module.executor = None
            if not failed:
                self.checkpoints.train_ends()

    # The model and its steps

    def setup(self, trainer: pl.Trainer) -> None:
        """Check the run, split the model over the ranks, make the optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = checks.checked_module(self.lightning_module)
        if getattr(self, "_module", None) is not module:  # an earlier fit's optimizers go with it
            self._module, self.optimizers = module, []
        self.checkpoints.check_folders(trainer, self.cluster_environment)
        fitting, data = trainer.state.fn == TrainerFn.FITTING, checks.data_module_of(trainer)
        describe_model(module, None if data is None else data.settings.context_window)
        self.split = SplitModel.of(module) or SplitModel.make(
            module,
            rank=self.rank,
            schedule=self.schedule,
            groups=self.mesh_groups,
            precision=self.precision_plugin,
            device=self.root_device,
            mean_context=0 if data is None else data.mean_context,
            mesh_searched=self._searched,
        )
        precision = str(self.precision_plugin.precision)
        self.split.check(self.mesh, self.schedule, self.mesh_groups, precision)
        self.model_to_device()
        self.executor = self.split.executor
        self.planning.attach(self.split, module, self._devices, data)
        self.executor.begin(self.reduce_dtype, self.planning.chunks(data))
        name_document = "document {}".format if data is None else data.name_of
        self.steps = StepRunner(self.split, module, self.guard, name_document)
        module.executor = self._run_step
        self.precision_plugin.guard = self.guard
        self.barrier()
        if fitting:
            checks.make_optimizers(module, lambda: self.setup_optimizers(trainer))
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers if fitting else [], self.root_device)

    def model_to_device(self) -> None:
        """Move the module's own buffers and metrics; the model was made on its device."""
        self.split.move_rest(self._module, self.root_device)

    def _run_step(self, batch: StepBatch) -> Tensor:
        """Run a step; a LanguageModule's ``step`` calls this instead of its own loop."""
        self.processes.check_connected(self.world_size)
        self.checkpoints.check(self._module.trainer)
        return self.steps.run(batch)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run a whole step; an out-of-memory error is told which options take less."""
        given = self._module, self._devices.reduce_dtype
        with noting_out_of_memory(self.executor, lambda: self.split.memory_model(*given)):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Wait for the step's gradients; its backwards have run."""
        self.precision_plugin.pre_backward(closure_loss, self._module)
        self.steps.finish(closure_loss)
        return self.precision_plugin.post_backward(closure_loss, self._module)

    def planning_context(self, data: WLBDataModule) -> PlanningContext:
        """What this run's steps are planned for, once the model is split."""
        return self.planning.context(data)

    # Checkpoints: all ranks write one together, and read it once their shards are made

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` collects the weights itself, if it may."""
        if self.processes.faults.alone is None:  # a save calls this first
            self.checkpoints.refuse_half_steps()
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` collects optimizer state itself."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: :meth:`load_checkpoint` has loaded the weights."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a sharded checkpoint folder; collective over all ranks.

        After an exception before training, or on some ranks only, nothing is saved, as stderr says.
        """
        if cause := self.processes.faults.alone or self.checkpoints.refusal:
            say(self.global_rank, f"{filepath} is not saved, since {cause}")
            return
        self.processes.check_connected(self.world_size)
        checks.refuse_storage_options(storage_options)
        path, module = checks.local_path(self.broadcast(filepath)), self._module
        self.checkpoints.save(path, checkpoint, module, self.optimizers, self.split.renamed)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a sharded checkpoint folder, plain types only, into model and optimizers."""
        path, own = checks.local_path(checkpoint_path), (self._module, self.optimizers)
        return self.checkpoints.load(path, *own, self.split.renamed)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint once the save before it has succeeded."""
        if self.is_global_zero and not self.processes.faults.alone:
            self.checkpoints.remove(filepath)

    def on_train_start(self) -> None:
        """From here on saves may be written in the background."""
        self.checkpoints.train_begins(self._module.trainer)

    def on_train_end(self) -> None:
        """Wait for saves in the background; every callback has started its last save."""
        self.checkpoints.train_ends()
        self.barrier()  # rank 0 alone links and removes

    def on_exception(self, exception: BaseException) -> None:
        """Wait for saves in the background, but not long: other ranks may have died."""
        with without_hiding_cause():
            self.checkpoints.train_ends(END_SECONDS, interrupted=True)
