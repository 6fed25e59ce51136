"""What runs on a node before anything else does: it says whether the node has this package, and the same one.

Sent by value, since the node may not have it: the functions here import nothing of this package but what they look for, and do
so inside.
"""

from __future__ import annotations

from typing import Any


def package_facts() -> dict[str, Any]:
    """Version of the package that is imported here, and a digest of its source files."""
    import hashlib
    import importlib
    from pathlib import Path

    package = importlib.import_module("tilegym_db")  # what a node has of that name
    folder = Path(package.__file__ or "").parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return {"version": package.__version__, "digest": digest.hexdigest()}


def describe_node(own: dict[str, Any]) -> dict[str, Any]:
    """Host name, Python and package of a node; of the GPUs the names, where the package is ``own``, that of the driver."""
    import platform
    import sys

    facts: dict[str, Any] = {"host": platform.node(), "executable": sys.executable, "gpu_names": ()}
    try:
        facts |= package_facts()
    except Exception as error:  # whatever keeps the package from being imported there is what has to be told
        return facts | {"missing": f"{type(error).__name__}: {error}"}
    if facts["digest"] == own["digest"]:
        from tilegym_db.driver import driver_gpu_names

        facts["gpu_names"] = driver_gpu_names()
    return facts
