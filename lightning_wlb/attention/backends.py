"""Which kernel runs: the backends of causal attention over packed segments of different length.

The backend is chosen when :class:`VarlenAttention` is made; segments are those of :class:`.Kernel`:

=========  ============================================  ==================  ======  ==============
name       kernel                                        dtypes              device  lacks
=========  ============================================  ==================  ======  ==============
``cpu``    torch's CPU kernel, two calls per segment     float16 to float64  CPU     nothing
``exact``  dense attention of each segment, for tests    float16 to float64  both    nothing
``torch``  ``torch.nn.attention.varlen`` (torch ≥ 2.11)  float16, bfloat16   CUDA    softcap
``flash``  FlashAttention-3, on Hopper                   float16, bfloat16   CUDA    sinks
``flash``  ``flash_attn`` from 2.7 on, below 3           float16, bfloat16   CUDA    sinks
``flash``  ``flash_attn`` 4.x                            float16, bfloat16   CUDA    sinks, softcap
=========  ============================================  ==================  ======  ==============

``auto`` is ``cpu`` for CPU tensors; on CUDA ``flash`` if installed, else ``torch``. A call with an
option (:class:`.AttentionOptions`) that the backend lacks is refused.

Two other files use the name that a backend's loader returns: ``cost/memory_model.py`` counts the
allocations of a kernel's backward, and ``profiling/device.py`` chooses a device's shipped profile.

Cost: the attention pairs, and memory linear in tokens. For one short sequence without packing,
``scaled_dot_product_attention`` is simpler and as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lightning_wlb.attention.kernel_interface import PLAIN, AttentionOptions, Kernel
from lightning_wlb.attention.kernels_cpu import cpu_attention
from lightning_wlb.attention.kernels_exact import exact_attention
from lightning_wlb.attention.kernels_gpu import load_flash, load_torch
from lightning_wlb.attention.kv_cache import call_in_backward
from lightning_wlb.attention.metadata import AttentionMetadata


class Timer(Protocol):
    """Times kernels; on CUDA it records events, since a kernel may run after its call returns."""

    def start(self) -> None:
        """The kernel is about to be called."""

    def stop(self) -> None:
        """The kernel has been called."""


@dataclass(frozen=True)
class AttentionBackend:
    """A kernel that a user may choose."""

    #: returns the kernel's name in profiles and the kernel; ImportError says why there is none
    load: Callable[[], tuple[str, Kernel]]
    devices: tuple[str, ...]
    needs: str = ""

    def loaded(self) -> tuple[str, Kernel]:
        """The kernel's name and function, from ``load``; ImportError without a device for it."""
        if "cpu" not in self.devices and not torch.cuda.is_available():
            raise ImportError("there is no CUDA device")
        return self.load()


BACKENDS: dict[str, AttentionBackend] = {
    "cpu": AttentionBackend(lambda: ("cpu", cpu_attention), ("cpu",)),
    "torch": AttentionBackend(
        lambda: ("torch (FlashAttention-2)", load_torch()),
        ("cuda",),
        "torch 2.11 or newer built for CUDA",
    ),
    "flash": AttentionBackend(
        load_flash,
        ("cuda",),
        "flash-attn (2.7 or newer), FlashAttention-3 on Hopper, or flash-attn-4",
    ),
    "exact": AttentionBackend(lambda: ("exact", exact_attention), ("cpu", "cuda")),
}
"""The backends that a user may name besides ``"auto"``."""


def available_backends() -> list[str]:
    """Names of the backends that can be chosen on this machine."""
    names = []
    for name, backend in BACKENDS.items():
        try:
            backend.loaded()
        except ImportError:
            continue
        names.append(name)
    return names


def kernel_name(backend: str, device: torch.device | str) -> str:
    """The name, as in profiles, of the kernel that a backend runs on a device of this machine.

    Libraries for CUDA are imported only for CUDA devices.

    Raises:
        ValueError: as :class:`VarlenAttention`, or if the backend does not run on the device.
    """
    device_type = torch.device(device).type
    if backend == "auto" and device_type == "cpu":
        backend = "cpu"
    return VarlenAttention(backend).kernel_name(device_type)


