from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tilegym_db.models.parts import PARTS
from tilegym_db.paths import shipped_root
from tilegym_db.published import schema as written
from tilegym_db.published.schema import schema_files


@pytest.fixture(scope="module")
def schemas() -> dict[str, str]:
    return schema_files()


def test_the_checked_in_schema_is_what_the_records_say(schemas):
    found = {path.name: path.read_text() for path in (shipped_root() / "schema").iterdir()}
    assert found == schemas, "run: make schema"


def test_unknown_keys_and_dtypes_are_errors_in_the_schema_too(schemas):
    schema = json.loads(schemas["definition.schema.json"])
    assert schema["additionalProperties"] is False
    assert "bfloat16" in json.dumps(schema["properties"]["dtypes"])
    assert {"name", "version", "op_type", "axes", "inputs", "outputs", "reference"} <= set(schema["required"])


def test_the_schema_names_every_part_of_a_model(schemas):
    schema = json.loads(schemas["definition.schema.json"])
    description = schema["$defs"]["Serving"]["properties"]["part"]["description"]
    listed, _, any_code = description.partition(":")[2].partition(". ")
    names = [*re.findall(r"\w+", listed), *re.findall(r"``(\w+)``", any_code)]
    assert sorted(names) == sorted(PARTS)


@pytest.mark.turn("tilegym_db/published/schema.py")  # writes every schema in a process
def test_check_fails_on_a_stale_file_and_writing_mends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["schema", *arguments, str(tmp_path)])
        return written.main()

    assert run("--check") == 1
    assert run() == 0
    assert run("--check") == 0
    (tmp_path / "trace.schema.json").write_text("{}")
    assert run("--check") == 1
