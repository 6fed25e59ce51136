"""``fi_trace`` dumps: one JSON file per operator and shape, written by flashinfer's trace templates.

They are Definitions with extra keys (``check``, ``init``, ``optional``, ``param``) and fewer guarantees. The reference may be
missing or have any name, an output may overwrite an input, and a const axis may lack its value.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilegym_db.interchange.checks import Problem, Rules, check_definition, check_solution, walk
from tilegym_db.interchange.collecting import Collection
from tilegym_db.interchange.flashinfer_trace import defaults_filled

DIALECT = "fi-trace"
RULES = Rules(
    languages=frozenset(["python", "triton", "cutedsl", "tilelang", "cpp", "cuda", "cutlass", "cutile"]),
    dtypes=None,
    const_needs_value=False,
    reference_required=False,
    entry_named_run=False,
    in_place_by_name=True,
    derived_axes=True,
    destination_passing_default=False,
)
_MARKS = frozenset({"check", "init"})
_LOOKED_AT = 50


def is_this(root: Path) -> bool:
    """Return True if a file, or some file at the top of a folder, is such a dump. Most dumps name a flashinfer API."""
    files = [root] if root.suffix == ".json" else sorted(root.glob("*.json"))[:_LOOKED_AT]
    return any(_is_dump(file) for file in files)


def _is_dump(file: Path) -> bool:
    if not file.is_file():  # reading a FIFO would wait for a writer
        return False
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(value, dict) or not {"name", "axes", "inputs", "outputs"} <= set(value):
        return False
    tags = value.get("tags")
    named = isinstance(tags, list) and any(isinstance(tag, str) and tag.startswith("fi_api:") for tag in tags)
    return named or bool(_MARKS & set(value))


def read(root: Path) -> Collection:
    """Read every dump. Invalid ones are refused with their reasons, and so are two of one name."""
    single = root.is_file()
    found = Collection(DIALECT, RULES, root.parent if single else root)
    paths, refused = ([(root.name, root)], []) if single else walk(root)
    found.refused += refused
    for path, file in paths:
        if file.suffix != ".json":
            if not found.refuse_spelling(path, file, ".json"):
                found.carry(path, file)
            continue
        valid = found.read_valid(path, file, _problems)
        if valid is None:
            continue
        record, digest, span = valid
        if "spec" in record:
            filled, unset = defaults_filled(record, RULES)
            found.add("solution", filled, digest, path, span, unset=unset)
        else:
            found.add("definition", record, digest, path, span, findings=dump_findings(record))
    return found


def _problems(record: Mapping[str, Any], rules: Rules) -> list[Problem]:
    return (check_solution if "spec" in record else check_definition)(record, rules)


def dump_findings(record: Mapping[str, Any]) -> list[str]:
    """Return the gaps in a dump that prevent measuring it."""
    findings = []
    reference = record.get("reference")
    if reference is None:
        findings.append("it has no reference to verify against")
    else:
        names = [node.name for node in ast.parse(reference).body if isinstance(node, ast.FunctionDef)]
        if "run" not in names:
            findings.append(f"its reference is not called 'run' but {', '.join(names)}")
    findings += [f"axes.{name}: a const axis without a value" for name, axis in record["axes"].items()
                 if axis.get("type") == "const" and "value" not in axis]  # fmt: skip
    findings += [f"outputs.{name}: overwrites the input of that name" for name in record["outputs"]
                 if name in record["inputs"]]  # fmt: skip
    known = Rules(frozenset()).dtypes or frozenset()
    for group in ("inputs", "outputs"):
        findings += [f"{group}.{name}: dtype '{spec['dtype']}' is unknown to FlashInfer-Bench"
                     for name, spec in record[group].items() if spec["dtype"] not in known]  # fmt: skip
    return findings
