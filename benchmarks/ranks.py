"""A function on several ranks of this machine: forked processes over gloo, with a hard time-out.

A fork server that has torch loaded starts a rank in tens of milliseconds. A rank that raises,
dies or hangs ends the call with an error; it never hangs the caller. This is for tests, benchmarks
and measurements: ranks run on one thread, cannot have children (so no loader workers), and return
what pickles. It is not for training, where the Trainer starts the ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
PRELOADED = ("torch.distributed.fsdp", "lightning.pytorch", __name__)
"""Modules that the fork server imports, so that no rank has to."""
_context.set_forkserver_preload(list(PRELOADED))


class RankFailed(RuntimeError):
    """A rank raised, died or did not finish in time."""


def free_port() -> int:
    """A TCP port that was free a moment ago, and that Linux gives to no connection by itself."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port := 10_000 + secrets.randbelow(20_000)))
            return port


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    process_group: bool = True,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``function(rank, *args)`` on ``world_size`` ranks; their results in rank order.

    Args:
        function: a function at the top level of a module; its result must be picklable.
        world_size: number of processes.
        args: passed on to every rank.
        timeout: seconds for the whole run.
        process_group: initialise the process group before the call. Where false only the
            environment variables are set (MASTER_ADDR, LOCAL_RANK, ...), as for a Trainer.
        backend: of the process group.

    Raises:
        RankFailed: with the traceback of the first rank that failed.
    """
    processes, pipes = start_ranks(
        function, world_size, *args, timeout=timeout, backend=backend if process_group else None
    )
    try:
        return _collect(pipes, timeout)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def start_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float,
    backend: str | None = None,
) -> tuple[list[BaseProcess], list[Connection]]:
    """Start the ranks that :func:`run_ranks` waits for.

    Args:
        function: as there, like the arguments that follow.
        world_size: number of processes.
        args: passed on to every rank.
        timeout: seconds that a collective may take.
        backend: of the process group; None for none.

    Returns:
        The process of each rank, and of each a pipe. ``recv_bytes`` reads from it, pickled, whether
        the call succeeded and its result or traceback; it raises EOFError where the rank died.
    """
    port = free_port()
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(world_size):
        ours, theirs = _context.Pipe(duplex=False)
        arguments = (theirs, function, rank, world_size, port, backend, timeout, args)
        process = _context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return processes, pipes


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    missing = list(range(len(pipes)))
    while missing:
        ready = wait([pipes[rank] for rank in missing], max(deadline - time.monotonic(), 0))
        if not ready:
            raise RankFailed(f"ranks {missing} did not finish within {timeout:g} s")
        for rank in [rank for rank in missing if pipes[rank] in ready]:
            try:
                fine, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not fine:
                raise RankFailed(f"rank {rank} failed:\n{value}")
            results[rank] = value
            missing.remove(rank)
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    backend: str | None,
    timeout: float,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(1)
    try:
        if backend is not None:
            device = torch.device("cuda", rank) if backend == "nccl" else None
            if device is not None:
                torch.cuda.set_device(device)  # else all ranks would be on the first
            dist.init_process_group(
                backend,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                device_id=device,
            )
        value = function(rank, *args)
        if backend is not None:
            dist.barrier()
            dist.destroy_process_group()
        # By value: torch would send tensors as handles, which die with this process.
        pipe.send_bytes(pickle.dumps((True, value)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
