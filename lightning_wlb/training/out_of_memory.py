"""Explains a step that runs out of memory: what ran, and which options would take how much less.

The error gets a note, which Python prints below its message. Its bytes are those of the memory
model (``cost/memory_model.py``) if all micro-batches were like the rank's largest; ``lightning-wlb
plan`` says by the same bytes what fits. They are an upper bound of what is modelled, without
fragmentation and communication buffers. For a step that left the mesh the note names the pipeline.

Cost: nothing until there is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args

from lightning_wlb.cost.memory_model import MemoryModel
from lightning_wlb.data.batch import StepBatch
from lightning_wlb.plan import Recompute
from lightning_wlb.prediction.step_memory import StepMemory, most_open
from lightning_wlb.profiling.device import is_out_of_memory
from lightning_wlb.schedule.actions import Action
from lightning_wlb.supervision.progress import PROGRESS
from lightning_wlb.training.cuda_settings import ALLOCATOR, EXPANDABLE, has_expandable_segments
from lightning_wlb.training.executor import Executor
from lightning_wlb.training.pipeline_messages import PipelineRank

_SHOWN = 8
"""Slices that a note names."""


@contextmanager
def noting_out_of_memory(executor: Executor, memory: Callable[[], MemoryModel]) -> Iterator[None]:
    """A context for a training step, which adds a :func:`note` to an out-of-memory error."""
    try:
        yield
    except Exception as error:
        batch = PROGRESS.batch
        if is_out_of_memory(error) and batch is not None:
            error.add_note(note(PROGRESS.action, batch, executor.pipeline, memory()))
        raise


def note(
    action: Action | None, batch: StepBatch, pipeline: PipelineRank, model: MemoryModel
) -> str:
    """A paragraph about a step that ran out of memory in ``action``; None: before the first one."""
    said = f"WLBStrategy: out of memory in step {batch.plan.step}"
    if schemes := batch.plan.schemes:
        said += f", which left the mesh, in the pipeline on {schemes[batch.replica]}"
    own = batch.own_plan
    if action is not None:
        running = own.forward[action.micro_batch]
        slices = own.slices_of(running)
        more = f" and {len(slices) - _SHOWN} more" if len(slices) > _SHOWN else ""
        said += (
            f", action {action}: micro-batch {action.micro_batch} of {own.tokens_of(running)}"
            f" tokens, {running.rows} rows on this rank,"
            f" {' '.join(map(str, slices[:_SHOWN]))}{more}"
        )
    if schemes:
        return f"{said}. Give WLBStrategy(dynamic=...) without these pipelines, or 'off'."
    if not own.forward:
        return f"{said}."
    place = pipeline.rank.pipeline
    program = pipeline.programs(batch.plan.replicas, batch.replica)[place]
    count = most_open(program, pipeline.rank.mesh.virtual_stages)
    parts = StepMemory.of(model, pipeline.stages).rank_parts[place]

    def needed(rows: int, recompute: Recompute) -> int:
        return model.rank_bytes(parts, count, rows, len(own.forward), recompute)

    longest = max(own.forward, key=lambda each: needed(each.rows, each.recompute))
    rows, tokens = longest.rows, own.tokens_of(longest)
    held = needed(rows, longest.recompute)
    choices = {
        f"activation_checkpointing={mode!r}": needed(rows, mode) for mode in get_args(Recompute)
    }
    window, tensor = batch.plan.nominal_tokens // batch.plan.micro_batches, model.mesh.tensor
    if tokens > window:
        fewer = -(-rows * window // tokens // tensor) * tensor
        choices[f"cap={window}"] = needed(fewer, longest.recompute)
    less = sorted(((held - each, option) for option, each in choices.items()), reverse=True)
    options = [f"{option}: {_megabytes(saved)} less" for saved, option in less if saved > 0]
    options.append(
        "a mesh of more ranks for each replica, of which lightning-wlb plan --mesh says more"
    )
    gaps = ""
    if pipeline.device.type == "cuda" and not has_expandable_segments():
        gaps = f" {ALLOCATOR}={EXPANDABLE} leaves fewer gaps between tensors of changing sizes."
    return (
        f"{said}. By the memory model this rank needs {_megabytes(held)}:"
        f" {_megabytes(model.state_bytes(parts))} for parameters, gradients and optimizer state,"
        f" the rest for {count} open micro-batches of {rows} rows. What takes less:"
        f" {'; '.join(options)}.{gaps}"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
