"""The LightningModule that trains a decoder on step batches.

One batch is one optimiser step: a plan and this rank's micro-batches. The loss of a step is the
sum of its token losses divided by the *global* number of target tokens, never a mean of means.

With ``strategy="auto"`` on one device, :meth:`LanguageModule.step` loops over the micro-batches.
That path is the reference: every parallel run gives the same result. ``WLBStrategy`` replaces only
this loop, by setting ``LanguageModule.executor``.

Cost of the reference path: the activations of all micro-batches of a step are held until its single
backward. ``activation_checkpointing="full"`` bounds them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, Literal, NoReturn, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_wlb.argument_checks import choice, flag, number, whole
from lightning_wlb.attention.backends import BACKENDS
from lightning_wlb.attention.kv_cache import KeyValueCache
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.data import trainer_guards
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.data.planning_context import PlanningStrategy
from lightning_wlb.models.config import TransformerConfig, as_config
from lightning_wlb.models.decoder import Decoder, check_decoder, check_size, without_values
from lightning_wlb.models.load_from_checkpoint import LoadsCheckpoints, numbered
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import ActivationCheckpointing, StepPlan

LossNormalisation = Literal["step", "nominal"]


class LanguageModule(LoadsCheckpoints):
    """Next-token training of a :class:`~lightning_wlb.models.transformer.Transformer`.

    For a model of your own override :meth:`build_model`, which may return any :class:`.Decoder`;
    the shortest way is a subclass of ``Transformer`` that replaces some modules.

    Args:
        config: sizes of the model, a preset's name, or a mapping of fields; ``"tiny"`` if None.
        learning_rate: peak learning rate of AdamW.
        weight_decay: for matrices only, not for vectors (norm weights, biases).
        betas: AdamW's.
        warmup_tokens: the learning rate rises linearly from 0 over this many tokens.
        decay_tokens: tokens, warm-up included, after which a cosine decay ends; None: no decay.
        min_learning_rate_ratio: the cosine ends at this ratio of ``learning_rate``.
        loss_normalisation: divide a step's loss by its own target tokens (``"step"``), or by the
            configured tokens of a global batch (``"nominal"``), which weights all tokens alike.
        activation_checkpointing: what backward recomputes instead of storing it, for all
            micro-batches: ``"none"``, ``"selective"`` (feed-forward halves) or ``"full"`` (layers).
            With ``"auto"`` and a device profile, plans choose for each micro-batch as little as
            fits in memory; without a profile ``"auto"`` is ``"none"``.
        attention_backend: see :class:`~lightning_wlb.attention.backends.VarlenAttention`.
        compile: compile the model's blocks (norms, rotary embedding, feed-forward networks, the
            loss's softmax) by ``torch.compile``, once for all lengths, in the first step.
        seed: seed of the initial weights; None: the seed of ``seed_everything``, or 0 without one.

    Attributes:
        model: None until :meth:`configure_model`.
        executor: runs a step's micro-batches and returns :meth:`step`'s loss. ``WLBStrategy`` sets
            it; under other strategies it is None.
        tokens_seen: tokens trained on so far, over all replicas; saved in the checkpoint.

    Raises:
        ValueError: a value of another type, an unlisted option, or numbers out of range or order.
    """

    model: Decoder | None

    def __init__(
        self,
        config: TransformerConfig | str | dict[str, Any] | None = None,
        *,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_tokens: int = 0,
        decay_tokens: int | None = None,
        min_learning_rate_ratio: float = 0.1,
        loss_normalisation: LossNormalisation = "step",
        activation_checkpointing: ActivationCheckpointing = "auto",
        attention_backend: str = "auto",
        compile: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        choice("loss_normalisation", loss_normalisation, get_args(LossNormalisation))
        choice(
            "activation_checkpointing", activation_checkpointing, get_args(ActivationCheckpointing)
        )
        choice("attention_backend", attention_backend, ("auto", *BACKENDS))
        # Checkpoints hold plain types only, as they are loaded with weights_only=True. So the
        # arguments, which save_hyperparameters reads, become plain Python.
        self.learning_rate = learning_rate = number("learning_rate", learning_rate, 0)
        self.weight_decay = weight_decay = number("weight_decay", weight_decay, 0)
        self.betas = betas = _betas(betas)
        self.warmup_tokens = warmup_tokens = whole("warmup_tokens", warmup_tokens, 0)
        decay_tokens = None if decay_tokens is None else whole("decay_tokens", decay_tokens, 1)
        min_learning_rate_ratio = number("min_learning_rate_ratio", min_learning_rate_ratio, 0, 1)
        # Not self.compile, which is a method of every module.
        self.compiles_blocks = compile = flag("compile", compile)
        self.seed = seed = None if seed is None else whole("seed", seed, 0)
        if decay_tokens is not None and decay_tokens <= warmup_tokens:
            raise ValueError(
                f"warmup_tokens={warmup_tokens}, decay_tokens={decay_tokens}: the decay ends at"
                " decay_tokens, counted from the start. Give 0 <= warmup_tokens < decay_tokens."
            )
        self.config, plain = self.read_config(config)
        self.save_hyperparameters(ignore=["config"])
        self.save_hyperparameters({"config": plain})
        self.decay_tokens = decay_tokens
        self.min_learning_rate_ratio = min_learning_rate_ratio
        self.loss_normalisation = loss_normalisation
        self.activation_checkpointing: ActivationCheckpointing = activation_checkpointing
        self.attention_backend = attention_backend
        self.model = None
        self.executor: Callable[[StepBatch], Tensor] | None = None
        self.tokens_seen = 0
        # The last counted step: its tokens, its Trainer and the number of steps before it.
        self._counted = 0, 0, 0
        self._weights_of: object = None  # the progress of the fit whose weights these are

    def read_config(self, config: Any) -> tuple[Any, dict[str, Any]]:
        """The configuration that ``config`` gives, and the same in plain types for checkpoints."""
        understood = as_config(config)
        return understood, asdict(understood)

    @property
    def model_shape(self) -> ModelShape:
        """The sizes for the cost model; override it in a model that does not use ``config``."""
        return self.config.shape

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = "setup", "on_train_start", "on_save_checkpoint", "on_load_checkpoint"
        trainer_guards.keep_hooks(LanguageModule, cls, names)

    def setup(self, stage: str) -> None:
        """Count tokens from 0, and so restart the learning rate, unless the run is resumed.

        Raises:
            MisconfigurationException: gradients are accumulated, or another Trainer fits it.
        """
        trainer_guards.refuse_two_runs(trainer_guards.fitting_trainer(), self._trainer, self)
        if stage != TrainerFn.FITTING:
            return
        trainer_guards.refuse_accumulation(self.trainer)
        if not self.trainer.global_step:
            self.tokens_seen, self._counted, self._weights_of = 0, (0, 0, 0), None

    def on_train_start(self) -> None:
        """Let a resumed run count epochs as an unbroken one; WLBStrategy does so itself."""
        trainer_guards.has_other_weights(self.trainer, self._weights_of, 0)
        self._weights_of = trainer_guards.fit_of(self.trainer, self._weights_of)
        if not isinstance(self.trainer.strategy, PlanningStrategy):
            trainer_guards.count_as_unbroken(self.trainer)

    def configure_model(self) -> None:
        """Build ``self.model``, with values unless the strategy gives memory and values later.

        Raises:
            ValueError: the model lacks an option, has dropout, or exceeds checkpoint or memory.
        """
        if self.model is not None:
            return
        # Some strategies give the model memory and values themselves, after splitting it.
        deferred = getattr(getattr(self._trainer, "strategy", None), "defers_initialisation", False)
        if not deferred and torch.get_default_device().type == "cpu":
            with without_values():
                blank = self.build_model()
            if isinstance(blank, Decoder):
                check_size(blank)
        with torch.device("meta") if deferred else nullcontext():
            self.model = self.build_model()
        if isinstance(self.model, Decoder):  # else the strategy refuses it
            if deferred and self.trainer.strategy.root_device.type == "cpu":
                check_size(self.model, self.trainer.num_nodes)
            check_decoder(self.model, self.activation_checkpointing)
            if self.compiles_blocks:
                self.model.compile_blocks()
        if not deferred:
            self.init_weights()

    def build_model(self) -> Decoder:
        """The whole model; :meth:`init_weights` fills its parameters, whatever their values are.

        It is also called on the meta device: to compare sizes, and under ``WLBStrategy``, which can
        thus split a model larger than a rank's memory. Override it for a model of your own.
        """
        return Transformer(self.config, attention_backend=self.attention_backend)

    def build_blank_model(self) -> Decoder:
        """The whole model, without values, like this module's model before it was split."""
        # In the dtype of the run, in which Lightning lets configure_model build.
        with self.trainer.precision_plugin.module_init_context(), torch.device("meta"):
            model = self.build_model()
            if self.compiles_blocks:
                model.compile_blocks()
        return model

    @property
    def planned_checkpointing(self) -> ActivationCheckpointing:
        """The ``activation_checkpointing`` with which plans for this module are made."""
        return self.checkpointing_with(self.model)

    def checkpointing_with(self, model: Decoder | None) -> ActivationCheckpointing:
        """The mode that ``model`` always has; the user's if it supports every mode, or is None."""
        own = "auto" if model is None else model.activation_checkpointing
        return self.activation_checkpointing if own == "auto" else own

    def init_weights(self) -> None:
        """Fill the parameters with values that depend only on the seed and their names."""
        assert self.model is not None
        self.model.initialise(self.initial_seed)

    @property
    def initial_seed(self) -> int:
        """The seed of initial values: ``seed``, or else ``seed_everything``'s, or else 0."""
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed

    def step(self, batch: StepBatch) -> Tensor:
        """The loss of one optimiser step: token losses divided by :meth:`loss_denominator`.

        Returns:
            0-dim, float32 or wider. Zero, with zero gradients, if no token has a target.

        Raises:
            MisconfigurationException: the batch is no step batch.
            ValueError: its plan was made with another activation checkpointing.
        """
        self.check_batch(batch)
        if torch.is_grad_enabled() and (self._trainer is None or self._trainer.training):
            self.tokens_seen = self._tokens_taken() + batch.tokens
            if self._trainer is not None:
                self._counted = batch.tokens, id(self._trainer), self._trainer.global_step
        if self.executor is not None:
            return self.executor(batch)
        assert self.model is not None
        # Without micro-batches the gradient of every parameter is zero, not missing.
        total = torch.zeros((), device=self.device)
        if not batch.micro_batches:
            total = torch.stack([parameter.sum() for parameter in self.parameters()]).sum() * 0
        cache = KeyValueCache()
        for micro_batch in batch.micro_batches:
            total = total + self.model(micro_batch.with_cache(cache))
        return total / self.loss_denominator(batch.plan)

    def loss_denominator(self, plan: StepPlan) -> int:
        """The divisor of a step's sum of token losses, at least 1."""
        nominal = self.loss_normalisation == "nominal"
        return max(plan.nominal_tokens if nominal else plan.target_tokens, 1)

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """One optimiser step; logs the step's ``train_loss`` and ``tokens``."""
        loss = self.step(batch)
        if not batch.target_tokens:
            rank_zero_warn(
                "A step has no token with a target: its gradient is zero, and only the optimizer's"
                " momentum and weight decay change weights. Is the mask of targets right?"
            )
        self.log("train_loss", loss.detach(), prog_bar=True)
        # Filled on the device: Lightning would copy a number there, and wait for the device.
        self.log("tokens", torch.full((), float(batch.tokens), device=loss.device))
        return loss

    def validation_step(self, batch: StepBatch, batch_idx: int) -> None:
        """Logs ``val_loss``, the mean over target tokens of the whole evaluation."""
        self._evaluate(batch, "val_loss")

    def test_step(self, batch: StepBatch, batch_idx: int) -> None:
        """Logs ``test_loss``, the mean over target tokens of the whole evaluation."""
        self._evaluate(batch, "test_loss")

    def predict_step(self, *_: Any) -> NoReturn:
        """Raise an error, see :func:`.refuse_prediction`."""
        trainer_guards.refuse_prediction()

    def _evaluate(self, batch: StepBatch, name: str) -> None:
        total = self.step(batch) * self.loss_denominator(batch.plan)
        if batch.target_tokens:
            loss = total / batch.target_tokens
            # All ranks have the same value; without sync_dist Lightning would warn.
            self.log(name, loss, prog_bar=True, batch_size=batch.target_tokens, sync_dist=True)

    def check_batch(self, batch: object) -> None:
        """Refuse anything but a step batch, or one planned with other activation checkpointing."""
        if not isinstance(batch, StepBatch):
            raise MisconfigurationException(
                f"LanguageModule got a batch of type {type(batch).__name__}, but one batch must be"
                " one planned optimiser step, a lightning_wlb StepBatch. Give the Trainer no"
                " DataLoader of your own, but your documents: trainer.fit(model, WLBDataModule("
                "documents, context_window=..., micro_batches=...))."
            )
        planned = self.planned_checkpointing
        for micro_batch in batch.micro_batches:
            if planned not in ("auto", micro_batch.recompute):
                raise ValueError(
                    f"a micro-batch of the plan recomputes {micro_batch.recompute!r}, but plans for"
                    f" this module and its model have activation_checkpointing={planned!r}. Give"
                    " StepDataset.for_model activation_checkpointing=module.planned_checkpointing."
                )

    def log(self, *args: Any, **options: Any) -> None:
        """Lightning's method, with batch size 1 by default: Lightning cannot find it in a batch."""
        if options.get("batch_size") is None:
            options["batch_size"] = 1
        super().log(*args, **options)

    def configure_optimizers(self) -> Any:
        """AdamW, with a schedule by tokens if there is a warm-up or a decay."""
        trained = {name: each for name, each in self.named_parameters() if each.requires_grad}
        # Biases of experts have two dims, with a row for each expert.
        matrices = {n for n, p in trained.items() if p.ndim > 1 and not n.endswith("bias")}
        decayed = [p for n, p in trained.items() if n in matrices]
        others = [p for n, p in trained.items() if n not in matrices]
        groups = ((decayed, self.weight_decay), (others, 0.0))
        # Both groups on every stage, even if empty (all parameters frozen): schedules keep a value
        # for each group, and every rank loads the schedules that rank 0 has saved.
        optimizer = torch.optim.AdamW(
            [{"params": group, "weight_decay": decay} for group, decay in groups],
            lr=self.learning_rate,
            betas=self.betas,
            # One kernel instead of dozens; on a CPU it saves nothing.
            fused=(bool(trained) and all(each.is_cuda for each in trained.values())) or None,
        )
        # Lightning refuses to clip gradients for a fused optimizer, even without a scaler.
        optimizer._step_supports_amp_scaling = False
        if not self.warmup_tokens and self.decay_tokens is None:
            return optimizer
        trainer_guards.refuse_part(self, self._trainer)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.learning_rate_factor(self._tokens_taken())
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step", "name": "lr"}]

    def learning_rate_factor(self, tokens: int) -> float:
        """Factor of ``learning_rate`` for the step after ``tokens`` trained tokens."""
        if tokens < self.warmup_tokens:
            return tokens / self.warmup_tokens
        if self.decay_tokens is None:
            return 1.0
        part = (tokens - self.warmup_tokens) / (self.decay_tokens - self.warmup_tokens)
        least = self.min_learning_rate_ratio
        return least + (1 - least) * (1 + math.cos(math.pi * min(part, 1.0))) / 2

    def _tokens_taken(self) -> int:
        """``tokens_seen`` without a step that failed before its optimizer step and is repeated."""
        tokens, *since = self._counted
        failed = self._trainer and since == [id(self._trainer), self._trainer.global_step]
        return self.tokens_seen - (tokens if failed else 0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save ``tokens_seen``; an epoch that was cut short is not over."""
        trainer_guards.leave_open_epoch(checkpoint)
        checkpoint["tokens_seen"] = tokens = self._tokens_taken()
        trainer = trainer_guards.saving_trainer()
        if trainer_guards.has_other_weights(trainer, self._weights_of, tokens):
            checkpoint["evaluated"] = True

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore ``tokens_seen``, and convert optimizer state from parameter names to numbers.

        Raises:
            ValueError: the checkpoint is of another config, or lacks the position in the documents.
        """
        seen = whole("the checkpoint's tokens_seen", checkpoint.get("tokens_seen", 0), 0)
        fits = self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        if self._trainer is not None:
            self.compare_config(checkpoint)
        if fits:
            self.require_position(checkpoint)
        # Only now: what is refused leaves the counts, which another Trainer may save.
        self.tokens_seen, self._counted = seen, (0, 0, 0)
        self._weights_of = trainer_guards.fit_of(self.trainer, self._weights_of) if fits else None
        if fits and (states := checkpoint.get("optimizer_states")):
            checkpoint["optimizer_states"] = numbered(self, states)


def _betas(given: Any) -> tuple[float, float]:
    if isinstance(given, Iterable) and not isinstance(given, str):
        first, *rest = [number("betas", each, 0) for each in given] or [1.0]
        if len(rest) == 1 and max(first, *rest) < 1:
            return first, rest[0]
    raise ValueError(f"betas={given!r}. Give two numbers from 0 to below 1, as in (0.9, 0.95).")
