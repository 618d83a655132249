"""Steps that leave the mesh where another strategy is simulated to be faster, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_wlb.cost.flops import Work
from lightning_wlb.mesh import Mesh
from lightning_wlb.plan import Scheme
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.pool import Pool
from tests.planning.test_unequal import SHAPE, receiver

DATA = DataSettings(16384, 2, {"method": "slim", "micro_packs": 2}, shuffle=False)
LENGTHS = [1000] * 40 + [16000] * 2 + [500] * 60
SPREAD = Scheme(0, (4,), tensor=4)
ALONE = tuple(Scheme(rank, (4,)) for rank in range(4))


def pool(*strategies: tuple[Scheme, ...]) -> Pool:
    kinds = {scheme.shape: scheme for strategy in strategies for scheme in strategy}
    return Pool(strategies, {shape: receiver(each, 5) for shape, each in kinds.items()})


def planner(choice: Pool | None, data: DataSettings = DATA) -> Planner:
    judge = receiver(SPREAD, 5).judge
    return Planner(LENGTHS, data, Work.of(SHAPE), Mesh(tensor=4), judge=judge, pool=choice)


def test_steps_leave_the_mesh_where_another_strategy_is_faster_and_holds_their_pieces() -> None:
    """Four ranks by themselves exchange nothing within a layer, but hold no long document."""
    chosen, plain = planner(pool(ALONE)), planner(None)
    assert receiver(ALONE[0], 5).longest < 16000
    left = []
    for _ in range(4):
        plan, on_mesh = chosen.next_step(), plain.next_step()
        assert plan.pieces == on_mesh.pieces  # what enters a step does not depend on it
        long = any(piece.tokens > 15000 for piece in plan.pieces)
        left.append(bool(plan.strategy))
        assert plan.strategy == (() if long else ALONE)
        if long:
            assert plan.digest == on_mesh.digest
    assert set(left) == {False, True}
    assert chosen.state_dict() == plain.state_dict()


def test_a_strategy_that_is_not_faster_is_not_taken() -> None:
    slow = tuple(Scheme(rank, (2, 2)) for rank in (0, 2))
    assert planner(pool((SPREAD,))).next_step().strategy == ()
    assert planner(pool(ALONE, slow)).next_step().strategy == ALONE


def test_what_cannot_be_chosen_from_is_refused() -> None:
    with pytest.raises(ValueError, match="a pool without a strategy"):
        Pool((), {})
    with pytest.raises(ValueError, match=r"without a predictor for the pipeline on ranks \[0, 1\)"):
        Pool((ALONE,), {})
    with pytest.raises(ValueError, match="a pool of strategies needs a device profile"):
        Planner(LENGTHS, DATA, Work.of(SHAPE), pool=pool(ALONE))
    with pytest.raises(ValueError, match="Use packing='auto', 'slim' or 'hydraulis'"):
        planner(pool(ALONE), replace(DATA, packing="best_fit")).next_step()
