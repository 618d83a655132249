"""Measures what an action of a run costs beside its model: executor, hooks, sums of gradients.

A profile of the bare model leaves that out, and micro-batches chosen by it are too small. So the
reference decoder, with one layer and with three, runs micro-batches as a rank of a run does
(:class:`.Step` with :class:`.ParameterBuckets`) and bare, in turn. The difference is the overhead:
so much for each action, and so much per parameter of each backward, which is what three layers take
more than one. Bare backwards add to ``.grad`` in the dtype of the model, so the part per parameter
is what the sums in float32 and the hooks cost beyond that.

Cost: a second on a CPU for layers of width 256. Memory of three layers twice, with gradients.
Messages between ranks are not in it; a profile's links are. The CUDA branch has not run on a
device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_wlb.cost.profile import ActionOverhead
from lightning_wlb.data.loader import StepDataset
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.distributed.process_groups import NO_GROUPS
from lightning_wlb.mesh import Rank
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.planning import DataSettings
from lightning_wlb.profiling.action_stopwatch import Stopwatch, make_stopwatch
from lightning_wlb.schedule.actions import BACKWARD, FORWARD, Action
from lightning_wlb.training.executor import Step
from lightning_wlb.training.gather_and_reduce import ParameterBuckets
from lightning_wlb.training.pipeline_messages import Messages, PipelineRank
from lightning_wlb.training.sharded_parameters import Bucket, shard_over

VOCABULARY = 256
"""Vocabulary of the models that run: small, since a profile measures the ends by themselves."""
ROWS = {"cpu": 32, "cuda": 4096}
"""Tokens of a micro-batch: few, to see the rest; on a GPU enough to hide the time of a launch."""
MICRO_BATCHES = 8
STEPS = 5
"""The first one warms up."""


def measure_overhead(
    config: TransformerConfig,
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "auto",
) -> ActionOverhead:
    """Time that actions of a run take on this device beyond those of the bare model.

    Not collective.

    Args:
        config: of the model whose layers are run.
        device: the one to measure.
        dtype: that the model computes in.
        backend: of attention.
    """
    forward, backward, counts = [], [], []
    with _one_rank(device) as mesh:
        for layers in (1, 3):
            small = replace(config, layers=layers, vocab_size=VOCABULARY, tied_embeddings=False)
            pair = _Pair(small, device, dtype, backend, mesh)
            counts.append(sum(each.numel() for each in pair.bare.parameters()))
            there, back = pair.more_ns()
            forward.append(there)
            backward.append(back)
    each = max(backward[1] - backward[0], 0.0) / (counts[1] - counts[0])
    rest = min(back - each * count for back, count in zip(backward, counts, strict=True))
    return ActionOverhead(
        ns=(float(round(max(min(forward), 0.0))), float(round(max(rest, 0.0)))),
        parameter_ns=float(f"{each:.4g}"),
    )


class _Pair:
    """The same model twice: as a rank of a run has it, and bare."""

    def __init__(
        self,
        config: TransformerConfig,
        device: torch.device,
        dtype: torch.dtype,
        backend: str,
        mesh: DeviceMesh,
    ) -> None:
        def model() -> Transformer:
            with device:  # a host takes seconds to draw a billion parameters
                made = Transformer(config, attention_backend=backend).to(dtype)
            for parameter in made.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
            return made

        self.bare, self.run = model(), model()
        shard_over(self.run, mesh)
        ends = self.run.embed, *self.run.layers.values(), self.run.head
        parts = [each for each in ends if each is not None]
        buckets = [Bucket.of([part], [0], list(part.modules())) for part in parts]
        wide = torch.promote_types(dtype, torch.float32)
        self.buckets = ParameterBuckets(buckets, mesh.get_group(), None, dtype, wide)
        layers, rows = range(config.layers), ROWS[device.type]
        self.pipeline = PipelineRank(Rank(), (layers,), "1f1b", {}, config.dim, dtype, device)
        documents = InMemoryDocuments([np.zeros(rows, np.int64)] * MICRO_BATCHES)
        data = DataSettings(rows, MICRO_BATCHES, packing="best_fit")
        self.batch = next(iter(StepDataset.for_model(documents, data, config.shape))).to(device)

    def more_ns(self) -> tuple[float, float]:
        """How many ns longer a forward and a backward take in a run."""
        samples: dict[tuple[bool, str], list[float]] = {}
        for number in range(STEPS):
            for in_run in (False, True):
                for action, seconds in self._step(in_run):
                    if number:
                        samples.setdefault((in_run, action.kind), []).append(seconds)
        (bare, back), (run, run_back) = (
            (median(samples[kind, FORWARD]), median(samples[kind, BACKWARD]))
            for kind in (False, True)
        )
        return 1e9 * (run - bare), 1e9 * (run_back - back)

    def _step(self, in_run: bool) -> list[tuple[Action, float]]:
        """Seconds of each action of a step."""
        stopwatch = make_stopwatch(self.pipeline.device)
        stopwatch.begin_step()
        if in_run:
            self._run(stopwatch)
        else:
            self._run_bare(stopwatch)
        return [(each.action, each.compute) for each in stopwatch.timings()]

    def _run(self, stopwatch: Stopwatch) -> None:
        pipeline, messages = self.pipeline, Messages(self.pipeline, {})
        program = pipeline.programs(self.batch.plan.replicas, 0)[0]
        step = Step(self.run, pipeline, NO_GROUPS, self.batch, messages, 1)
        with self.buckets.step(program):
            for action in program:
                with stopwatch.action(action), self.buckets.action(action):
                    step.run(action)

    def _run_bare(self, stopwatch: Stopwatch) -> None:
        for number, micro_batch in enumerate(self.batch.micro_batches):
            with stopwatch.action(Action(0, FORWARD, number)):
                out = self.bare(micro_batch)
            with stopwatch.action(Action(0, BACKWARD, number)):
                torch.autograd.backward(out)


@contextmanager
def _one_rank(device: torch.device) -> Iterator[DeviceMesh]:
    """A mesh of this process alone, also among others."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = [dist.get_rank()]
    group = dist.new_group(own, backend="gloo", use_local_synchronization=True)
    try:
        yield DeviceMesh.from_group(group, device.type)
    finally:
        dist.destroy_process_group(None if alone else group)
