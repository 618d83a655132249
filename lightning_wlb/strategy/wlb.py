"""WLBStrategy: data × pipeline × context × tensor parallelism driven by step plans.

A thin Lightning adapter. What it adds to a Trainer:

* ``setup_environment`` builds the mesh; ``setup`` applies the parallelisms (parallelize.py);
* a module's step runs through the executor: all forwards and backwards of the plan happen inside
  ``training_step``, and ``backward`` makes the one reduction and sets ``.grad``, because Lightning
  calls training_step, zero_grad, backward, clip, step in this order;
* gradients are clipped by their norm over all ranks, and steps whose loss or gradients are not
  finite are answered (nonfinite.py); checkpoints are written by all ranks (saving.py).

Not for modules that are not a :class:`.LanguageModule`, nor for manual
optimisation: both are refused at set-up.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.cost.memory_model import MemoryModel
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.distributed.device_mesh import Size
from lightning_wlb.heterogeneous.setup import Dynamic
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.prediction.predictor import model_stages
from lightning_wlb.strategy.checks import (
    check_precision,
    check_reduce_dtype,
    check_trainer,
    checked_model,
    checked_module,
    refuse_lbfgs,
    refuse_loss,
    same_loss,
)
from lightning_wlb.strategy.choosing import ChoosingStrategy
from lightning_wlb.strategy.model_summary import Display
from lightning_wlb.training.clipping_and_nonfinite import OnNonfinite, StepGuard
from lightning_wlb.training.executor import Executor
from lightning_wlb.training.messages import PipelineRank
from lightning_wlb.training.out_of_memory import explained
from lightning_wlb.training.parallelize import parallelize
from lightning_wlb.training.precision import WLBPrecision, name_of
from lightning_wlb.training.tied_weights import add_tied_gradients


class WLBStrategy(ChoosingStrategy):
    """Workload-balanced 4D parallelism: ``Trainer(strategy="wlb")`` or with sizes of your own.

    The product of the four sizes is the number of devices over all nodes. A size that is given
    stays. Where those that are ``"auto"`` leave a choice, the mesh is taken that is predicted to be
    fastest for the model and the documents (:mod:`.choosing`): so with ``strategy="wlb"`` alone.
    Where nothing is known of the model, the documents or the device, the first ``"auto"``, in the
    order of the arguments, takes the devices that the other sizes leave, and any further one is 1.

    Args:
        data_parallel_size: replicas that train on different documents, and share the parameters.
        pipeline_parallel_size: stages that the layers are split into, by cost.
        context_parallel_size: ranks that share the tokens of each micro-batch.
        tensor_parallel_size: ranks that share each weight, with sequence parallelism.
        schedule: order of the pipeline's actions: ``"1f1b"``, ``"interleaved"`` or ``"gpipe"``.
            ``"auto"`` is chosen with the mesh; where that leaves no choice it is ``"1f1b"``, or
            ``"interleaved"`` with several stages per rank.
        virtual_pipeline_size: stages per pipeline rank. None is chosen with the mesh; where that
            leaves no choice it means 2 for ``"interleaved"``, which with 1 is ``"1f1b"``; the
            others run 1.
        process_group_backend: ``"nccl"`` on CUDA and ``"gloo"`` on CPU by default.
        timeout: how long a collective may wait for a rank; None: ten minutes. A rank that ends, in
            whatever way, is noticed at once.
        on_nonfinite: what becomes of a step whose loss or gradients are NaN or infinite:
            ``"raise"`` names step, ranks, parameters and documents; ``"skip"`` leaves the
            optimizer's step out, with a warning, and raises after ten in a row; ``"ignore"``
            trains on.
        async_save: write checkpoints while training goes on, which waits only while tensors are
            copied. Takes memory of the CPU for a copy of each rank's parameters and optimizer
            state, twice where two checkpoints are saved at the end of a step.
        on_save_failure: ``"raise"`` ends the run on all ranks when a checkpoint cannot be saved;
            ``"warn"`` goes on without it. Either way no other checkpoint is lost.
        verify_checkpoints: compare what is read from a checkpoint with the checksums in its
            manifest, in a thread beside reading. False compares the sizes of files only.
        reduce_dtype: in which what tensor- and context-parallel ranks add up travels:
            ``"float32"``, or, where a precision computes in bfloat16, ``"bfloat16"``, which halves
            these messages and rounds where two ranks' values meet. None: float32 or wider.
            Gradients of parameters are added up in float32 or wider, whatever this is.
        dynamic: strategies, each a :class:`.Scheme` for every pipeline, that a training step may
            take in place of the mesh's pipelines. It takes the one whose simulated step is
            shortest, which needs a device profile; parameters and optimizer state stay where the
            mesh has them. ``"auto"``: up to four that are simulated to make the run's first steps
            faster by more than 2 %, or none, of which the log has the figure. ``"off"``: all steps
            run on the mesh.

    Raises:
        MisconfigurationException: if a size is neither ``"auto"`` nor a whole number, or (when it
            runs) the sizes do not fit the number of devices.
        ValueError: if the schedule is unknown or cannot run so many stages per rank, another
            ``on_nonfinite`` or ``reduce_dtype``, or ``dynamic`` with anything but these.
    """

    strategy_name = "wlb"
    # Tells LanguageModule.configure_model to build on the meta device.
    defers_initialisation = True

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
        on_save_failure: str = "raise",
        verify_checkpoints: bool = True,
        reduce_dtype: str | None = None,
        dynamic: Dynamic = "off",
    ) -> None:
        super().__init__(
            (
                data_parallel_size,
                pipeline_parallel_size,
                context_parallel_size,
                tensor_parallel_size,
            ),
            schedule,
            virtual_pipeline_size,
            process_group_backend,
            timeout,
            async_save,
            on_save_failure,
            verify_checkpoints,
            reduce_dtype,
            dynamic,
        )
        # A step that has run, and its loss, until its gradients are there.
        self._ran: tuple[StepBatch, Tensor] | None = None
        self.guard = StepGuard(on_nonfinite)

    def __repr__(self) -> str:
        # pytorch_lightning shows it when it refuses a strategy that is not its own.
        shown = ", ".join(map(repr, self._asked))
        return f"WLBStrategy({shown}) for lightning.pytorch.Trainer, not pytorch_lightning.Trainer"

    # Precision

    @property
    def precision_plugin(self) -> WLBPrecision:
        """Always a :class:`.WLBPrecision`, made from the Trainer's ``precision``."""
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, WLBPrecision) else WLBPrecision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # None must stay None: the Trainer takes a plugin that is here before it for the user's.
        if plugin is not None and not isinstance(plugin, WLBPrecision):
            check_precision(plugin)
            plugin = WLBPrecision(str(plugin.precision))
        self._precision_plugin = plugin

    # Model and optimizers

    def setup_environment(self) -> None:
        """Make the mesh and its process groups, where the Trainer asks for nothing impossible."""
        assert self.lightning_module is not None
        check_trainer(self.lightning_module.trainer)
        precision = self.precision_plugin
        check_reduce_dtype(self._asked_reduce_dtype, precision.compute_dtype, precision.precision)
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Check the run, apply the parallelisms, make the optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = checked_module(self.lightning_module, trainer)
        self.check_checkpoint_folders(trainer)
        # The model itself knows who has split it, so that both are freed together.
        previous: WLBStrategy | None = getattr(module.model, "parallelized_by", None)
        if previous is None:
            self._parallelize(trainer, module)
        elif previous is not self:
            self._adopt(previous)
        self.model_to_device()
        assert self.executor is not None
        self.executor.begin(self.reduce_dtype)
        if trainer.state.fn == TrainerFn.FITTING:
            self._prepare_strategies()
            data = getattr(trainer, "datamodule", None)
            if isinstance(data, WLBDataModule) and not data.measures:
                self._make_pool(data)  # Else when the devices have been measured.
        module.executor = self._run_step
        self._guard(trainer)
        self._ran = None
        Display.take_over(trainer, self.rank, [f"model.{tie.head}" for tie in self._tied_copies()])
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            refuse_lbfgs(self.optimizers)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _adopt(self, previous: WLBStrategy) -> None:
        """Go on with a model that another Trainer's strategy has parallelised."""
        asked, done = self._split_for(), previous._split_for()
        if asked != done:
            raise MisconfigurationException(
                f"An earlier Trainer has split the module for {done}; it cannot be split again for"
                f" {asked}. Save a checkpoint with the earlier Trainer, and give a new module and"
                " ckpt_path=... to this one."
            )
        if self.mesh_groups is not previous.mesh_groups:
            raise MisconfigurationException(
                "The process group with which an earlier Trainer has split the module was"
                " destroyed. Give a new module and ckpt_path=... to this one, or leave the process"
                " group alone between the two."
            )
        self._ties = previous._ties
        self.executor, self._runs = previous.executor, previous._runs

    def _split_for(self) -> str:
        return (
            f"the mesh {self.mesh}, schedule {self.schedule!r} with {self.mesh.virtual_stages}"
            f" stages per rank, precision {self.precision_plugin.precision!r}"
        )

    def _parallelize(self, trainer: pl.Trainer, module: LanguageModule) -> None:
        model = checked_model(module)
        shape, mesh = module.model_shape, self.mesh
        shape.check_tensor_parallel(mesh.tensor)
        # What a layer costs per token depends on how much a token attends to.
        attended = int(getattr(getattr(trainer, "datamodule", None), "mean_context", 0))
        stages = model_stages(shape, mesh.stages, attended)
        precision = self.precision_plugin
        self._ties, parameters = parallelize(
            model,
            self.mesh_groups.mesh,
            stages,
            self.mesh_groups.parameters,
            initialise=module.init_weights,
            device=self.root_device,
            dtype=precision.parameter_dtype,
            compute_dtype=precision.compute_dtype,
            sum_dtype=precision.sum_dtype,
        )
        self.executor = Executor(
            model,
            PipelineRank(
                rank=self.rank,
                stages=tuple(stages),
                schedule=self.schedule,
                groups=self.mesh_groups.channels,
                hidden_size=shape.dim,
                dtype=precision.compute_dtype,
                device=self.root_device,
            ),
            self.mesh_groups,
            parameters,
        )
        self._runs = None
        model.parallelized_by = self  # type: ignore[assignment]

    def model_to_device(self) -> None:
        """Move the module's own buffers and metrics, and what it calls its device.

        Not the model, which is made where it belongs; ``Module.to`` cannot replace its shards.
        """
        module = self.lightning_module
        assert module is not None
        split = {
            name: child
            for name, child in module._modules.items()
            if child is not None and any(True for _ in child.parameters())
        }
        module._modules.update(dict.fromkeys(split))
        try:
            module.to(self.root_device)
        finally:
            module._modules.update(split)

    def _run_step(self, batch: StepBatch) -> Tensor:
        """What a LanguageModule's ``step`` calls instead of its own loop."""
        assert self.executor is not None
        module = self.lightning_module
        assert isinstance(module, LanguageModule)
        self.check_saves()
        denominator = module.loss_denominator(batch.plan)
        if torch.is_grad_enabled():
            if self._ran is not None:
                raise MisconfigurationException(
                    f"{type(module).__name__}.training_step called self.step more than once, or"
                    " returned None after it. A step's backward passes run inside self.step: call"
                    " it once and return its loss."
                )
            loss = self.executor.run(batch, denominator)
            self._ran = batch, loss
            return loss.clone()
        # Parameters gathered in inference mode could not train afterwards.
        with torch.inference_mode(False), torch.no_grad():
            return self.executor.run(batch, denominator)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run a step, all of it; what runs out of memory is told which options take less."""
        assert self.executor is not None
        with explained(self.executor, self._memory_model):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _memory_model(self) -> MemoryModel:
        module, precision = self.lightning_module, self.precision_plugin
        assert isinstance(module, LanguageModule)
        assert module.model is not None
        device = self.root_device.type
        kernel: VarlenAttention | None = getattr(module.model, "attention_kernel", None)
        return MemoryModel(
            module.model_shape,
            self.mesh,
            name_of(precision.compute_dtype),
            name_of(precision.parameter_dtype),
            accelerator=device != "cpu",
            reduce_dtype=name_of(self.reduce_dtype),
            kernel="" if kernel is None else kernel.kernel_name(device),
        )

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Wait for the step's gradients, which travel since its backwards, and set ``.grad``.

        The loss, and what the ranks have told each other, are read when all of that is queued on
        the device, which would have nothing to do while they are waited for.
        """
        assert self.executor is not None
        module = self.lightning_module
        assert module is not None
        ran, self._ran = self._ran, None
        if ran is None or closure_loss.requires_grad:
            refuse_loss(closure_loss, None if ran is None else ran[1])
        batch, loss = ran
        self.precision_plugin.pre_backward(closure_loss, module)
        self.executor.finish()
        if not self.executor.left_mesh:
            add_tied_gradients(
                self.executor.model, self._ties, self._tied_peer(), self.mesh_groups.pipeline
            )
        self.executor.read()
        self.guard.ran(batch, self.executor.losses)
        if not same_loss(closure_loss, loss):
            refuse_loss(closure_loss, loss)
        return self.precision_plugin.post_backward(closure_loss, module)

    def _tied_peer(self) -> int | None:
        """The rank with the same shard of the tied weight on the pipeline's other end."""
        rank = self.rank
        if not self._ties or rank.first_stage == rank.last_stage:
            return None
        return rank.group("pipeline")[-1 if rank.first_stage else 0]

    def _guard(self, trainer: pl.Trainer) -> None:
        """Put the guard between the gradients of a step and the optimizer."""
        assert self.executor is not None
        model = self.executor.model
        copies = [model.get_parameter(tie.head) for tie in self._tied_copies()]
        data = getattr(trainer, "datamodule", None)
        name_of = getattr(data, "name_of", "document {}".format)
        self.guard.attach(model, self.mesh, self.root_device, copies, name_of)
        self.precision_plugin.guard = self.guard

    def teardown(self) -> None:
        """Let go of the module; the process group stays for a further run."""
        self.finish_saves()
        module = self.lightning_module
        if isinstance(module, LanguageModule):
            module.executor = None
        super().teardown()
