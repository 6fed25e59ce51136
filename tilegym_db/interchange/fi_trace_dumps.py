"""``fi_trace`` dumps: one JSON file per operator and shape, as flashinfer's trace templates write them.

They are Definitions with more keys (``check``, ``init``, ``optional``, ``param``) and fewer promises: no reference, a
reference of any name, an output that overwrites an input, a const axis whose value is not known.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilegym_db.interchange.checks import Rules, check_definition, check_solution
from tilegym_db.interchange.collecting import Collection
from tilegym_db.interchange.flashinfer_trace import defaults_filled
from tilegym_db.interchange.reading import walk

DIALECT = "fi-trace"
RULES = Rules(
    languages=frozenset(["python", "triton", "cutedsl", "tilelang", "cpp", "cuda", "cutlass", "cutile"]),
    dtypes=None,
    const_needs_value=False,
    reference_required=False,
    entry_named_run=False,
    in_place_by_name=True,
    destination_passing_default=False,
)
_MARKS = frozenset({"check", "init"})
_LOOKED_AT = 50


def is_this(root: Path) -> bool:
    """Return True if a folder (or one file) holds such dumps: Definitions at its top, most of which name a flashinfer
    API.
    """
    files = [root] if root.suffix == ".json" else sorted(root.glob("*.json"))[:_LOOKED_AT]
    return any(_is_dump(file) for file in files)


def _is_dump(file: Path) -> bool:
    if not file.is_file():  # reading a FIFO waits for a writer
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
    """Return every dump; what breaks a rule is refused, with its reason.

    Raises:
        RecordError: two of them have one name.
    """
    single = root.is_file()
    found = Collection(DIALECT, RULES, root.parent if single else root)
    paths, refused = ([(root.name, root)], []) if single else walk(root)
    found.refused += refused
    for path, file in paths:
        if file.suffix != ".json":
            if not found.refuse_spelling(path, file, ".json"):
                found.carry(path, file)
            continue
        content = file.read_bytes()
        parsed = found.parse(path, content)
        if parsed is None:
            continue
        record, digest = parsed
        kind = "solution" if "spec" in record else "definition"
        problems = (check_solution if kind == "solution" else check_definition)(record, RULES)
        if problems:
            found.refuse(path, problems)
            continue
        found.carry(path, file, "records")
        if kind == "solution":
            filled, unset = defaults_filled(record, RULES)
            found.add("solution", filled, digest, path, (0, len(content)), unset=unset)
        else:
            found.add("definition", record, digest, path, (0, len(content)), findings=dump_findings(record))
    return found


def dump_findings(record: Mapping[str, Any]) -> list[str]:
    """What a dump leaves open, so that it cannot be measured as it is."""
    findings = []
    reference = record.get("reference")
    if reference is None:
        findings.append("it has no reference, so nothing can be verified against it")
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
        findings += [f"{group}.{name}: dtype '{spec['dtype']}' is none of FlashInfer-Bench's"
                     for name, spec in record[group].items() if spec["dtype"] not in known]  # fmt: skip
    return findings
