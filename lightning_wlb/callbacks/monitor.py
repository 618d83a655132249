"""ImbalanceMonitor: how evenly the mesh works, measured while it trains.

Every rank times the forward and the backward of each of its micro-batches (the executor's
stopwatch). At the end of a step one all-gather of 32 bytes per micro-batch and rank brings the
times together, and every rank computes the same figures. The sizes are known beforehand from the
plan, which also names the pipelines of a step that leaves the mesh (``WLBStrategy(dynamic=...)``).

Cost: two clock readings per action and attention kernel, one small collective per step. On CUDA
it waits for the end of a step, which the executor does in any case to share the loss.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console

from lightning_wlb.argument_checks import flag, whole
from lightning_wlb.callbacks import imbalance
from lightning_wlb.callbacks.heat_map import HeatMap
from lightning_wlb.callbacks.run_summary import (
    LEVELS,
    Records,
    StepRecord,
    ranks_in_words,
    strategies_table,
    summary_table,
)
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.distributed.process_groups import gather_from_all_ranks
from lightning_wlb.heterogeneous.planning.pool import Pool
from lightning_wlb.mesh import ONE_DEVICE
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import Schemes, StepPlan
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.prediction.step import StepPrediction
from lightning_wlb.profiling.device import peak_flops
from lightning_wlb.strategy.checks import data_module_of
from lightning_wlb.strategy.wlb import WLBStrategy
from lightning_wlb.training.precision import name_of


class ImbalanceMonitor(L.Callback):
    """Measures, logs and reports imbalance, delay and throughput.

    Logs after every step, to any logger, as ``wlb/...``: ``imbalance_pipeline``,
    ``imbalance_data``, ``imbalance_context`` (1 = balanced; docs/design.md says what they are),
    ``imbalance_pipeline_planned`` and ``imbalance_data_planned`` (from the plan's FLOPs),
    ``delay_mean`` and ``delay_max`` (steps), ``tokens``, ``target_tokens``, ``step_seconds``,
    ``tokens_per_second_per_device``, ``tflops_per_device``, ``mfu`` where the device's
    peak is known, and ``loader_wait_seconds``; where steps may leave the mesh also ``strategy``,
    its number in ``WLBStrategy.dynamic``, from 1 on, or 0 for the mesh. Step time excludes the wait
    for the data loader. This wait is for the step's own batch, on the rank that waited longest;
    Lightning prefetches one batch, so the wait took place before the previous step. At the end of
    fit, rank 0 prints a table (one more by strategy if steps leave the mesh) and writes a heat map.

    Args:
        heat_map: whether to write a heat map, or the path of the PNG file. By default it is
            ``imbalance.png`` in the logger's folder, without a logger in ``default_root_dir``.
        warm_up_steps: how many first steps on each strategy are left out of the measured figures of
            the tables and of :meth:`summary`.
        profile: device profile to predict every step with, by name (``lightning-wlb plan --help``
            lists them), path or object; for ``wlb/..._predicted`` in the log, and in the table.

    Attributes:
        heat_map_path: where the heat map was written, on rank 0 once fit has ended; None: nowhere.

    Raises:
        MisconfigurationException: the Trainer runs another strategy.
        ValueError: ``warm_up_steps`` is negative.
    """

    def __init__(
        self,
        heat_map: bool | str | Path = True,
        warm_up_steps: int = 2,
        profile: str | Path | Profile | None = None,
    ) -> None:
        super().__init__()
        self.heat_map = heat_map if isinstance(heat_map, str | Path) else flag("heat_map", heat_map)
        self.warm_up_steps = whole("warm_up_steps", warm_up_steps, 0)
        self.profile = Profile.load(profile) if isinstance(profile, str | Path) else profile
        self._predictor: Predictor | None = None
        self._pool: Pool | None = None
        self._strategies: tuple[Schemes, ...] = ()
        self.heat_map_path: Path | None = None
        self._records: Records | None = None
        self._drawing: HeatMap | None = None
        self._mesh = ONE_DEVICE
        self._begin = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a strategy that does not run step plans."""
        if stage == "fit" and not isinstance(trainer.strategy, WLBStrategy):
            raise MisconfigurationException(
                f"ImbalanceMonitor measures the step plans that WLBStrategy runs, but the Trainer"
                f" has {type(trainer.strategy).__name__}. Use Trainer(strategy='wlb') after"
                " `import lightning_wlb`; it works with one device too."
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to measure, and forget the run before."""
        strategy = trainer.strategy
        assert isinstance(strategy, WLBStrategy)
        strategy.executor.measure()
        self._mesh = strategy.mesh
        dtype = trainer.precision_plugin.compute_dtype  # type: ignore[attr-defined]
        peak = peak_flops(strategy.root_device, dtype)
        self._records = Records(self._mesh.devices, peak, self.warm_up_steps)
        self._drawing = HeatMap(self._mesh) if self.heat_map and trainer.is_global_zero else None
        self.heat_map_path = None
        self._predictor, self._pool, self._strategies = None, None, strategy.planning.schemes
        data = data_module_of(trainer)
        if self.profile is not None and data is not None:
            self.profile.check(
                device_type=strategy.root_device.type,
                dtype=name_of(strategy.executor.pipeline.dtype),
            )
            assert isinstance(pl_module, LanguageModule)
            self._predictor = replace(
                strategy.planning.context(data), profile=self.profile, shape=pl_module.model_shape
            ).predictor
        if self._strategies and self._predictor is not None:
            self._pool = Pool.of(self._strategies, self._predictor)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the step's clock."""
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Gather every rank's timings, keep the step's figures and log them. Collective."""
        assert self._records is not None
        assert isinstance(batch, StepBatch)
        assert isinstance(trainer.strategy, WLBStrategy)
        plan = batch.plan
        shapes = imbalance.shapes_of(plan, self._mesh)
        counts = [len(replica.forward) for replica in plan.replicas]
        elapsed = time.perf_counter() - self._begin
        own = imbalance.rank_timings(trainer.strategy.executor.timings(), max(counts))
        mine = torch.tensor([elapsed, batch.wait_seconds, *own.ravel()], dtype=torch.float64)
        everyone = gather_from_all_ranks(mine.to(trainer.strategy.root_device)).cpu().numpy()
        elapsed, wait = everyone[:, :2].max(axis=0).tolist()
        timings = imbalance.in_pipelines(everyone[:, 2:].reshape(-1, *own.shape), shapes)
        work = Work.of(pl_module.model_shape)  # type: ignore[arg-type]
        step = self._predicted(plan)
        record = StepRecord(
            tokens=plan.tokens,
            target_tokens=plan.target_tokens,
            delay_mean=plan.delay,
            delay_max=plan.max_delay,
            drain=plan.drain,
            flops=sum(work.total(piece.tokens) for piece in plan.pieces),
            seconds=elapsed,
            wait=wait,
            seconds_predicted=float("nan") if step is None else step.total_ns / 1e9,
            levels=(
                *imbalance.measured_imbalance(timings, imbalance.slots(plan)),
                *imbalance.planned_imbalance(plan, work),
                *(imbalance.UNKNOWN if step is None else imbalance.predicted_imbalance(step)),
            ),
        )
        number = 1 + self._strategies.index(plan.schemes) if plan.schemes else 0
        timed = self._records.add(record, number)
        if timed and self._drawing is not None:
            self._drawing.add(plan.step, timings, counts, elapsed, plan.schemes)
        figures = self._records.rates(record.tokens, record.flops, record.seconds)
        if self._strategies:
            figures["strategy"] = number
        pl_module.log_dict({**_logged(record, figures), **_epochs(batch.state)}, batch_size=1)

    def _predicted(self, plan: StepPlan) -> StepPrediction | None:
        """The step as the profile predicts it; None without a profile."""
        if self._predictor is None:
            return None
        if not plan.schemes:
            return self._predictor.predict(plan)
        assert self._pool is not None
        return self._pool.predict(plan, self._predictor)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table and write the heat map, on rank 0."""
        # log_dir is a collective: every rank asks for it.
        folder = trainer.log_dir or trainer.default_root_dir
        if not trainer.is_global_zero or self._records is None or not len(self._records):
            return
        sizes = asdict(self._mesh)
        if self._drawing is not None and self._drawing.steps:
            asked = self.heat_map
            path = Path(folder) / "imbalance.png" if asked is True else Path(str(asked))
            try:
                self._drawing.draw(path, f"Compute and waiting by rank, {ranks_in_words(sizes)}")
                self.heat_map_path = path.absolute()
            except (OSError, ValueError) as error:  # it must not prevent a save that follows fit
                rank_zero_warn(f"The heat map {path} was not written: {error}.")
        console = Console(markup=False)
        console.print(summary_table(self.summary(), sizes))
        if self._strategies:
            console.print(strategies_table(self.strategies()))
        if self.heat_map_path is not None:
            console.print(f"Heat map: {self.heat_map_path}", soft_wrap=True, highlight=False)

    def summary(self) -> dict[str, float]:
        """The run so far in plain numbers, which are the same on every rank.

        Returns:
            * ``steps``, ``timed_steps`` (without warm-up), ``tokens``, ``target_tokens``,
              ``tokens_per_step``, ``tokens_per_step_spread`` (standard deviation over mean);
            * ``seconds_per_step``, ``seconds_per_step_p99``, ``seconds_per_million_tokens``,
              ``tokens_per_second_per_device``, ``tflops_per_device``, and ``mfu`` where known, from
              the sums over the timed steps;
            * ``seconds_per_million_tokens_median``, ``tflops_per_device_median``: over timed steps;
            * ``loader_wait_seconds``, ``loader_wait_seconds_p99`` per timed step, and
              ``loader_wait_share``, its share of wait and step time together;
            * ``seconds_per_step_predicted``, not a number without a profile;
            * ``delay_mean`` (over tokens, drain included) and ``delay_max`` in steps,
              ``drain_steps`` and, where there are any, ``delay_mean_drain`` (over their tokens);
            * ``imbalance_<level>_mean``, ``_p99`` and ``_aggregate`` for the levels ``pipeline``,
              ``data``, ``context`` (measured, timed steps), ``pipeline_planned``,
              ``data_planned`` (FLOPs, all steps), and the three with ``_predicted`` (timed steps,
              not a number without a profile).

            A figure is not a number where there is nothing to divide by.

        Raises:
            RuntimeError: before the first fit.
        """
        if self._records is None:
            raise RuntimeError("ImbalanceMonitor.summary() has no steps yet: call trainer.fit.")
        return self._records.summary()

    def strategies(self) -> list[dict[str, Any]]:
        """The strategies that steps have taken, in plain data that is the same on every rank.

        Returns:
            For each strategy: its number ``strategy`` in ``WLBStrategy.dynamic``, from 1, or 0 for
            the mesh, and the figures of :meth:`summary` over its steps. Empty without ``dynamic``.

        Raises:
            RuntimeError: before the first fit.
        """
        if self._records is None:
            raise RuntimeError("ImbalanceMonitor.strategies() has no steps yet: call trainer.fit.")
        numbers = range(len(self._strategies) + 1) if self._strategies else ()
        found = [{"strategy": number, **self._records.summary(number)} for number in numbers]
        return [each for each in found if each["steps"]]


def _logged(record: StepRecord, figures: dict[str, float]) -> dict[str, float]:
    """One step's figures by the names under which they are logged."""
    levels = zip(LEVELS, record.levels, strict=True)
    every = {
        **{f"imbalance_{name}": level.degree for name, level in levels},
        "step_seconds": record.seconds,
        "step_seconds_predicted": record.seconds_predicted,
        "loader_wait_seconds": record.wait,
        "delay_mean": record.delay_mean,
        "delay_max": record.delay_max,
        "tokens": record.tokens,
        "target_tokens": record.target_tokens,
        **figures,
    }
    # A figure is NaN if nothing was predicted or, without our kernel, no attention was timed.
    return {f"wlb/{name}": float(value) for name, value in every.items() if not np.isnan(value)}


def _epochs(state: dict[str, Any]) -> dict[str, float]:
    """The number of passes over each store of a mixture, parts of a pass included."""
    return {
        f"wlb/epoch/{name}": standing["passes"] + standing["position"] / standing["documents"]
        for name, standing in state.get("mixture", {}).items()
    }
