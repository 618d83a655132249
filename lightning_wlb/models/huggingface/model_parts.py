"""A family's model, built without memory and taken apart into the parts of a pipeline stage.

A family's base model does more than call its layers: it makes rotary tables, chooses a table by the
kind of layer, scales the embedding. So its own ``forward`` runs on every stage, with
:class:`StageLayers` in place of its list of layers. The work before the first layer (Granite scales
the embedding) and after the last layer must happen once in the model, not once per stage. So
stand-ins replace absent layers. Stand-ins before the stage's layers drop their input and return the
hidden states that the stage has received. Stand-ins after them return their input, and the first of
them keeps it as the stage's output. In the same way the ``ForCausalLM``'s own forward runs a
family's head, with :class:`GivenHidden` in place of the base model.

Most families' head is a plain matrix, whose loss is :func:`~.loss.token_loss`. Others scale or cap
the logits or add a bias. Their own code computes them by chunks of rows, again in backward.

Cost of initial values (:func:`initial_values`): if a rank holds a shard of a module, it draws all
of the module's values, in float32 (in a mixture of experts, all experts of a layer).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM

from lightning_wlb.distributed.process_groups import group_rank, group_size
from lightning_wlb.models.decoder import NO_TABLES, seed_of, without_values
from lightning_wlb.models.huggingface.attention import NAME, RUNNING, recomputed
from lightning_wlb.models.huggingface.families import PARTS
from lightning_wlb.models.loss import logits_loss, row_chunks, token_loss
from lightning_wlb.models.tensor_parallel import embed_words, gather_rows, local

_FEW = 64  # an activation's learned constants have no more values


@contextmanager
def without_memory_on_meta() -> Iterator[None]:
    """If the default device is meta, modules made inside have parameters without memory.

    Their buffers have values nevertheless, unless :func:`.without_values` is active. Parameters of
    at most ``_FEW`` values have them too, as transformers' rules for initial values leave out some.
    """
    if torch.get_default_device().type != "meta" or NO_TABLES.get():
        yield
        return
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.numel() > _FEW:
            marks = vars(parameter)
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            vars(parameter).update(marks)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # type: ignore[assignment,method-assign]
    try:
        # Lightning builds under the meta device, where buffers would have no values.
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_family_model(config: Any) -> Any:
    """The family's model with this package's attention; without memory on the meta device."""
    config = copy.deepcopy(config)
    dtype = torch.get_default_dtype()
    with without_memory_on_meta():
        causal = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=NAME,
            # transformers' grouped product of experts has no float64.
            experts_implementation="eager" if dtype == torch.float64 else None,
            dtype=dtype,
            trust_remote_code=False,
        )
    # Moving parameters to meta one by one has untied shared parameters.
    causal.tie_weights()
    return causal


def blank_model(config: Any, attention: str = "eager", dtype: torch.dtype | None = None) -> Any:
    """The family's ``ForCausalLM``, without values."""
    with without_values():
        # Overrides the folder's setting, some values of which fetch code.
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            attn_implementation=attention,
            dtype=dtype,
            trust_remote_code=False,
        )
    model.tie_weights()
    return model


def part_names(base: Any) -> tuple[str, str, str]:
    """Names of the base model's embedding, layers and last norm, from its pipeline plan.

    Other modules before the layers, such as a dropout of 0, stay on every stage.
    """
    config = base.config
    plan = list(type(config).base_model_pp_plan or PARTS.get(config.model_type, ()))
    lists = [name for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1 or len(plan) < 3 or plan[-2] != lists[0]:
        raise ValueError(
            f"{type(base).__name__}'s base_model_pp_plan is {', '.join(plan) or None}, but a"
            " decoder is an embedding, layers and a norm. Choose another family (docs/families.md)."
        )
    return plan[0], lists[0], plan[-1]


class StageLayers:
    """Replaces a base model's list of layers: as long, but only the stage's layers compute.

    Attributes:
        layers: the layers of the stage, by global number as a string.
        count: the number of layers of the whole model.
        span: global numbers of the layers that the next forward runs.

    Args:
        in_pairs: whether the family's layers return (rows, attention weights).
    """

    def __init__(self, layers: nn.ModuleDict, count: int, in_pairs: bool = False) -> None:
        self.layers = layers
        self.count = count
        self.span = range(count)
        self._before, self._behind = (_Absent(before, in_pairs) for before in (True, False))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self.count))]
        number = range(self.count)[index]
        if number < self.span.start:
            return self._before
        return self.layers[str(number)] if number in self.span else self._behind

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])


class _Absent(nn.Module):
    """Replaces layers of other stages, before the stage's own layers (``before``) or after them."""

    block_type = None  # Nemotron-H looks up a mask by it

    def __init__(self, before: bool, in_pairs: bool) -> None:
        super().__init__()
        self.before, self.in_pairs = before, in_pairs

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = RUNNING.get()
        if self.before:
            assert run.received is not None
            hidden_states = run.received
        elif run.left is None:
            run.left = hidden_states
        return (hidden_states, None) if self.in_pairs else hidden_states


