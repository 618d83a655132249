"""Whole training steps that others published, as the package predicts them.

A fact says how a run was cut: a replica of data parallelism runs ``micro_batches`` micro-batches of
``sequences`` whole documents of ``sequence`` tokens each, all alike, so one replica is simulated
and stands for all. Parameters are sharded over data × context as this package shards them, whatever
the run did; partial sums travel in bfloat16, as in all these runs.

The package predicts its own executor. :class:`Theirs` leaves out what only this one does (logits
computed twice, gradients added up by a pass of their own) and what a fact says the run did not do:
messages hidden behind products (``hidden``) and products that selective recomputation saved
(``per op``, torchtitan's: every second product of a layer). Clocks follow the cube root of the
power limit (power is voltage² · frequency, and voltage follows frequency), so products and
attention of a device of 500 W are taken to run at 0.89 of their rates at 700 W; element-wise work
follows the data sheet's bandwidth. What else makes a run not comparable is in ``unlike``.

Memory is counted as these runs (FSDP2, optimizer and parameters sharded and gathered anew by each
layer) hold it, with this package's activations: :func:`held_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.published import Fact
from lightning_wlb.cost.flops import head_flops
from lightning_wlb.cost.latency import LatencyModel
from lightning_wlb.cost.memory_model import MemoryModel, StageParts
from lightning_wlb.cost.overlap import Exposed
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.rates import AttentionTable, LinearTable
from lightning_wlb.cost.shape import LayerShape, ModelShape
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import MicroBatch, Recompute, ReplicaPlan, Slice
from lightning_wlb.prediction.predictor import Predictor, model_stages
from lightning_wlb.prediction.step import SimulatedReplicas

GATED = 3
PLAIN = 2
"""Matrices of a feed-forward network."""

MODELS = {
    # name: dim, layers, heads, key/value heads, hidden width, matrices, vocabulary
    "llama-3.1-8b": (4096, 32, 32, 8, 14336, GATED, 128256),
    "llama-3.1-70b": (8192, 80, 64, 8, 28672, GATED, 128256),
    "llama-3.1-405b": (16384, 126, 128, 8, 53248, GATED, 128256),
    "llama-3.1-405b-7": (16384, 7, 128, 8, 53248, GATED, 128256),
    "llama-3.1-405b-21": (16384, 21, 128, 8, 53248, GATED, 128256),
    "llama-3.1-405b-42": (16384, 42, 128, 8, 53248, GATED, 128256),
    "llama-2-7b": (4096, 32, 32, 32, 11008, GATED, 32000),
    "llama-2-13b": (5120, 40, 40, 40, 13824, GATED, 32000),
    "llama-2-34b": (8192, 48, 64, 8, 22016, GATED, 32000),
    "llama-2-70b": (8192, 80, 64, 8, 28672, GATED, 32000),
    "kempner-13b": (5120, 40, 40, 8, 17920, GATED, 128256),
    "kempner-175b": (12288, 96, 96, 8, 39680, GATED, 128256),
    "gpt3-175b": (12288, 96, 96, 96, 49152, PLAIN, 51200),
    "nemotron-15b": (6144, 32, 48, 8, 24576, PLAIN, 256000),
    "nemotron-340b": (18432, 96, 96, 8, 73728, PLAIN, 256000),
    "gpt2-1558m": (1600, 48, 25, 25, 6400, PLAIN, 50304),
    "mpt-1b": (2048, 24, 16, 16, 8192, PLAIN, 50368),
    "mpt-3b": (2560, 32, 20, 20, 10240, PLAIN, 50368),
    "mpt-7b": (4096, 32, 32, 32, 16384, PLAIN, 50368),
    "mpt-13b": (5120, 40, 40, 40, 20480, PLAIN, 50368),
    "mpt-30b": (7168, 48, 56, 56, 28672, PLAIN, 50368),
    "mpt-70b": (8192, 80, 64, 64, 32768, PLAIN, 50368),
    "gpt-1.7b": (2048, 24, 16, 16, 8192, PLAIN, 131072),
    "gpt-7.1b": (4096, 30, 32, 32, 16384, PLAIN, 131072),
    "gpt-16b": (6144, 32, 48, 48, 24576, PLAIN, 131072),
    "gpt-32b": (7168, 48, 56, 56, 28672, PLAIN, 131072),
    "gpt-70b": (8192, 84, 64, 64, 32768, PLAIN, 131072),
    "gpt-119b": (10240, 92, 80, 80, 40960, PLAIN, 131072),
    "gpt-177b": (12288, 96, 96, 96, 49152, PLAIN, 131072),
    "gpt-314b": (16384, 96, 128, 128, 65536, PLAIN, 131072),
    "gpt-462b": (18432, 112, 144, 144, 73728, PLAIN, 131072),
}


def shape_of(name: str) -> ModelShape:
    """The sizes of a model by its name in the tables."""
    dim, layers, heads, kv_heads, hidden, matrices, words = MODELS[name]
    width = dim // heads
    layer = LayerShape(
        heads,
        kv_heads,
        width,
        value_dim=width,
        attention_parameters=2 * dim * width * (heads + kv_heads),
        feed_forward_parameters=matrices * dim * hidden,
        vector_parameters=2 * dim,
    )
    return ModelShape.of_layers(dim, words, [layer] * layers)


PER_OP = "per op"

POWER = 700
MEMORY = {"H100 SXM, HBM2e of 2.4 TB/s": 2.4 / 3.35}
"""Bandwidth of a device's memory over that of the profile's."""


FSDP_COPIES = 2 * (2 + 2) + 2 + 2
"""Bytes of memory traffic of a parameter in a micro-batch, in bfloat16: twice out of the buffer of
an all-gather, and its gradient into that of a reduce-scatter."""


@dataclass(frozen=True)
class Theirs(LatencyModel):
    """The latency model of a run by another program than this package's.

    Args:
        hidden: whether tensor-parallel messages are hidden behind products.
        per_op: whether ``"selective"`` saves every second product.
        plain: width of a feed-forward network without a gate, 0 where it has one. These models
            (MPT, GPT) have no rotary embedding either.
    """

    hidden: bool = False
    per_op: bool = False
    plain: int = 0

    def layer_traffic(self, rows: int, *, backward: bool) -> int:
        """Without gate and rotation: the activation function reads its input and writes once."""
        if not self.plain:
            return super().layer_traffic(rows, backward=backward)
        residual, activation = 10 * self.shape.dim, 2 * self.plain
        each = 2 * (residual + activation) // self.mesh.tensor
        return (1 + backward) * rows * each

    def waits_ns(self, rows: int) -> tuple[Exposed, Exposed]:
        """Nothing, where messages are hidden."""
        return (Exposed(0, 0, 0),) * 2 if self.hidden else super().waits_ns(rows)

    def head_ns(self, rows: int, *, backward: bool) -> int:
        """Without the logits that this package's backward computes again."""
        again = head_flops(self.shape, rows) // self.mesh.tensor if backward else 0
        seconds = self.profile.head.seconds(again, rows, backward=True)
        return super().head_ns(rows, backward=backward) - round(
            seconds / self.profile.sustained * 1e9
        )

    def again_ns(self, rows: int, recompute: Recompute) -> int:
        """Of ``"selective"`` per op: wk, wo, w3, and all that is no product."""
        if recompute != "selective" or not self.per_op:
            return super().again_ns(rows, recompute)
        dim, layer = self.shape.dim, self.layer
        saved = dim * layer.head_width * (layer.heads + layer.kv_heads)  # wq, wv
        saved += 2 * layer.feed_forward_parameters // GATED  # w1, w2
        seconds = self.profile.layer.seconds(
            2 * saved * rows // self.mesh.tensor, rows, backward=False
        )
        return super().again_ns(rows, "full") - round(seconds / self.profile.sustained * 1e9)


