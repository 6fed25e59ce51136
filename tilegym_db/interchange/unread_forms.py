"""Recognises files of other projects that no dialect reads, so that a refusal can say the reason and the way in by hand."""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from tilegym_db.errors import RecordError
from tilegym_db.files import read_bytes

MAX_FILES = 200
"""Maximum number of files of a folder that are looked at."""
_MOE_CONFIG = re.compile(r"E=\d+,N=\d+,device_name=[^,]+(,.*)?\.json")

PROBLEM = (
    "a problem of KernelBench: a module of one size, without axes, bounds or planted errors. To make it an operator: "
    "tilegym-db new definition NAME, with its forward() as run() in reference.py"
)
ANSWER = (
    "an answer to KernelBench: the kernel is called by a module, ModelNew, and not by its inputs. To bring the kernel in: "
    "tilegym-db new solution DEFINITION -l triton, and move its launch into run()"
)
SUBMISSION = (
    "a submission to GPU MODE: custom_kernel(data) takes one tuple. To bring the kernel in: "
    "tilegym-db new solution DEFINITION -l triton, and call custom_kernel((x, ...)) from run()"
)
TILE_SIZES = (
    "tuned tile sizes of vLLM's fused_moe: they are tunables of that kernel, and no measurement. To find those of the "
    "kernels here: tilegym-db tune moe_experts"
)


def unread_form(path: Path) -> str | None:
    """Return what a file or folder is, and how to bring it in by hand; None if it is not known. Nothing is executed."""
    files: Iterable[Path] = [path]
    if path.is_dir():
        below = (one for one in path.rglob("*") if one.suffix in (".py", ".json") and one.is_file())
        files = itertools.islice(below, MAX_FILES)
    return next((form for file in files if (form := _form_of(file))), None)


def _form_of(file: Path) -> str | None:
    if _MOE_CONFIG.fullmatch(file.name):
        return TILE_SIZES
    if file.suffix != ".py":
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(read_bytes(file, "source"))
    except (RecordError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    named = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    if "ModelNew" in named:
        return ANSWER
    if {"Model", "get_inputs"} <= named:
        return PROBLEM
    return SUBMISSION if "custom_kernel" in named else None
