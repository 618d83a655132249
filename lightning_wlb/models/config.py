"""Sizes of the reference decoder, and the presets that the papers' experiments name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_wlb.argument_checks import check_names, flag, number, whole, wrong_type
from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.model_folder_checks import check_counts


@dataclass
class TransformerConfig:
    """Sizes and constants of a :class:`~lightning_wlb.models.transformer.Transformer`.

    Args:
        dim: width of the residual stream.
        layers: number of decoder layers.
        heads: query heads, a multiple of ``kv_heads``.
        kv_heads: key and value heads (grouped-query attention).
        ffn_dim: hidden width of the SwiGLU feed-forward network.
        vocab_size: number of words.
        head_dim: width of one head, even; ``dim // heads`` if None.
        rope_theta: base of the rotary embedding's wavelengths.
        norm_eps: added to the mean square in RMSNorm.
        tied_embeddings: the output matrix is the embedding table.
        sliding_window: most tokens that a token attends to, its own included; None: all earlier.

    Raises:
        ValueError: a value of another type or out of range, or sizes that do not fit each other.
    """

    dim: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn_dim: int = 176
    vocab_size: int = 256
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        sizes = ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size")
        optional = ("head_dim", "sliding_window")
        for name in (*sizes, *(name for name in optional if getattr(self, name) is not None)):
            setattr(self, name, whole(f"TransformerConfig: {name}", getattr(self, name), 1))
        check_counts({"layers": self.layers, "num_heads": self.heads})
        for name in ("rope_theta", "norm_eps"):
            value = number(f"TransformerConfig: {name}", getattr(self, name), 0, above=True)
            setattr(self, name, value)
        self.tied_embeddings = flag("TransformerConfig: tied_embeddings", self.tied_embeddings)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"TransformerConfig: heads={self.heads} is not a multiple of"
                f" kv_heads={self.kv_heads}; each key/value head serves equally many query heads."
                f" Set kv_heads to a divisor of {self.heads}."
            )
        if self.head_dim is None:
            if self.dim % self.heads:
                raise ValueError(
                    f"TransformerConfig: dim={self.dim} does not divide by heads={self.heads}."
                    " Change one of them, or set head_dim."
                )
            self.head_dim = self.dim // self.heads
        if self.head_dim % 2:
            raise ValueError(
                f"TransformerConfig: head_dim={self.head_dim} is odd, but the rotary embedding"
                " turns pairs. Choose dim and heads so that dim / heads is even, or set head_dim."
            )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> TransformerConfig:
        """A configuration by name; ``overrides`` replace single fields, as in ``vocab_size=4096``.

        ``tiny`` is for the demo on a CPU. ``550m``, ``7b``, ``30b`` and ``70b`` are the models of
        WLB-LLM's Table 1. The paper only says that they are "LLaMA-like" and that 7B is LLaMA2-7B.
        Here ``7b`` and ``70b`` have the sizes of LLaMA2, ``30b`` those of LLaMA's 33B,
        ``llama3-8b`` those of Llama 3, ``550m`` the proportions of 7B: 12 heads of 128, 16 layers.

        Raises:
            ValueError: an unknown preset or field; the message lists the known ones.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(
                f"TransformerConfig: {name!r} is none of the presets {', '.join(PRESETS)}."
            )
        return as_config(PRESETS[name] | overrides)

    @property
    def shape(self) -> ModelShape:
        """The fields of the same names, for the cost model."""
        shared = {each.name for each in fields(ModelShape)} & {each.name for each in fields(self)}
        return ModelShape(**{name: getattr(self, name) for name in shared})


_LLAMA = {"vocab_size": 32_000}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "550m": _LLAMA | {"dim": 1536, "layers": 16, "heads": 12, "kv_heads": 12, "ffn_dim": 4096},
    "7b": _LLAMA | {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "ffn_dim": 11_008},
    "30b": _LLAMA | {"dim": 6656, "layers": 60, "heads": 52, "kv_heads": 52, "ffn_dim": 17_920},
    "70b": _LLAMA | {"dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn_dim": 28_672},
    "llama3-8b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14_336}
    | {"vocab_size": 128_256, "rope_theta": 500_000.0},
}


def as_config(config: TransformerConfig | str | Mapping[str, Any] | None) -> TransformerConfig:
    """A configuration from a configuration, a preset's name or a mapping; None is ``"tiny"``.

    Raises:
        ValueError: something else, or an unknown preset or field; the message lists the known ones.
    """
    if isinstance(config, TransformerConfig):
        return config
    if isinstance(config, Mapping):
        check_names("TransformerConfig", config, [each.name for each in fields(TransformerConfig)])
        return TransformerConfig(**config)
    if config is None or isinstance(config, str):
        return TransformerConfig.preset("tiny" if config is None else config)
    presets = f"a preset's name ({', '.join(PRESETS)})"
    raise wrong_type("config", config, f"a TransformerConfig, {presets} or a mapping of fields")
