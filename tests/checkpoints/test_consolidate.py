"""What consolidation refuses, and what it leaves behind. (What it writes: test_sharded.py.)"""

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_wlb.checkpoints import consolidate, sharded, writing
from lightning_wlb.checkpoints.consolidate import StoredCheckpoint
from lightning_wlb.cli.main import main
from lightning_wlb.models.language_module import LanguageModule
from tests.checkpoints.small_checkpoints import write


@pytest.fixture
def source(tmp_path) -> Path:
    return write(tmp_path / "run.ckpt", 3, 1.0, hyper_parameters={"size": 1})


def test_weights_alone_and_the_default_name(source, capsys):
    assert main(["consolidate", str(source)]) == 0
    file = source.with_name("run.ckpt.consolidated")
    whole = torch.load(file, weights_only=True)
    assert whole["global_step"] == 3
    assert whole["hyper_parameters"] == {"size": 1}
    assert set(whole) == {"global_step", "hyper_parameters", "state_dict"}, "nothing of ours"
    want = torch.nn.Linear(1, 1)
    sharded.load(source, want, [], {}, None)
    assert {name: float(value) for name, value in whole["state_dict"].items()} == {
        name: float(value.detach()) for name, value in want.named_parameters()
    }
    assert f"{file}: {file.stat().st_size:,} bytes" in capsys.readouterr().out
    assert main(["consolidate", str(source)]) == 2
    assert "exists. Give another file, or --force to replace it." in capsys.readouterr().err
    file.write_text("old")
    assert main(["consolidate", str(source), "--force"]) == 0
    assert torch.load(file, weights_only=True)["global_step"] == 3


def test_what_is_refused(source, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"is not a folder\. Give the one"):
        consolidate.write_file(tmp_path / "nothing.ckpt", tmp_path / "file")
    with pytest.raises(ValueError, match=r"exists\. Give another file\.$"):
        consolidate.write_file(source, tmp_path, force=True)
    with pytest.raises(ValueError, match="no such folder to write to"):
        consolidate.write_file(source, tmp_path / "nowhere" / "file")
    with pytest.raises(ValueError, match=r"weights_only=False: .* is a folder"):
        LanguageModule.load_from_checkpoint(source, weights_only=False)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        consolidate.write_file(source, tmp_path / "file")
    shard = source / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is damaged: __0_0\.distcp has"):
        consolidate.write_file(source, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["run.ckpt"]


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
    # Objects of classes are never unpickled.
    torch.save({"state_dict": {}, "hyper_parameters": {"model": nn.Linear(1, 1)}}, tmp_path / "o")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        StoredCheckpoint(tmp_path / "o")
