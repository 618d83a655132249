"""Document lengths in, step plans out.

For each step the planner takes the next global batch of the epoch's order. The packing method holds
back or releases pieces, forms micro-batches and deals them to the replicas, and then every
micro-batch gets a sharding and its rows. After an epoch's last arrival, waiting pieces are drained
in steps of at most N·C tokens, and the next epoch starts empty.

Every rank runs the same planner and gets the same plan: costs are integers, ties go by document
number, the order by ``numpy.random.default_rng((seed, epoch))``. Any mesh can resume the state.

Cost: milliseconds of plain Python for a step of some hundred pieces, including the validation of
the plan; once per epoch a permutation of the document numbers, of 4 bytes each. The planner of ten
million documents is ready in seconds (``benchmarks/results/scale.json``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_wlb.argument_checks import choice, whole, wholes
from lightning_wlb.cost.attention_tiles import SegmentCost, reference_kernel_cost
from lightning_wlb.cost.flops import Work
from lightning_wlb.mesh import ONE_DEVICE, Mesh
from lightning_wlb.plan import ActivationCheckpointing, Schemes, StepPlan
from lightning_wlb.planning.global_batches import GlobalBatches, Stream
from lightning_wlb.planning.mixture import MixedBatches, StoreShare
from lightning_wlb.planning.packing.base import MicroBatches
from lightning_wlb.planning.plan_scoring import Placement, PlanScorer
from lightning_wlb.planning.replica_plans import laid_out
from lightning_wlb.planning.settings import DataSettings
from lightning_wlb.planning.step_chooser import StepChooser, check_packing, fastest
from lightning_wlb.prediction.recompute import recomputing
from lightning_wlb.sharding import ADAPTIVE, SHARDINGS

Targets = Callable[[int, int, int], int]


class Release(NamedTuple):
    """The pieces that enter optimiser step ``step``, on any mesh.

    ``drain`` says whether the step drains waiting pieces after the epoch's last arrival. For a
    packing that slices pieces, all pieces are in one micro-batch here.
    """

    step: int
    epoch: int
    micro_batches: MicroBatches
    drain: bool


class Planner:
    """Plans the steps of a run, one after another.

    Args:
        lengths: tokens of each document of the store, by document number.
        data: settings that decide which pieces enter a step.
        work: forward and backward work of the model on a slice.
        mesh: the ranks that the steps are planned for.
        sharding: how micro-batches lie on the context ranks, a name in
            ``lightning_wlb.sharding.SHARDINGS``, or ``"adaptive"``: for each micro-batch the
            sharding with the least predicted attention latency.
        targets: ``(document, start, stop)`` -> tokens of ``[start, stop)`` that have a
            next-token target; None: every token but the document's last.
        kernel_cost: cost of attention segments, forward + backward, for adaptive sharding.
        scorer: compares plans for packings that try several for a step, such as a
            :class:`~lightning_wlb.planning.plan_scoring.ProfileScorer`; None: by exact work.
        activation_checkpointing: what all micro-batches recompute in backward; ``"auto"``: what the
            scorer decides, or nothing without a scorer.
        mixture: the share of each of several stores, whose ``lengths`` follow one another; empty
            for a single store (:mod:`lightning_wlb.planning.mixture`).
        step_chooser: may give a step other pipelines than the mesh's; None: all run on the mesh.

    Attributes:
        packer: the packing of the run, with the pieces that wait.

    Raises:
        ValueError: no documents, an empty document, a document above the context window where
            ``long_documents="error"``, a step chooser without a scorer or with a packing that
            cannot deal to pipelines that differ, or an unknown sharding or recomputation.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any],
        data: DataSettings,
        work: Work,
        mesh: Mesh = ONE_DEVICE,
        *,
        sharding: str = ADAPTIVE,
        targets: Targets | None = None,
        kernel_cost: SegmentCost = reference_kernel_cost,
        scorer: PlanScorer | None = None,
        activation_checkpointing: ActivationCheckpointing = "auto",
        mixture: Sequence[StoreShare] = (),
        step_chooser: StepChooser | None = None,
    ) -> None:
        self._data = data
        self._mesh = mesh
        self._work = work
        self._sharding = choice("sharding", sharding, (ADAPTIVE, *SHARDINGS))
        self._kernel_cost = kernel_cost
        choice(
            "activation_checkpointing", activation_checkpointing, get_args(ActivationCheckpointing)
        )
        self._checkpointing = activation_checkpointing
        self._scorer = scorer
        if step_chooser is not None and scorer is None:
            raise ValueError("a step chooser needs a device profile to choose by: give scorer.")
        self._step_chooser = step_chooser
        self._targets = targets or self._targets_in_document
        self._store_lengths = np.asarray(lengths, dtype=np.int64)
        _check_lengths(self._store_lengths, data)
        self._lengths = self._store_lengths
        if data.long_documents == "truncate":
            self._lengths = np.minimum(self._store_lengths, data.context_window)
        self.packer = data.packer(data.rules(self._lengths, work))
        if step_chooser is not None:
            check_packing(self.packer)
        self._mixture = tuple(mixture)
        self._arrivals = arrivals_of(self._lengths, data, self._mixture)
        self._settings = self._fingerprint()
        self._step = 0  # steps planned
        self._tokens = 0  # tokens of these steps

    @property
    def dropped_tokens(self) -> int:
        """Tokens per epoch that ``long_documents="truncate"`` leaves out."""
        return int(self._store_lengths.sum()) - int(self._lengths.sum())

    @property
    def finished(self) -> bool:
        """Whether the run has reached ``max_tokens``."""
        return self._data.max_tokens is not None and self._tokens >= self._data.max_tokens

    def next_step(self) -> StepPlan | None:
        """The plan of the next step.

        Returns:
            None once when the epoch is over (the next call starts the next epoch), and None for
            ever when ``max_tokens`` is reached (:attr:`finished`).
        """
        release = self.release()
        return None if release is None else self.place(release)

    def release(self) -> Release | None:
        """The pieces of the next step without its plan, in a small part of the time of a plan.

        Returns None where :meth:`next_step` returns it.
        """
        # A run whose last step ends an epoch first goes on to the next epoch.
        if self.finished and (self.packer.held or not self._arrivals.exhausted):
            return None
        micro_batches, drain = self.packer.next_step(self._arrivals, self._step)
        if not any(micro_batches):
            self._arrivals.start_epoch(self._arrivals.epoch + 1)
            self.packer.reset()
            return None
        release = Release(self._step, self._arrivals.epoch, micro_batches, drain)
        self._step += 1
        self._tokens += sum(piece.tokens for packed in micro_batches for piece in packed)
        return release

    def place(self, release: Release) -> StepPlan:
        """The plan of a step with these pieces."""
        pieces = tuple(sorted(piece for packed in release.micro_batches for piece in packed))
        scorer = self._scorer or self.packer.rules.work_scorer(self._mesh)
        place = Placement(self._mesh, self._sharding, scorer)
        replicas = laid_out(
            self.packer.replicas(release.micro_batches, place),
            self._mesh,
            self._sharding,
            self._kernel_cost,
        )
        settled = tuple(
            scorer.settled(replicas)
            if self._checkpointing == "auto"
            else recomputing(replicas, self._checkpointing)
        )
        cap = self.packer.cap(place)
        schemes: Schemes = ()
        if self._step_chooser is not None:
            arranged = self._step_chooser.arranged(pieces, self.packer)
            if (chosen := fastest(arranged, scorer(settled), scorer.limit)) is not None:
                schemes, _, _, settled, cap = chosen
        return StepPlan(
            step=release.step,
            epoch=release.epoch,
            replicas=settled,
            pieces=pieces,
            target_tokens=sum(
                self._targets(piece.document, piece.origin, piece.stop) for piece in pieces
            ),
            cap=cap,
            micro_batches=self._data.micro_batches,
            nominal_tokens=self._data.nominal_tokens,
            drain=release.drain,
            schemes=schemes,
        ).validate()

    def state_dict(self) -> dict[str, Any]:
        """The run's position after the last plan, in plain ints, strings, lists and dicts.

        The state is the same on every rank, and independent of the mesh.
        """
        return {
            "settings": dict(self._settings),
            **self._arrivals.state_dict(),
            "step": self._step,
            "tokens": self._tokens,
            "packer": self.packer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken.

        ``max_tokens`` and the mesh may differ from the run that saved the state.

        Raises:
            ValueError: data settings differ from the saved state's, or no run can have saved it.
        """
        saved = state["settings"]
        differing = [
            f"{name}={saved.get(name)!r} in the saved state, {self._settings.get(name)!r} here"
            for name in {**self._settings, **saved}
            if saved.get(name) != self._settings.get(name)
        ]
        if differing:
            raise ValueError(
                "The saved data state belongs to other data settings: "
                + "; ".join(differing)
                + ". Documents would be lost or repeated. Resume with the settings of the saved"
                " run, or start the data afresh by loading the weights alone."
            )
        try:
            self._step = whole("step", state["step"], 0)
            self._tokens = whole("tokens", state["tokens"], 0)
            self._arrivals.load_state_dict(state)
            self.packer.load_state_dict(state["packer"])
            self._check_held()
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise ValueError(
                f"The saved data state is damaged or made up ({type(error).__name__}: {error}). Use"
                " another checkpoint, or start the data anew with the weights alone."
            ) from error

    def _check_held(self) -> None:
        """Refuse waiting pieces that are no part of a document, or that wait twice."""
        before = None
        for piece in sorted(self.packer.held):
            document, origin, stop, arrival = wholes("a piece that waits", piece, 0)
            number = document % len(self._lengths) if self._mixture else document
            length = self._lengths[number]
            late = arrival > self._step
            if late or not origin < stop <= min(length, origin + self._data.context_window):
                raise ValueError(f"no step can have left the piece {tuple(piece)}")
            if before is not None and before[0] == document and before[2] > origin:
                raise ValueError(f"the piece {tuple(piece)} waits twice")
            before = piece

    def _targets_in_document(self, document: int, start: int, stop: int) -> int:
        length = int(self._store_lengths[document % len(self._store_lengths)])
        return max(min(stop, length - 1) - start, 0)

    def _fingerprint(self) -> dict[str, Any]:
        """The data settings, resolved, with what identifies the documents and the cost model."""
        data, total = self._data, self._work.total
        return {
            "documents": len(self._store_lengths),
            # A view, not bytes: a copy of ten million lengths is 80 MB.
            "document_lengths": hashlib.sha256(
                np.ascontiguousarray(self._store_lengths, "<i8").data
            ).hexdigest()[:16],
            "context_window": data.context_window,
            "micro_batches": data.micro_batches,
            "packing": data.packing_choice.method,
            "cap": data.token_cap,
            "global_batches": "nearest pieces",  # 0.1.0 took whole documents
            "thresholds": list(self.packer.thresholds),
            "long_documents": data.long_documents,
            "seed": data.seed,
            "shuffle": data.shuffle,
            "work": [total.per_token, total.per_pair, total.window, *map(list, total.narrower)],
            **({"mixture": [list(share) for share in self._mixture]} if self._mixture else {}),
            **data.packing_choice.options.fingerprint,
        }


def arrivals_of(
    lengths: NDArray[np.int64], data: DataSettings, mixture: Sequence[StoreShare]
) -> GlobalBatches:
    """The global batches of a run; ``lengths`` are the documents' tokens after truncation."""
    settings = data.nominal_tokens, data.context_window, data.packer.cuts_stream
    stream = Stream(*settings, data.seed, data.shuffle)
    return MixedBatches(mixture, lengths, stream) if mixture else GlobalBatches(lengths, stream)


def releases_of(planner: Planner, steps: int) -> list[Release]:
    """The next ``steps`` releases of a run without ``max_tokens``, in one or several epochs."""
    found: list[Release] = []
    while len(found) < steps:
        if (release := planner.release()) is not None:
            found.append(release)
    return found


def plan_steps(planner: Planner, steps: int) -> list[StepPlan]:
    """The next ``steps`` plans of a run without ``max_tokens``, in one or several epochs."""
    return list(map(planner.place, releases_of(planner, steps)))


def _check_lengths(lengths: NDArray[np.int64], data: DataSettings) -> None:
    if len(lengths) == 0:
        raise ValueError("The document store is empty: there is nothing to plan. Add documents.")
    if lengths.min() < 1:
        document = int(np.argmax(lengths < 1))
        raise ValueError(
            f"Document {document} has {lengths[document]} tokens; a document needs at least 1."
            " Leave empty documents out of the store."
        )
    if data.long_documents == "error" and lengths.max() > data.context_window:
        document = int(np.argmax(lengths > data.context_window))
        raise ValueError(
            f"Document {document} has {lengths[document]} tokens, more than"
            f" context_window={data.context_window}, and long_documents='error'. Raise the context"
            " window, or choose long_documents='split' (pieces of at most a window) or 'truncate'."
        )
