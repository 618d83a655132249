"""Styles of splitting that are refused, and blocks whose output is a sum.

The placements themselves are held by tests/models/huggingface/test_meshes.py.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from lightning_wlb.models.huggingface.tensor_parallel import Split, output_is_sum, split_of

PLAN = {"layers.*.mlp.experts": "moe_tp_experts", "layers.*.mlp.odd": "diagonal"}


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
