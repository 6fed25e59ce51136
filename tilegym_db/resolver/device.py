"""What the resolver asks of the device: which GPU it is, whether a CUDA graph is being captured, where launches go.

Each question is answered through PyTorch, which is imported only once there is a device to ask about.
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
    """(GPU slug, ``sm_XX``) of the device a tensor lies on; ``("cpu", "cpu")`` for the CPU.

    A device that is neither (``meta``, another vendor) is named by its type and has no target: nothing is published for
    it, so stock code runs.
    """
    if device.type != "cuda":
        return (CPU, CPU) if device.type == CPU else (device.type, "")
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return gpu_slug(torch.cuda.get_device_name(device)), f"sm_{major}{minor}"


def default_gpu() -> tuple[str, str]:
    """Return the current CUDA device where PyTorch has one, else the CPU; works without PyTorch."""
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
    """Return the one device all tensor arguments lie on, or why a kernel must not be given them.

    A tensor subclass (a distributed, fake or quantised tensor) looks like its parts from outside and is not.
    """
    import torch

    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"an argument is a {type(tensor).__name__}, not a plain tensor"
    devices = sorted({str(tensor.device) for tensor in tensors})
    return tensors[0].device if len(devices) == 1 else f"the tensors lie on {' and '.join(devices) or 'no device'}"


def is_capturing() -> bool:
    """True while the current stream records a CUDA graph: no allocation, no compilation, no synchronisation now."""
    import torch

    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def on_device(launch: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``launch`` with ``device`` current. Free where the process has one GPU: only then is it always current."""
    if device.type != "cuda":
        return launch
    import torch

    if torch.cuda.device_count() == 1:
        return launch

    def launch_there(*args: Any) -> Any:
        with torch.cuda.device(device):
            return launch(*args)

    return launch_there
