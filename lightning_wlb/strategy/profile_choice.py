"""The device profile that a run plans its steps by: given, shipped, kept, or measured now.

A run whose mesh was searched for, and any on a GPU, plans its steps by a device profile, which
knows how much memory there is: the data module's, or the shipped one that is nearest to the device.
Where times decide about plans (a pipeline, adaptive sharding) and the data module gives no profile,
the devices of several ranks are then measured, when the first batch is asked for:

1. A checkpoint is loaded by then, and holds what the run before it was planned by. That goes on.
2. Else rank 0 looks whether the same was measured before: in the user's cache folder, under the
   name of the device, the versions of torch and CUDA, the kernel, the dtype, threads, ranks per
   node, sizes of a layer, and this package's code.
3. If not, every rank measures its device, all at the same time: as in a step, ranks of a node share
   its memory, its caches and its power. Links within a node are measured between all of its ranks;
   those between nodes are the shipped profile's.
4. Rank 0's numbers are everyone's. They are kept for the next run.

A rank whose measurement fails ends it for all of them, with one warning, and the run goes on by
what it had without. The random numbers of the run are left as they were. What is left, such as
replicas alone on CPUs, or documents packed by their tokens, is planned by work alone.

What is measured is the reference decoder with the sizes of the model's commonest layer
(:mod:`~lightning_wlb.profiling.device_profile`), and what actions take beside it
(:mod:`~lightning_wlb.training.action_overhead`). A mixture of experts is not like one, and is not
measured.

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
from lightning_wlb.cost.profile import Link, Profile
from lightning_wlb.cost.shape import LayerShape, ModelShape
from lightning_wlb.data.cache import built_before, built_once, fingerprint
from lightning_wlb.data.datamodule import WLBDataModule
from lightning_wlb.distributed.collective_errors import Ranks
from lightning_wlb.mesh import Mesh
from lightning_wlb.mesh_search.search import progress_bar
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.profiling.device import device_name, shipped_profile
from lightning_wlb.profiling.device_profile import measure_quickly
from lightning_wlb.profiling.link_speed import link_of_ranks
from lightning_wlb.sharding import ADAPTIVE
from lightning_wlb.strategy.launch import RunDevices
from lightning_wlb.supervision.progress import BETWEEN, PROGRESS
from lightning_wlb.training.action_overhead import measure_overhead
from lightning_wlb.training.precision import name_of

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
        config: a model of one layer.
        device: the device of this rank.
        dtype: the model computes in it.
        backend: the kernel backend of attention, or ``"auto"``.
        ranks: processes on each node.
        link: between ranks of a node; None: to be measured, as there is only one node.
        network: between nodes, if there are several.
        memory_bytes: the memory of each rank's device; None: the ranks share what is measured.
    """

    config: TransformerConfig
    device: torch.device
    dtype: torch.dtype
    backend: str
    ranks: int
    link: Link | None = None
    network: Link | None = None
    memory_bytes: int | None = None

    @property
    def made_of(self) -> tuple[str, ...]:
        """What a profile has to be made of to stand for this measurement."""
        kernel = kernel_name(self.backend, self.device)
        return self.device.type, name_of(self.dtype), kernel, f"{self.ranks} ranks a node"

    def is_met_by(self, kept: Profile) -> bool:
        """Whether what another run has measured tells the same of the same devices."""
        ranks = f"{kept.devices_per_node} ranks a node"
        made_of = kept.device_type, kept.dtype, kept.kernel, ranks
        return made_of == self.made_of and (self.network is None or "network" in kept.links)


class ProfileChoice:
    """What the runs of a strategy are planned by, one run after another.

    Attributes:
        profile: plans the run's steps; None: the data module's does, if it has one.
        unmeasured: what ``profile`` is where nothing is measured.
    """

    def __init__(self) -> None:
        self.profile: Profile | None = None
        self.unmeasured: Profile | None = None

    def begin(
        self, devices: RunDevices, backend: str, given: Profile | None, *, searched: bool
    ) -> None:
        """Begin a run by what is known of its devices; collective over all ranks.

        Args:
            devices: the run's devices.
            backend: the kernel backend of attention, or ``"auto"``.
            given: the data module's profile.
            searched: whether the run's mesh is searched for.
        """
        self.profile = self.unmeasured = None
        if not searched and (devices.device.type == "cpu" or given is not None):
            return
        profile = shipped_profile(devices.device, backend) if given is None else given
        if profile is not None and (devices.nodes == 1 or "network" in profile.links):
            self.profile = replace(profile, devices_per_node=devices.per_node)
            self.unmeasured = self.profile

    def decides(self, mesh: Mesh, data: WLBDataModule) -> bool:
        """Whether times decide about plans of steps on the mesh."""
        compares = data.settings.packer.compares_plans
        return (compares and (mesh.pipeline > 1 or self.unmeasured is not None)) or (
            data.sharding == ADAPTIVE and mesh.context > 1
        )

    def measure(
        self,
        devices: RunDevices,
        mesh: Mesh,
        data: WLBDataModule,
        module: LanguageModule,
        *,
        leaves_mesh: bool,
    ) -> None:
        """Plan by what the run's devices are measured to take, where that is to be known.

        What a checkpoint has brought is not measured again, so that a resumed run gets the plans of
        an unbroken one; but it is where another number of ranks shares a node now, whose memory and
        links are others for each. Collective over all ranks.

        Args:
            devices: the run's devices.
            mesh: the run's mesh.
            data: the data module, which keeps the measurement, in checkpoints too.
            module: builds the model.
            leaves_mesh: whether steps may run on other pipelines than the mesh's.
        """
        if not data.measures or mesh.devices == 1:
            return
        if not (leaves_mesh or self.decides(mesh, data)):
            return
        measurement = self._measurement(devices, module)
        if measurement is None:
            return
        if data.measured is not None:
            kept = Profile.from_json(data.measured) if data.measured else None
            if kept is None:
                return
            if measurement.is_met_by(kept):
                rank_zero_info(f"WLBStrategy: steps are planned by {kept.provenance}, as before.")
                self.profile = kept
                return
            rank_zero_info(
                f"WLBStrategy: the run was planned by {kept.provenance}. Here it goes on with"
                f" {', '.join(measurement.made_of)}, which is measured anew."
            )
        PROGRESS.note(BETWEEN, "the measurement of the device")
        profile = agreed_profile(measurement)
        data.keep_measurement(profile)
        self.profile = profile or self.profile

    def _measurement(self, devices: RunDevices, module: LanguageModule) -> Measurement | None:
        """What can be measured of these devices; None: nothing."""
        several, known = devices.nodes > 1, self.profile
        links = known.links if known else {}
        if (several and "network" not in links) or devices.device.type not in ("cpu", "cuda"):
            return None
        config = decoder_like(module.model_shape)
        if config is None:
            rank_zero_info(
                "WLBStrategy: this device is not measured, since layers of this model are not like"
                " those of the reference decoder. WLBDataModule(profile=...) takes a profile."
            )
            return None
        return Measurement(
            config,
            devices.device,
            devices.compute_dtype,
            module.attention_backend,
            devices.per_node,
            links["node"] if several else None,
            links["network"] if several else None,
            None if known is None else known.memory_bytes,
        )


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
