"""Whose kernels the device time went to: those that a Solution's own language built, or somebody else's. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilegym_db.records import Solution
from tilegym_db.records.solution import TILE_LANGUAGES
from tilegym_db.verify.worker.reply import KernelUse

__all__ = [
    "MIN_OWNED_SHARE",
    "Ownership",
    "judge_ownership",
    "kernel_names",
    "own_kernel",
]

MIN_OWNED_SHARE = 0.9
_SHOWN_NAME, _SHOWN = 120, 40
"""Characters of a name, and names, that a Trace keeps."""


@dataclass(frozen=True)
class Ownership:
    """What the device time of the calls went to.

    ``total_us`` is all of it, memsets and copies included, and ``activities`` counts them; ``kernels`` are the first names, each
    shortened; ``problem`` is a sentence, or None where all is well.
    """

    share: float
    kernels: tuple[str, ...]
    total_us: float
    problem: str | None = None
    activities: int = 0


# What the three languages mark a kernel with; nothing else of a source becomes one.
_MARKS = ("jit", "kernel", "prim_func")
# How libraries and PyTorch's own compiler name theirs; a source that takes such a name gains nothing by it.
_OF_LIBRARIES = re.compile(
    r"nvjet|cutlass|cublas|cudnn|sm\d+_|ampere_|volta_|gemm[kKS]\w*_|triton_(poi|red|per|tem|mm|for)"
)


def kernel_names(sources: Mapping[str, bytes]) -> set[str]:
    """Every function of the Python sources that is marked as a kernel, nested ones included."""
    trees = (ast.parse(source) for path, source in sources.items() if path.endswith(".py"))
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {
        node.name
        for node in functions
        if any(_is_mark(decorator) for decorator in node.decorator_list) and not _OF_LIBRARIES.match(node.name)
    }


def _is_mark(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return name in _MARKS


def own_kernel(functions: Iterable[str]) -> re.Pattern[str]:
    """What a kernel is called that was built from one of the functions.

    Triton names a kernel as its function, TileLang appends ``_kernel`` and a number, cuTile ``_K`` and the signature.
    No library can choose such a name at run time: the names are read from the sources, not from the process.
    """
    own = "|".join(sorted(map(re.escape, functions))) or "(?!)"
    return re.compile(rf"(void )?({own})(_kernel(_\d+)?|_K\w+)?(\(.*\))?")


def judge_ownership(solution: Solution, sources: Mapping[str, bytes], used: Sequence[KernelUse]) -> Ownership:
    """Does a tile Solution do its own work, on the stream it was called on?

    Cleared memory (an output, a workspace) is nobody's. A ``python`` Solution may launch whatever PyTorch launches.

    Args:
        solution: names the language.
        sources: path -> bytes.
        used: everything that ran on the device because of the calls.
    """
    kernels = tuple(dict.fromkeys(use.name[:_SHOWN_NAME] for use in used))[:_SHOWN]
    total_us, activities = sum(use.us for use in used), sum(use.count for use in used)
    streams = sorted({use.stream for use in used})
    if len(streams) > 1:
        return Ownership(
            0.0, kernels, total_us, f"work ran on {len(streams)} streams, not only on the one it was called on"
        )
    if solution.spec.language not in TILE_LANGUAGES:
        return Ownership(1.0, kernels, total_us, activities=activities)
    counted = [use for use in used if not use.name.startswith("Memset")]
    pattern = own_kernel(kernel_names(sources))
    owned = sum(use.us for use in counted if pattern.fullmatch(use.name.strip()))
    total = sum(use.us for use in counted)
    if total <= 0:
        return Ownership(0.0, kernels, total_us, "nothing ran on the device")
    share = owned / total
    if share < MIN_OWNED_SHARE:
        names = (use.name for use in counted if not pattern.fullmatch(use.name.strip()))
        foreign = tuple(dict.fromkeys(name[:_SHOWN_NAME] for name in names))
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        problem = (
            f"only {share:.0%} of the device time is in kernels that its {solution.spec.language} source defines "
            f"(at least {MIN_OWNED_SHARE:.0%} must be); the rest: {', '.join(foreign[:_SHOWN])}{more}"
        )
        return Ownership(share, kernels, total_us, problem)
    return Ownership(share, kernels, total_us, activities=activities)
