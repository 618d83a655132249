"""Both kinds of checkpoint give out the same weights, a few at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_wlb.checkpoints import sharded
from lightning_wlb.checkpoints.stored import StoredCheckpoint

GIVEN = {"hyper_parameters": {"seed": 3}}


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2, dtype=torch.bfloat16))
    layers.register_buffer("counts", torch.arange(4))
    return layers


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_weights_come_out_by_name_as_they_are_stored(kind, tmp_path):
    layers, path = model(), tmp_path / "one.ckpt"
    if kind == "folder":
        optimizer = torch.optim.AdamW(layers.parameters())
        sharded.save(path, layers, [optimizer], GIVEN, {})
    else:
        torch.save(GIVEN | {"state_dict": layers.state_dict()}, path)
    stored = StoredCheckpoint(path)
    assert stored.hyper_parameters == {"seed": 3}
    assert stored.names == set(layers.state_dict())
    read = stored.read(["0.weight", "1.bias", "counts"])
    assert set(read) == {"0.weight", "1.bias", "counts"}
    for name, value in read.items():
        wanted = layers.state_dict()[name]
        assert value.dtype == wanted.dtype
        assert torch.equal(value, wanted)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a checkpoint"):
        StoredCheckpoint(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"with meta\.pt in it"):
        StoredCheckpoint(tmp_path)
    (tmp_path / "text.ckpt").write_text("text")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        StoredCheckpoint(tmp_path / "text.ckpt")
    torch.save([1], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="it holds a list"):
        StoredCheckpoint(tmp_path / "list.ckpt")
    # Objects of classes are never unpickled.
    torch.save({"state_dict": {}, "hyper_parameters": {"model": nn.Linear(1, 1)}}, tmp_path / "o")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        StoredCheckpoint(tmp_path / "o")
