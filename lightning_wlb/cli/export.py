"""Write a checkpoint of a Hugging Face model as a folder that from_pretrained opens.

Reads the folder that WLBStrategy wrote, of any mesh, or the single file of another strategy, and
writes safetensors under the family's own names with config and tokenizer beside them; for LoRA only
the adapters, as peft reads them. One process, no GPU; a layer and a file of weights in memory.

  lightning-wlb export runs/last.ckpt exported
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from lightning_wlb.checkpoints import manifest
from lightning_wlb.file_checks import check_regular, printable, read_bytes, read_json
from lightning_wlb.model_folder_checks import check_beside, check_model, is_here

TEMPLATE = "chat_template.jinja"

if TYPE_CHECKING:
    from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint

_PREFIX = "model."  # of the decoder in the module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="folder of WLBStrategy, or one with such folders in it (the newest is taken), or a"
        " .ckpt file of another strategy",
    )
    parser.add_argument("folder", type=Path, help="to write; it must not exist, or be empty")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer.json, or its folder, to copy beside the weights with the files that belong"
        " to it, or a file of another name, to copy alone (default: the one training started from)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the weights (default: that of the model's config)",
    )
    parser.add_argument("--force", action="store_true", help="replace an export that is there")


def run(arguments: argparse.Namespace) -> None:
    """Export, and say what was written."""
    console = Console(markup=False)  # a path may have brackets
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("layers", total=None)
        path, tensors, copied = export(
            arguments.checkpoint,
            arguments.folder,
            tokenizer=arguments.tokenizer,
            dtype=arguments.dtype,
            force=arguments.force,
            report=lambda done, of: progress.update(task, completed=done, total=of),
        )
    beside = f"Copied beside them: {', '.join(map(str, copied))}"
    if arguments.tokenizer is None and not any("token" in each.name for each in copied):
        beside = "There is no tokenizer beside them: --tokenizer FOLDER copies one."
    console.print(
        printable(f"{tensors} tensors of {path} in {arguments.folder}\n{beside}"),
        highlight=False,
        soft_wrap=True,
    )


def export(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: str | None = None,
    force: bool = False,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[Path, int, list[Path]]:
    """Write a checkpoint of a :class:`.HuggingFaceModule` as transformers does.

    Args:
        checkpoint: a folder that :class:`.WLBStrategy` wrote, or a folder that contains such
            folders (the newest undamaged one is taken), or another strategy's file.
        folder: the folder to write; it appears when it is whole.
        tokenizer: a folder whose tokenizer is copied, or a file that is copied as
            ``tokenizer.json``; the tokenizer of ``pretrained`` if None and there.
        dtype: ``"bfloat16"`` or ``"float32"``; the model config's if None.
        force: replace an export that is there.
        report: called with the parts that are done, and all.

    Returns:
        The checkpoint, the number of tensors, and the files that were copied.

    Raises:
        ValueError: another model's checkpoint, a ``folder`` in use or not empty, or no tokenizer.
    """
    if not Path(checkpoint).exists():  # checked before the imports, which take seconds
        raise ValueError(f"{checkpoint} is not a checkpoint: there is no such file or folder.")
    from lightning_wlb.checkpoints import atomic_folders
    from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint
    from lightning_wlb.strategy.resuming import candidates_in, load_first

    folder = Path(folder).absolute()
    _refuse_overlap("checkpoint", Path(checkpoint), folder)
    if folder.exists() and not force and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{folder} is not empty. Give another folder, or --force to replace an export."
        )
    path, stored = load_first(candidates_in(Path(checkpoint), False), StoredCheckpoint)
    given = stored.hyper_parameters
    config = given.get("config")
    if not (isinstance(config, Mapping) and "model_type" in config):
        raise ValueError(
            f"{checkpoint} is not of a HuggingFaceModule: its hyperparameters have no Hugging Face"
            " config. lightning_wlb.Transformer rotates neighbouring pairs of a head's values,"
            " which no family of transformers does, so that it has no folder to be exported to."
            " Use it by LanguageModule.load_from_checkpoint (docs/guide/resuming.md)."
        )
    copied, templates = _beside(tokenizer, given.get("pretrained"))
    base = Path(given.get("pretrained") or checkpoint)
    for each in (base, *(file.parent for file in (*copied.values(), *templates.values()))):
        _refuse_overlap("model that training started from or tokenizer", each, folder)
    aside = atomic_folders.begin(folder, manifest.EXPORT)
    try:
        tensors = _write(stored, given, aside.folder, dtype, report)
        for name, each in copied.items():
            check_regular(each)
            shutil.copyfile(each, aside.folder / name)
        settings = aside.folder / "tokenizer_config.json"
        fields = read_json(settings) if settings.exists() else {}
        if isinstance(fields, dict) and (templates or "auto_map" in fields):
            fields.pop("auto_map", None)  # it names code, which would be passed on
            if templates:  # one file has them all: an export has no subfolder
                texts = {name: read_bytes(each).decode() for name, each in templates.items()}
                named = [{"name": name, "template": text} for name, text in texts.items()]
                fields["chat_template"] = named
            settings.write_text(json.dumps(fields, indent=2) + "\n")
        for file in aside.folder.glob("*.safetensors"):  # at first only their owner may read them
            shutil.copymode(next(aside.folder.glob("*config.json")), file)
        files = {each.name: manifest.durable(each) for each in sorted(aside.folder.iterdir())}
        listed = manifest.Manifest(manifest.EXPORT, aside.save, 1, -1, files)
        manifest.write(aside.folder, listed)
        atomic_folders.finish(aside)
    except BaseException:
        atomic_folders.discard(aside)
        raise
    return path, tensors, [*copied.values(), *templates.values()]


def _write(
    stored: StoredCheckpoint,
    given: dict[str, Any],
    folder: Path,
    dtype: str | None,
    report: Callable[[int, int], None],
) -> int:
    import torch

    from lightning_wlb.models.huggingface.config_and_shape import read_config
    from lightning_wlb.models.huggingface.load_and_export import write_adapted, write_model

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        wanted = [_PREFIX + name for name in names]
        missing = [name for name in wanted if name not in stored.names]
        if missing:
            raise ValueError(
                f"The checkpoint has no {', '.join(missing[:5])}: it does not hold all weights of"
                " the model that its hyperparameters describe."
            )
        return {name.removeprefix(_PREFIX): value for name, value in stored.read(wanted).items()}

    config = read_config(given["config"])
    wanted = None if dtype is None else getattr(torch, dtype)
    if given.get("lora") is not None:
        return write_adapted(read, config, given["lora"], given["pretrained"], folder, dtype=wanted)
    return write_model(read, config, folder, dtype=wanted, report=report)


def _beside(
    tokenizer: str | Path | None, pretrained: str | None
) -> tuple[dict[str, Path], dict[str, Path]]:
    """The files to copy, by name in the export, and the chat templates by name if several."""
    from tokenizers import Tokenizer

    from lightning_wlb.data.tokenising.texts import explained
    from lightning_wlb.models.huggingface.load_and_export import GENERATION, files_beside

    here = pretrained and is_here(pretrained) and Path(pretrained).is_dir()
    base = Path(pretrained) if pretrained and here else None
    source = base if tokenizer is None else Path(tokenizer)
    copied: dict[str, Path] = {}
    if base is not None and (base / GENERATION).is_file():
        check_beside(base, base / GENERATION)
        copied[GENERATION] = base / GENERATION
    if source is None:
        return copied, {}
    if not source.exists():
        raise ValueError(f"--tokenizer {tokenizer}: there is no such folder or file.")
    if source.is_file() and source.name != "tokenizer.json":
        check_regular(source)
        with explained(f"--tokenizer {tokenizer} is no tokenizer.json"):
            Tokenizer.from_file(str(source))
        return copied | {"tokenizer.json": source}, {}
    folder = source if source.is_dir() else source.parent
    check_model(folder)
    copied |= {name: folder / name for name in files_beside(folder)}
    if tokenizer is not None and not any("token" in name for name in copied):
        raise ValueError(f"--tokenizer {tokenizer}: there is no tokenizer in that folder.")
    templates = {t.stem: t for t in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if templates and TEMPLATE in copied:
        templates.setdefault("default", copied.pop(TEMPLATE))
    return copied, templates


def _refuse_overlap(what: str, source: Path, folder: Path) -> None:
    """Refuse to replace a folder that is read: --force would remove it."""
    read, written = source.resolve(), folder.resolve()
    if written == read or written in read.parents:
        raise ValueError(
            f"{folder} is or holds the {what} {source}, which is read. Export to another folder."
        )