class GivenHidden(nn.Module):
    """Replaces the base model when the ``ForCausalLM`` is run only for its head."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Output:
        """Return the embeddings as the last hidden state."""
        return _Output(inputs_embeds)


class _Output:
    """A base model's output: the last hidden state, and None for all other attributes."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


class FamilyEmbedding(nn.Module):
    """A family's token embedding, whose words may lie on several ranks.

    As in transformers, the padding token's row gets no gradient, on any number of ranks.
    """

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words = words
        self._padding = words.padding_idx

    def forward(self, tokens: Tensor, group: ProcessGroup | None) -> Tensor:
        """int64 [P] -> [P/TP, dim]."""
        own = self.words.weight.shape[0]
        if group_size(group) > 1 and self._padding is not None:
            # The padding token's number among this rank's words, as `words` counts them.
            number = self._padding - group_rank(group) * own
            self.words.padding_idx = number if 0 <= number < own else None
        return embed_words(self.words, tokens, own, group)


class FamilyHead(nn.Module):
    """Final norm, output projection, and the family's further operations on logits.

    ``causal`` is the ``ForCausalLM`` of the projection, with :class:`.GivenHidden` as base model.
    """

    def __init__(self, norm: nn.Module, projection: nn.Linear, causal: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.projection = projection
        self._causal = (causal,)
        self.plain = is_plain(causal, projection)

    def forward(self, hidden: Tensor, labels: Tensor | None, group: ProcessGroup | None) -> Tensor:
        """[P/TP, dim] -> the sum of token losses; logits [P, vocabulary/TP] without labels."""
        hidden = gather_rows(self.norm(hidden[None])[0], group)
        if labels is None:
            return self.logits(hidden)
        if self.plain:
            return token_loss(hidden, local(self.projection.weight), labels, group)
        # Zero, but connected to the hidden states in the graph even without rows.
        total = hidden[:0].sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
        # A family's operations on logits take about as much memory again as the plain loss.
        for chunk in row_chunks(hidden.shape[0], local(self.projection.weight), times=2):
            total = total + recomputed(self._loss)(hidden[chunk], labels[chunk])
        return total

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, dim] after the norm -> [rows, vocabulary/TP], by the family's own code."""
        return self._causal[0](inputs_embeds=hidden[None], use_cache=False).logits[0]

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return logits_loss(self.logits(hidden), labels, RUNNING.get().groups.tensor)


def is_plain(causal: nn.Module, projection: nn.Module) -> bool:
    """Whether a family's logits are a matrix times the hidden states and nothing else.

    The family's own code runs with a projection that returns a known tensor. A plain head calls the
    projection with the unchanged hidden states, and returns that tensor unchanged as the logits.
    """
    if type(projection).forward is not nn.Linear.forward or projection.bias is not None:
        return False
    hidden = torch.arange(4, device="cpu", dtype=torch.float32).view(1, 1, 4)
    logits = torch.arange(3, device="cpu", dtype=torch.float32).view(1, 1, 3)
    seen: list[Tensor] = []

    def given(x: Tensor) -> Tensor:
        seen.append(x)
        return logits

    projection.forward = given
    try:
        out = causal(inputs_embeds=hidden, use_cache=False).logits
    finally:
        del projection.forward
    (came,) = seen
    return torch.equal(came, hidden) and torch.equal(out, logits)


def initial_values(
    module: nn.Module,
    above: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    rule: Callable[[nn.Module], None],
    seed: int,
    name: str,
) -> dict[str, Tensor]:
    """Initial values of a module's own parameters, whole, float32 on the CPU, by name.

    ``rule`` is transformers' ``_init_weights``; parameters that it fills neither for the module nor
    for the one ``above`` (as of a router) are left out. ``shapes`` are the family's, since the
    module's parameters may be split or without memory. The values depend only on the run's seed and
    the module's name, so they are the same on any mesh.
    """
    # The rule fills a copy of the module without children, whose parameters are whole, and NaN.
    twin = copy.copy(module)
    twin._modules = {}
    twin._parameters = {
        own: None
        if each is None
        else nn.Parameter(torch.full(shapes[own], torch.nan, dtype=torch.float32, device="cpu"))
        for own, each in module._parameters.items()
    }
    twin._buffers = {
        own: None if each is None else each.detach().to("cpu", copy=True)
        for own, each in module._buffers.items()
    }
    alike = _DtypeContextManager(torch.float32)  # in which some rules draw
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"), alike:
        torch.manual_seed(seed_of(seed, name))
        rule(twin)
        values = {own: each.detach() for own, each in twin._parameters.items() if each is not None}
        if any(each.isnan().any() for each in values.values()) and not above._parameters:
            parent = copy.copy(above)
            parent._modules = {name.rpartition(".")[2]: twin}
            with suppress(AttributeError):  # for parts that are not there
                rule(parent)
    return {own: each for own, each in values.items() if not each.isnan().any()}
