"""JSON Schema of the records, generated from their models: ``python -m tilegym_db.published.schema [--check] DIR``.

The files let an editor or another language check a record. They say what a schema can say; what ties fields together
(an axis that a shape uses must be declared) only the models check.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tilegym_db.files import write_atomically
from tilegym_db.published.trace_set import TraceSetHeader
from tilegym_db.records.base import Record, RecordPart
from tilegym_db.records.definition import Definition
from tilegym_db.records.loop import Attempt, Experiment, Pattern, Promotion, Task
from tilegym_db.records.model_run import ModelRun
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.solution import Solution
from tilegym_db.records.trace import Trace
from tilegym_db.records.workload import Workload

RECORDS: tuple[type[Record], ...] = (
    *(Definition, Solution, Workload, Trace, TraceSetHeader, GpuPeaks, ModelRun),
    *(Task, Attempt, Promotion, Experiment, Pattern),
)
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(record: type[Record]) -> dict[str, Any]:
    """Return the JSON Schema of one record."""
    schema = {"$schema": DIALECT, **record.model_json_schema(by_alias=True)}
    for model in _models_of(record):
        part = schema if model is record else schema.get("$defs", {}).get(model.__name__)
        if part is not None:
            _describe(model, part)
    return schema


def _models_of(record: type[BaseModel]) -> set[type[BaseModel]]:
    """Return the model and every class of this package's records: those that a schema names are among them."""
    found: set[type[BaseModel]] = {record}
    waiting: list[type[BaseModel]] = [RecordPart]
    while waiting:
        for model in waiting.pop().__subclasses__():
            found.add(model)
            waiting.append(model)
    return found


def _describe(model: type[BaseModel], schema: dict[str, Any]) -> None:
    """Add the docstring below each field as its description, in front of what the schema says of it.

    Pydantic can do so itself (``use_attribute_docstrings``), but reads and parses the sources at every import for it.
    """
    texts = {name: text for base in reversed(model.__mro__) for name, text in _attribute_docstrings(base).items()}
    properties = schema.get("properties", {})
    for name, field in model.model_fields.items():
        spelled = field.alias or name
        if name in texts and spelled in properties and "description" not in properties[spelled]:
            properties[spelled] = dict(sorted({**properties[spelled], "description": texts[name]}.items()))


def _attribute_docstrings(model: type) -> dict[str, str]:
    """Field -> the string that follows its annotation in the class's own source."""
    if not issubclass(model, RecordPart) or "__annotations__" not in vars(model):
        return {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, after in itertools.pairwise(tree.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            texts[field.target.id] = inspect.cleandoc(after.value.value)
    return texts


def schema_files() -> dict[str, str]:
    """File name -> text of every schema."""
    return {
        f"{record.kind}.schema.json": json.dumps(json_schema(record), indent=2, ensure_ascii=False) + "\n"
        for record in RECORDS
    }


def main() -> int:
    """Write the files, or with ``--check`` only compare them; returns 1 where one differs."""
    parser = argparse.ArgumentParser(description="Generate the JSON Schema of the records.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not current")
    arguments = parser.parse_args()
    stale = [
        name
        for name, text in schema_files().items()
        if not (arguments.folder / name).is_file() or (arguments.folder / name).read_text(encoding="utf-8") != text
    ]
    for name in stale:
        if arguments.check:
            print(f"{arguments.folder / name} is not what the records say. Run: make schema", file=sys.stderr)
        else:
            write_atomically(arguments.folder / name, schema_files()[name].encode())
            print(arguments.folder / name)
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
