"""What the NVIDIA driver says of this machine's GPUs, without PyTorch and without a process.

First from the files that it shows, which takes a millisecond; more from its management library, which takes longer to start.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

# Where one of these is, a CUDA program may find a device: a desktop or server, Windows' subsystem for Linux, a Jetson.
_SIGNS = ("dev/nvidiactl", "dev/nvidia0", "proc/driver/nvidia", "dev/dxg", "dev/nvmap", "dev/nvhost-ctrl")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)


def driver_files(root: Path = Path("/")) -> tuple[Path, ...]:
    """Return the files that show a driver; none where no CUDA device can be here. ``root`` is for tests."""
    return tuple(path for path in (root / sign for sign in _SIGNS) if path.exists())


def driver_gpu_names(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the device names, as ``NVIDIA H200``, of every GPU of the driver; empty if it does not list them.

    A GPU that ``CUDA_VISIBLE_DEVICES`` hides is listed as well: the answer says what cannot be here, not what can be used.
    """
    names = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            match = _MODEL.search(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return ()  # one that cannot be read may be any
        if match is None or not match[1].strip("?"):
            return ()
        names.append(match[1])
    return tuple(names)


def started_library() -> ModuleType | None:
    """Return the bindings of NVIDIA's management library, started; None if there is no driver, or one that does not
    answer.

    The caller owes it one ``nvmlShutdown``.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml  # type: ignore[no-any-return]


def driver_version() -> str:
    """Such as ``580.159.03``; empty if no driver answers."""
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
    """``NVIDIA H200, driver 580.159.03`` of each GPU that the driver can reach; empty if none answers."""
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
