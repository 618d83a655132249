"""Where in a run a fault can be planted, and what it does there.

A place is a name that the run comes to: ``script`` (a rank's first line), ``start-up`` (launched,
not yet connected), ``prepare_data``, ``setup``, ``train_dataloader``, ``step`` (a batch begins),
``forward`` and ``backward`` (inside the model), ``after backward``, ``optimizer``, ``batch end``,
``validation``, ``saving`` (the Trainer collects state), ``writing`` (a rank writes its shard),
``save: ...`` (one of ``lightning_wlb.checkpoints.atomic_folders.POINTS``), ``state`` (what a
callback saves), ``read`` (a worker reads a document) and ``tokens`` (what it reads). An action is a
function of the :class:`Plant`; of ``tokens``, of the tokens.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import lightning.pytorch as L
import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_wlb.checkpoints import atomic_folders
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from tests.strategy import harness

if TYPE_CHECKING:
    from tests.soak.faults import Fault


class Plant:
    """A fault in one rank of a run; without a fault, or on other ranks, it does nothing."""

    def __init__(self, fault: Fault | None, rank: int, folder: Path) -> None:
        self.fault = fault if fault is not None and rank in fault.ranks else None
        self.rank, self.folder = rank, folder
        # Shared with the loader's workers, which are forked.
        self.step = RawValue(ctypes.c_int, 0)
        self.fired = RawValue(ctypes.c_bool, False)
        self.callback = PlantedCallback(self)
        self.module: L.LightningModule | None = None

    def due(self, place: str) -> bool:
        fault = self.fault
        return fault is not None and fault.place == place and self.step.value >= fault.step

    def at(self, place: str) -> None:
        """The run has come to a place: act if this is where and when."""
        if self.due(place) and not self.fired.value:
            self.mark()
            self.fault.does(self)

    def mark(self) -> None:
        """Tell the outside when the fault has acted."""
        self.fired.value = True
        mark = self.folder / f"fired-{self.rank}"
        mark.with_suffix(".new").write_text(str(time.monotonic()))
        mark.with_suffix(".new").rename(mark)

    def wrap(self, strategy: Any) -> None:
        """Come to ``start-up`` before the processes connect."""
        connect = strategy.setup_environment

        def setup_environment() -> None:
            self.at("start-up")
            connect()

        strategy.setup_environment = setup_environment


@contextmanager
def planted(fault: Fault | None, rank: int, folder: Path) -> Iterator[Plant]:
    """Plant a fault also where a run has no hook: in torch's modules, in the writing of a save."""
    plant = Plant(fault, rank, folder)
    write = _FileSystemWriter.write_data

    def write_data(*args: Any, **kwargs: Any) -> Any:
        plant.at("writing")
        return write(*args, **kwargs)

    def forward(module: Any, args: Any) -> None:
        if torch.is_grad_enabled():
            plant.at("forward")

    def watch(module: Any, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad and plant.due("backward"):
            output.register_hook(lambda _: plant.at("backward"))

    def exchange(*paths: Path) -> bool:
        # Two renames are what there is to interrupt where names cannot be exchanged.
        return not plant.due("save: moved") and exchanges(*paths)

    exchanges = atomic_folders._exchange
    hooks = register_module_forward_pre_hook(forward), register_module_forward_hook(watch)
    try:
        with (
            mock.patch.object(_FileSystemWriter, "write_data", write_data),
            mock.patch.object(atomic_folders, "reached", lambda point: plant.at(f"save: {point}")),
            mock.patch.object(atomic_folders, "_exchange", exchange),
        ):
            yield plant
    finally:
        for hook in hooks:
            hook.remove()


HOOKS = {
    "on_train_batch_start": "step",
    "on_after_backward": "after backward",
    "on_before_optimizer_step": "optimizer",
    "on_train_batch_end": "batch end",
    "on_validation_batch_start": "validation",
    "on_save_checkpoint": "saving",
}
"""The callback hooks of Lightning at which a run comes to a place."""


class PlantedCallback(L.Callback):
    """Comes to the places of a Trainer."""

    def __init__(self, plant: Plant) -> None:
        self.plant = plant
        for hook, place in HOOKS.items():
            setattr(self, hook, partial(self._at, place))

    def _at(self, place: str, trainer: L.Trainer, *_: Any) -> None:
        self.plant.step.value = trainer.global_step
        self.plant.at(place)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.plant.module = pl_module
        self._at("setup", trainer)

    def state_dict(self) -> dict[str, Any]:
        if not self.plant.due("state"):
            return {}
        self.plant.mark()
        return {"value": self.plant.fault.does(self.plant)}


class PlantedDocuments(InMemoryDocuments):
    """The documents of the tests; reading one is a place."""

    plant: Plant

    def read(self, document: int, start: int, stop: int) -> Any:
        self.plant.at("read")
        tokens = super().read(document, start, stop)
        if not self.plant.due("tokens"):
            return tokens
        if not self.plant.fired.value:
            self.plant.mark()
        return self.plant.fault.does(tokens)


class PlantedData(WLBDataModule):
    """The data of the tests, read by a worker; making it is a place."""

    def __init__(self, plant: Plant, repeats: int) -> None:
        generator = np.random.default_rng(0)
        sequences = [
            generator.integers(0, harness.VOCABULARY, n) for n in harness.LENGTHS * repeats
        ]
        store = PlantedDocuments(sequences, vocab_size=harness.VOCABULARY)
        store.plant = self.plant = plant
        super().__init__(
            store,
            context_window=harness.WINDOW,
            micro_batches=3,
            num_workers=1,
            validation_documents=4,
        )

    def prepare_data(self) -> None:
        self.plant.at("prepare_data")
        super().prepare_data()

    def train_dataloader(self) -> Any:
        self.plant.at("train_dataloader")
        return super().train_dataloader()


def session(number: int) -> Iterator[int]:
    """The processes of a session of the operating system."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getsid(int(entry)) == number:
                    yield int(entry)
            except ProcessLookupError:
                continue


# Actions


def raises(plant: Plant) -> None:
    raise RuntimeError(f"planted on rank {plant.rank}")


def runs_out_of_memory(plant: Plant) -> None:
    raise torch.OutOfMemoryError(f"planted on rank {plant.rank}: tried to allocate 80.00 GiB")


def exits(code: int) -> Callable[[Plant], None]:
    return lambda plant: os._exit(code)


def leaves(plant: Plant) -> None:
    print(f"planted on rank {plant.rank}", file=sys.stderr)
    sys.exit(3)


def hangs(plant: Plant) -> None:
    time.sleep(3600)


def holds_lock(plant: Plant) -> None:
    """Foreign code, in which no other thread of Python runs."""
    ctypes.PyDLL(None).sleep(3600)


def sends(number: signal.Signals) -> Callable[[Plant], None]:
    """A signal to the process itself."""
    return lambda plant: os.kill(os.getpid(), number)


def sends_all(number: signal.Signals) -> Callable[[Plant], None]:
    """A signal to every process of the run, as ``scancel`` and a terminal do; to itself last."""

    def act(plant: Plant) -> None:
        others = [pid for pid in session(os.getsid(0)) if pid != os.getpid()]
        for pid in [*others, os.getpid()]:
            with suppress(ProcessLookupError):  # a worker whose pass has ended meanwhile
                os.kill(pid, number)

    return act


def sends_workers(number: signal.Signals) -> Callable[[Plant], None]:
    """A signal to the loader's workers of this rank."""

    def act(plant: Plant) -> None:
        for child in active_children():
            os.kill(child.pid or 0, number)

    return act


def hangs_after(act: Callable[[Plant], None], seconds: float = 0.0) -> Callable[[Plant], None]:
    """In a worker: read for ever, and do something else meanwhile."""

    def both(plant: Plant) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        time.sleep(seconds)
        plant.mark()
        act(plant)
        time.sleep(3600)

    return both


def kills_rank(plant: Plant) -> None:
    """In a worker: kill -9 of the rank that it reads for."""
    os.kill(os.getppid(), signal.SIGKILL)


def cuts_connections(plant: Plant) -> None:
    """As a network that fails: every connection of this process ends."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getpeername():
                        copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # the listing's own, or a socket without a peer


def turns_clock(seconds: float) -> Callable[[Plant], None]:
    """The wall clock of this process jumps; that which only runs forwards does not."""

    def act(plant: Plant) -> None:
        real = time.time
        time.time = lambda: real() + seconds

    return act


def stalls(seconds: int) -> Callable[[Plant], None]:
    """Stop, as a process does that is swapped out, and go on."""

    def act(plant: Plant) -> None:
        later = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", later])
        os.kill(os.getpid(), signal.SIGSTOP)

    return act


def finds_stale_handle(plant: Plant) -> None:
    """As on a network file system whose server has removed what a client has open."""
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), f"planted on rank {plant.rank}")


def fills_weights(plant: Plant) -> None:
    """Not a number in this rank's part of a weight."""
    _local(next(plant.module.parameters())).fill_(float("nan"))


def fills_gradients(plant: Plant) -> None:
    """Infinity in this rank's part of a gradient."""
    for parameter in plant.module.parameters():
        if parameter.grad is not None and _local(parameter.grad).numel():
            _local(parameter.grad).fill_(float("inf"))
            return


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fills_disk(plant: Plant) -> None:
    """Leave 16 KiB of the checkpoints' file system."""
    home = plant.folder / "checkpoints"
    free = shutil.disk_usage(home).free - 16 * 1024
    (home / "filler").write_bytes(bytes(free))


def forbids_writing(plant: Plant) -> None:
    """Make the checkpoints' file system read-only."""
    home = plant.folder / "checkpoints"
    subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)


def removes_checkpoints(plant: Plant) -> None:
    shutil.rmtree(plant.folder / "checkpoints")
