"""A step has no operator that ``torch.use_deterministic_algorithms`` would refuse on CUDA."""

from __future__ import annotations

from random import Random

import torch

from tests.attention.support import Watched
from tests.strategy.random_plans import batch_of, model_of, plan_of, random_replica, run_step

# What torch documents to raise an error on CUDA then. (It makes index_add and scatter_add, by which
# gradients of keys and of logits are added up, deterministic.)
REFUSED = (
    *("put", "histc", "bincount", "median", "kthvalue", "cumsum", "scatter_reduce", "nll_loss2d"),
    *("ctc_loss", "embedding_bag", "grid_sampler", "reflection_pad", "adaptive", "unpool"),
    *("upsample", "replication_pad", "index_reduce"),
)


def test_no_operator_of_a_step_is_one_that_cuda_refuses() -> None:
    """By the names of all that run on a CPU."""
    lengths = [7, 12, 3, 1]
    replica = random_replica(Random(3), lengths)
    batch = batch_of(plan_of(replica, lengths).validate(), lengths)
    model = model_of().to(torch.bfloat16)
    with Watched() as watch:
        run_step(model, batch)
    assert {"embedding_dense_backward", "gather"} & watch.names
    assert not [
        name
        for name in watch.names
        if any(name.strip("_").startswith(refused) for refused in REFUSED)
    ]
