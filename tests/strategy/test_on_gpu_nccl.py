"""Two ranks over NCCL on one CUDA device, along each axis, against one rank on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.strategy.test_on_gpu import GPU, TOLERANCE, on_cpu, ran, worst

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
__all__ = ["on_cpu"]  # a fixture


@pytest.mark.parametrize("mesh", [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)], ids=str)
def test_two_ranks_over_nccl_are_one_on_a_cpu(
    mesh: tuple[int, ...],
    on_cpu: dict[str, Any],
    record_property: Callable[[str, object], None],
) -> None:
    for found in ran(GPU, 2, mesh=mesh):
        assert found["losses"] == pytest.approx(on_cpu["losses"], rel=1e-12)
        error = worst(found["parameters"], on_cpu["parameters"])
        record_property("error", error)
        assert error <= TOLERANCE
