"""The closed form: what it must get right, though it may not choose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_wlb.cost.shape import LayerShape, ModelShape, Recurrence
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.closed_form import ClosedForm
from lightning_wlb.mesh_search.evaluate import evaluate
from lightning_wlb.mesh_search.search import legal_meshes
from tests.cost.devices import with_usable
from tests.mesh_search.requests import request

EVEN = request(lengths=[4096] * 40, micro_batches=8, packing="best_fit", steps=1)
"""Documents that fill the window: whatever the mesh, micro-batches are alike."""


@pytest.mark.parametrize("mesh", legal_meshes(EVEN), ids=str)
def test_on_even_documents_it_is_near_the_simulation(mesh: Mesh) -> None:
    step = ClosedForm(EVEN).step_ns(mesh)
    simulated = evaluate(EVEN, mesh).row.steps_ns / EVEN.steps
    assert 0.88 < step / simulated < 1.1


def test_a_state_that_does_not_fit_is_no_step() -> None:
    small = replace(EVEN, profile=replace(EVEN.profile, memory_bytes=10**9))
    assert ClosedForm(small).step_ns(Mesh(4)) == 0


def test_less_memory_costs_time_and_then_nothing_fits() -> None:
    mesh, steps = Mesh(4), []
    (state,) = EVEN.predictor(mesh).memory.state_bytes
    for activations in (2**36, 3 * 2**29, 2**30, 2**20):
        asked = replace(EVEN, profile=with_usable(EVEN.profile, state + activations, mesh))
        steps.append(ClosedForm(asked).step_ns(mesh))
    assert steps[0] < steps[1] < steps[2]
    assert steps[3] == 0


def test_the_longest_document_bounds_a_packing_that_keeps_it_whole() -> None:
    lengths = np.array([4096, *[64] * 128])
    asked = request(lengths=lengths, micro_batches=3, steps=1, packing="best_fit")
    one, four = (ClosedForm(replace(asked, devices=n)).step_ns(Mesh(n)) for n in (1, 4))
    alone = request(lengths=[4096] * 4, micro_batches=1, steps=1, packing="best_fit", devices=1)
    longest = ClosedForm(alone).step_ns(Mesh(1))
    assert one > 1.5 * longest
    assert four > 0.9 * longest


@pytest.mark.parametrize("mesh", [Mesh(8), Mesh(4, context=2), Mesh(4, tensor=2)], ids=str)
def test_replicas_that_share_a_long_document_exchange_its_keys(mesh: Mesh) -> None:
    """Without that exchange the first two would be at 0.95 of the simulation."""
    asked = request(8, [65536, 65536], window=65536, micro_batches=2, steps=1)
    assert 0.98 < ClosedForm(asked).step_ns(mesh) / evaluate(asked, mesh).steps_ns < 1.02


@pytest.mark.parametrize("mesh", [Mesh(8), Mesh(4, context=2), Mesh(2, 1, 2, 2)], ids=str)
def test_recurrent_layers_exchange_the_rows_of_shared_pieces_among_sharers_alone(mesh) -> None:
    """Where all rows were counted as theirs, the step took 1.06 times as long."""
    recurrence = Recurrence(heads=32, flops=2**19, moved=6144, state=2**17, last_rows=3072)
    attends = LayerShape(16, 4, 64, 64, 4 * 2**20, 8 * 2**20)
    recurs = LayerShape(1, 1, 1, 1, 4 * 2**20, 8 * 2**20, recurrence=recurrence)
    shape = ModelShape.of_layers(1024, 32_000, ([recurs] * 3 + [attends]) * 2)
    lengths = [131_072] + [2048] * 192
    asked = request(8, lengths, window=131_072, micro_batches=4, steps=1, shape=shape)
    asked = replace(asked, profile=replace(asked.profile, memory_bytes=4 * 10**11))
    assert 0.98 < ClosedForm(asked).step_ns(mesh) / evaluate(asked, mesh).steps_ns < 1.02
