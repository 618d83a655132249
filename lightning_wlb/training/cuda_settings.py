"""Settings of CUDA and of torch's allocator that a run makes if the user has made none.

* ``CUDA_DEVICE_MAX_CONNECTIONS=32``, the maximum. Under NCCL each process group has a stream of its
  own, and a rank has up to twelve beside that of computation. With CUDA's default of eight queues
  some would carry two streams, one behind the other: a receive may then wait behind a send that
  waits for the same neighbour. (Others set 1; docs/design.md says why that would be wrong here.)
* ``PYTORCH_ALLOC_CONF=expandable_segments:True``: micro-batches differ in length from step to step,
  and blocks of fixed size that were made for one leave gaps for the next. On Linux only.

If CUDA has started already it is too late, and a run of several ranks warns. Read in the sources of
torch 2.13 and NVIDIA's documentation; not run on CUDA.
"""

from __future__ import annotations

import os
import sys

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_CONNECTIONS = 32
ALLOCATOR = "PYTORCH_ALLOC_CONF"
_ALLOCATOR_BEFORE = "PYTORCH_CUDA_ALLOC_CONF"  # torch's older name for it
EXPANDABLE = "expandable_segments:True"


def prepare_cuda(ranks: int) -> None:
    """Set the variables that are not set, for this process and those that it starts.

    A single rank sends no messages, and gets no setting for them.
    """
    given = os.environ
    wanted = {} if CONNECTIONS in given or ranks == 1 else {CONNECTIONS: str(MOST_CONNECTIONS)}
    if ALLOCATOR not in given and _ALLOCATOR_BEFORE not in given and sys.platform == "linux":
        wanted[ALLOCATOR] = EXPANDABLE
    if CONNECTIONS in given and given[CONNECTIONS] != str(MOST_CONNECTIONS) and ranks > 1:
        rank_zero_warn(
            f"{CONNECTIONS}={given[CONNECTIONS]}: messages between ranks may wait for each other in"
            f" fewer queues than there are process groups, or for ever. Leave it out;"
            f" {MOST_CONNECTIONS} is taken then."
        )
    if not torch.cuda.is_initialized():
        given.update(wanted)
    elif wanted and ranks > 1:
        settings = " ".join(f"{name}={value}" for name, value in wanted.items())
        rank_zero_warn(
            "CUDA was used before the Trainer was made, too early for WLBStrategy to set"
            f" {settings}. Make the Trainer first, or set them where the program is started."
        )


def has_expandable_segments() -> bool:
    """Whether torch's allocator was told to use segments that grow."""
    return EXPANDABLE in os.environ.get(ALLOCATOR, os.environ.get(_ALLOCATOR_BEFORE, ""))
