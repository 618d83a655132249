"""The model of a run, split over the ranks: how it is split, described in the log, and run.

The model holds its :class:`SplitModel`, so the split outlives its Trainer. Another goes on with the
same shards; model and split are freed together. A :class:`StepRunner` runs one run's steps on it.

Cost: that of :func:`.parallelize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.memory_model import MemoryModel
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.distributed.process_groups import MeshGroups
from lightning_wlb.mesh import Mesh, Rank
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import Schemes
from lightning_wlb.prediction.predictor import model_stages
from lightning_wlb.strategy.checks import checked_model
from lightning_wlb.strategy.rank_agreement import compare_ranks, digest_of, training_of
from lightning_wlb.training.clipping_and_nonfinite import StepGuard
from lightning_wlb.training.executor import Executor
from lightning_wlb.training.parallelize import add_tied_gradients, parallelize
from lightning_wlb.training.pipeline_messages import PipelineRank
from lightning_wlb.training.precision import WLBPrecision, name_of


@dataclass(eq=False, kw_only=True)
class SplitModel:
    """A module's model on the ranks of a mesh.

    Args:
        precision: the Trainer's, such as ``"bf16-mixed"``.
        mesh_searched: whether its mesh was searched for.
        prepared_for: the heterogeneous pipelines that the executor can run steps on.
    """

    executor: Executor
    precision: str
    mesh_searched: bool
    prepared_for: tuple[Schemes, ...] = ()

    @staticmethod
    def of(module: LanguageModule) -> SplitModel | None:
        """How an earlier Trainer has split the module's model; None: none has."""
        split = getattr(module.model, "split", None)
        return split if isinstance(split, SplitModel) else None

    @staticmethod
    def make(
        module: LanguageModule,
        *,
        rank: Rank,
        schedule: str,
        groups: MeshGroups,
        precision: WLBPrecision,
        device: torch.device,
        mean_context: int,
        mesh_searched: bool,
    ) -> SplitModel:
        """Split the module's model; collective over all ranks.

        Args:
            module: its model is whole, perhaps without values.
            mean_context: number of tokens that a token attends to on average, by which the layers'
                costs, and so the stages, are determined. 0: not known.
            mesh_searched: whether the mesh was searched for.

        Raises:
            MisconfigurationException: a model that cannot be split.
        """
        model, shape, mesh = checked_model(module), module.model_shape, rank.mesh
        shape.check_tensor_parallel(mesh.tensor, mesh.context)
        stages = model_stages(shape, mesh.stages, mean_context)
        parameters = parallelize(
            model,
            groups.mesh,
            stages,
            groups.parameters,
            initialise=module.init_weights,
            device=device,
            dtype=precision.parameter_dtype,
            compute_dtype=precision.compute_dtype,
            sum_dtype=precision.sum_dtype,
        )
        pipeline = PipelineRank(
            rank=rank,
            stages=tuple(stages),
            schedule=schedule,
            groups=groups.channels,
            hidden_size=shape.dim,
            dtype=precision.compute_dtype,
            device=device,
        )
        split = SplitModel(
            executor=Executor(model, pipeline, groups, parameters),
            precision=str(precision.precision),
            mesh_searched=mesh_searched,
        )
        model.split = split  # type: ignore[assignment]
        return split

    @property
    def mesh(self) -> Mesh:
        """The mesh that it is split over."""
        return self.executor.pipeline.rank.mesh

    @property
    def schedule(self) -> str:
        """The order of the pipeline's actions."""
        return self.executor.pipeline.schedule

    def check(self, mesh: Mesh, schedule: str, groups: MeshGroups, precision: str) -> None:
        """Raise MisconfigurationException for a run that needs the model split differently."""
        done = _words(self.mesh, self.schedule, self.precision)
        asked = _words(mesh, schedule, precision)
        if asked != done:
            raise MisconfigurationException(
                f"An earlier Trainer split the module for {done}; it cannot be split for {asked}."
                " Save a checkpoint with that one, and give this a new module and ckpt_path=...."
            )
        if self.executor.groups is not groups:
            raise MisconfigurationException(
                "The process group with which an earlier Trainer split the module was destroyed."
                " Give this one a new module and ckpt_path=..., or keep the group in between."
            )

    @staticmethod
    def move_rest(module: pl.LightningModule, device: torch.device) -> None:
        """Move the module's own buffers and metrics to a device, and set ``module.device``.

        The model stays: it is made on its device, and ``Module.to`` cannot replace its shards.
        """
        split: dict[str, nn.Module | None] = {
            name: child
            for name, child in module._modules.items()
            if child is not None and any(True for _ in child.parameters())
        }
        module._modules.update(dict.fromkeys(split))
        try:
            module.to(device)
        finally:
            module._modules.update(split)

    @property
    def tied_copies(self) -> dict[str, str]:
        """Parameters that another stage has as well: name on this stage -> name on the other."""
        rank = self.executor.pipeline.rank
        return self.executor.model.tied if rank.last_stage and not rank.first_stage else {}

    @property
    def renamed(self) -> dict[str, str]:
        """Name in the module -> name in checkpoints, where a tied copy has the embedding's name."""
        return {f"model.{own}": f"model.{other}" for own, other in self.tied_copies.items()}

    def memory_model(self, module: LanguageModule, reduce_dtype: str) -> MemoryModel:
        """The memory model of this rank's parts."""
        pipeline, precision = self.executor.pipeline, WLBPrecision(self.precision)
        # A model of the user's own may call another kernel.
        kernel: VarlenAttention | None = getattr(module.model, "attention_kernel", None)
        device = pipeline.device.type
        return MemoryModel(
            module.model_shape,
            pipeline.rank.mesh,
            name_of(precision.compute_dtype),
            name_of(precision.parameter_dtype),
            accelerator=device != "cpu",
            reduce_dtype=reduce_dtype,
            kernel="" if kernel is None else kernel.kernel_name(device),
            overlap=self.executor.chunks is not None and self.executor.model.overlaps == "all",
        )


