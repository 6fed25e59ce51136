"""The import graph of the package in docs/architecture.md: the layers and their imports.

    python tools/import_graph.py            # writes the block
    python tools/import_graph.py --check

An arrow goes from a part of ``tilegym_db`` to each part that its modules import, inside functions too; what follows from other
arrows is left out, so that the picture can be read.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import grimp
from marked_blocks import ROOT, with_block, write_or_check

PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = "tilegym_db"


def layers() -> list[list[str]]:
    """Return the layers of the contract in pyproject.toml, from the top; several parts may share one."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    return [[part.strip(" ()") for part in layer.replace(":", "|").split("|")] for layer in found]


def edges(parts: set[str]) -> set[tuple[str, str]]:
    """Return (importer, imported) pairs of the parts, without those that a longer way implies."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    direct = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            one, two = _part(module), _part(imported)
            if one in parts and two in parts and one != two:
                direct.add((one, two))
    return {edge for edge in direct if not _is_implied(edge, direct)}


def _part(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.").partition(".")[0] if module != PACKAGE else ""


def _is_implied(edge: tuple[str, str], direct: set[tuple[str, str]]) -> bool:
    start, goal = edge
    reached, waiting = set(), [two for one, two in direct if one == start and two != goal]
    while waiting:
        part = waiting.pop()
        if part == goal:
            return True
        if part not in reached:
            reached.add(part)
            waiting += [two for one, two in direct if one == part]
    return False


def mermaid() -> str:
    """Return the graph as a mermaid block; the direction of the arrows puts the layers in their order."""
    arrows = sorted(edges({part for layer in layers() for part in layer}))
    return "\n".join(["```mermaid", "flowchart TB", *(f"  {one} --> {two}" for one, two in arrows), "```"])


def wanted() -> dict[Path, str]:
    """Return file -> the content that it must have."""
    return {PAGE: with_block(PAGE.read_text(), "import graph", mermaid())}


if __name__ == "__main__":
    raise SystemExit(write_or_check(__doc__ or "", wanted()))
