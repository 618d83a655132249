"""The sums of a step's gradients beside its parameters: when they are held, and when complete."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_wlb.heterogeneous import parameters as linked
from lightning_wlb.heterogeneous.parameters import _Live
from lightning_wlb.heterogeneous.pipelines import Settings

VALUES = {"a": torch.ones(2), "b": torch.full((2,), 3.0), "c": torch.full((2,), 5.0)}


class Sent:
    """In place of a push of three slots: what was in each."""

    def __init__(self, link, groups, sums, *_) -> None:
        self.sums, self.slots = sums, []
        assert sums.keys() == {"a", "c"}

    @property
    def next(self) -> int:
        return 2 - len(self.slots)

    def post(self) -> None:
        name = "abc"[self.next]
        self.slots.append(self.sums[name].tolist() if name in self.sums else None)


@pytest.fixture
def live(monkeypatch) -> _Live:
    """Three slots of a parameter each; that of the second one is frozen."""
    modules = {name: nn.Module() for name in VALUES}
    for module in modules.values():
        module.register_parameter("weight", nn.Parameter(torch.empty(2, device="meta")))
    link = SimpleNamespace(units=[0, 1, 2], weights=SimpleNamespace(frozen={"b"}))
    places = {name: [(module, "weight")] for name, module in modules.items()}
    pull = SimpleNamespace(
        arrive=lambda slot: {"abc"[slot]: VALUES["abc"[slot]].clone()}, finish=lambda: None
    )
    monkeypatch.setattr(linked, "Push", Sent)
    sizes = torch.float32, torch.float64, torch.device("cpu")
    here = SimpleNamespace(parts={}, places=places, link=link)
    return _Live(here, pull, None, Settings(None, 2, "1f1b", *sizes))  # type: ignore[arg-type]


def loss(live: _Live, *names: str) -> torch.Tensor:
    return sum(live._here.places[n][0][0].weight.square().sum() for n in names)  # type: ignore


def test_sums_are_held_from_the_first_gradient_to_the_push(live: _Live) -> None:
    live.arrive_all()
    assert live._sums == {}
    loss(live, "a", "b").backward()
    assert live._sums.keys() == {"a"}
    assert live._sums["a"].dtype == torch.float64
    live.awaits_last(held=False)
    loss(live, "a", "b", "c").backward()
    assert live.finish().slots == [[10.0, 10.0], None, [4.0, 4.0]], "of a twice, of c once"
    assert live._sums == {}


def test_what_got_no_gradient_is_pushed_as_zeros(live: _Live) -> None:
    assert live.finish().slots == [[0.0, 0.0], None, [0.0, 0.0]]


def test_a_gradient_that_comes_too_late_is_refused(live: _Live) -> None:
    live.arrive_all()
    live.awaits_last(held=False)
    again = loss(live, "c")
    loss(live, "c").backward()
    with pytest.raises(RuntimeError, match=r"c gets a gradient after .* were complete"):
        again.backward()
