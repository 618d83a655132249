"""Small checkpoints, and what a stranger may do to them."""

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import nn

from lightning_wlb.checkpoints import manifest, sharded, writing


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = str(made)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.made,)


def list_anew(folder: Path) -> None:
    """Give a changed folder a manifest that fits it, as whoever changed it can."""
    save = manifest.read(folder).save
    (folder / manifest.NAME).unlink()
    files = {each.name: manifest.durable(each) for each in folder.iterdir()}
    manifest.write(folder, manifest.Manifest(manifest.CHECKPOINT, save, 1, 0, files))


def poison(path: Path, way: str, made: Path) -> None:
    """Put something that makes a folder when it is unpickled into a checkpoint that verifies."""
    stored = pickle.loads((path / ".metadata").read_bytes())
    if way == "metadata":
        stored.planner_data["extra"] = Hostile(made)
        (path / ".metadata").write_bytes(pickle.dumps(stored))
    elif way == "rest":
        rest = torch.load(path / "meta.pt", weights_only=True)
        torch.save(rest | {"callbacks": Hostile(made)}, path / "meta.pt")
    else:
        # In the place of a learning rate, whose entry has more than enough bytes.
        place = next(p for index, p in stored.storage_data.items() if index.fqn.endswith(".lr"))
        entry = pickle.dumps(Hostile(made))
        shard = bytearray((path / place.relative_path).read_bytes())
        shard[place.offset : place.offset + len(entry)] = entry
        (path / place.relative_path).write_bytes(shard)
    list_anew(path)


def model(value: float, width: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, all of whose numbers follow from one."""
    layers = nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=value)
    for parameter in layers.parameters():
        nn.init.constant_(parameter, value)
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return layers, optimizer


def save(path: Path, value: float, width: int = 2) -> None:
    """Save the model of a value, after as many steps."""
    layers, optimizer = model(value, width)
    writing.write(
        path, sharded.collect(layers, [optimizer], {"global_step": int(value), "value": value}, {})
    )


def load(path: Path, width: int = 2) -> float:
    """The value whose model a folder holds; fails where parts of it are of different ones."""
    layers, optimizer = model(0.5, width)
    rest = sharded.load(path, layers, [optimizer], {})
    value = rest["value"]
    wanted, settings = model(value, width)
    assert rest == {"global_step": int(value), "value": value}
    for name, each in wanted.state_dict().items():
        assert torch.equal(layers.state_dict()[name], each), name
    mine, theirs = optimizer.state_dict(), settings.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        for name, each in state.items():
            assert torch.equal(mine["state"][index][name], each), name
    return value


def as_one_file(folder: Path, file: Path) -> None:
    """What Lightning's ``consolidate_checkpoint`` makes of a folder."""
    torch.save(_format_checkpoint(_load_distributed_checkpoint(folder)), file)


def write(path: Path, step: int, time: float, **rest: object) -> Path:
    with patch.object(manifest.time, "time", lambda: time):
        writing.write(
            path, sharded.collect(torch.nn.Linear(1, 1), [], {"global_step": step, **rest}, {})
        )
    return path


def written(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def archive(content: bytes, compression: int = zipfile.ZIP_STORED, value: Any = 0) -> io.BytesIO:
    """What torch writes of a value, with another pickle in it."""
    made = io.BytesIO()
    with zipfile.ZipFile(written(value)) as old, zipfile.ZipFile(made, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("data.pkl") else old.read(name))
    made.seek(0)
    return made


class Called:
    """Calls something when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call
