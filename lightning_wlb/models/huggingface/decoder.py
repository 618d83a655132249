"""Any Hugging Face causal language model as a :class:`.Decoder`, with its modules unchanged.

A forward runs the base model's own ``forward`` on packed rows as a batch of one, with explicit
positions; attention goes to this package's kernels, and the head sums token losses. Parameters have
this package's names; :meth:`HuggingFaceDecoder.family_name` gives the family's names.

Cost against :class:`.Transformer`: queries are computed before attention, so they do not hide the
exchange of keys, and a layer's parts are transformers' eager code. Families whose layers carry a
state from row to row run piece by piece if :mod:`.recurrent` knows their functions, or are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_wlb.attention.backends import VarlenAttention
from lightning_wlb.data.batch import MicroBatchTensors
from lightning_wlb.distributed.process_groups import NO_GROUPS, ProcessGroups
from lightning_wlb.models.decoder import Decoder
from lightning_wlb.models.huggingface import families
from lightning_wlb.models.huggingface import lora as adapters
from lightning_wlb.models.huggingface.attention import Running, during, recomputed
from lightning_wlb.models.huggingface.model_parts import (
    FamilyEmbedding,
    FamilyHead,
    GivenHidden,
    StageLayers,
    build_family_model,
    initial_values,
    part_names,
    without_memory_on_meta,
)
from lightning_wlb.models.huggingface.recurrent import FAMILIES, by_segments
from lightning_wlb.models.huggingface.tensor_parallel import (
    Split,
    add_hooks,
    attends,
    present_shards,
    splits_of,
)
from lightning_wlb.models.tensor_parallel import assign


class HuggingFaceDecoder(Decoder):
    """A decoder made of transformers' modules, filled by :meth:`.Decoder.initialise` or weights.

    Args:
        config: a transformers ``PretrainedConfig`` of a causal language model.
        attention_backend: see :class:`.VarlenAttention`.
        lora: fields of peft's ``LoraConfig`` (:data:`.lora.FIELDS`): only its adapters are trained
            and in the state dict. None trains all parameters.

    Attributes:
        config: a copy of the config.

    Raises:
        ValueError: a config or family that cannot be trained exactly on packed rows.
    """

    embed: FamilyEmbedding | None
    head: FamilyHead | None
    activation_checkpointing = "auto"
    overlaps = "late"

    attention_kernel: VarlenAttention

    def __init__(
        self, config: Any, *, attention_backend: str = "auto", lora: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        families.check_config(config)
        causal = build_family_model(config)
        families.check_family(causal)
        prefix = causal.base_model_prefix
        base = getattr(causal, prefix)
        words_name, layers_name, norm_name = part_names(base)
        families.check_no_noise(config)
        if config.model_type not in families.CHECKED | FAMILIES.keys():
            rank_zero_warn(
                f"Model type {config.model_type!r} is not among the Hugging Face families whose"
                " gradients are checked on packed rows and under tensor parallelism"
                " (docs/families.md). Compare the first losses with those of one process."
            )
        self.config = base.config
        self._lora = lora
        if lora is not None:
            with without_memory_on_meta():
                adapters.inject(causal, lora, f"{prefix}.{layers_name}")
            adapters.keep_adapters_only(self)
        projection = causal.get_output_embeddings()
        projection_name = next(name for name, each in causal.named_children() if each is projection)
        words, layers, norm = (getattr(base, each) for each in (words_name, layers_name, norm_name))

        self.embed = FamilyEmbedding(words)
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
        # The base model is not registered and loses these parts, else parameters had two names.
        for name in (words_name, layers_name, norm_name):
            delattr(base, name)
        self.stages = StageLayers(self.layers, len(layers), config.model_type == "bamba")
        setattr(base, layers_name, self.stages)
        setattr(base, norm_name, nn.Identity())
        delattr(causal, prefix)
        setattr(causal, prefix, GivenHidden())
        self.head = FamilyHead(norm, projection, causal)
        # Rotary tables and other modules without parameters are on every stage.
        self.tables = nn.ModuleDict(
            {name: each for name, each in base.named_children() if name != norm_name}
        )
        parts = (self.embed, self.layers, self.head)
        known = {id(parameter) for part in parts for parameter in part.parameters()}
        families.check_parts(causal, known)
        families.check_parts(base, known)
        self._without_values = {name for name, each in self.named_parameters() if each.is_meta}
        self._family = (causal, base, words)
        self._is_tied = projection.weight is words.weight
        self._family_names = {
            "embed.words.": f"{prefix}.{words_name}.",
            "layers.": f"{prefix}.{layers_name}.",
            "head.norm.": f"{prefix}.{norm_name}.",
            "head.projection.": f"{projection_name}.",
        }
        self._longrope_window = families.longrope_window(self.config)
        self._across_rows = set(range(len(layers))) - families.row_by_row(self.config)
        by_segments(self.layers.values(), self.config.model_type)
        self._recompute()
        self._split()
        self.attention_kernel = VarlenAttention(attention_backend)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast as torch does, but never cast buffers to a narrower dtype.

        That would change rotary angles and routing biases of experts. Lightning casts whole
        modules, while transformers' ``from_pretrained(dtype=...)`` leaves these buffers unchanged.
        """
        before = {
            (each, name): buffer
            for each in self.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None
        }
        super()._apply(fn, recurse)
        for (each, name), buffer in before.items():
            cast = each._buffers[name]
            if cast is not None and cast.itemsize < buffer.itemsize:
                each._buffers[name] = buffer.to(cast.device)
        return self

    def forward(
        self,
        micro_batch: MicroBatchTensors,
        hidden: Tensor | None = None,
        layers: range | None = None,
        groups: ProcessGroups = NO_GROUPS,
    ) -> Tensor:
        """See :meth:`.Decoder.forward`.

        Raises:
            ValueError: a layer that did not call attention, or a rotation by other rows' positions.
        """
        if layers is None:
            numbers = sorted(map(int, self.layers))
            layers = range(numbers[0], numbers[-1] + 1)
        self._check_positions(micro_batch)
        self.stages.span = layers
        run = Running(micro_batch, groups, self.attention_kernel)
        with during(run):
            if hidden is None:
                assert self.embed is not None
                assert micro_batch.tokens is not None
                hidden = self.embed(micro_batch.tokens, groups.tensor)
            run.received = hidden[None]
            _, base, _ = self._family
            out = base(
                inputs_embeds=hidden[None],
                position_ids=micro_batch.positions[None],
                use_cache=False,
            ).last_hidden_state
            hidden = (out if run.left is None else run.left)[0]
            if self.head is not None and layers.stop == self.stages.count:
                hidden = self.head(hidden, micro_batch.labels, groups.tensor)
        if missing := sorted(self._across_rows & set(layers) - run.attended):
            raise ValueError(
                f"model type {self.config.model_type!r}: layers {missing} did not call attention."
                " A layer of another kind (a recurrence or convolution over rows) would mix packed"
                " documents. Choose another family (docs/families.md)."
            )
        return hidden

    def tensor_parallel_plan(self, size: int) -> dict[str, Placement]:
        """See :meth:`.Decoder.tensor_parallel_plan`; it follows the family's own plan.

        Raises:
            ValueError: a family without a plan, or with a plan that this package cannot follow.
        """
        if not self._plan:
            raise ValueError(
                f"tensor_parallel_size={size}: transformers has no tensor-parallel plan for model"
                f" type {self.config.model_type!r}. Use tensor_parallel_size=1; pipeline and"
                " context parallelism split the model too."
            )
        if self._refusal is not None:
            raise self._refusal
        ends: dict[str, Placement] = {
            "embed.words.weight": Shard(0),
            "head.projection.*": Shard(0),
            "head.norm.*": Replicate(),
        }
        return ends | {name: split.placement(size) for name, split in self._splits.items()}

    @property
    def tied(self) -> dict[str, str]:
        """The output matrix and the embedding, if they are tied."""
        return {"head.projection.weight": "embed.words.weight"} if self._is_tied else {}

    def initialise(self, seed: int) -> None:
        """Fill the parameters module by module by transformers' rules, and adapters by peft's."""
        causal, _, words = self._family
        for prefix, module in self.named_modules():
            own = [
                name
                for name, each in module._parameters.items()
                if each is not None and not adapters.is_adapter(f"{prefix}.{name}")
            ]
            if not own:
                continue
            is_copy = f"{prefix}.weight" in self.tied
            source, place = (words, "embed.words") if is_copy else (module, prefix)
            shapes = {name: self.family_shape(f"{place}.{name}") for name in own}
            above, name = self.get_submodule(prefix.rpartition(".")[0]), adapters.base_name(place)
            values = initial_values(source, above, shapes, causal._init_weights, seed, name)
            for name in own:
                parameter = module._parameters[name]
                assert parameter is not None
                if name in values:
                    assign(parameter, values[name].view(parameter.shape))
                elif f"{prefix}.{name}" in self._without_values:
                    raise ValueError(
                        f"transformers has no rule for the initial values of {prefix}.{name}, a"
                        f" {type(module).__name__}'s. Start from weights: pretrained=True."
                    )
        self.initialise_adapters(seed)

    def initialise_adapters(self, seed: int) -> None:
        """Fill the adapters with initial values with which they change nothing yet."""
        for name, parameter in self.named_parameters():
            if adapters.is_adapter(name):
                assert self._lora is not None
                value = adapters.initial_value(name, self.family_shape(name), seed, self._lora)
                assign(parameter, value.view(parameter.shape))

    def family_name(self, name: str) -> str:
        """The name of a parameter or buffer in the family's own model with peft's adapters."""
        for mine, theirs in self._family_names.items():
            if name.startswith(mine):
                return theirs + adapters.base_name(name.removeprefix(mine))
        raise KeyError(name)

    def family_shape(self, name: str) -> tuple[int, ...]:
        """The family's shape of a parameter, into which ``view`` converts a packed parameter."""
        return self._shapes[name]

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of buffers among a model's weights, as DeepSeek-V3's routing biases."""
        for prefix, module in self.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}", buffer

    def _check_positions(self, micro_batch: MicroBatchTensors) -> None:
        """Refuse positions that would make longrope change the rotation of the whole batch."""
        window = self._longrope_window
        # Only for longrope, as reading the positions waits for the device (longrope does so too).
        if window is None or micro_batch.rows == 0:
            return
        longest = int(micro_batch.positions.max()) + 1
        if longest > window:
            raise ValueError(
                f"a document of at least {longest} tokens under longrope: beyond"
                f" {window} tokens the rotary embedding of all rows of a batch depends on its"
                f" longest document. Use context_window={window} or less, or 'yarn' scaling."
            )

    def _recompute(self) -> None:
        """Let layers recompute what a micro-batch says: everything, or the part after attention."""
        for layer in self.layers.values():
            # Inside the layer's call, so that hooks around the layer run once.
            layer.forward = recomputed(layer.forward, "full")
            for part in layer.children():
                matrices = any(each.ndim > 1 for each in part.parameters())
                if matrices and not attends(part):
                    part.forward = recomputed(part.forward, "selective")

    def _split(self) -> None:
        """Determine how parameters are split, and let the modules read their shards."""
        kind = self.config.model_type
        self._shapes = {
            name: tuple(each.shape) for name, each in self.named_parameters(remove_duplicate=False)
        }
        # The family's plan: with a plan from a config.json ranks might compute another model.
        self._plan = dict(type(self.config).base_model_tp_plan or families.OWN_PLANS.get(kind, {}))
        self._plan |= families.RECURRENT_PLANS.get(kind, {})
        self._splits: dict[str, Split] = {}
        self._refusal: ValueError | None = None
        try:
            self._splits = splits_of(self.layers, self._plan, self.config)
        except ValueError as error:
            # A single rank needs no split, so errors wait for tensor_parallel_plan.
            self._refusal = error
            return
        present_shards(self, self._splits)
        add_hooks(self.layers, self._plan, self._splits, self._shapes, self.config.hidden_size)
