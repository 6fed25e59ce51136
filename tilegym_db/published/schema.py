"""Writes JSON Schemas of the records from their models: ``python -m tilegym_db.published.schema [--check] DIR``.

With these files an editor or another language can check a record. Only the models check rules between fields, such as
that an axis used by a shape must be declared.
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
from tilegym_db.records.base import Record, RecordPart
from tilegym_db.records.definition import Definition
from tilegym_db.records.loop import Attempt, Award, Experiment, ModelRun, Pattern, Task
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.records.solution import Family, Solution
from tilegym_db.records.trace import Trace
from tilegym_db.records.workload import Workload

RECORDS: tuple[type[Record], ...] = (
    *(Definition, Solution, Family, Workload, Trace, GpuPeaks, ModelRun),
    *(Task, Attempt, Award, Experiment, Pattern),
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
    """Return the model and every class of this package's records, which include all classes that a schema names."""
    found: set[type[BaseModel]] = {record}
    waiting: list[type[BaseModel]] = [RecordPart]
    while waiting:
        for model in waiting.pop().__subclasses__():
            found.add(model)
            waiting.append(model)
    return found


def _describe(model: type[BaseModel], schema: dict[str, Any]) -> None:
    """Add the docstring below each field to the front of its description.

    Pydantic's ``use_attribute_docstrings`` does the same, but it reads and parses the sources at every import.
    """
    texts = {name: text for base in reversed(model.__mro__) for name, text in _attribute_docstrings(base).items()}
    properties = schema.get("properties", {})
    for name, field in model.model_fields.items():
        spelled = field.alias or name
        if name in texts and spelled in properties and "description" not in properties[spelled]:
            properties[spelled] = dict(sorted({**properties[spelled], "description": texts[name]}.items()))


def _attribute_docstrings(model: type) -> dict[str, str]:
    """Return field -> the string that follows its annotation in the class's source."""
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
    """Return file name -> text of every schema."""
    return {
        f"{record.kind}.schema.json": json.dumps(json_schema(record), indent=2, ensure_ascii=False) + "\n"
        for record in RECORDS
    }


def main() -> int:
    """Write the files, or only compare them with ``--check``; return 1 if one differs."""
    parser = argparse.ArgumentParser(description="Generate the JSON Schema of the records.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not current")
    arguments = parser.parse_args()
    wanted = schema_files()
    stale = [
        name
        for name, text in wanted.items()
        if not (arguments.folder / name).is_file() or (arguments.folder / name).read_text(encoding="utf-8") != text
    ]
    for name in stale:
        if arguments.check:
            print(f"{arguments.folder / name} is not what the records say. Run: make schema", file=sys.stderr)
        else:
            write_atomically(arguments.folder / name, wanted[name].encode())
            print(arguments.folder / name)
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
