"""How much memory ranks need while they read pretrained weights, on several meshes.

A model of random weights is written as ``save_pretrained`` does it, and read by four processes of
this machine through a Trainer, which takes no step. Of each rank it is measured how far its own
memory (anonymous pages, which leaves out the mapped files) rises while it fills its parameters, and
how many bytes of the files it asks for. A rank may need its share and one layer. A second figure is
what a 70B configuration takes to be built without memory.

Run ``python -m benchmarks.loading --help``. Prints a table and then, as its last line, one JSON
object. Linux only: it reads /proc.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import report
from benchmarks.ranks import run_ranks
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.models.huggingface.decoder import HuggingFaceDecoder
from lightning_wlb.models.huggingface.huggingface_module import HuggingFaceModule
from lightning_wlb.models.huggingface.safetensors_folder import Folder
from lightning_wlb.models.tensor_parallel import held
from lightning_wlb.strategy.wlb import WLBStrategy

RANKS = 4
# data, pipeline, context, tensor
MESHES = ((4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 1, 4), (2, 1, 1, 2), (1, 2, 2, 1))
MB = 1e6


def own_memory() -> int:
    """Bytes of anonymous pages of this process."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("RssAnon:")[1].split()[0])


class Peak:
    """Within it, the most that :func:`own_memory` rises above what it was."""

    def __enter__(self) -> Peak:
        self.before, self.rise = own_memory(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.0005):
            self.rise = max(self.rise, own_memory() - self.before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.rise = max(self.rise, own_memory() - self.before)


class Measured(HuggingFaceModule):
    """Fills its parameters under watch."""

    def init_weights(self) -> None:
        read, self.read = Folder.read, 0

        def counted(folder: Folder, *args: Any) -> Tensor:
            values = read(folder, *args)
            self.read += values.nbytes
            return values

        with patch.object(Folder, "read", counted), Peak() as peak:
            super().init_weights()
        assert self.model is not None
        self.figures = {
            "peak_mb": peak.rise / MB,
            "share_mb": sum(held(each).nbytes for each in self.model.parameters()) / MB,
            "largest_layer_mb": max(
                sum(each.numel() * each.element_size() for each in layer.parameters())
                for layer in self.model.layers.values()
            )
            / MB,
            "read_mb": self.read / MB,
        }


def on_rank(rank: int, folder: str, mesh: tuple[int, ...]) -> dict[str, float]:
    module = Measured(folder, pretrained=True)
    documents = InMemoryDocuments([list(range(1, 60))] * 8, vocab_size=64)
    data = WLBDataModule(
        documents, context_window=64, micro_batches=2, profile="none", num_workers=0
    )
    trainer = L.Trainer(
        strategy=WLBStrategy(*mesh),
        devices=RANKS,
        accelerator="cpu",
        max_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return module.figures


def configs(width: int, layers: int) -> dict[str, Any]:
    """A dense model and a mixture of experts."""
    from transformers import LlamaConfig, MixtralConfig

    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8 * width,
    }
    return {
        "llama": LlamaConfig(intermediate_size=3 * width, **sizes),
        "mixtral": MixtralConfig(intermediate_size=width, num_local_experts=8, **sizes),
    }


def written(config: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100MB")


def rows(width: int, layers: int, meshes: tuple[tuple[int, ...], ...]) -> list[dict[str, Any]]:
    table = []
    for family, config in configs(width, layers).items():
        with tempfile.TemporaryDirectory() as folder:
            written(config, Path(folder))
            for mesh in meshes:
                ranks = run_ranks(on_rank, RANKS, folder, mesh, process_group=False, timeout=600)
                # Of the rank that is nearest to its limit, or furthest above it.
                worst = max(
                    ranks,
                    key=lambda each: each["peak_mb"] - each["share_mb"] - each["largest_layer_mb"],
                )
                table.append(
                    {
                        "model": family,
                        "mesh": "x".join(map(str, mesh)),
                        **{name: round(value, 1) for name, value in worst.items()},
                        "passed": worst["peak_mb"] <= worst["share_mb"] + worst["largest_layer_mb"],
                    }
                )
    return table


def built_without_memory(rank: int) -> dict[str, float]:
    """Llama 3.1's 70B configuration."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with Peak() as peak, torch.device("meta"):
        decoder = HuggingFaceDecoder(config)
    parameters = sum(each.numel() for each in decoder.parameters())
    return {
        "parameters_b": round(parameters / 1e9, 1),
        "rise_mb": round(peak.rise / MB, 1),
        "process_mb": round((peak.before + peak.rise) / MB, 1),
    }


def main(argv: list[str] | None = None) -> None:
    parser = report.parser("loading", __doc__)
    parser.add_argument("--width", type=int, default=1024, help="of the model (default 1024)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--meshes", type=int, default=len(MESHES), help="how many, from the first")
    parser.add_argument("--output", type=Path, help="JSON file to write as well")
    arguments = parser.parse_args(argv)
    table = rows(arguments.width, arguments.layers, MESHES[: arguments.meshes])
    (large,) = run_ranks(built_without_memory, 1, process_group=False)
    title = f"Reading weights, width {arguments.width}, {arguments.layers} layers, float32 at rest"
    headings = [heading.replace("_", " ") for heading in table[0]]
    cells = [[str(value) for value in row.values()] for row in table]
    Console(width=120).print(report.table(title, headings, cells))
    report.finish(
        {
            "benchmark": "loading",
            "width": arguments.width,
            "layers": arguments.layers,
            "rows": table,
            "built_without_memory": large,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
