"""Where the tests of attention and of gradients compute, and which kernel attends there.

``pytest --device cuda --attention-backend NAME`` say so; the environment hands it on to the ranks
that a test starts. A named backend stands in the place of every other one. On CUDA that is
``exact`` unless another one is named, because no other kernel has the precision that tests compare
in. Ranks share the devices that there are: over gloo where they are fewer than ranks, since NCCL
refuses two ranks on one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch.distributed import Backend

from lightning_wlb.attention import backends as varlen

MOST_RANKS = 8
"""Of a test."""
DEVICE = torch.device(os.environ.get("TESTS_DEVICE") or "cpu")
ON_CUDA = DEVICE.type == "cuda"
BACKEND = os.environ.get("TESTS_ATTENTION_BACKEND") or ("exact" if ON_CUDA else None)
BACKENDS: Mapping[str, varlen.AttentionBackend] = dict(varlen.BACKENDS)
"""Every backend by its own name, for tests of their choice."""

if BACKEND is not None:
    varlen.BACKENDS.update(dict.fromkeys(BACKENDS, BACKENDS[BACKEND]))
if ON_CUDA and torch.cuda.device_count() < MOST_RANKS:
    Backend.default_device_backend_map["cuda"] = "gloo"