class VarlenAttention:
    """Causal variable-length attention by the kernel chosen here.

    Attributes:
        timer: called around the kernel in forward and in backward unless it is None; no
            collective runs between its ``start`` and ``stop``. It may be set and unset at any time.

    Raises:
        ValueError: the backend is unknown or missing; the message has the reason and a remedy.
    """

    timer: Timer | None = None

    def __init__(self, backend: str = "auto") -> None:
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(
                f"unknown attention backend {backend!r}, not {', '.join(['auto', *BACKENDS])}."
            )
        self.backend = backend
        self._kernels: dict[str, tuple[str, Kernel]] = {}
        if backend == "auto":
            self._kernels["cpu"] = BACKENDS["cpu"].loaded()
            if torch.cuda.is_available():
                try:
                    self._kernels["cuda"] = BACKENDS["flash"].loaded()
                except ImportError:
                    self._kernels["cuda"] = BACKENDS["torch"].loaded()
            return
        chosen = BACKENDS[backend]
        try:
            self._kernels = dict.fromkeys(chosen.devices, chosen.loaded())
        except ImportError as reason:
            raise ValueError(
                f"attention backend {backend!r} is not available: {reason}. It needs"
                f" {chosen.needs}. Available here: {', '.join(available_backends())}. Install what"
                " is missing, choose one of these, or leave the choice to 'auto'."
            ) from reason

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Attention of packed queries over packed keys and values; there may be no queries.

        Arguments and result are those of :class:`.Kernel`.

        Raises:
            ValueError: shapes or dtypes do not fit each other or the metadata, no kernel of the
                backend fits device, dtype or option, or the metadata lacks keys in the window.
        """
        _check_shapes(q, k, v, metadata)
        _check_options(options, q, metadata)
        kernel = self._kernel_for(q)
        if metadata.queries == 0:
            # Nothing to compute, but autograd must still reach the empty q, k and v, since a rank
            # without tokens joins the collectives of their backward. The gradient of sinks is zero.
            nothing = k.sum() + v.sum()
            return q + (nothing if options.sinks is None else nothing + options.sinks.sum())
        timer = self.timer
        if timer is None:
            return kernel(q, k, v, metadata, options)
        if options.sinks is None:
            q, k, v = call_in_backward(timer.stop, q, k, v)
        else:
            q, k, v, sinks = call_in_backward(timer.stop, q, k, v, options.sinks)
            options = replace(options, sinks=sinks)
        timer.start()
        out = kernel(q, k, v, metadata, options)
        timer.stop()
        (out,) = call_in_backward(timer.start, out)
        return out

    def kernel_name(self, device_type: str) -> str:
        """The kernel's name for a kind of device; ValueError if the backend has none for it."""
        if device_type not in self._kernels:
            raise ValueError(
                f"attention backend {self.backend!r} runs on {' and '.join(self._kernels)}, but the"
                f" tensors are on {device_type}. Choose backend 'auto' or an accelerator that fits."
            )
        return self._kernels[device_type][0]

    def _kernel_for(self, q: Tensor) -> Kernel:
        device = q.device.type
        name = self.kernel_name(device)
        _, kernel = self._kernels[device]
        halves = (torch.float16, torch.bfloat16)
        if device == "cuda" and name != "exact" and q.dtype not in halves:
            raise ValueError(
                f"attention kernel {name!r} has no {q.dtype} on CUDA, only float16 and bfloat16."
                " Train with precision 'bf16-mixed' or 'bf16-true', or in this precision on CPU; to"
                " compare gradients on the GPU give attention_backend='exact', which is slow."
            )
        return kernel


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
    """Everything that can be checked without waiting for the device."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{shapes}: give q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim]."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{shapes}: {q.shape[1]} heads are no multiple of {k.shape[1]} kv_heads.")
    if q.shape[0] != metadata.queries or k.shape[0] != metadata.keys:
        raise ValueError(
            f"{shapes}: the metadata describes {metadata.queries} queries and {metadata.keys} keys."
            " Cut off padding rows, and gather keys, before the call (packed_attention does both)."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}. Cast after"
            " the rotary embedding."
        )
    if not q.device == k.device == v.device == metadata.cu_seqlens_q.device:
        raise ValueError(
            f"q, k, v and the metadata must be on one device, not {q.device}, {k.device},"
            f" {v.device} and {metadata.cu_seqlens_q.device}. Move the batch with its .to(device)."
        )


def _check_options(options: AttentionOptions, q: Tensor, metadata: AttentionMetadata) -> None:
    window, of_metadata = options.sliding_window, metadata.sliding_window
    if of_metadata is not None and (window is None or window > of_metadata):
        raise ValueError(
            f"the batch was made for a sliding window of {of_metadata} tokens and lacks keys that"
            f" attention with sliding_window={window} reads. Say this layer's window in the data"
            " module's ModelShape (model_shape); ModelShape.of_layers takes each layer's window."
        )
    sinks = options.sinks
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.device != q.device):
        raise ValueError(
            f"sinks {tuple(sinks.shape)} on {sinks.device} for q {tuple(q.shape)} on {q.device}:"
            " give one for each of this rank's query heads, on the same device."
        )
