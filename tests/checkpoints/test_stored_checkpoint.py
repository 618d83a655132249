"""What one process reads of a checkpoint, and what it refuses."""

import os
import shutil

import pytest
import torch
from torch import nn

from lightning_wlb.checkpoints import manifest, sharded, writing
from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint
from lightning_wlb.models.language_module import LanguageModule

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
        writing.write(path, sharded.collect(layers, [optimizer], GIVEN, {}))
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
    layers = nn.Linear(1, 1)
    writing.write(tmp_path / "run.ckpt", sharded.collect(layers, [], {}, {}))
    with pytest.raises(ValueError, match=r"weights_only=False: .* is a folder"):
        LanguageModule.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=False)
    shard = tmp_path / "run.ckpt" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is damaged: __0_0\.distcp has"):
        StoredCheckpoint(tmp_path / "run.ckpt")
    # Objects of classes are never unpickled.
    torch.save({"state_dict": {}, "hyper_parameters": {"model": nn.Linear(1, 1)}}, tmp_path / "o")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        StoredCheckpoint(tmp_path / "o")


def test_a_file_that_is_written_anew_while_it_is_read_is_refused(tmp_path):
    """As Lightning does if its temporary folder is on another file system."""
    file, later = tmp_path / "last.ckpt", tmp_path / "later.ckpt"
    for path, value in ((file, 1.0), (later, 2.0)):
        values = torch.full((9,), value)
        torch.save({"state_dict": {"a": values, "b": values[3:], "c": {"version": 3}}}, path)
    stored = StoredCheckpoint(file)
    first, rest, own = stored.read(["a", "b", "c"]).values()
    # What shares a storage does in the copy: else a small file could ask for 64 times its size.
    assert first.untyped_storage().data_ptr() == rest.untyped_storage().data_ptr()
    assert own == {"version": 3}
    os.replace(shutil.copy(file, tmp_path / "same"), file)
    assert stored.read(["a"])["a"].eq(1).all(), "the file that was opened is as it was"
    stored = StoredCheckpoint(file)
    shutil.copyfile(later, file)
    with pytest.raises(manifest.Damaged, match=r"last\.ckpt was replaced while it was read"):
        stored.read(["a"])
    assert first.eq(1).all()
