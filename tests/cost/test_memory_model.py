"""The memory model against what autograd saves, and against counted parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_wlb.attention.metadata import AttentionMetadata
from lightning_wlb.cost.communication import communicators, heterogeneous_communicators
from lightning_wlb.cost.memory_model import MemoryModel, StageParts, chunk_rows, usable_bytes
from lightning_wlb.cost.profile import Profile
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.data.batch import MicroBatchTensors
from lightning_wlb.distributed.process_groups import NO_GROUPS, ProcessGroups, group_size
from lightning_wlb.mesh import Mesh
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.tensor_parallel import held, shard_parameters
from lightning_wlb.models.transformer import Transformer
from lightning_wlb.plan import Recompute, Scheme
from lightning_wlb.prediction.micro_batch import MODES
from lightning_wlb.sharding import layout, rank_indices
from tests.models.steps import stage
from tests.ranks import run_ranks

CONFIG = TransformerConfig(dim=64, layers=3, heads=4, kv_heads=2, ffn_dim=176, vocab_size=256)
LAYER = CONFIG.shape.each_layer[0]


def micro_batch(lengths: list[int]) -> MicroBatchTensors:
    plan = layout("per_document_contiguous", lengths, 1, 1)
    indices = rank_indices(plan, 0)
    return MicroBatchTensors(
        tokens=torch.zeros(plan.rows, dtype=torch.int64),
        labels=torch.zeros(plan.rows, dtype=torch.int64),
        positions=torch.from_numpy(indices.offset),
        attention=AttentionMetadata.from_indices(indices, plan.rows, 1),
        rows=plan.rows,
    )


def saved_bytes(
    model: Transformer,
    batch: MicroBatchTensors,
    *,
    hidden: bool,
    groups: ProcessGroups = NO_GROUPS,
) -> int:
    """Bytes of every storage that autograd saves, parameters left out, each once."""
    parameters = {held(p).untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    kept = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    own = batch.rows // group_size(groups.tensor)
    x = torch.randn(own, CONFIG.dim, requires_grad=True) if hidden else None
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model(batch, x, groups=groups)
    storages.setdefault(out.untyped_storage().data_ptr(), out.untyped_storage().nbytes())
    for given in (batch.tokens, batch.labels, batch.positions):
        assert given is not None
        storages.pop(given.untyped_storage().data_ptr(), None)  # there for the whole step
    return sum(storages.values())


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("lengths", [[512], [300, 200, 12], [64] * 5])
def test_a_middle_stage_saves_what_the_model_says(recompute: Recompute, lengths: list[int]) -> None:
    model = stage(Transformer(CONFIG), range(CONFIG.layers))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    batch = replace(micro_batch(lengths), recompute=recompute)
    memory = MemoryModel(CONFIG.shape, dtype="float32", accelerator=False)
    predicted = memory.micro_batch_bytes(StageParts((3,)), batch.rows, recompute)
    assert predicted == saved_bytes(model, batch, hidden=True)


def saved_in_parallel(rank: int) -> list[int]:
    """What a tensor-parallel rank saves, by recomputation, waiting for messages and not."""
    model = stage(Transformer(CONFIG), range(CONFIG.layers))
    model.initialise(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard_parameters(model, mesh, model.tensor_parallel_plan(mesh.size()))
    return [
        saved_bytes(
            model,
            replace(micro_batch([300, 200, 12]), recompute=recompute),
            hidden=True,
            groups=ProcessGroups(tensor=mesh.get_group(), chunks=chunks),
        )
        for recompute in MODES
        for chunks in (None, lambda rows, ranks: 3)
    ]


def test_a_tensor_parallel_rank_saves_what_the_model_says() -> None:
    """Byte for byte; own rows for two half layers, where messages are behind products."""
    plain = MemoryModel(CONFIG.shape, Mesh(tensor=2), dtype="float32", accelerator=False)
    wanted = [
        replace(plain, overlap=overlap).micro_batch_bytes(StageParts((3,)), 512, recompute)
        for recompute in MODES
        for overlap in (False, True)
    ]
    rows = 512 * CONFIG.dim * 4
    lower = [off - on for off, on in zip(wanted[::2], wanted[1::2], strict=True)]
    assert lower == [3 * rows, 3 * rows // 2, 0]
    assert run_ranks(saved_in_parallel, 2) == [wanted] * 2


def test_a_last_stage_saves_what_the_model_says() -> None:
    model = stage(Transformer(CONFIG), [2], head=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    batch = micro_batch([100, 156])
    memory = MemoryModel(CONFIG.shape, dtype="float32", accelerator=False)
    predicted = memory.micro_batch_bytes(StageParts((1,), head=True), batch.rows)
    assert saved_bytes(model, batch, hidden=True) == pytest.approx(predicted, rel=0.01)


def test_parameters_are_those_of_the_module() -> None:
    whole = Transformer(CONFIG)
    memory = MemoryModel(CONFIG.shape)
    parts = StageParts((CONFIG.layers,), embedding=True, head=True)
    assert memory.parameters(parts) == sum(p.numel() for p in whole.parameters())


def test_parameters_shrink_with_tensor_parallelism_but_not_norms_and_scarce_key_heads() -> None:
    one, four = (MemoryModel(CONFIG.shape, Mesh(tensor=size)) for size in (1, 4))
    norms = 2 * 64
    keys = 2 * 64 * 2 * 16  # two key heads over four ranks are replicated
    split = one.parameters(StageParts((1,))) - norms - keys
    assert four.parameters(StageParts((1,))) == split // 4 + norms + keys


def test_state_is_whole_parameters_and_gradients_and_a_shard_of_the_rest() -> None:
    memory = MemoryModel(CONFIG.shape, Mesh(data=2, context=2))
    count = memory.parameters(StageParts((1,)))
    assert count % 4 == 0
    assert memory.state_bytes(StageParts((1,))) == count * (2 + 4) + count // 4 * (4 + 8 + 4)


@pytest.mark.parametrize(
    ("dtype", "rest", "each"),
    [
        ("bfloat16", "float32", 2 + 4 + 12),
        ("bfloat16", "bfloat16", 4 + 6),
        ("float64",) * 2 + (32,),
    ],
)
def test_a_rank_alone_holds_gradients_once_and_copies_parameters_to_another_dtype(
    dtype: str, rest: str, each: int
) -> None:
    memory = MemoryModel(CONFIG.shape, dtype=dtype, rest_dtype=rest)
    assert memory.state_bytes(StageParts((1,))) == memory.parameters(StageParts((1,))) * each


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(context=2), Mesh(tensor=2), Mesh(context=4)])
@pytest.mark.parametrize("recompute", MODES)
def test_the_longest_micro_batch_fits_and_one_more_row_does_not(
    mesh: Mesh, recompute: Recompute
) -> None:
    memory = MemoryModel(CONFIG.shape, mesh)
    parts, available = StageParts((3,), embedding=True), 184_000_000
    tokens = memory.longest_micro_batch(parts, 4, available, 6, recompute)

    def total(rows: int) -> int:
        keys = rows if mesh.context == 1 else rows * mesh.context + rows // 2
        inputs = memory.input_bytes(parts, rows, keys if mesh.context > 1 else 0)
        return (
            memory.state_bytes(parts)
            + 4 * memory.micro_batch_bytes(parts, rows, recompute)
            + 6 * inputs
            + memory.transient_bytes(parts, rows, keys, recompute)
        )

    rows = tokens // mesh.context
    assert total(rows) <= available < total(rows + mesh.tensor)


def test_a_model_whose_state_does_not_fit_has_no_micro_batch() -> None:
    memory = MemoryModel(CONFIG.shape)
    assert memory.longest_micro_batch(StageParts((3,)), 1, 100_000, 1) == 0


def test_inputs_are_what_the_ends_read_positions_and_the_index_of_keys() -> None:
    memory = MemoryModel(CONFIG.shape)
    assert memory.input_bytes(StageParts((1,)), 100, 0) == 8 * 100
    assert memory.input_bytes(StageParts((1,), embedding=True, head=True), 100, 250) == 8 * 550


def test_keys_that_later_slices_read() -> None:
    memory = MemoryModel(CONFIG.shape, dtype="bfloat16")
    keys = 3 * 2 * 10 * 2 * 16  # layers, keys and values, rows, heads, width of a head
    for how in ("none", "selective"):
        assert memory.kept_keys_bytes(StageParts((3,)), 10, how) == 0  # autograd keeps them
    assert memory.key_gradient_bytes(StageParts((3,)), 10) == 4 * keys  # summed in float32
    assert memory.kept_keys_bytes(StageParts((3,)), 10, "full") == 2 * keys


def test_layers_that_differ_are_counted_by_kind() -> None:
    experts = replace(LAYER, feed_forward_parameters=5000, idle_parameters=90_000)
    mixed = ModelShape.of_layers(64, 256, [LAYER, experts, experts])
    model, plain = MemoryModel(mixed), MemoryModel(CONFIG.shape)
    both, first = StageParts((1, 2)), StageParts((1, 0))
    # Idle experts take memory, but nothing of a token is saved for them.
    assert model.parameters(first) == plain.parameters(StageParts((1,)))
    attention = LAYER.attention_parameters + LAYER.vector_parameters
    assert model.parameters(both) - model.parameters(first) == 2 * (attention + 95_000)
    saved = model.micro_batch_bytes(both, 96) - model.micro_batch_bytes(first, 96)
    assert saved == 2 * model.layer_bytes(experts, 96)
    assert plain.layer_bytes(LAYER, 96) - model.layer_bytes(experts, 96) == (
        4 * 96 * (176 - 5000 // (3 * 64)) * 2
    )
    # What lives inside one pass is that of the largest layer that the stage has.
    assert model.transient_bytes(both, 96, 96) == plain.transient_bytes(StageParts((3,)), 96, 96)


def test_tensor_parallel_ranks_share_idle_experts_too() -> None:
    experts = replace(LAYER, idle_parameters=1000)
    one, two = (
        MemoryModel(ModelShape.of_layers(64, 0, [experts]), Mesh(tensor=size)) for size in (1, 2)
    )
    whole, norms = one.parameters(StageParts((1,))), LAYER.vector_parameters
    assert two.parameters(StageParts((1,))) == (whole - norms) // 2 + norms


@pytest.mark.parametrize(
    ("kernel", "kv_heads", "elements"),
    [
        # Queries of 4 heads in float32, three segments with 128 rows more each; heads of 80 are
        # padded to 96, also where gradients of keys and values are added up in float32.
        ("flash_attn 2", 4, 4 * 4 * 96 * (1000 + 3 * 128)),
        ("torch (FlashAttention-2)", 2, 4 * 4 * 96 * (1000 + 3 * 128) + 2 * 2 * 4 * 80 * 1500),
        ("flash_attn 3", 2, 4 * 96 * (4 * (1000 + 3 * 128) + 2 * 2 * (1500 + 3 * 128))),
        ("flash_attn 4", 4, 4 * 4 * 96 * (1000 + 3 * 128)),
        ("", 4, 4 * 4 * 96 * (1000 + 3 * 128)),  # of a profile that does not say
        ("exact", 4, 0),
    ],
)
def test_kernels_on_cuda_add_gradients_up_beside_their_results(
    kernel: str, kv_heads: int, elements: int
) -> None:
    wide = replace(CONFIG, heads=4, kv_heads=kv_heads, head_dim=80).shape
    (layer,) = wide.kinds

    def inside(name: str) -> int:
        return int(
            MemoryModel(wide, kernel=name).layer_transient_bytes(layer, 1000, 1500, "none", 3)
        )

    assert inside(kernel) - inside("cpu") == elements


@pytest.mark.parametrize(
    ("accelerator", "dtype", "rows", "wanted"),
    [
        # float32 logits of 4,096 rows and the same in bfloat16; the matrix' gradient in both.
        (True, "bfloat16", 20_000, 6 * (4096 * 128_256 + 128_256 * 64)),
        (True, "bfloat16", 100, 6 * (100 * 128_256 + 128_256 * 64)),
        (False, "float32", 20_000, 4 * (256 * 128_256 + 128_256 * 64)),
    ],
)
def test_the_loss_head_holds_one_chunk_and_the_gradient_of_its_matrix(
    accelerator: bool, dtype: str, rows: int, wanted: int
) -> None:
    shape = replace(CONFIG.shape, vocab_size=128_256)
    memory = MemoryModel(shape, dtype=dtype, accelerator=accelerator)
    assert memory.transient_bytes(StageParts((0,), head=True), rows, rows) == wanted
    assert memory.transient_bytes(StageParts((0,)), rows, rows) == 0


def test_process_groups_are_counted_on_a_gpu_that_is_too_small_for_them() -> None:
    mesh = Mesh(data=4, pipeline=2, context=2, tensor=2, virtual_stages=2)
    # All ranks, three axes, the ring's four channels, gathering, sets of two and of four replicas.
    assert communicators(mesh) == 1 + 3 + 4 + 1 + 2
    assert [communicators(Mesh()), communicators(Mesh(tensor=2))] == [0, 2]
    assert communicators(Mesh(pipeline=2)) == 1 + 1 + 2
    h100 = Profile.load("h100")
    assert usable_bytes(h100, mesh) == h100.memory_bytes * 92 // 100, "eight percent hold them"
    small = replace(h100, memory_bytes=24 * 10**9)
    assert usable_bytes(small, Mesh()) == 24 * 10**9 * 92 // 100
    # 9.6 MB for each of 24 channels.
    taken = 11 * 24 * (4_194_304 + 4_915_200 + 524_288)
    assert usable_bytes(small, mesh) == 24 * 10**9 * 97 // 100 - taken
    assert usable_bytes(replace(small, memory_bytes=10**9), mesh) == 0
    assert usable_bytes(replace(small, device_type="cpu"), mesh) == 24 * 10**9 * 92 // 100
    each = 24 * (4_194_304 + 4_915_200 + 524_288)
    assert usable_bytes(small, mesh, 14) == usable_bytes(small, mesh) - 3 * each


def test_steps_elsewhere_take_the_groups_of_every_strategy() -> None:
    """On the rank that is in most of them, and those over which parameters travel once."""
    pairs = tuple(Scheme(first, (2, 2)) for first in (0, 2))
    mixed = (Scheme(0, (4,), context=2), Scheme(2, (4,)), Scheme(3, (4,)))
    assert heterogeneous_communicators([]) == 0
    # Two channels, and the pair of pipelines that may share micro-batches; all ranks.
    assert heterogeneous_communicators([pairs]) == 2 + 1 + 1
    assert heterogeneous_communicators([pairs, mixed]) == 2 + 1 + 1 + 1
    assert heterogeneous_communicators([(Scheme(0, (1, 3), 2, 2),)]) == 2 + 1 + 1 + 1


def test_sums_that_travel_narrower_are_copied_for_it() -> None:
    wide = MemoryModel(CONFIG.shape, Mesh(context=4))
    narrow, parts = replace(wide, reduce_dtype="bfloat16"), StageParts((1,))
    held = [each.transient_bytes(parts, 1000, 4500) for each in (wide, narrow)]
    # Keys and values of the rows of all ranks, two heads of 16, in bfloat16.
    assert held[1] - held[0] == 2 * 4000 * 2 * 16 * 2
    exact = replace(wide, dtype="float64")
    assert exact.transient_bytes(parts, 1000, 4500) == replace(
        exact, reduce_dtype="float64"
    ).transient_bytes(parts, 1000, 4500)


@pytest.mark.parametrize(
    ("words", "on_cpu", "on_accelerator"),
    [
        (1, 2**22, 4096),
        (4096, 1024, 4096),
        (16_384, 256, 4096),
        (128_256, 256, 4096),
        (262_144, 256, 2048),
        (2**23, 256, 256),
    ],
)
def test_rows_of_a_chunk(words: int, on_cpu: int, on_accelerator: int) -> None:
    assert chunk_rows(words, accelerator=False) == on_cpu
    assert chunk_rows(words, accelerator=True) == on_accelerator
