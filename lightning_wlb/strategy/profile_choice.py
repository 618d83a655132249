"""A device profile that a run measures for itself when it begins.

1. Rank 0 looks whether the same was measured before: in the user's cache folder, under the name of
   the device, the versions of torch and CUDA, the kernel, the dtype, threads, ranks per node, sizes
   of a layer, and this package's code.
2. If not, every rank measures its device, all at the same time: as in a step, ranks of a node share
   its memory, its caches and its power. Links within a node are measured between all of its ranks;
   those between nodes are the shipped profile's.
3. Rank 0's numbers are everyone's. They are kept for the next run.

A rank whose measurement fails ends it for all of them, with one warning, and the run goes on by
what it had without. The random numbers of the run are left as they were.

What is measured is the reference decoder with the sizes of the model's commonest layer
(:mod:`~lightning_wlb.profiling.device_profile`), and what actions take beside it
(:mod:`.overhead`). A mixture of experts is not like one, and is not measured.

Cost: 20 seconds at most, then nothing. Memory of four layers with their activations.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_wlb.attention.backends import kernel_name
from lightning_wlb.cost.profile import Link, Profile, shipped_profiles
from lightning_wlb.cost.shape import LayerShape, ModelShape
from lightning_wlb.data.cache import built_before, built_once, fingerprint
from lightning_wlb.distributed.collective_errors import Ranks
from lightning_wlb.distributed.process_groups import gather_from_all_ranks
from lightning_wlb.mesh_search.search import progress_bar
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.profiling.device import device_name
from lightning_wlb.profiling.device_profile import measure_quickly
from lightning_wlb.profiling.link_speed import link_of_ranks
from lightning_wlb.training.action_overhead import measure_overhead

SECONDS, LAYERS = 20.0, 0.7
"""For all of it, and the part of them after which layers and kernels leave larger points out."""

PHASES = 4
"""Attention, layers, memory, actions."""

_KEPT = "profile.json"
_PLANNED = "WLBStrategy: steps are planned by"


@dataclass(frozen=True)
class Measurement:
    """What is to be measured.

    Args:
        config: of a model of one layer.
        device: of this rank.
        dtype: that the model computes in.
        backend: of attention.
        ranks: of each node.
        link: within the node; None: to be measured, as there is only one node.
        network: between nodes, if there are several.
        memory_bytes: of each rank's device; None: the ranks share what is measured.
    """

    config: TransformerConfig
    device: torch.device
    dtype: torch.dtype
    backend: str
    ranks: int
    link: Link | None = None
    network: Link | None = None
    memory_bytes: int | None = None


def decoder_like(shape: ModelShape) -> TransformerConfig | None:
    """One layer of the reference decoder with the sizes of a model's commonest; None for a mixture.

    Sliding windows are left out: they change what attention is asked for, not how fast it is.
    """
    layer: LayerShape = max(shape.kinds, key=lambda kind: shape.kinds[kind])
    if layer.idle_parameters or layer.head_width % 2 or not layer.gated_width(shape.dim):
        return None
    return TransformerConfig(
        dim=shape.dim,
        layers=1,
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_width,
        ffn_dim=layer.gated_width(shape.dim),
        vocab_size=max(shape.vocab_size, 1),
    )


def agreed_profile(asked: Measurement) -> Profile | None:
    """The profile of the run's devices, the same on all ranks; collective over all of them.

    None where it could not be measured, about which one warning says why.
    """
    try:
        return _agreed(asked)
    finally:
        # Modules with hooks, and errors, hold what was measured in circles of references.
        gc.collect()
        if asked.device.type == "cuda":
            torch.cuda.empty_cache()


def _agreed(asked: Measurement) -> Profile | None:
    ranks, began = Ranks(), time.monotonic()
    try:
        text = ranks.lead(lambda: _recalled(_key(asked)))
        if text is not None:
            rank_zero_info(f"{_PLANNED} a measurement of this device that an earlier run has kept.")
            return Profile.from_json(text)
        with _progress(ranks.leads) as report:
            link = asked.link or link_of_ranks(asked.device)
            until = began + SECONDS
            measured = ranks.every(lambda: _measured(asked, link, report, ranks.leads, until))[0]
        kept = ranks.lead(lambda: _keep(_key(asked), measured))
    except Exception as error:
        rank_zero_warn(
            f"WLBStrategy could not measure this device ({error}), and plans steps without."
            " Give WLBDataModule(profile=...) a file that `lightning-wlb profile` wrote, or"
            ' profile="none" to have nothing measured.'
        )
        return None
    profile = Profile.from_json(measured)
    rank_zero_info(
        f"{_PLANNED} what this device takes for layers of width {asked.config.dim}, measured in"
        f" {time.monotonic() - began:.0f} s ({profile.device}, {profile.dtype}, attention by"
        f" {profile.kernel}, {asked.ranks} ranks a node). Kept in {kept};"
        ' WLBDataModule(profile="none") turns it off.'
    )
    return profile


def _measured(
    asked: Measurement, link: Link, report: Callable[[str], None], leads: bool, until: float
) -> str:
    """The profile of this rank, as JSON; empty on ranks whose numbers do not count."""
    config, device, dtype, backend = asked.config, asked.device, asked.dtype, asked.backend
    cuda = device.type == "cuda"
    with (
        torch.random.fork_rng([device] if cuda else []),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        layers = LAYERS * SECONDS
        profile = measure_quickly(
            config, device=device, dtype=dtype, backend=backend, seconds=layers, report=report
        )
        report("what actions take beside the model")
        beside = measure_overhead(config, device, dtype, backend, until)
    if not leads:
        return ""
    memory = profile.memory_bytes * (1 if cuda else profile.devices_per_node) // asked.ranks
    links = {"node": link, **({} if asked.network is None else {"network": asked.network})}
    between = "measured between all ranks of the run" if asked.link is None else "the shipped ones"
    return replace(
        profile,
        sources=(profile.sources[0], f"Measured when a run began, coarsely. Links: {between}."),
        kernel=kernel_name(backend, device),
        action=profile.action + beside,
        memory_bytes=asked.memory_bytes or (profile.memory_bytes if cuda else memory),
        devices_per_node=asked.ranks,
        links=links,
    ).to_json()


def _key(asked: Measurement) -> str:
    package = Path(__file__).parents[1]
    made_of = fingerprint(
        sorted(package.rglob("*.py")),
        package,
        device_name(asked.device),
        torch.__version__,
        torch.version.cuda,
        kernel_name(asked.backend, asked.device),
        torch.get_num_threads(),
        replace(asked, device=torch.device(asked.device.type)),
    )
    return f"profile-{made_of}"


def _recalled(key: str) -> str | None:
    """What was kept under this name; None where there is none that can be read."""
    folder = built_before(key)
    try:
        text = None if folder is None else (folder / _KEPT).read_text(encoding="utf-8")
        return text and Profile.from_json(text).to_json()
    except (OSError, ValueError):
        return None


def _keep(key: str, text: str) -> str:
    """Where the profile is kept for later runs, in words."""
    try:
        return str(built_once(key, lambda folder: _write(folder / _KEPT, text)))
    except OSError as error:  # the next run measures again
        return f"no folder, since none can be written ({error.strerror})"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


@contextmanager
def _progress(leads: bool) -> Iterator[Callable[[str], None]]:
    """What is being measured, on the terminal of the rank that leads."""
    if not leads:
        yield lambda text: None
        return
    with progress_bar() as tell:
        done = count()
        yield lambda text: tell(f"Measuring: {text}", next(done), PHASES)


FAST_KERNELS = ("flash_attn 3", "flash_attn 4")


def profile_of(device: torch.device, backend: str = "auto") -> Profile | None:
    """The profile nearest to this device; collective over all ranks.

    Its memory is that of the GPU that has least. None for devices that are neither CPU nor CUDA.

    Args:
        device: of this rank.
        backend: of attention.

    Raises:
        ValueError: the backend is not there.
    """
    if device.type == "cpu":
        return Profile.load("cpu")
    if device.type != "cuda":
        return None
    own = torch.cuda.get_device_properties(device)
    everyone = gather_from_all_ranks(torch.tensor([own.total_memory], device=device))
    return nearest(own.name, int(everyone.min()), kernel_name(backend, device))


def nearest(name: str, memory_bytes: int, kernel: str) -> Profile:
    """The shipped profile of the GPU of this name, or else the one that is nearest in memory.

    Args:
        name: of the GPU.
        memory_bytes: that it has.
        kernel: of attention, as :func:`.backends.kernel_name` calls it.
    """
    shipped = [Profile.load(each) for each in shipped_profiles()]
    gpus = [
        each
        for each in shipped
        if each.device_type == "cuda" and (each.kernel in FAST_KERNELS) == (kernel in FAST_KERNELS)
    ]
    named = [each for each in gpus if each.name.split("-")[0].upper() in name.upper()]
    found = min(named or gpus, key=lambda each: abs(each.memory_bytes - memory_bytes))
    if not named:
        rank_zero_warn(
            f"There is no device profile of {name}. Steps are predicted by the analytic profile"
            f" {found.name!r} with {memory_bytes / 1e9:.0f} GB of memory: the best mesh may be"
            " another one. Measure the device with `lightning-wlb profile --output FILE`, and give"
            " WLBDataModule(profile=FILE)."
        )
    return replace(found, memory_bytes=memory_bytes)
