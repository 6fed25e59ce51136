"""What a call may leave behind in its process for everybody who calls after it: switches, generators, environment, modules.

The worker takes a snapshot before a Solution is loaded, when its language is, and compares; the harness refuses a Solution that
changed anything. In a model the same kernel shares its process with code that depends on all of it: one that draws from
PyTorch's own generator changes which tokens are sampled after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Snapshot", "StateWatch", "changes", "switches", "traces_of_calls"]

Snapshot = dict[str, str]

# The toolchains set variables of their own when they compile, and read them again.
_OF_TOOLCHAINS = ("TRITON", "TORCH", "TILELANG", "TVM", "CUDA", "CUTILE", "PYTORCH", "KMP", "OMP", "NVIDIA", "CUPTI")
# What torch.compile changes for good when it first compiles. What uses it is a baseline, and never serves a model.
_OF_TORCH_COMPILE = ("recursion limit", "the environment", "warnings.filters")
_TINY = 1e-40  # subnormal in float32: zero where denormals are flushed


def _backends() -> Snapshot:
    """Every readable switch below ``torch.backends`` that is a plain value, by its dotted name."""
    found: Snapshot = {}
    for library in ("cuda.matmul", "cudnn", "mkldnn", "opt_einsum"):
        module: Any = torch.backends
        for part in library.split("."):
            module = getattr(module, part)
        for name in ("enabled", "benchmark", "deterministic", "allow_tf32", "allow_fp16_reduced_precision_reduction"):
            found[f"torch.backends.{library}.{name}"] = str(getattr(module, name, None))
        name = "allow_bf16_reduced_precision_reduction"
        found[f"torch.backends.{library}.{name}"] = str(getattr(module, name, None))
    cuda: Any = torch.backends.cuda
    for name in ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"):
        found[f"torch.backends.cuda.{name}"] = str(getattr(cuda, name)())
    return found


_SWITCHES: dict[str, Callable[[], object]] = {
    "torch.is_grad_enabled": torch.is_grad_enabled,
    "torch.is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "torch.get_default_dtype": torch.get_default_dtype,
    "torch.get_default_device": torch.get_default_device,
    "torch.get_num_threads": torch.get_num_threads,
    "torch.get_num_interop_threads": torch.get_num_interop_threads,
    "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "torch.is_deterministic_algorithms_warn_only_enabled": torch.is_deterministic_algorithms_warn_only_enabled,
    "torch.is_anomaly_enabled": torch.is_anomaly_enabled,
    "torch.is_autocast_enabled": lambda: [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
    "torch.get_autocast_dtype": lambda: [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
    "denormals are kept": lambda: bool((torch.tensor([_TINY]) * torch.ones(1)).item()),
    "working directory": os.getcwd,
    "recursion limit": sys.getrecursionlimit,
    "switch interval": sys.getswitchinterval,
    "trace function": lambda: (sys.gettrace(), sys.getprofile()),
}


def switches() -> Snapshot:
    """What nothing may change, loading and compiling included."""
    return {name: str(read()) for name, read in _SWITCHES.items()} | _backends()


def traces_of_calls() -> Snapshot:
    """What importing a language may change, and a Solution may not: generators, environment, filters of warnings."""
    found = {
        "torch's random state": _digest(torch.get_rng_state().numpy().tobytes()),
        "Python's random state": _digest(repr(random.getstate()).encode()),
        "warnings.filters": _digest(repr(_filters()).encode()),
        "the environment": str(sorted((k, v) for k, v in os.environ.items() if not k.startswith(_OF_TOOLCHAINS))),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["CUDA's random state"] = _digest(torch.cuda.get_rng_state().numpy().tobytes())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy's random state"] = _digest(repr(numpy.random.get_state()).encode())
    return found


class StateWatch:
    """The process before a Solution was loaded, compared with the process whenever somebody asks."""

    def __init__(self) -> None:
        """Take the snapshot of switches, which not even a language may change."""
        self._before, self._ignored = switches(), frozenset[str]()

    def begin(self, packages: Iterable[str], *, compiles: bool) -> None:
        """Import what a language's sources import, and take the snapshot of the rest.

        Args:
            packages: what the sources import: their language, and reviewed libraries, which may set up the process for themselves
                when they are imported. Where one cannot be imported, loading the Solution says so.
            compiles: the Solution uses torch.compile.
        """
        for package in packages:
            with contextlib.suppress(ImportError):
                importlib.import_module(package)
        self._before |= traces_of_calls()
        self._ignored = frozenset(_OF_TORCH_COMPILE if compiles else ())

    def changes(self) -> list[str]:
        """One sentence for each thing that is another one now."""
        after = switches() | traces_of_calls()
        return changes({name: value for name, value in self._before.items() if name not in self._ignored}, after)


def _filters() -> list[object]:
    """The filters for Python's own kinds of warnings; a library that is imported late may add some for kinds of its own."""
    return [entry for entry in warnings.filters if entry[2].__module__ == "builtins"]


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    """One sentence for each thing that is another one now."""
    return [
        f"{name} is {after[name][:80]} after calls and was {value[:80]} before"
        for name, value in before.items()
        if name in after and after[name] != value
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
