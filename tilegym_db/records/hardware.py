"""Names of GPUs and compile targets, and the slug of a driver's device name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tilegym_db.errors import HardwareError, did_you_mean

CPU = "cpu"

# slug -> compute capability. GPUs of different speed have different slugs; the first word is the family that users type.
GPU_SLUGS: dict[str, str] = {
    "cpu": "",
    "v100-sxm": "sm_70",
    "v100-sxm-16gb": "sm_70",
    "v100-pcie": "sm_70",
    "v100-pcie-16gb": "sm_70",
    "t4": "sm_75",
    "a100-sxm": "sm_80",
    "a100-sxm-40gb": "sm_80",
    "a100-pcie": "sm_80",
    "a100-pcie-40gb": "sm_80",
    "a800-sxm": "sm_80",
    "a800-sxm-40gb": "sm_80",
    "a800-pcie": "sm_80",
    "a800-pcie-40gb": "sm_80",
    "a10": "sm_86",
    "a40": "sm_86",
    "a6000": "sm_86",
    "rtx3090": "sm_86",
    "l4": "sm_89",
    "l20": "sm_89",
    "l40": "sm_89",
    "l40s": "sm_89",
    "rtx6000-ada": "sm_89",
    "rtx4090": "sm_89",
    "h20": "sm_90",
    "h20-3e": "sm_90",
    "h100-sxm": "sm_90",
    "h100-pcie": "sm_90",
    "h100-nvl": "sm_90",
    "h800-sxm": "sm_90",
    "h800-pcie": "sm_90",
    "h800-nvl": "sm_90",
    "h200": "sm_90",
    "h200-nvl": "sm_90",
    "gh200": "sm_90",
    "b200": "sm_100",
    "gb200": "sm_100",
    "b300": "sm_103",
    "gb300": "sm_103",
    "rtx5090": "sm_120",
    "rtx-pro-6000": "sm_120",
    "gb10": "sm_121",
}

TARGETS: tuple[str, ...] = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
"""The compile targets that a Solution may declare; each backend maps them to its compiler's names."""

# Patterns over the driver's name ("NVIDIA H100 80GB HBM3"); the first match decides.
_DRIVER_NAMES: tuple[tuple[str, str], ...] = (
    (r"\bGH200\b", "gh200"),
    (r"\bH200 NVL", "h200-nvl"),
    (r"\bH200\b", "h200"),
    (r"\bH100 NVL", "h100-nvl"),
    (r"\bH100.*PCIe", "h100-pcie"),
    (r"\bH100\b", "h100-sxm"),
    (r"\bH800 NVL", "h800-nvl"),
    (r"\bH800.*PCIe", "h800-pcie"),
    (r"\bH800\b", "h800-sxm"),
    (r"\bH20-3e\b", "h20-3e"),
    (r"\bH20\b", "h20"),
    (r"\bGB200\b", "gb200"),
    (r"\bB200\b", "b200"),
    (r"\bGB300\b", "gb300"),
    (r"\bB300\b", "b300"),
    (r"\bGB10\b", "gb10"),
    (r"\bA100.*PCIe", "a100-pcie"),
    (r"\bA100\b", "a100-sxm"),
    (r"\bA800.*PCIe", "a800-pcie"),
    (r"\bA800\b(?=.*SXM)", "a800-sxm"),
    (r"\bV100.*PCIe", "v100-pcie"),
    (r"\bV100\b", "v100-sxm"),
    (r"\bRTX PRO 6000\b", "rtx-pro-6000"),
    (r"\bRTX 6000 Ada", "rtx6000-ada"),
    (r"\bRTX A6000\b", "a6000"),
    (r"\bRTX 5090\b", "rtx5090"),
    (r"\bRTX 4090\b", "rtx4090"),
    (r"\bRTX 3090\b", "rtx3090"),
    (r"\bL40S\b", "l40s"),
    (r"\bL40\b", "l40"),
    (r"\bL20\b", "l20"),
    (r"\bL4\b", "l4"),
    (r"\bA10\b", "a10"),
    (r"\bA40\b", "a40"),
    (r"\bT4\b", "t4"),
)

# GPUs whose names state their memory -> the GB of the slug without a suffix. Another size is another GPU.
_MEMORY_GB: dict[str, int] = {
    **dict.fromkeys(
        ("a100-sxm", "a100-pcie", "a800-sxm", "a800-pcie", "h100-sxm", "h100-pcie", "h800-sxm", "h800-pcie"), 80
    ),
    **dict.fromkeys(("v100-sxm", "v100-pcie"), 32),
    "gh200": 480,
}

# Words of a name that make another GPU of it: slower or smaller, and never served by what its namesake measured.
_VARIANTS: tuple[tuple[str, str], ...] = (
    (r"\b(?:3090|4090|5090) Ti\b", "ti"),
    (r"\b(?:4090|5090) D\b", "d"),
    (r"\bServer Edition\b", "server"),
    (r"\bMax-Q\b", "max-q"),
    (r"\b(?:Laptop|Mobile)\b", "laptop"),
)
_SLICE = r"\bMIG (\d+)[gc](?:\.(\d+)[gc])?\.(\d+)gb(\+me)?"
_SHARED = r"\bGRID\b|\b[A-Z]+\d+[A-Z]*-\d+[ABCQ]\b"
"""A slice of a GPU that a hypervisor shares; it keeps its own name."""
_VARIANT_SLUG = re.compile(r"(?:-(?:ti|d|server|max-q|laptop|\d+gb|mig(?:-\d+[gc])+-\d+gb(?:-me)?))+")


