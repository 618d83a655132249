"""The functions that are compared compute the same."""

import pytest
import torch

from benchmarks import loss_head
from lightning_wlb.models import loss


def test_all_functions_are_the_same_loss(monkeypatch):
    monkeypatch.setattr(loss, "chunk_rows", loss.chunk_rows)  # put back behind the test
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 4), torch.randn(16, 4)
    labels = torch.randint(0, 16, (20,))
    wanted = loss.token_loss(hidden, weight, labels).item()
    functions = [loss_head.ours(3), loss_head.ours(64)]
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        functions += [loss_head.of_torch(3), loss_head.of_torch(None)]
    for function in functions:
        assert function(hidden, weight, labels).item() == pytest.approx(wanted, rel=1e-5)
