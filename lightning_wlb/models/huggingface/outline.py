"""The base model's own forward, run on one stage's layers.

A family's base model does more between its layers than call them: it makes rotary tables, chooses
one by the kind of layer, scales the embedding. So its own ``forward`` runs on every stage, with
:class:`Stages` in place of its list of layers: layers of other stages pass rows through. What the
family does in front of its first layer (Granite scales the embedding) and behind its last must
happen once in the model, not once a stage. So the last absent layer in front of the stage's gives
out what the stage was given, whatever came in, and the first one behind keeps what the stage made.

In the same way a family's head runs by the ``ForCausalLM``'s own forward, with :class:`GivenHidden`
in place of its base model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_wlb.models.huggingface.attention import running


class Stages:
    """What a base model takes for its list of layers: as long, but only some layers compute.

    Args:
        layers: the layers that are here, by global number as a string.
        count: layers of the whole model.

    Attributes:
        span: global numbers of the layers that the next forward runs.
    """

    def __init__(self, layers: nn.ModuleDict, count: int) -> None:
        self.layers = layers
        self.count = count
        self.span = range(count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self.count))]
        number = range(self.count)[index]
        if number < self.span.start:
            return _before
        return self.layers[str(number)] if number in self.span else _behind

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])


class _Before(nn.Module):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        run = running()
        assert run is not None
        assert run.received is not None
        return run.received


class _Behind(nn.Module):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        run = running()
        assert run is not None
        if run.left is None:
            run.left = hidden_states
        return hidden_states


_before, _behind = _Before(), _Behind()


class GivenHidden(nn.Module):
    """Stands for the base model where the ``ForCausalLM`` is run for its head alone."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Output:
        """Give back the embeddings as the last hidden state."""
        return _Output(inputs_embeds)


class _Output:
    """A base model's output of which only the last hidden state is there."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        # Router logits, caches, attention weights: none.
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]
