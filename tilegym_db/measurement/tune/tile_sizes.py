"""Tile sizes that vLLM tuned for its fused_moe, as starting points of a search for our Triton experts.

A file of vLLM names experts, intermediate size, device and dtype, and has a config by number of tokens. It is no measurement of
our kernels: their nearest configs are only tried first, and are verified and raced like any other.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import UsageError
from tilegym_db.files import read_bytes
from tilegym_db.records import Config, Definition, Workload, axes_key
from tilegym_db.records.solution import config_id
from tilegym_db.records.text import parse_object, shown

NEAREST = 2
"""Number of configs that a table gives for each Workload."""
LARGEST = 1 << 30
"""Maximum of a size and of a number of tokens."""
VERSION = "triton_version"
"""Key of newer files that is no number of tokens."""
OF_EXPERTS = frozenset(("M", "E", "I"))
"""Axes of an operator that the files are for: tokens, experts and intermediate size."""
_COUNT = re.compile(r"[1-9][0-9]{0,9}")
_NAME = re.compile(
    r"E=(?P<experts>[0-9]+),N=(?P<width>[0-9]+),device_name=(?P<device>[^,]+)(,dtype=(?P<dtype>[^,]+))?"
    r"(,block_shape=\[(?P<block>[0-9, ]+)\])?\.json"
)
SIZES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
IGNORED = ("SPLIT_K", "waves_per_eu", "matrix_instr_nonkdim", "kpack")
"""Keys that have no counterpart in our kernels."""
_DTYPES = {None: ("bfloat16", "float16", "float32"), "fp8_w8a8": ("float8_e4m3fn",)}
"""Name of a dtype in a file's name -> dtypes of the weights."""
_COLUMNS = {
    4: ("BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages"),
    3: ("BLOCK_SIZE_N", "num_warps", "num_stages"),
}
_TABLES: dict[str, dict[str, float]] = {
    "UP": {"_UP": 0.5, "_CONFIGS": 1.0},
    "DOWN": {"_DOWN": 1.0, "_CONFIGS": 1.0},
    "VARIANT": {"_FIRST": 0.5, "_SECOND": 1.0},
}
"""Tunable that is an index -> tables of the source by BLOCK_M, and the share of vLLM's columns in ours.

A tile of ``_UP`` and ``_FIRST`` has as many columns of up beside those of gate, and vLLM's has both in its BLOCK_SIZE_N.
"""
_Table = Mapping[int, Sequence[Sequence[int]]]
_DIRECT = {"BLOCK_M": "BLOCK_SIZE_M", "GROUP_M": "GROUP_SIZE_M", "num_warps": "num_warps", "num_stages": "num_stages"}


@dataclass(frozen=True)
class TunedSizes:
    """A file of tile sizes: what it is tuned for, and the sizes by number of tokens."""

    file: str
    experts: int
    width: int
    device: str
    dtype: str | None
    by_tokens: Mapping[int, Mapping[str, int]]


@dataclass(frozen=True)
class Start:
    """A config to try first, and where it is from."""

    config: Config
    reason: str


def read_tile_sizes(path: Path) -> TunedSizes:
    """Read one file of vLLM's ``fused_moe/configs``.

    Raises:
        UsageError: the name or content is not of that form, or its dtype is of no kernel here.
        RecordError: it cannot be read, or is no JSON, or a key is twice in one object.
    """
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise UsageError(
            f"{path} does not name tile sizes of vLLM's fused_moe: E=...,N=...,device_name=...[,dtype=...].json",
            code="tile_sizes_name",
        )
    if named["dtype"] not in _DTYPES:
        known = ", ".join(name for name in _DTYPES if name)
        raise UsageError(
            f"{path.name} is for {named['dtype']}, which no experts here take; of vLLM's dtypes they take none and {known}.",
            code="tile_sizes_dtype",
        )
    content = parse_object(read_bytes(path, "file of tile sizes"), "file of tile sizes", path)
    reason = _content_problem(content)
    if reason is not None:
        raise UsageError(f"{path} has no tile sizes by number of tokens: {reason}.", code="tile_sizes_content")
    sizes = {int(tokens): {key: row[key] for key in SIZES} for tokens, row in content.items() if tokens != VERSION}
    return TunedSizes(path.name, int(named["experts"]), int(named["width"]), named["device"], named["dtype"], sizes)