def run_on(profile: Profile, device: str, power: int) -> Profile:
    """The profile of a device of another power limit, or another memory."""
    clock = (power / POWER) ** (1 / 3)

    def times(rates: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(rate * clock for rate in rates)

    def products(table: LinearTable) -> LinearTable:
        return replace(table, forward=times(table.forward), backward=times(table.backward))

    def attention(table: AttentionTable) -> AttentionTable:
        forward, backward = (tuple(map(times, rows)) for rows in (table.forward, table.backward))
        return replace(table, forward=forward, backward=backward)

    return replace(
        profile,
        attention=tuple(map(attention, profile.attention)),
        layer=products(profile.layer),
        head=products(profile.head),
        element_bytes_per_second=profile.element_bytes_per_second * MEMORY.get(device, 1.0),
    )


def simulated(fact: Fact) -> tuple[Predictor, SimulatedReplicas]:
    """One replica's step, as the package simulates it on the fact's mesh."""
    sizes = {name: text for name, text in fact.sizes.items() if name not in _BESIDE}
    return _simulated(tuple(sizes.items()))


_BESIDE = ("where", "unlike", "kernel", "rest")


@lru_cache(maxsize=512)
def _simulated(sizes: tuple[tuple[str, str], ...]) -> tuple[Predictor, SimulatedReplicas]:
    run = dict(sizes)
    axes = ("data", "pipeline", "context", "tensor", "virtual")
    mesh = Mesh(*(int(run[axis]) for axis in axes))
    device = run_on(Profile.load(run["profile"]), run["device"], int(run["power"]))
    copied = FSDP_COPIES / device.element_bytes_per_second * 1e9
    copies = copied if run["code"] != "fused" and mesh.data > 1 else 0.0
    per_op = run["recompute"] == PER_OP
    *_, hidden, matrices, _ = MODELS[run["model"]]
    latency = Theirs(
        replace(
            device,
            devices_per_node=int(run["per_node"]),
            action=replace(device.action, parameter_ns=copies),
        ),
        shape_of(run["model"]),
        mesh,
        reduce_dtype="bfloat16",
        compiled=run["code"] != "eager",
        hidden=run["hidden"] == "tensor",
        per_op=per_op,
        plain=hidden if matrices == PLAIN else 0,
    )
    tokens, each, count = (int(run[name]) for name in ("sequence", "sequences", "micro_batches"))
    predictor = Predictor(
        latency,
        tuple(model_stages(latency.shape, mesh.stages, tokens // 2)),
        "interleaved" if mesh.virtual_stages > 1 else "1f1b",
    )
    recompute: Recompute = "selective" if per_op else run["recompute"]  # type: ignore[assignment]
    replica = equal_documents(tokens, each, count, mesh, recompute)
    return predictor, predictor.simulate([replica])


def equal_documents(
    tokens: int, each: int, count: int, mesh: Mesh, recompute: Recompute
) -> ReplicaPlan:
    """A replica's ``count`` micro-batches of ``each`` documents of so many tokens."""
    micro = tuple(
        MicroBatch(
            tuple(range(at * each, (at + 1) * each)),
            "per_document",
            tokens * each // mesh.context,
            (0,),
            recompute,
        )
        for at in range(count)
    )
    documents = tuple(Slice(number, 0, 0, tokens) for number in range(each * count))
    return ReplicaPlan(documents, micro)


def predict(fact: Fact) -> float:
    """Tokens per second of a GPU, the step's seconds, or what a GPU holds."""
    if fact.unit in ("GiB", "GB"):
        return held_bytes(fact) / {"GiB": 2**30, "GB": 1e9}[fact.unit]
    predictor, step = simulated(fact)
    seconds = step.simulations[0].total_ns / 1e9
    if fact.unit == "s":
        return seconds
    tokens = fact.number("sequence") * fact.number("sequences") * fact.number("micro_batches")
    mesh = predictor.latency.mesh
    rate = tokens * mesh.data / seconds / mesh.devices
    if fact.unit == "tokens/s/GPU":
        return rate
    assert fact.unit == "TFLOP/s/GPU", fact
    return rate * megatron_flops(fact["model"], fact.number("sequence")) / 1e12


def held_bytes(fact: Fact) -> float:
    """What FSDP2 holds at the start of the loss's backward, without a pipeline.

    Shards of parameters, gradients and two moments; two layers and the output matrix gathered, and
    its gradient; what the layers saved, as this package counts it; and of each logit what
    ``cross_entropy`` in float32 makes of it: its log-softmax and the gradients of both.
    """
    shape = shape_of(fact["model"])
    data, rows = fact.number("data"), fact.number("sequence") * fact.number("sequences")
    each = 4 if fact["rest"] == "float32" else 2
    model = MemoryModel(shape, Mesh(data), "bfloat16", kernel=Profile.load(fact["profile"]).kernel)
    (count,), (layer,) = shape.kinds.values(), shape.kinds
    whole, one = (
        model.parameters(StageParts((number,), embedding=number > 1, head=number > 1))
        for number in (count, 1)
    )
    per_op = fact["recompute"] == PER_OP
    mode: Recompute = "full" if per_op else fact["recompute"]  # type: ignore[assignment]
    parts = StageParts((count,), embedding=True, head=True)
    saved = model.micro_batch_bytes(parts, rows, mode)
    if per_op:
        # Beside a layer's input the results of wq, wv, attention, w1 and w2, and log-sum-exp.
        widths = 3 * shape.dim + layer.kv_heads * layer.head_width + layer.gated_width(shape.dim)
        saved += count * rows * (2 * widths + 4 * layer.heads)
    words = shape.vocab_size * shape.dim
    gathered = 2 * 2 * one + 2 * 2 * words if data > 1 else 0
    if fact.number("micro_batches") > 1 and data > 1:
        gathered += 2 * whole  # gradients of earlier micro-batches, not yet reduced
    transient = model.transient_bytes(StageParts((count,)), rows, rows, mode)
    return 4 * each * whole / data + gathered + saved + max(12 * rows * shape.vocab_size, transient)


def megatron_flops(model: str, sequence: int) -> float:
    """FLOPs of a token as Megatron-LM counts them for its README: attention without a mask.

    Narayanan et al. 2021 (arXiv:2104.04473), section 5.1, without recomputation.
    """
    dim, layers, *_, words = MODELS[model]
    return 72 * layers * dim**2 * (1 + sequence / (6 * dim) + words / (12 * dim * layers))
