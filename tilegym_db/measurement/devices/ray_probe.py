"""Probe that runs first on a node of a Ray cluster: it reports if the node has this package, in the same version.

Ray sends these functions by value, since the node may lack the package. So they import the package only inside.
"""

from __future__ import annotations

from typing import Any


def package_facts() -> dict[str, Any]:
    """Return the version of the imported package, and a digest of its source files."""
    import hashlib
    import importlib
    from pathlib import Path

    package = importlib.import_module("tilegym_db")  # the node's own package of that name
    folder = Path(package.__file__ or "").parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return {"version": package.__version__, "digest": digest.hexdigest()}


def describe_node(own: dict[str, Any]) -> dict[str, Any]:
    """Return host name, Python and package of a node, and its GPU names according to the driver if the package equals
    ``own``.
    """
    import platform
    import sys

    facts: dict[str, Any] = {"host": platform.node(), "executable": sys.executable, "gpu_names": ()}
    try:
        facts |= package_facts()
    except Exception as error:  # report any error of the import
        return facts | {"missing": f"{type(error).__name__}: {error}"}
    if facts["digest"] == own["digest"]:
        from tilegym_db.driver import driver_gpu_names

        facts["gpu_names"] = driver_gpu_names()
    return facts
