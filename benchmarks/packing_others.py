"""What a user would take instead, on the same lengths: verl's and Megatron Core's balancing.

* verl: ``verl.utils.seqlen_balancing.get_seqlen_balanced_partitions``, Karmarkar-Karp over its own
  estimate of work, with more micro-batches until all fit the token limit and small micro-batches at
  both ends, as its ``rearrange_micro_batches`` does.
* Megatron Core 0.16: ``BalancedCPScheduler`` of the hybrid context-parallel schedule, which
  spreads each sequence over as many ranks of DP × CP as its length needs, in groups that run one
  after another. It has no pipeline, so it is compared by the balance of 16 ranks.

Both packages are installed without their dependencies into a temporary folder that is removed
afterwards, and only these files of theirs are imported, with empty modules in place of what they
import and the functions here do not use.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.packing_runs import STAGES, loads_of, run
from benchmarks.workloads import REFERENCE_WORK
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Slice
from lightning_wlb.planning import DataSettings
from lightning_wlb.planning.plan_scoring import WorkScorer
from lightning_wlb.planning.replica_plans import replica_plan

RANKS = 16
PACKAGES = ("verl", "megatron-core>=0.16,<0.17")
_UNUSED = {
    "verl.protocol": ("DataProto",),
    "verl.utils": ("tensordict_utils",),
    "verl.utils.device": ("get_device_name",),
    "megatron.core": ("parallel_state",),
    "megatron.core.rerun_state_machine": ("RerunDataIterator",),
}


def compare(lengths: np.ndarray, window: int, cap: int, steps: int) -> list[dict[str, Any]]:
    """Both packages on the global batches of ``steps`` steps of 4 windows, without delay.

    Args:
        lengths: tokens of each document, at most ``window``.
        window: C.
        cap: tokens that verl may put into a micro-batch.
        steps: how many global batches.

    Returns:
        One row each, with version and figures; empty if they cannot be installed.
    """
    data = DataSettings(window, 4, packing="best_fit")
    batches = []
    for step in run(lengths, data, Mesh()):
        batches.append([piece.tokens for piece in step.pieces])
        if len(batches) == steps:
            break
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
        if subprocess.run([*command, *PACKAGES], check=False).returncode:
            return []
        root = Path(folder)
        verl = _load(root, "verl/utils/seqlen_balancing.py")
        megatron = _load(root, "megatron/core/pipeline_parallel/hybrid_cp_schedule.py")
        versions = {
            path.name.split("-")[0]: path.name.split("-")[1].removesuffix(".dist")
            for path in root.glob("*.dist-info")
        }
        return [
            {"package": "verl", "version": versions["verl"].removesuffix("-info"),
             **_verl(verl, batches, cap)},
            {"package": "megatron-core", "version": versions["megatron_core"],
             **_megatron(megatron, batches, window)},
        ]  # fmt: skip


def _verl(module: Any, batches: list[list[int]], cap: int) -> dict[str, float]:
    scorer = WorkScorer(REFERENCE_WORK, Mesh(pipeline=STAGES))
    spent = work = 0
    degrees = []
    for batch in batches:
        weights = [24576 * tokens + tokens**2 for tokens in batch]  # its calculate_workload
        bins = 4
        while True:
            parts = module.get_seqlen_balanced_partitions(weights, bins, equal_size=False)
            if all(sum(batch[index] for index in part) <= cap for part in parts):
                break
            bins += 1
        parts.sort(key=lambda part: (sum(weights[index] for index in part), part[0]), reverse=True)
        parts = parts[::2][::-1] + parts[1::2]
        packs = [[Slice(index, 0, 0, batch[index]) for index in part] for part in parts]
        replica = replica_plan(packs, 0, "per_sequence")
        total = loads_of(REFERENCE_WORK.total, replica)
        spent += scorer([replica]).time
        work += sum(total)
        degrees.append(max(total) * len(total) / sum(total))
    return {
        "time_over_work": round(spent / work, 4),
        "imbalance_mean": round(float(np.mean(degrees)), 4),
        "imbalance_p99": round(float(np.percentile(degrees, 99)), 4),
    }


def _megatron(module: Any, batches: list[list[int]], window: int) -> dict[str, float]:
    """Σ over groups of the busiest rank's work, over the mean; a rank holds C/8 tokens."""
    scheduler = module.BalancedCPScheduler(window // 8, types.SimpleNamespace(size=lambda: RANKS))
    degrees, spent, work = [], 0.0, 0.0
    for batch in batches:
        groups, _ = scheduler.get_groups_and_subsamples(list(enumerate(batch)), None)
        busiest = total = 0.0
        for group in groups:
            # A sequence is listed by each of the ranks that share it.
            loads = [
                sum(REFERENCE_WORK.total(tokens) / scheduler.gpus_needed(tokens) for tokens in rank)
                for rank in group
            ]
            busiest += max(loads)
            total += sum(loads)
        degrees.append(busiest * RANKS / total)
        spent, work = spent + busiest, work + total / RANKS
    return {
        "ranks": RANKS,
        "imbalance_mean": round(float(np.mean(degrees)), 4),
        "imbalance_p99": round(float(np.percentile(degrees, 99)), 4),
        "imbalance_aggregate": round(spent / work, 4),
    }


def _load(root: Path, path: str) -> Any:
    """Import one file, with empty modules for what it imports from its own package."""
    for name, members in _UNUSED.items():
        module = types.ModuleType(name)
        for member in members:
            setattr(module, member, None)
        for depth in range(1, name.count(".") + 1):
            parent = ".".join(name.split(".")[:depth])
            sys.modules.setdefault(parent, types.ModuleType(parent))
        sys.modules[name] = module
        for member in members:
            sys.modules.setdefault(f"{name}.{member}", types.ModuleType(f"{name}.{member}"))
    name = path.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, root / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
