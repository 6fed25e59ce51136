from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilegym_db.models.parts import PARTS
from tilegym_db.paths import shipped_root
from tilegym_db.published.schema import schema_files


@pytest.mark.parametrize("name", schema_files())
def test_the_checked_in_schema_is_what_the_records_say(name):
    assert (shipped_root() / "schema" / name).read_text() == schema_files()[name], "run: make schema"


def test_unknown_keys_and_dtypes_are_errors_in_the_schema_too():
    schema = json.loads(schema_files()["definition.schema.json"])
    assert schema["additionalProperties"] is False
    assert "bfloat16" in json.dumps(schema["properties"]["dtypes"])
    assert {"name", "version", "op_type", "axes", "inputs", "outputs", "reference"} <= set(schema["required"])


def test_the_schema_names_every_part_of_a_model():
    schema = json.loads(schema_files()["definition.schema.json"])
    description = schema["$defs"]["Serving"]["properties"]["part"]["description"]
    listed, _, any_code = description.partition(":")[2].partition(". ")
    names = [*re.findall(r"\w+", listed), *re.findall(r"``(\w+)``", any_code)]
    assert sorted(names) == sorted(PARTS)


def test_check_fails_on_a_stale_file_and_writing_mends_it(tmp_path: Path):
    def run(*arguments: str) -> int:
        command = [sys.executable, "-m", "tilegym_db.published.schema", *arguments, str(tmp_path)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert run("--check") == 1
    assert run() == 0
    assert run("--check") == 0
    (tmp_path / "trace.schema.json").write_text("{}")
    assert run("--check") == 1
