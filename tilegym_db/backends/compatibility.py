"""Which installed packages do not fit together, from their metadata alone: nothing is imported."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

__all__ = ["Misfit", "installed_versions", "misfits", "torch_requirements"]

TILEIRAS = "nvidia-cuda-tileiras"
COMPILER_PARTS = ("nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-crt")
"""What tileiras and nvcc call; of one release (13.4, say) they fit, of several they may not."""
HOPPER_RELEASE = Version("13.3")
"""The first release of tileiras that compiles for sm_90."""


@dataclass(frozen=True)
class Misfit:
    """Packages that are installed and do not fit together: what follows, and the command that mends it."""

    packages: tuple[str, ...]
    detail: str
    fix: str


def installed_versions() -> dict[str, str]:
    """Version by distribution, of what this module looks at; absent where it is not installed."""
    versions = {}
    for name in (TILEIRAS, *COMPILER_PARTS, "torch", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def torch_requirements() -> tuple[str, ...]:
    """What the installed PyTorch requires, as its metadata says it; empty where there is none."""
    try:
        return tuple(importlib.metadata.requires("torch") or ())
    except importlib.metadata.PackageNotFoundError:
        return ()


def misfits(versions: Mapping[str, str], required_by_torch: tuple[str, ...] = ()) -> list[Misfit]:
    """Say what does not fit together.

    Args:
        versions: version by distribution name, as :func:`installed_versions` returns.
        required_by_torch: requirements of the installed PyTorch (``triton==3.9.0; platform_system == "Linux"``).
    """
    return [*_compiler_misfits(versions), *_triton_misfits(versions, required_by_torch)]


def _compiler_misfits(versions: Mapping[str, str]) -> Iterator[Misfit]:
    release = _release(versions.get(TILEIRAS, ""))
    if release is not None and release < HOPPER_RELEASE:
        detail = f"{TILEIRAS} {versions[TILEIRAS]} cannot compile for Hopper (sm_90); {HOPPER_RELEASE} and newer can"
        yield Misfit((TILEIRAS,), detail, f"pip install -U {TILEIRAS} {' '.join(COMPILER_PARTS)}")
    leader = TILEIRAS if release is not None else "nvidia-cuda-nvcc"
    leading = _release(versions.get(leader, ""))
    others = [name for name in COMPILER_PARTS if name != leader and _release(versions.get(name, "")) is not None]
    apart = tuple(name for name in others if _release(versions[name]) != leading)
    if leading is not None and apart:
        named = ", ".join(f"{name} {versions[name]}" for name in (leader, *apart))
        pins = " ".join(f"'{name}=={leading}.*'" for name in (leader, *others))
        yield Misfit((leader, *apart), f"compilers of several releases: {named}", f"pip install {pins}")


def _triton_misfits(versions: Mapping[str, str], required_by_torch: tuple[str, ...]) -> Iterator[Misfit]:
    if "triton" not in versions or "torch" not in versions:
        return
    for text in required_by_torch:
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        fits = requirement.specifier.contains(versions["triton"], prereleases=True)
        if requirement.name == "triton" and applies and not fits:
            detail = (
                f"torch {versions['torch']} asks for triton{requirement.specifier}, and {versions['triton']} is here"
            )
            yield Misfit(("torch", "triton"), detail, f"pip install 'triton{requirement.specifier}'")


def _release(version: str) -> Version | None:
    """13.4.92 -> 13.4; None where there is no version or it is not one."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    return Version(f"{parsed.major}.{parsed.minor}")