def _words(mesh: Mesh, schedule: str, precision: str) -> str:
    return (
        f"the mesh {mesh}, schedule {schedule!r} with {mesh.virtual_stages} stages per rank,"
        f" precision {precision!r}"
    )


class StepRunner:
    """Runs steps inside ``training_step``, and finishes each in the strategy's ``backward``.

    ``module.step`` calls :meth:`run`; ``name_of`` names a document in messages by its number.
    """

    def __init__(
        self,
        split: SplitModel,
        module: LanguageModule,
        guard: StepGuard,
        name_of: Callable[[int], str],
    ) -> None:
        self._split, self._module, self._guard = split, module, guard
        # A step that has run, and its loss, until its gradients are there.
        self._ran: tuple[StepBatch, Tensor] | None = None
        self._compared: set[bool] = set()  # before the first evaluation, and the first training
        executor = split.executor
        copies = [executor.model.get_parameter(name) for name in split.tied_copies]
        guard.attach(executor.model, split.mesh, executor.pipeline.device, copies, name_of)

    def run(self, batch: StepBatch) -> Tensor:
        """Run all forwards, and in training all backwards, of a step; returns its loss.

        Raises:
            MisconfigurationException: the step before it was not finished; or, in the first step of
                an evaluation or of training, settings or values differ between ranks.
        """
        module, executor = self._module, self._split.executor
        denominator = module.loss_denominator(batch.plan)
        if (training := torch.is_grad_enabled()) not in self._compared:
            compare_ranks(lambda: training_of(module, executor))
            self._compared.add(training)
        if training:
            if self._ran is not None:
                raise MisconfigurationException(
                    f"{type(module).__name__}.training_step called self.step more than once, or"
                    " returned None after it. It runs backward: call it once and return its loss."
                )
            executor.settings = digest_of(module.trainer.optimizers)
            loss = executor.run(batch, denominator)
            self._ran = batch, loss
            return loss.clone()
        # Parameters gathered in inference mode could not train afterwards.
        with torch.inference_mode(False), torch.no_grad():
            return executor.run(batch, denominator)

    def finish(self, returned: Tensor) -> None:
        """Wait for the gradients, whose reduction the step has begun, and set ``.grad``.

        Only then the loss and the ranks' exchange are read, so that the device has work meanwhile.

        Raises:
            MisconfigurationException: ``returned``, from ``training_step``, is not the loss of the
                step that ran; or the options of optimizers differ between ranks.
        """
        executor = self._split.executor
        ran, self._ran = self._ran, None
        if ran is None or returned.requires_grad:
            _refuse_loss(returned, None if ran is None else ran[1])
        batch, loss = ran
        executor.finish()
        # Heterogeneous pipelines sum tied gradients, too.
        if executor.bucket_lifetimes is executor.parameters:
            place, group = executor.pipeline.rank, executor.groups.pipeline
            add_tied_gradients(executor.model, place, group)
        executor.read()
        if not executor.settings_agree:
            compare_ranks(lambda: training_of(self._module, executor))
        self._guard.ran(batch, executor.losses)
        if not torch.allclose(returned.detach().to(loss), loss, rtol=0, atol=0, equal_nan=True):
            _refuse_loss(returned, loss)


def _refuse_loss(returned: Tensor, ran: Tensor | None) -> NoReturn:
    raise MisconfigurationException(
        f"training_step returned a loss of {float(returned):g}, but the step that ran has"
        f" {'none' if ran is None else f'{float(ran):g}'}. WLBStrategy would not train terms or"
        " factors of your own: the step's backward passes have already run. Return"
        " self.step(batch) as it is, and change the loss inside the model's head."
    )


def describe_model(module: LanguageModule, window: int | None) -> None:
    """Log what a module trains, and remove Lightning's summary callbacks from its Trainer.

    Their tables would show the parameters of rank 0's stage alone, and 0 FLOPs.

    Args:
        module: nothing is logged if its model is split already.
        window: the context window, if it is known.
    """
    callbacks: list[pl.Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    tables = [each for each in callbacks if type(each) in (ModelSummary, RichModelSummary)]
    for each in tables:
        callbacks.remove(each)
    if not tables or SplitModel.of(module) is not None:
        return
    total = sum(each.numel() for each in module.parameters())
    trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
    said = f"{type(module).__name__}: {total:,} parameters"
    if trained < total:
        said += f", {trained:,} of them trained"
    if window is not None:
        work = Work.of(module.model_shape)
        said += (
            f"; a document of {window:,} tokens takes {work.forward(window):.3g} FLOPs forward"
            f" and {work.backward(window):.3g} backward"
        )
    rank_zero_info(f"{said}.")
