"""What one document takes alone, against the simulation of a step that has nothing else."""

from __future__ import annotations

from lightning_wlb.heterogeneous.planning.document_time import UTILISED, document_ns
from lightning_wlb.mesh import Mesh
from tests.prediction.test_predictor import plan_of, predictor


def test_a_long_document_takes_what_its_step_keeps_the_busiest_rank_busy() -> None:
    model = predictor(Mesh(pipeline=2))
    (simulation,) = model.predict(plan_of([[[2 * UTILISED]]])).simulations
    assert document_ns(model, 2 * UTILISED, "none") == max(simulation.busy_ns)


def test_short_documents_divide_the_time_of_as_many_as_fill_a_micro_batch() -> None:
    model = predictor(Mesh(pipeline=2))
    (simulation,) = model.predict(plan_of([[[UTILISED // 4] * 4]])).simulations
    assert document_ns(model, UTILISED // 4, "none") == max(simulation.busy_ns) / 4
