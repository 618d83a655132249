"""Styles of splitting that are refused, and blocks whose output is a sum.

The placements themselves are held by tests/models/huggingface/test_meshes.py.
"""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")

from lightning_wlb.models.huggingface.config_and_shape import read_config
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.tensor_parallel import Split, output_is_sum, split_of
from tests.models.huggingface.configs import tiny

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


def test_a_config_file_does_not_say_how_ranks_share_the_work(tmp_path):
    """With such a plan two ranks would count attention twice."""
    fields = tiny("llama").to_dict() | {"base_model_tp_plan": {"layers.*.self_attn": "rowwise"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with torch.device("meta"):
        decoders = [HuggingFaceDecoder(read_config(each)) for each in (tmp_path, tiny("llama"))]
    assert decoders[0]._plan == decoders[1]._plan
