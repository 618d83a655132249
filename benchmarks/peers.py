"""How other people's code packs and deals documents: one function for each of their packers.

What comes with a package is called where the user has installed it; what exists only in a
repository, from a clone in a folder that the caller names. Nothing of theirs is in this repository.
Of verl and Megatron Core only the files that hold the algorithm run: their packages
import CUDA extensions and Ray, which take no part, so what such a file imports of its own package
is left empty unless it is named here. What is missing raises :class:`Missing`.

All functions answer in indices into the lengths that they were given: [replicas][micro-batches].
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from lightning_wlb.mesh import Mesh

Packs = list[list[list[int]]]
"""[replicas][micro-batches], indices of documents."""

CLONES = {"megatron": "Megatron-LM"}
"""Import name and the folder of its clone."""


class Missing(Exception):
    """A packer's code is not here; the message is the word for the table."""


# verl


def verl(lengths: Sequence[int], mesh: Mesh, limit: int) -> Packs:
    """``_balance_batch`` of its trainer, then ``rearrange_micro_batches`` on each replica.

    Both deal by Karmarkar-Karp on 24576·tokens + tokens². Replicas run equally many micro-batches,
    which verl agrees on by an all-reduce; here those with fewer are asked again.

    Args:
        lengths: tokens of each document.
        mesh: its data-parallel size is looked at.
        limit: most tokens of a micro-batch.
    """
    module = module_of("verl", "verl.utils.seqlen_balancing")
    module.tu.index_select_tensor_dict = lambda batch, partition: partition
    work = module.calculate_workload(torch.tensor(lengths)).tolist()
    # Its batches divide by the ranks, each of which gets as many documents. Where these do not, the
    # shortest ones are added afterwards, one to a rank.
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    left, even = order[: len(order) % mesh.data], order[len(order) % mesh.data :]
    parts = module.get_seqlen_balanced_partitions(
        [work[index] for index in even], mesh.data, equal_size=True
    )
    dealt = [[even[at] for at in part] for part in parts]
    for part, index in zip(dealt, left, strict=False):
        part.append(index)
    least = 1
    while True:
        found = []
        for part in dealt:
            own = torch.tensor([lengths[index] for index in part])
            rows = torch.zeros(int(own.sum()), dtype=torch.int8)
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), own.cumsum(0)])
            batch = {"input_ids": torch.nested.nested_tensor_from_jagged(rows, ends)}
            _, groups = module.rearrange_micro_batches(batch, limit, min_num_micro_batch=least)
            found.append([[part[index] for index in group] for group in groups])
        most = max(map(len, found))
        if all(len(groups) == most for groups in found):
            return found
        least = most


# Megatron Core


def megatron_dp_balanced(lengths: Sequence[int], mesh: Mesh, limit: int, clones: Path) -> Packs:
    """``DpBalancedScheduler``: next fit in the order of the documents, micro-batches dealt in turn.

    Args:
        lengths: tokens of each document.
        mesh: its data- and context-parallel sizes are looked at.
        limit: most tokens of a micro-batch over its context-parallel group.
        clones: folder with a clone named ``Megatron-LM``.
    """
    name = "megatron.core.datasets.data_schedule"
    utils = ("megatron.core.datasets.data_schedule_utils",)
    scheduler = module_of("megatron", name, utils, clones=clones).DpBalancedScheduler(
        limit // mesh.context, mesh.context, mesh.data, None
    )
    groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
    return [[group[replica * mesh.context] for group in groups] for replica in range(mesh.data)]


def megatron_hybrid(
    lengths: Sequence[int], ranks: int, limit: int, clones: Path | None
) -> list[list[list[int]]]:
    """``BalancedCPScheduler``: each document on as many of data × context ranks as it needs.

    Args:
        lengths: tokens of each document.
        ranks: data × context.
        limit: most tokens of a document on a rank.
        clones: as for :func:`megatron_dp_balanced`; None: the installed package.

    Returns:
        [groups][ranks], the documents of each rank in their order. A document is listed by every
        rank that shares it, and groups wait for each other.
    """
    name = "megatron.core.pipeline_parallel.hybrid_cp_schedule"
    module = module_of("megatron", name, clones=clones)
    scheduler = module.BalancedCPScheduler(limit, SimpleNamespace(size=lambda: ranks))
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    return [[list(own) for own in group] for group in groups]


# TRL


