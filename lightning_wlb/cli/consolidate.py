"""Write a checkpoint folder as one file, as any other strategy of Lightning saves it.

Reads the folder that WLBStrategy wrote, of any mesh, and verifies it. Nothing in it is run: neither
its metadata nor its entries are unpickled as Python objects. One process, no GPU; the whole
checkpoint in memory.

A Trainer resumes from the file under strategy="auto", with optimizer state and position in the
data; LanguageModule.load_from_checkpoint takes its weights (and those of the folder, too).

  lightning-wlb consolidate runs/last.ckpt --output whole.ckpt
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options."""
    parser.add_argument("folder", type=Path, help="a checkpoint of WLBStrategy")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (default: FOLDER.consolidated)"
    )
    parser.add_argument("--force", action="store_true", help="replace a file")


def run(arguments: argparse.Namespace) -> None:
    """Consolidate, and say what was written.

    Raises:
        ValueError: what :func:`.write_file` refuses.
    """
    from lightning_wlb.checkpoints.consolidate import write_file

    folder: Path = arguments.folder
    output = arguments.output or folder.with_name(f"{folder.name}.consolidated")
    console = Console()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("weights", total=None)
        size = write_file(
            folder,
            output,
            force=arguments.force,
            report=lambda done, of: progress.update(task, completed=done, total=of),
        )
    console.print(f"{output}: {size:,} bytes", highlight=False, soft_wrap=True)