def gpu_slug(driver_name: str) -> str:
    """Return the slug for a driver's device name; an unknown device gets a slug from its own name.

    A MIG slice, a laptop part and another size of memory have slugs other than their namesakes.
    """
    own = re.sub(r"[^a-z0-9]+", "-", driver_name.lower().removeprefix("nvidia")).strip("-") or "unknown"
    if re.search(_SHARED, driver_name):
        return own
    whole = re.sub(_SLICE, "", driver_name, flags=re.IGNORECASE)
    for pattern, slug in _DRIVER_NAMES:
        if re.search(pattern, whole, re.IGNORECASE):
            return "-".join((slug, *_variant_words(driver_name, whole, slug)))
    return own


def _variant_words(name: str, whole: str, slug: str) -> list[str]:
    words = []
    memory = re.search(r"(\d+) ?GB\b", whole, re.IGNORECASE)
    if memory is not None and int(memory[1]) != _MEMORY_GB.get(slug, int(memory[1])):
        words.append(f"{int(memory[1])}gb")
    words += [word for pattern, word in _VARIANTS if re.search(pattern, whole, re.IGNORECASE)]
    part = re.search(_SLICE, name, re.IGNORECASE)
    if part is not None:
        compute = f"{part[1]}c-{part[2]}g" if part[2] else f"{part[1]}g"
        words.append(f"mig-{compute}-{part[3]}gb" + ("-me" if part[4] else ""))
    return words


def gpu_base(slug: str) -> str:
    """Return the known slug that a variant belongs to: ``h100-sxm`` for ``h100-sxm-mig-1g-10gb``; "" for an unknown GPU."""
    if slug in GPU_SLUGS:
        return slug
    found = [
        known for known in GPU_SLUGS if _VARIANT_SLUG.fullmatch(slug.removeprefix(known)) and slug.startswith(known)
    ]
    return max(found, key=len, default="")


_GB = {
    **_MEMORY_GB, "gh200": 96, "h200": 141, "h200-nvl": 141, "h100-nvl": 94, "h20": 96, "h20-3e": 141, "b200": 180, "l40s": 48,
    "l40": 48, "l20": 48, "l4": 24, "a10": 24, "a40": 48, "a6000": 48, "rtx6000-ada": 48, "rtx5090": 32, "rtx4090": 24,
    "rtx3090": 24, "rtx-pro-6000": 96, "t4": 16,
}  # fmt: skip
"""Memory of GPUs whose slugs do not state it."""


def memory_bytes(slug: str) -> int:
    """Return the memory of a GPU in bytes, as its vendor states it; 0 if it is not known here."""
    stated = re.search(r"-(\d+)gb(?:-me)?$", slug)
    return int(stated[1] if stated else _GB.get(slug, 0)) * 10**9


def gpu_family(slug: str) -> str:
    """Return the family of a slug, as queries use it: ``h100`` for ``h100-sxm``."""
    return slug.split("-")[0] if slug in GPU_SLUGS and not slug.startswith("rtx") else slug


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


def is_known_gpu(text: str) -> bool:
    """Return True if a name is that of a GPU without a look at traces: a slug, a family, a variant, or a driver's name."""
    name = text.strip().lower()
    families = {gpu_family(slug) for slug in GPU_SLUGS}
    return (
        name in families or bool(gpu_base(name) or gpu_base(gpu_slug(text.strip()))) or bool(re.match(_VENDORS, name))
    )


def parse_gpu(text: str, known: Iterable[str] = ()) -> str:
    """Return a GPU slug or family that a user typed, in lower case; a driver's name gives its slug.

    Args:
        known: slugs of other GPUs that have traces or are in this machine.

    Raises:
        HardwareError: the GPU is unknown; the message lists the known ones.
    """
    name = text.strip().lower()
    here = set(known)
    names = {*GPU_SLUGS, *(gpu_family(slug) for slug in GPU_SLUGS), *here}
    if name in names or gpu_base(name):
        return name
    slug = gpu_slug(text.strip())
    if gpu_base(slug) or slug in here or re.match(_VENDORS, name):
        return slug
    listed = sorted(names)
    if re.match(_OF_AMD, name):
        raise HardwareError(
            f"unknown GPU {text!r}: GPUs are recognised by NVIDIA's driver, and AMD's are not. Use --gpu cpu on their hosts.",
            code="gpu_unknown",
        )
    if re.fullmatch(r"(cuda|gpu)(:\d+)?", name):
        raise HardwareError(
            f"unknown GPU {text!r}, which names a device of PyTorch. The GPU of this machine is auto; a kind of GPU has a name "
            "such as h200.",
            code="gpu_unknown",
        )
    raise HardwareError(
        f"unknown GPU {text!r}.{did_you_mean(name, listed)} Known: {', '.join(listed)}, auto. A GPU that has traces here, or "
        "a name as the driver states it, is known too.",
        code="gpu_unknown",
    )


_OF_AMD = r"gfx\d|mi\d{2,3}|radeon|instinct"
"""Begins of names of AMD's GPUs and targets."""
_VENDORS = r"(nvidia|tesla|quadro|geforce|grid|amd|intel)\b"
"""Words that a device name begins with, as the driver states it."""


def normalise_target(text: str) -> str:
    """Return ``sm_90`` for ``sm_90``, ``sm_90a`` or ``90``; raise :class:`HardwareError` for an unknown target."""
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3})[af]?", text.strip().lower())
    target = f"sm_{match.group(1)}" if match else text
    if target not in TARGETS:
        raise HardwareError(f"unknown compile target {text!r}; known: {', '.join(TARGETS)}.", code="target_unknown")
    return target