@cache
def trl_rows(lengths: tuple[int, ...], window: int, strategy: str) -> list[list[tuple[int, int]]]:
    """``trl.pack_dataset``: rows of at most a window, each of pieces (document, tokens) in order.

    Args:
        lengths: tokens of each document.
        window: tokens of a row.
        strategy: ``"bfd"`` or ``"wrapped"``.
    """
    try:
        import pyarrow as pa
        from datasets import Dataset, disable_caching, disable_progress_bars
        from trl.data_utils import pack_dataset
    except ImportError:
        raise Missing("trl") from None
    disable_caching()
    disable_progress_bars()
    sizes = torch.tensor(lengths)
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(sizes)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).int().numpy()
    rows = pa.ListArray.from_arrays(ends, numbers.numpy())
    packed = pack_dataset(Dataset(pa.table({"input_ids": rows})), window, strategy)
    result = []
    for row in packed.with_format("arrow").data.column("input_ids").chunks:
        for each in row:
            found, counts = torch.unique_consecutive(
                torch.from_numpy(each.values.to_numpy().copy()), return_counts=True
            )
            result.append(list(zip(found.tolist(), counts.tolist(), strict=True)))
    return result


# transformers


def transformers_rebalance(
    lengths: Sequence[int], batch: int, replicas: int, accumulated: int, seed: int
) -> list[Packs]:
    """``BatchRebalanceSampler``: steps of ``batch`` documents each, a micro-batch for each slot.

    Args:
        lengths: tokens of each document.
        batch: documents of a step.
        replicas: data-parallel ranks.
        accumulated: micro-batches of each.
        seed: of the order of documents.
    """

    class AllRanks(_transformers().BatchRebalanceSampler):
        def _yield_global_batch(self, batch_indices: list[int]) -> Iterator[Packs]:
            # Every rank works out the same and takes its own part.
            yield self._assign(batch_indices, [self.lengths[index] for index in batch_indices])

    return list(AllRanks(list(lengths), batch, replicas, accumulated, seed=seed))


def transformers_grouped(
    lengths: Sequence[int], each: int, replicas: int, accumulated: int, seed: int
) -> list[Packs]:
    """``LengthGroupedSampler``: micro-batches of ``each`` documents, dealt in turn as accelerate.

    Args:
        lengths: tokens of each document.
        each: documents of a micro-batch.
        replicas: data-parallel ranks.
        accumulated: micro-batches of each in a step.
        seed: of the order of documents.
    """
    sampler = _transformers().LengthGroupedSampler
    generator = torch.Generator().manual_seed(seed)
    order = list(sampler(each * accumulated, lengths=list(lengths), generator=generator))
    micro_batches = [order[at : at + each] for at in range(0, len(order) - each + 1, each)]
    size = replicas * accumulated
    return [
        [micro_batches[start + rank : start + size : replicas] for rank in range(replicas)]
        for start in range(0, len(micro_batches) - size + 1, size)
    ]


def _transformers() -> Any:
    try:
        from transformers import trainer_pt_utils
    except ImportError:
        raise Missing("transformers") from None
    return trainer_pt_utils


# Modules


@cache
def module_of(
    top: str, name: str, files: tuple[str, ...] = (), *, clones: Path | None = None
) -> ModuleType:
    """The module of that name, of whose package only ``files`` are read besides."""
    root = _root(top, clones)
    paths = {each: root / (each.replace(".", "/") + ".py") for each in (name, *files)}
    if not all(path.exists() for path in paths.values()):
        raise Missing(CLONES.get(top, top) if clones else top)
    with _alone(_OnlyFiles(top, paths)):
        return importlib.import_module(name)


def _root(top: str, clones: Path | None) -> Path:
    if clones is not None and top in CLONES:
        return clones / CLONES[top]
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise Missing(top)
    return Path(next(iter(spec.submodule_search_locations))).parent


@contextmanager
def _alone(finder: _OnlyFiles) -> Iterator[None]:
    """What is imported of the finder's package inside is forgotten again."""

    def imported() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == finder.top]

    before = {name: sys.modules.pop(name) for name in imported()}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in imported():
            del sys.modules[name]
        sys.modules.update(before)


class _OnlyFiles(MetaPathFinder, Loader):
    """Imports some files of a package, by the name of their module, and all others as empty."""

    def __init__(self, top: str, paths: dict[str, Path]) -> None:
        self.top, self.paths = top, paths

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname in self.paths:
            return importlib.util.spec_from_file_location(fullname, self.paths[fullname])
        if fullname.partition(".")[0] == self.top:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        def placeholder(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = placeholder  # type: ignore[method-assign]
