"""Figures of strategies that were taken in their warm-up alone."""

import math

from lightning_wlb.callbacks.by_schemes import ByStrategy
from lightning_wlb.callbacks.run_summary import Records
from lightning_wlb.plan import Scheme
from tests.callbacks.test_run_summary import record


def test_a_strategy_that_was_never_timed_has_no_times() -> None:
    records, by_strategy = Records(devices=2, warm_up_steps=1), ByStrategy([(Scheme(0, (2, 2)),)])
    assert not records.add(record(), 0)
    (found,) = by_strategy.report(records)
    (pipeline,) = found["pipelines"]
    assert (found["steps"], found["timed_steps"], pipeline["ranks"]) == (1, 0, [0, 1])
    assert math.isnan(pipeline["compute_seconds"])
    assert math.isnan(found["seconds_per_step"])
