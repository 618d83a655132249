"""Train, validate or test by a configuration file: LightningCLI with a further section.

``lightning-wlb fit --config run.yaml`` needs no script. The file has LightningCLI's sections, and
``wlb`` with the arguments of :class:`.WLBStrategy`, for ``trainer.strategy: wlb``, as
``examples/continue.yaml`` does. ``lightning-wlb fit --print_config`` prints options and defaults.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn

from lightning_wlb.cli.main import TRAINING
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.file_checks import check_links, read_bytes, written_aside
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.strategy.wlb import WLBStrategy

BESIDE_THE_POINT = (
    "💡 Tip",
    "TPU available",
    "Initializing distributed",
    "[rank: ",  # the seed of another rank
    "-----",  # a box around the name of the backend
)
"""Beginnings of Lightning's log lines that would bury ours."""

SECTIONS = {"trainer": Trainer, "data": WLBDataModule, "wlb": WLBStrategy}
"""Sections of a configuration, and the classes whose arguments they have."""

_WARNINGS = "`isinstance.treespec, LeafSpec", "The dirpath has changed from"


class WordsParser(LightningArgumentParser):
    """Takes words in a configuration for words, not files; prints help without Sphinx's marks."""

    def _add_signature_parameter(self, *given: Any, **options: Any) -> Any:
        """As jsonargparse's, but only ``--config`` and a whole section may name a file.

        Otherwise ``wlb``, ``tiny`` or ``cpu`` would mean a file of that name in the working folder
        or beside the configuration: perhaps another user's, whose classes would be instantiated.
        """
        return super()._add_signature_parameter(*given, **options | {"sub_configs": False})

    def format_help(self, *given: Any, **options: Any) -> str:
        """The help as plain text."""
        text = re.sub(
            r":\w+:`~?(?:[\w.]*\.)?([^`]*)`", r"\1", super().format_help(*given, **options)
        )
        return re.sub(r"``([^`]+)``", r"\1", text)


class RunsConfig(SaveConfigCallback):
    """Writes a run's configuration into its log folder, but never over somebody else's file.

    Without a logger that is the working folder, where a ``config.yaml`` may be the user's own, or
    a stranger's link. A requeued job finds the file of its first run.
    """

    mark = "# What a run was configured by; the next run in this folder writes over it.\n"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask for the folder, as all ranks must; Lightning itself writes to a remote folder."""
        self._folder = trainer.log_dir or ""
        self.save_to_log_dir = "://" in self._folder
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file, or warn of another file in its place."""
        if self.save_to_log_dir:
            return
        path = Path(self._folder, self.config_filename)
        given = self.config.get("config") or []
        try:
            check_links(path.parent)
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path):
                own = read_bytes(path, links=False).startswith(self.mark.encode())
                if not own or path.resolve() in [Path(str(each)).resolve() for each in given]:
                    raise ValueError(f"{path} is there, and is another file.")
            with written_aside(path) as file:
                file.write((self.mark + self.parser.dump(self.config, skip_none=False)).encode())
        except (OSError, ValueError) as error:
            rank_zero_warn(
                f"The configuration of this run is not written down: {error} Use a logger, or give"
                " the run a default_root_dir of its own."
            )


class WLBCLI(LightningCLI):
    """LightningCLI whose ``trainer.strategy: wlb`` takes its arguments from the section ``wlb``.

    Args:
        model_class: by default any :class:`.LanguageModule`, chosen by ``model.class_path``.
        datamodule_class: by default :class:`.WLBDataModule`.
        options: LightningCLI's.

    Raises:
        MisconfigurationException: the section ``wlb`` is not empty, but the strategy is another.
    """

    def __init__(
        self,
        model_class: type[LightningModule] | None = None,
        datamodule_class: type[LightningDataModule] | None = None,
        **options: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "seed_everything_default": 0,
            "subclass_mode_model": model_class is None,
            # Its options would be accepted and ignored.
            "auto_configure_optimizers": False,
            "save_config_callback": RunsConfig,
            "save_config_kwargs": {"overwrite": True},
        }
        super().__init__(
            model_class or LanguageModule, datamodule_class or WLBDataModule, **(defaults | options)
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser, of the command or of a subcommand."""
        parser = super().init_parser(**kwargs)
        parser.__class__ = WordsParser
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the section ``wlb``."""
        parser.add_class_arguments(WLBStrategy, "wlb", instantiate=False)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the configuration says what the model is.

        LightningCLI would take arguments, and import classes, that a checkpoint's file names.
        """

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """As LightningCLI's, but refuses, by name, a file that ``torch.load`` cannot read."""
        given: dict[str, Any] = super()._prepare_subcommand_kwargs(subcommand)
        path = Path(str(given.get("ckpt_path")))
        # Some strategies, such as DeepSpeed's, read folders of their own.
        reads_files = type(self.trainer.strategy).load_checkpoint is Strategy.load_checkpoint
        if reads_files and path.exists() and not zipfile.is_zipfile(path):
            raise ValueError(
                f"{path} is no file that torch.save has written, or is damaged. A folder is what"
                " trainer.strategy: wlb goes on from; Lightning's consolidate_checkpoint makes it a"
                " file (docs/guide/resuming.md)."
            )
        return given

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, with the strategy that the section ``wlb`` describes."""
        strategy = self._get(self.config, "trainer.strategy")
        given = self._get(self.config, "wlb").as_dict()
        if strategy == WLBStrategy.strategy_name:
            # config_init has schemes as objects, config as the file's mappings.
            kwargs["strategy"] = WLBStrategy(**self._get(self.config_init, "wlb").as_dict())
        else:
            usual = self._parser(self.subcommand).get_defaults().wlb.as_dict()
            if changed := {name: each for name, each in given.items() if each != usual[name]}:
                raise MisconfigurationException(
                    f"the section wlb sets {changed}, but trainer.strategy is {strategy!r}. Write"
                    " trainer.strategy: wlb, or give the sizes under the strategy's own init_args."
                )
        return super().instantiate_trainer(**kwargs)


def quieten() -> None:
    """Hide Lightning's log lines in :data:`BESIDE_THE_POINT`, and the warnings in ``_WARNINGS``."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda each: not each.getMessage().startswith(BESIDE_THE_POINT))
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message)


def run(arguments: Sequence[str]) -> None:
    """Run ``fit``, ``validate`` or ``test`` with the options that follow it."""
    quieten()
    with suppress(ImportError):  # so that the help lists the class, and its short name is known
        import_module("lightning_wlb.models.huggingface.huggingface_module")
    given = list(arguments)
    # LightningCLI warns if it is given arguments in addition to the command line.
    args = None if given == sys.argv[1:] else given
    # A wrong option is an error like others, not a page of all options.
    quiet = {"exit_on_error": False}
    try:
        WLBCLI(
            args=args,
            parser_kwargs={"prog": "lightning-wlb"} | quiet | dict.fromkeys(TRAINING, quiet),
        )
    except argparse.ArgumentError as error:
        raise argparse.ArgumentError(None, f"{error}{_meant(str(error))}") from error


def _meant(message: str) -> str:
    """A question that names the option that may be meant, if a section lacks the given one."""
    found = re.search(rf"(?:arguments: --|option ')({'|'.join(SECTIONS)})\.(\w+)", message)
    if found is None:
        return ""
    near = get_close_matches(found[2], signature(SECTIONS[found[1]]).parameters, 1)
    return f". Is {found[1]}.{near[0]} meant?" if near else ""
