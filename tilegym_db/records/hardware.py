"""Names of GPUs and compile targets, and the slug of a driver's device name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tilegym_db.errors import HardwareError, did_you_mean

CPU = "cpu"

# slug -> compute capability. GPUs of different speed have different slugs; the first word is the family that users type.
GPU_SLUGS: dict[str, str] = {
    "cpu": "",
    "a100-sxm": "sm_80",
    "a100-pcie": "sm_80",
    "a10": "sm_86",
    "rtx3090": "sm_86",
    "l4": "sm_89",
    "l40s": "sm_89",
    "rtx4090": "sm_89",
    "h100-sxm": "sm_90",
    "h100-pcie": "sm_90",
    "h100-nvl": "sm_90",
    "h200": "sm_90",
    "h200-nvl": "sm_90",
    "gh200": "sm_90",
    "b200": "sm_100",
    "gb200": "sm_100",
    "b300": "sm_103",
    "rtx5090": "sm_120",
    "rtx-pro-6000": "sm_120",
}

TARGETS: tuple[str, ...] = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
"""The compile targets that a Solution may declare; each backend maps them to its compiler's names."""

# Patterns over the driver's name ("NVIDIA H100 80GB HBM3"); the first match decides.
_DRIVER_NAMES: tuple[tuple[str, str], ...] = (
    (r"GH200", "gh200"),
    (r"H200 NVL", "h200-nvl"),
    (r"H200", "h200"),
    (r"H100 NVL", "h100-nvl"),
    (r"H100 PCIe", "h100-pcie"),
    (r"H100", "h100-sxm"),
    (r"GB200", "gb200"),
    (r"B200", "b200"),
    (r"B300", "b300"),
    (r"A100.*PCIe", "a100-pcie"),
    (r"A100", "a100-sxm"),
    (r"RTX PRO 6000", "rtx-pro-6000"),
    (r"RTX 5090", "rtx5090"),
    (r"RTX 4090", "rtx4090"),
    (r"RTX 3090", "rtx3090"),
    (r"L40S", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bA10\b", "a10"),
)


def gpu_slug(driver_name: str) -> str:
    """Return the slug for a driver's device name; an unknown device gets a slug from its own name."""
    for pattern, slug in _DRIVER_NAMES:
        if re.search(pattern, driver_name, re.IGNORECASE):
            return slug
    return re.sub(r"[^a-z0-9]+", "-", driver_name.lower().removeprefix("nvidia")).strip("-") or "unknown"


def gpu_family(slug: str) -> str:
    """Return the family of a slug, as queries use it: ``h100`` for ``h100-sxm``."""
    return slug.split("-")[0] if slug in GPU_SLUGS and not slug.startswith("rtx-") else slug


def same_gpu(asked: str, slug: str) -> bool:
    """Return True if ``asked`` (a slug or a family) includes ``slug``."""
    return asked == slug or (asked not in GPU_SLUGS and gpu_family(slug) == asked)


def gpus_meant(asked: str, known: Iterable[str]) -> list[str]:
    """Return the ``known`` slugs that a name stands for, sorted: the slug itself, else every slug of that family.

    Every command, the Python API and (as ``gpu_family``) SQL resolve names such as ``h100`` this way.
    """
    slugs = sorted(set(known))
    return [asked] if asked in slugs else [slug for slug in slugs if same_gpu(asked, slug)]


def one_gpu_meant(asked: str, *known: Iterable[str]) -> str:
    """Return the one slug that a name stands for: the first match in the first group of ``known`` slugs that has one.

    Without a match, the name is looked up among all slugs.
    """
    for group in (*known, GPU_SLUGS):
        meant = gpus_meant(asked, group)
        if meant:
            return meant[0]
    return asked


def parse_gpu(text: str) -> str:
    """Return a GPU slug or family that a user typed, in lower case.

    Raises:
        HardwareError: the GPU is unknown; the message lists the known ones.
    """
    name = text.strip().lower()
    known = sorted({*GPU_SLUGS, *(gpu_family(slug) for slug in GPU_SLUGS)})
    if name not in known:
        raise HardwareError(
            f"unknown GPU {text!r}.{did_you_mean(name, known)} Known: {', '.join(known)}, auto.", code="gpu_unknown"
        )
    return name


def normalise_target(text: str) -> str:
    """Return ``sm_90`` for ``sm_90``, ``sm_90a`` or ``90``; raise :class:`HardwareError` for an unknown target."""
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3})[af]?", text.strip().lower())
    target = f"sm_{match.group(1)}" if match else text
    if target not in TARGETS:
        raise HardwareError(f"unknown compile target {text!r}; known: {', '.join(TARGETS)}.", code="target_unknown")
    return target
