"""HuggingFaceModule: a LanguageModule whose model is any Hugging Face decoder."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers import PretrainedConfig

from lightning_wlb.cost.shape import ModelShape
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.model_folder_checks import is_here
from lightning_wlb.models.decoder import STORED
from lightning_wlb.models.huggingface.config_and_shape import (
    positions_warning,
    read_config,
    shape_of,
)
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.load_and_export import load, open_weights
from lightning_wlb.models.huggingface.lora import checked_fields, same_adapters
from lightning_wlb.models.huggingface.safetensors_folder import (
    Tiles,
    beside_weights,
    digest_of,
    resolve,
)
from lightning_wlb.models.language_module import LanguageModule


class HuggingFaceModule(LanguageModule):
    """Next-token training of a Hugging Face decoder, by transformers' own modules.

    Args:
        config: a folder with a ``config.json``, a name on the hub, a transformers
            ``PretrainedConfig``, or a mapping of its fields, ``model_type`` among them.
        pretrained: start from weights: True reads them from the folder or name given as ``config``,
            a string from that folder or name. False: random values by the family's rules. None:
            random values, which is an error if ``config`` names weights. A checkpoint from which
            the Trainer resumes replaces these values.
        lora: train low-rank adapters on a frozen model: fields of peft's ``LoraConfig``, such as
            ``{"r": 16, "lora_alpha": 32}``. None trains all parameters.
        options: the arguments of :class:`.LanguageModule`.

    Raises:
        ValueError: a config that is not understood, or of a model that cannot be trained exactly on
            packed rows (the message has the reason and the remedy); a config beside weights (a
            folder that holds them, or a name on the hub) without ``pretrained``.
    """

    describing = frozenset(
        ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")
    )

    def __init__(
        self,
        config: str | Path | dict[str, Any] | PretrainedConfig,
        *,
        pretrained: bool | str | None = None,
        lora: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)  # type: ignore[arg-type]  # read_config takes it
        if pretrained is None and isinstance(config, str | Path) and beside_weights(config):
            raise ValueError(
                f"{str(config)!r} holds weights, or names a model that has them. Say"
                " pretrained=True to start from them, or pretrained=False for random values."
            )
        source: Any = pretrained
        if pretrained is True:
            if not isinstance(config, str | Path):
                raise ValueError(
                    f"pretrained=True with config of type {type(config).__name__}: there is no"
                    " folder to read weights from. Give it as pretrained='FOLDER'."
                )
            # A config may be given as its file, beside which the weights are.
            source = Path(config).parent if Path(config).is_file() else config
        if source and is_here(source) and Path(source).is_dir():
            source = Path(source).absolute()  # an export may run in another folder
        self.pretrained = str(source) if source else None
        self.lora = None if lora is None else checked_fields(lora)
        if self.lora is not None and self.pretrained is None:
            raise ValueError(
                "lora without pretrained: adapters belong to a model's weights, which a checkpoint"
                " of adapters does not hold. Give pretrained=True, or the weights' folder or name."
            )
        self._weights: dict[str, Tiles] | None = None  # open files, until the model is filled
        self.weights_folder: Path | None = None  # from which they are read
        self._base: str | None = None  # a digest of the frozen weights under the adapters
        self.save_hyperparameters({"pretrained": self.pretrained or False, "lora": self.lora})

    def read_config(self, config: Any) -> tuple[PretrainedConfig, dict[str, Any]]:
        """A transformers config and its fields, from the given config."""
        understood = read_config(config)
        # Through JSON, so that a checkpoint holds plain types only.
        return understood, json.loads(understood.to_json_string(use_diff=False))

    @cached_property
    def model_shape(self) -> ModelShape:
        """The sizes that the cost model plans with, from the model's own modules."""
        return shape_of(self.config)

    def build_model(self) -> HuggingFaceDecoder:
        """The whole model; on the meta device it takes no memory."""
        return HuggingFaceDecoder(
            self.config, attention_backend=self.attention_backend, lora=self.lora
        )

    def configure_model(self) -> None:
        """Build ``self.model`` after comparing its config's shapes with those of the weights.

        Raises:
            ValueError: as :meth:`.LanguageModule.configure_model`, or if these shapes differ.
        """
        # A loaded checkpoint may hold all weights, but a checkpoint of adapters never does.
        if self.model is None and (STORED.get() is None or self.lora is not None):
            self._open_pretrained()
        super().configure_model()

    def _open_pretrained(self) -> None:
        if self.pretrained is not None:
            folder = resolve(self.pretrained, fetch=STORED.get() is None)
            self._weights, self.weights_folder = open_weights(self.config, folder), folder
            self._base = None if self.lora is None else digest_of(self._weights)

    def init_weights(self) -> None:
        """Read the rank's part of the pretrained weights, or draw values from seed and names."""
        stored = STORED.get()  # must have the buffers too: absent ones would stay zero
        whole = stored and self.lora is None and self.state_dict().keys() <= stored.names
        if self.pretrained is None or whole:
            super().init_weights()
            return
        if self._weights is None:
            self._open_pretrained()
        assert isinstance(self.model, HuggingFaceDecoder)
        assert self._weights is not None
        load(self.model, self._weights)
        self._weights = None  # closes the files
        rank_zero_info(f"{type(self).__name__}: read the weights of {self.pretrained}.")
        self.model.initialise_adapters(self.initial_seed)

    def on_train_start(self) -> None:
        """Warn of experts without a load-balancing loss, and of positions beyond the config's."""
        super().on_train_start()
        coefficient = getattr(self.config, "router_aux_loss_coef", 0)
        mixture = any(layer.idle_parameters for layer in self.model_shape.kinds)
        if coefficient and mixture and self.lora is None:
            rank_zero_warn(
                f"Experts are trained without the load-balancing loss of router_aux_loss_coef="
                f"{coefficient:g}, as transformers trains them unless output_router_logits is set:"
                " it multiplies sums over all layers of a document, which no stage or slice of it"
                " has when its backward begins. From random values experts may fall out of use."
                " Set router_aux_loss_coef=0.0 in the config if that is meant."
            )
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, WLBDataModule):
            told = positions_warning(self.config, data.settings.context_window)
            if told is not None:
                rank_zero_warn(told)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save a digest of the frozen weights, which are not in a checkpoint of adapters."""
        super().on_save_checkpoint(checkpoint)
        if self._base is not None:
            checkpoint["base_weights"] = self._base

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Compare the checkpoint's arguments with this module's, which weights may not show.

        Raises:
            ValueError: another config, or adapters with another factor, for other modules, or for
                other weights (only a warning for a module without a Trainer).
        """
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get("hyper_parameters", {})
        then, now = (each.get("lora") for each in (saved, self.hparams))
        if "lora" in saved and not same_adapters(then, now):
            raise ValueError(
                f"the checkpoint was trained with lora={then}, this module has lora={now}: its"
                " adapters would mean something else. Give the lora of the checkpoint."
            )
        base = checkpoint.get("base_weights")
        if now is not None and base != self._base:
            others = (
                f"the checkpoint's adapters were trained on {saved.get('pretrained')!r} as it was"
                f" then (digest {base}), and {self.pretrained!r} holds other weights (digest"
                f" {self._base}). Give those that the run began with; or, to train the adapters on"
                " these, begin a new run of load_from_checkpoint(CHECKPOINT, pretrained=FOLDER)."
            )
            if self._trainer is not None and base is not None:
                raise ValueError(others)
            rank_zero_warn(others)  # the checkpoint is of an older version, or the user asks for it
        self.compare_config(checkpoint)
