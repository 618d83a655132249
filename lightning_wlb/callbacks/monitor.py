"""ImbalanceMonitor: how evenly the mesh works, measured while it trains.

Put it into a Trainer that runs ``strategy="wlb"``::

    monitor = ImbalanceMonitor()
    trainer = L.Trainer(strategy="wlb", devices=2, callbacks=[monitor])

Every rank times the forward and the backward of each of its micro-batches (the executor's
stopwatch). At the end of a step one all-gather of 32 bytes per micro-batch and rank brings the
times together, and every rank computes the same figures. The plan says how many micro-batches each
replica has, so the sizes are known beforehand.

Cost: two clock readings per action and attention kernel, one small collective per step. On CUDA
the end of a step is waited for, which the executor does in any case to share the loss.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console

from lightning_wlb.arguments import flag, whole
from lightning_wlb.callbacks import imbalance
from lightning_wlb.callbacks.heat_map import HeatMap
from lightning_wlb.callbacks.imbalance import Imbalance
from lightning_wlb.callbacks.measured_vs_predicted import STEPS, departure, run_predictor
from lightning_wlb.callbacks.records import LEVELS, Records, StepRecord
from lightning_wlb.callbacks.table import summary_table
from lightning_wlb.cost.flops import Work
from lightning_wlb.cost.profile import Profile
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.mesh import AXES, ONE_DEVICE, Mesh
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import StepPlan
from lightning_wlb.prediction.executed import units
from lightning_wlb.prediction.predictor import Predictor
from lightning_wlb.profiling.peaks import peak_flops
from lightning_wlb.strategy.executor import Executor
from lightning_wlb.strategy.process_groups import gather_from_all_ranks


class ImbalanceMonitor(L.Callback):
    """Measures, logs and reports imbalance, delay and throughput.

    Logs after every step, to any logger, as ``wlb/...``: ``imbalance_pipeline``,
    ``imbalance_data``, ``imbalance_context`` (1 = balanced; docs/design.md says what they are),
    ``imbalance_pipeline_planned`` and ``imbalance_data_planned`` (from the plan's FLOPs),
    ``delay_mean`` and ``delay_max`` (steps), ``tokens``, ``target_tokens``, ``step_seconds``,
    ``tokens_per_second_per_device``, ``tflops_per_device``, ``mfu`` where the device's
    peak is known, and ``loader_wait_seconds``. Step time excludes the wait for the data loader.
    That wait is for the step's own batch, on the rank that waited longest; Lightning prefetches
    one batch, so it took place before the previous step. At the end of fit, rank 0 prints a table
    and writes a heat map of rank × micro-batch.

    Args:
        heat_map: whether to write a heat map, or the path of the PNG file. By default it is
            ``imbalance.png`` in the logger's folder, without a logger in ``default_root_dir``.
        warm_up_steps: first steps that the measured figures of the table and of
            :meth:`summary` leave out.
        profile: device profile to predict every step with, by name (``lightning-wlb plan --help``
            lists them), path or object. Predicted figures then stand beside the measured ones, as
            ``wlb/..._predicted``, and one warning says if they differ by more than 20 %.

    Attributes:
        heat_map_path: where the heat map was written, on rank 0 once fit has ended.

    Raises:
        MisconfigurationException: if the Trainer runs another strategy.
        ValueError: if ``warm_up_steps`` is negative.
    """

    def __init__(
        self,
        heat_map: bool | str | Path = True,
        warm_up_steps: int = 2,
        profile: str | Path | Profile | None = None,
    ) -> None:
        super().__init__()
        is_path = isinstance(heat_map, str | Path)
        self.heat_map = heat_map if is_path else flag("heat_map", heat_map)
        self.warm_up_steps = whole("warm_up_steps", warm_up_steps, 0)
        self.profile = Profile.load(profile) if isinstance(profile, str | Path) else profile
        self._predictor: Predictor | None = None
        self.heat_map_path: Path | None = None
        self._records: Records | None = None
        self._drawing: HeatMap | None = None
        self._mesh = ONE_DEVICE
        self._begin = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a strategy that does not run step plans."""
        if stage == "fit" and not hasattr(trainer.strategy, "executor"):
            raise MisconfigurationException(
                f"ImbalanceMonitor measures the step plans that WLBStrategy runs, but the Trainer"
                f" has {type(trainer.strategy).__name__}. Use Trainer(strategy='wlb') after"
                " `import lightning_wlb`; it works with one device too."
            )

        if stage == "fit" and getattr(trainer.strategy, "dynamic", None):
            raise MisconfigurationException(
                "ImbalanceMonitor draws and counts the ranks of one mesh, but the Trainer has"
                " WLBStrategy(dynamic=...), whose steps run on pipelines of their own. Remove one"
                " of the two."
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to measure; a run before this one is forgotten."""
        _executor(trainer).measure()
        self._mesh = trainer.strategy.mesh  # type: ignore[attr-defined]
        self._records = Records(self._mesh.devices, _peak_flops(trainer), self.warm_up_steps)
        self._drawing = HeatMap(self._mesh) if self.heat_map and trainer.is_global_zero else None
        self.heat_map_path = None
        self._predictor = None
        if self.profile is not None:
            assert isinstance(pl_module, LanguageModule)
            pipeline = _executor(trainer).pipeline
            reduced = trainer.strategy.reduce_dtype  # type: ignore[attr-defined]
            self._predictor = run_predictor(self.profile, pl_module, self._mesh, pipeline, reduced)

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
        counts = [
            len(units(replica, self._mesh.context, self._mesh.tensor).forward)
            for replica in batch.plan.replicas
        ]
        elapsed, wait, everyone = _all_gather(
            time.perf_counter() - self._begin,
            batch.wait_seconds,
            imbalance.rank_timings(_executor(trainer).timings(), max(counts)),
            trainer.strategy.root_device,
        )
        seconds = imbalance.on_mesh(everyone, self._mesh)
        # Of an asymmetric plan, units ran in place of micro-batches.
        slots = max(batch.plan.micro_batches, sum(counts))
        measured = imbalance.measured_imbalance(seconds, slots)
        work = Work.of(pl_module.model_shape)  # type: ignore[arg-type]
        record = self._record(batch.plan, work, elapsed, wait, measured)
        self._records.add(record)
        if self._drawing is not None and len(self._records) > self.warm_up_steps:
            self._drawing.add(batch.plan.step, seconds, counts, slots)
        if self.profile is not None and len(self._records) == self.warm_up_steps + STEPS:
            warning = departure(self.summary(), self.profile)
            if warning is not None:
                rank_zero_warn(warning)
        rates = self._records.rates(record.tokens, record.flops, record.seconds)
        pl_module.log_dict({**_logged(record, rates), **_epochs(batch.state)}, batch_size=1)

    def _record(
        self, plan: StepPlan, work: Work, seconds: float, wait: float, measured: Imbalance
    ) -> StepRecord:
        """A step's figures: what was measured, what was planned, and what was predicted."""
        predicted_seconds, predicted = float("nan"), imbalance.UNKNOWN
        if self._predictor is not None:
            step = self._predictor.predict(plan)
            predicted_seconds, predicted = step.total_ns / 1e9, imbalance.predicted_imbalance(step)
        return StepRecord(
            tokens=plan.tokens,
            target_tokens=plan.target_tokens,
            delay_mean=plan.delay,
            delay_max=plan.max_delay,
            drain=plan.drain,
            flops=imbalance.step_flops(plan, work),
            seconds=seconds,
            wait=wait,
            seconds_predicted=predicted_seconds,
            levels=(*measured, *imbalance.planned_imbalance(plan, work), *predicted),
        )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table and write the heat map, on rank 0."""
        # A collective: on every rank.
        folder = trainer.log_dir or trainer.default_root_dir
        if not trainer.is_global_zero or self._records is None or not len(self._records):
            return
        if self._drawing is not None and self._drawing.steps:
            asked = self.heat_map
            path = Path(folder) / "imbalance.png" if asked is True else Path(str(asked))
            self._drawing.draw(path, f"Compute per rank and micro-batch, {_mesh_name(self._mesh)}")
            self.heat_map_path = path.absolute()
        console = Console()
        console.print(summary_table(self.summary(), _mesh_name(self._mesh)))
        if self.heat_map_path is not None:
            console.print(f"Heat map: {self.heat_map_path}", soft_wrap=True, highlight=False)

    def summary(self) -> dict[str, float]:
        """The run so far in plain numbers, which are the same on every rank.

        Returns:
            * ``steps``, ``timed_steps`` (without warm-up), ``tokens``, ``target_tokens``,
              ``tokens_per_step``;
            * ``seconds_per_step``, ``seconds_per_step_p99``, ``seconds_per_million_tokens``,
              ``tokens_per_second_per_device``, ``tflops_per_device``, and ``mfu`` where known: of
              the timed steps, in total over total;
            * ``seconds_per_million_tokens_median``, ``tflops_per_device_median``: of each timed
              step, and the median of that;
            * ``loader_wait_seconds``, ``loader_wait_seconds_p99`` per timed step, and
              ``loader_wait_share``, the part of wait and step time together;
            * ``seconds_per_step_predicted``, not a number without a profile;
            * ``delay_mean`` (over tokens, drain included) and ``delay_max`` in steps,
              ``drain_steps`` and, where there are any, ``delay_mean_drain`` (over their tokens);
            * ``imbalance_<level>_mean``, ``_p99`` and ``_aggregate`` for the levels ``pipeline``,
              ``data``, ``context`` (measured, timed steps), ``pipeline_planned``,
              ``data_planned`` (FLOPs, all steps), and the three with ``_predicted`` (timed steps,
              not a number without a profile).

            Not a number where there is nothing to divide by.

        Raises:
            RuntimeError: before the first fit.
        """
        if self._records is None:
            raise RuntimeError("ImbalanceMonitor.summary() has no steps yet: call trainer.fit.")
        return self._records.summary()


def _logged(record: StepRecord, rates: dict[str, float]) -> dict[str, float]:
    """The figures of one step by the name under which they are logged."""
    levels = zip(LEVELS, record.levels, strict=True)
    figures = {
        **{f"imbalance_{name}": level.degree for name, level in levels},
        "step_seconds": record.seconds,
        "step_seconds_predicted": record.seconds_predicted,
        "loader_wait_seconds": record.wait,
        "delay_mean": record.delay_mean,
        "delay_max": record.delay_max,
        "tokens": record.tokens,
        "target_tokens": record.target_tokens,
        **rates,
    }
    # A figure is not a number where nothing was predicted, or where no attention was timed, as in
    # a model without our kernel.
    return {f"wlb/{name}": float(value) for name, value in figures.items() if not np.isnan(value)}


def _epochs(state: dict[str, Any]) -> dict[str, float]:
    """How often each store of a mixture has been passed, parts of a pass included."""
    return {
        f"wlb/epoch/{name}": standing["passes"] + standing["position"] / standing["documents"]
        for name, standing in state.get("mixture", {}).items()
    }


def _mesh_name(mesh: Mesh) -> str:
    """``data 2 × context 4``: the axes that have more than one rank."""
    several = [f"{axis} {size}" for axis, size in zip(AXES, mesh.shape, strict=True) if size > 1]
    return " × ".join(several) or "one device"


def _executor(trainer: L.Trainer) -> Executor:
    executor = trainer.strategy.executor  # type: ignore[attr-defined]
    assert isinstance(executor, Executor)
    return executor


def _peak_flops(trainer: L.Trainer) -> float | None:
    dtype = trainer.precision_plugin.compute_dtype  # type: ignore[attr-defined]
    return peak_flops(trainer.strategy.root_device, dtype)


def _all_gather(
    elapsed: float, wait: float, timings: np.ndarray, device: torch.device
) -> tuple[float, float, np.ndarray]:
    """The longest ``elapsed`` and ``wait`` of all ranks, and their timings [ranks, ...]."""
    mine = torch.tensor([elapsed, wait, *timings.ravel()], dtype=torch.float64, device=device)
    rows = gather_from_all_ranks(mine).cpu().numpy()
    longest = rows[:, :2].max(axis=0)
    return float(longest[0]), float(longest[1]), rows[:, 2:].reshape(-1, *timings.shape)
