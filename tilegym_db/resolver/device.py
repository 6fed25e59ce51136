"""Questions of the resolver to the device: its GPU, the device of a launch, and if a CUDA graph is being captured.

PyTorch answers them. It is imported only if there is a device to ask about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tilegym_db.driver import driver_files
from tilegym_db.records.hardware import CPU, gpu_slug

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=64)
def device_gpu(device: torch.device) -> tuple[str, str]:
    """Return (GPU slug, ``sm_XX``) of the device of a tensor; ``("cpu", "cpu")`` for the CPU.

    A device of another kind (``meta``, another vendor) is named by its type and has no target. Nothing is published for it, so
    stock code runs.
    """
    if device.type != "cuda":
        return (CPU, CPU) if device.type == CPU else (device.type, "")
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return gpu_slug(torch.cuda.get_device_name(device)), f"sm_{major}{minor}"


def default_gpu() -> tuple[str, str]:
    """Return the current CUDA device if PyTorch has one, else the CPU; works without PyTorch."""
    if not driver_files():
        return CPU, CPU
    try:
        import torch
    except ImportError:
        return CPU, CPU
    if not torch.cuda.is_available():
        return CPU, CPU
    return device_gpu(torch.device("cuda", torch.cuda.current_device()))


def common_device(args: Sequence[Any]) -> torch.device | str:
    """Return the one device of all tensor arguments, or the reason if a kernel must not get them.

    A tensor subclass (a distributed, fake or quantised tensor) has the attributes of a plain tensor but not its memory.
    """
    import torch

    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"an argument is a {type(tensor).__name__}, not a plain tensor"
    devices = sorted({str(tensor.device) for tensor in tensors})
    return tensors[0].device if len(devices) == 1 else f"the tensors are on {' and '.join(devices) or 'no device'}"


def is_capturing() -> bool:
    """Return True while the current stream captures a CUDA graph, when nothing may allocate, compile or synchronise."""
    import torch

    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def synchronise(device: torch.device) -> None:
    """Wait until a device has done all work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def made_like(shadows: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return uninitialised tensors on a device with the sizes, strides and dtypes of tensors without memory."""
    import torch

    return tuple(torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device) for one in shadows)


def on_device(launch: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return ``launch`` with ``device`` current.

    With one GPU in the process it is always current, so this costs nothing. With several a call looks which one is current,
    because the context that changes it costs more, also where it changes nothing.
    """
    if device.type != "cuda":
        return launch
    import torch

    if torch.cuda.device_count() == 1:
        return launch

    current = torch.cuda.current_device

    def launch_there(*args: Any) -> Any:
        if current() == device.index:
            return launch(*args)
        with torch.cuda.device(device):
            return launch(*args)

    return launch_there
