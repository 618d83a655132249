"""Stored tensors as transformers' conversions put them together."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from lightning_wlb.models.huggingface.folder import Folder
from lightning_wlb.models.huggingface.sources import Converted, Tiles, find_sources
from tests.models.huggingface.configs import tiny
from tests.models.huggingface.folders import write


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", Tiles),
        # Renamed, stacked and joined.
        ("mixtral", "model.layers.1.mlp.experts.gate_up_proj", Tiles),
        ("qwen2_moe", "model.layers.1.mlp.experts.down_proj", Tiles),
        # One stored tensor is several parameters: transformers cuts it.
        ("hrm_text", "model.L_module.layers.0.mlp.up_proj.weight", Converted),
    ],
)
def test_a_rectangle_of_a_parameter(family, name, kind, tmp_path):
    model = write(tmp_path, tiny(family))
    whole = model.state_dict()[name]
    source = find_sources(Folder(tmp_path), model)[name]
    assert isinstance(source, kind)
    assert source.shape == tuple(whole.shape)
    # Across experts and across the two matrices of a joined parameter.
    box = tuple(slice(size // 4, size - size // 5) for size in whole.shape)
    target = torch.full_like(whole[box], torch.nan)
    source.copy_to(target, box)
    assert torch.equal(target, whole[box])


def test_every_parameter_and_nothing_else_has_a_source(tmp_path):
    for family in ("llama", "mixtral", "hrm_text"):
        model = write(tmp_path / family, tiny(family))
        assert set(find_sources(Folder(tmp_path / family), model)) == set(model.state_dict())
