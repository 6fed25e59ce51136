"""Reads the NVIDIA driver's GPUs without PyTorch and without a subprocess.

The driver's files are read first, in about a millisecond. Its management library tells more but starts more slowly.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

# One of these files exists if a CUDA device is possible: desktop or server, Windows Subsystem for Linux, Jetson.
_SIGNS = ("dev/nvidiactl", "dev/nvidia0", "proc/driver/nvidia", "dev/dxg", "dev/nvmap", "dev/nvhost-ctrl")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)


def driver_files() -> tuple[Path, ...]:
    """Return the files that show a driver; empty if no CUDA device is possible."""
    return tuple(path for path in (Path("/", sign) for sign in _SIGNS) if path.exists())


def driver_gpu_names() -> tuple[str, ...]:
    """Return the device name of every GPU of the driver, such as ``NVIDIA H200``; empty if the driver does not list them.

    GPUs that ``CUDA_VISIBLE_DEVICES`` hides are included: use the result to exclude GPUs, not to select them.
    """
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            match = _MODEL.search(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return ()  # an unreadable file may be of any GPU
        if match is None or not match[1].strip("?"):
            return ()
        names.append(match[1])
    return tuple(names)


def started_library() -> ModuleType | None:
    """Return the bindings of NVIDIA's management library, initialised; None if no driver answers.

    The caller must call ``nvmlShutdown`` once.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml  # type: ignore[no-any-return]


def driver_version() -> str:
    """Return the driver's version, such as ``580.159.03``; empty if no driver answers."""
    library = started_library()
    if library is None:
        return ""
    try:
        return str(library.nvmlSystemGetDriverVersion())
    except library.NVMLError:
        return ""
    finally:
        library.nvmlShutdown()


def driver_gpus() -> tuple[str, ...]:
    """Return each GPU that the driver can reach as ``NVIDIA H200, driver 580.159.03``; empty if no driver answers."""
    version, library = driver_version(), started_library()
    if library is None:
        return ()
    try:
        devices = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        return tuple(f"{library.nvmlDeviceGetName(device)}, driver {version}" for device in devices)
    except library.NVMLError:
        return ()
    finally:
        library.nvmlShutdown()
