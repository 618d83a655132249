"""How parameters are split, as data: exact placements and shapes by style."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from torch.distributed.tensor import Replicate, Shard

from lightning_wlb.models.huggingface.tensor_parallel import (
    Split,
    output_is_sum,
    split_of,
)

PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
    "layers.*.mlp.odd": "diagonal",
}


@pytest.mark.parametrize(
    ("name", "shape", "on_two", "on_four"),
    [
        ("layers.0.self_attn.q_proj.weight", (32, 16), Shard(0), Shard(0)),
        ("layers.0.self_attn.q_proj.bias", (32,), Shard(0), Shard(0)),
        ("layers.11.self_attn.k_proj.weight", (16, 16), Shard(0), Replicate()),
        ("layers.0.self_attn.o_proj.weight", (16, 32), Shard(1), Shard(1)),
        ("layers.0.self_attn.o_proj.bias", (16,), Replicate(), Replicate()),
        ("layers.0.self_attn.q_norm.weight", (8,), Replicate(), Replicate()),
        ("layers.0.mlp.experts.gate_up_proj", (4, 48, 16), Shard(2), Shard(2)),
        ("layers.0.mlp.experts.down_proj", (4, 16, 24), Shard(2), Shard(2)),
        ("layers.0.mlp.gate.weight", (4, 16), Replicate(), Replicate()),
        # LoRA: A x, then B: the product is split like the matrix beside it.
        ("layers.0.self_attn.q_proj.lora_A.default.weight", (2, 16), Replicate(), Replicate()),
        ("layers.0.self_attn.q_proj.lora_B.default.weight", (32, 2), Shard(0), Shard(0)),
        ("layers.0.self_attn.k_proj.lora_B.default.weight", (16, 2), Shard(0), Replicate()),
        ("layers.0.self_attn.o_proj.lora_A.default.weight", (2, 32), Shard(1), Shard(1)),
        ("layers.0.self_attn.o_proj.lora_B.default.weight", (16, 2), Replicate(), Replicate()),
        ("layers.0.self_attn.q_proj.base_layer.weight", (32, 16), Shard(0), Shard(0)),
    ],
)
def test_placements(name, shape, on_two, on_four):
    split = split_of(name, shape, PLAN, kv_heads=2)
    assert split.placement(2) == on_two
    assert split.placement(4) == on_four


def test_packed_parameters_are_held_with_the_two_matrices_apart():
    split = split_of("layers.0.mlp.experts.gate_up_proj", (4, 48, 16), PLAN, kv_heads=2)
    assert split.held_shape((4, 48, 16)) == (4, 2, 24, 16)


@pytest.mark.parametrize("name", ["layers.0.mlp.odd.weight", "layers.0.mlp.experts.bias"])
def test_a_style_that_says_nothing_of_a_parameter_is_refused(name):
    with pytest.raises(ValueError, match="Use tensor_parallel_size=1"):
        split_of(name, (4, 16), PLAN, kv_heads=2)


def test_a_block_is_a_sum_unless_something_whole_writes_the_hidden_size():
    rowwise = (Split("rowwise", 1), (16, 24))
    bias = (Split("rowwise", once=True), (16,))
    router = (Split("replicate"), (4, 16))
    shared = (Split("replicate"), (16, 24))
    behind = (Split("behind rowwise"), (16, 2))
    assert output_is_sum(16, [rowwise, bias, router, behind])
    assert not output_is_sum(16, [rowwise, shared])
