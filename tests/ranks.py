"""Real multi-rank runs on one machine: forked ranks over gloo, with a hard time-out.

A fork server that has torch loaded starts a rank in tens of milliseconds. A rank that raises,
dies or hangs fails the test with its traceback; it never hangs the suite.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "lightning.pytorch", "tests.ranks"]
)


class RankFailed(AssertionError):
    """A rank raised, died or did not finish in time."""


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    process_group: bool = True,
) -> list[Any]:
    """Call ``function(rank, *args)`` on ``world_size`` ranks; their results in rank order.

    Args:
        function: a function at the top level of a module; its result must be picklable.
        world_size: number of processes.
        args: passed on to every rank.
        timeout: seconds for the whole run.
        process_group: initialise the gloo process group before the call. Where false only the
            environment variables are set (MASTER_ADDR, LOCAL_RANK, ...), as for a Trainer.

    Raises:
        RankFailed: with the traceback of the first rank that failed.
    """
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_rank,
            args=(theirs, function, rank, world_size, port, process_group, timeout, args),
            daemon=True,
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        return _collect(pipes, time.monotonic() + timeout, timeout)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _collect(pipes: list[Connection], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankFailed(f"ranks {missing} did not finish within {timeout:g} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                fine, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not fine:
                raise RankFailed(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    process_group: bool,
    timeout: float,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(1)
    try:
        if process_group:
            dist.init_process_group(
                "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
        value = function(rank, *args)
        if process_group:
            dist.barrier()
            dist.destroy_process_group()
        # By value: torch would send tensors as handles, which die with this process.
        pipe.send_bytes(pickle.dumps((True, value)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