def _content_problem(content: Any) -> str | None:
    """Return why a value of JSON is no tile sizes by number of tokens, or None."""
    if not isinstance(content, dict) or not content.keys() - {VERSION}:
        return "it is empty, or no object"
    for tokens, row in content.items():
        if tokens == VERSION:
            continue
        if not _COUNT.fullmatch(tokens) or int(tokens) > LARGEST:
            return f"'{shown(tokens)}' is no whole number from 1 to {LARGEST}"
        if not isinstance(row, dict):
            return f"at {tokens} tokens there are no names and sizes"
        wrong = [key for key in SIZES if type(row.get(key)) is not int or not 0 < row[key] <= LARGEST]
        if wrong:
            return f"{wrong[0]} at {tokens} tokens is no whole number from 1 to {LARGEST}"
    return None


def starts(tuned: TunedSizes, solution: SolutionFiles, definition: Definition, workload: Workload) -> list[Start] | str:
    """Return the configs of a Solution nearest to the tuned sizes, nearest first, or why the file says nothing about it."""
    axes = definition.bind_axes(workload.axes)
    if not set(axes) >= OF_EXPERTS or solution.record.spec.language != "triton":
        return f"{solution.name} is no Triton kernel of experts with tokens M, experts E and intermediate size I"
    if (axes["E"], axes["I"]) != (tuned.experts, tuned.width):
        return f"{axes_key(workload.axes)}: the tile sizes are for E={tuned.experts} and I={tuned.width}"
    dtypes = definition.bind_dtypes(workload.dtypes)
    stacked = [name for name in definition.tensor_inputs if len(definition.inputs[name].shape or ()) == 3]
    weights = definition.dtype_of(stacked[0], dtypes) if stacked else "no weights of experts"  # scales come after them
    if weights not in _DTYPES[tuned.dtype]:
        return f"{solution.name} takes {weights}, and the tile sizes are for {tuned.dtype or 'weights that are not quantised'}"
    tokens = min(tuned.by_tokens, key=lambda one: abs(math.log2(one / max(axes["M"], 1))))
    wanted = tuned.by_tokens[tokens]
    tables = _tables(solution)
    ranked = [(_distance(config, wanted, tables), config) for config in solution.record.configs()]
    near = [(distance, config_id(config), config) for distance, config in ranked if distance is not None]
    near.sort(key=lambda item: item[:2])
    if not near:
        return f"{solution.name} states no sizes of its tiles"
    reason = f"nearest to vLLM's tile sizes at M={tokens} on {tuned.device}"
    return [Start(config, reason) for _, _, config in near[:NEAREST]]


def _tables(solution: SolutionFiles) -> dict[str, _Table]:
    """Return the tables of launch configurations in the sources, by name."""
    known = {name for tables in _TABLES.values() for name in tables}
    found: dict[str, _Table] = {}
    for path, content in solution.sources.items():
        for node in ast.parse(content).body if path.endswith(".py") else ():
            names = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign) and known & set(names):
                found |= dict.fromkeys(names, ast.literal_eval(node.value))
    return found


def _distance(config: Config, wanted: Mapping[str, int], tables: Mapping[str, _Table]) -> float | None:
    """Return the distance of a config from tile sizes in log2; None if it says nothing about rows of a tile."""
    rows = config.get("BLOCK_M")
    if not isinstance(rows, int):
        return None
    total = 0.0
    for name, value in config.items():
        if name in _DIRECT:
            total += abs(math.log2(float(value) / wanted[_DIRECT[name]]))
        elif name in _TABLES:
            shares = [(tables[table], share) for table, share in _TABLES[name].items() if table in tables]
            if not shares or any(rows not in table for table, _ in shares):  # single tokens have no tile of rows
                return None
            for table, share in shares:
                row = table[rows][int(value)]
                for have, key in zip(row, _COLUMNS[len(row)], strict=True):
                    total += abs(math.log2(have / (wanted[key] * (share if key == "BLOCK_SIZE_N" else 1.0))))
    return total
