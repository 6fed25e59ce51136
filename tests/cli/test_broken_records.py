"""A record of the user's that is broken is left out and named once; it stops the commands that are about it and no others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.resolver.resolve import resolve


def definition_file(overlay: Path) -> Path:
    path = overlay / "definitions" / "elementwise" / "draft.json"
    path.parent.mkdir(parents=True)
    return path


def solution_folder(overlay: Path) -> Path:
    folder = overlay / "solutions" / "elementwise" / "row_scale" / "draft"
    folder.mkdir(parents=True)
    return folder


def solution_text(**changes: object) -> str:
    spec = {"language": "python", "entry_point": "kernel.py::run"}
    return json.dumps({
        "name": "draft", "definition": "row_scale", "author": "me", "spec": spec, "sources": [{"path": "kernel.py"}], **changes
    })  # fmt: skip


def invalid_json(overlay: Path) -> str:
    definition_file(overlay).write_text('{"name": "draft",')
    return "draft.json: not valid JSON: EOF while parsing"


def key_twice(overlay: Path) -> str:
    definition_file(overlay).write_text('{"name": "draft", "name": "draft"}')
    return "draft.json: not a valid definition: the key 'name' occurs twice"


def wrong_schema(overlay: Path) -> str:
    definition_file(overlay).write_text('{"name": "draft", "colour": 1}')
    return "draft.json: not a valid definition: unknown key 'colour'"


def utf_16(overlay: Path) -> str:
    definition_file(overlay).write_text('{"name": "draft"}', encoding="utf-16")
    return "draft.json: line 1, column 1: this is UTF-16"


def not_utf_8(overlay: Path) -> str:
    definition_file(overlay).write_bytes(b'{"name":\n "dr\xe4ft"}')
    return "draft.json: line 2, column 5: byte 0xe4 is not valid UTF-8"


def fifo(overlay: Path) -> str:
    os.mkfifo(definition_file(overlay))
    return "draft.json: cannot read this definition: it is a FIFO"


def folder(overlay: Path) -> str:
    definition_file(overlay).mkdir()
    return "draft.json: cannot read this definition: it is a folder"


def loop_of_links(overlay: Path) -> str:
    path = definition_file(overlay)
    path.symlink_to(path.name)
    return "draft.json: cannot read this definition: Too many levels of symbolic links"


def endless_file(overlay: Path) -> str:
    path = definition_file(overlay)
    path.touch()
    os.truncate(path, 1 << 40)
    return "draft.json: this definition holds more than 16 MiB"


def missing_source(overlay: Path) -> str:
    (solution_folder(overlay) / "solution.json").write_text(solution_text())
    return "solution.json: sources: 'kernel.py' does not exist"


def no_record(overlay: Path) -> str:
    (solution_folder(overlay) / "kernel.py").write_text("def run(x, weight, factor): return x")
    return "solution.json: cannot read this solution: No such file"


def binary_source(overlay: Path) -> str:
    target = solution_folder(overlay)
    (target / "solution.json").write_text(solution_text())
    (target / "kernel.py").write_bytes(b"def run(x):\n    return '\x00'\n")
    return "source 'kernel.py': line 2, column 13: a NUL byte"


def fifo_as_source(overlay: Path) -> str:
    target = solution_folder(overlay)
    (target / "solution.json").write_text(solution_text())
    os.mkfifo(target / "kernel.py")
    return "kernel.py: cannot read this source: it is a FIFO"


def command_as_dependency(overlay: Path) -> str:
    spec = {"language": "python", "entry_point": "kernel.py::run", "dependencies": ["; rm -rf /"]}
    (solution_folder(overlay) / "solution.json").write_text(solution_text(spec=spec))
    return "spec.dependencies: '; rm -rf /' is not a requirement"


def name_that_is_shipped(overlay: Path) -> str:
    path = definition_file(overlay).with_name("row_scale.json")
    path.write_text("{}")
    return "'row_scale' exists twice"


BREAKS: list[Callable[[Path], str]] = [
    invalid_json, key_twice, wrong_schema, utf_16, not_utf_8, fifo, folder, loop_of_links, endless_file,
    missing_source, no_record, binary_source, fifo_as_source, command_as_dependency, name_that_is_shipped,
]  # fmt: skip


@pytest.mark.sweep(5)
@pytest.mark.parametrize("break_it", BREAKS, ids=lambda function: function.__name__)
def test_broken_draft_is_named_once_and_stops_only_its_commands(break_it, cli, row_scale, home, caplog, journal_traces):
    journal_traces(10.0)
    reason = break_it(home / "catalog")
    for command in (
        ("list",),
        ("show", "row_scale"),
        ("best", "row_scale"),
        ("best", "row_scale", "--rank"),
        ("list", "--solutions"),
    ):
        result = cli(*command)
        assert result.code in (0, 3), (command, result.err)
        assert "row_scale" in result.out + result.err
    request = {"axes": {"M": 4, "N": 8}, "dtypes": {"T": "float32"}, "gpu": "h200", "scalars": {"factor": 0.5}}
    assert resolve("row_scale", **request, catalog=Catalog.default()) is not None
    named = [record.getMessage() for record in caplog.records if record.name == "tilegym_db.catalog"]
    assert len(named) == 1, named
    assert reason in named[0]
    assert "Mend or remove it" in named[0]

    found = cli("check", "--static")
    assert found.code == 1
    assert reason in found.out
    if break_it is not name_that_is_shipped:
        about_it = cli("show", "draft")
        assert about_it.code == 1
        assert reason in about_it.err


def test_check_takes_the_name_of_one_solution(cli, row_scale, home):
    reason = missing_source(home / "catalog")
    about_it = cli("check", "draft")
    assert about_it.code == 1
    assert reason in about_it.out

    folder = home / "catalog" / "solutions" / "elementwise" / "row_scale" / "draft"
    (folder / "kernel.py").write_text("def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n")
    assert cli("check", "draft").code == 0
    assert cli("check", "no_such_name").code == 2


def test_broken_shipped_record_fails_check_and_no_other_command(cli, row_scale):
    shipped = row_scale / "definitions" / "elementwise" / "shipped.json"
    shipped.write_text('{"name": "shipped", "colour": 1}')
    without_record = row_scale / "solutions" / "elementwise" / "row_scale" / "unnamed"
    without_record.mkdir()
    (without_record / "kernel.py").write_text("def run(): ...\n")
    for command in (("list",), ("show", "row_scale")):
        assert cli(*command).code == 0
    found = cli("check")
    assert found.code == 1
    assert f"{shipped}: not a valid definition: unknown key 'colour'" in found.out
    assert "unnamed/solution.json: cannot read this solution: No such file" in found.out


def test_a_broken_line_among_workloads_leaves_the_others(cli, row_scale, home, workload_record, caplog):
    file = home / "catalog" / "workloads" / "elementwise" / "row_scale.jsonl"
    file.parent.mkdir(parents=True)
    lines = [json.dumps(workload_record(axes={"M": size, "N": 8})) for size in (5, "6", True, 2**62, 7)]
    file.write_text("\n".join(lines) + "\n")
    assert [workload.axes["M"] for workload in Catalog.default().workloads_for("row_scale")] == [4, 5, 7]
    (record,) = caplog.records
    assert f"{file}:2: not a valid workload: axes.M" in record.getMessage()
    found = cli("check").out
    assert f"{file}:2: " in found
    assert f"{file}:3: not a valid workload: axes.M" in found
    assert f"{file}:4: axis 'M' of row_scale is {2**62}; no axis is larger than" in found


def test_unreadable_loop_journal_stops_only_commands_of_the_loop(cli, row_scale, home, journal_traces):
    journal_traces(3.0)
    from tilegym_db.errors import StoreError
    from tilegym_db.records.loop import Attempt
    from tilegym_db.store.side_files import journaled

    (home / "loop").mkdir()
    os.mkfifo(home / "loop" / "attempts.jsonl")
    assert cli("best", "row_scale", "--rank").code == 0
    assert cli("sql", "SELECT count(*) FROM traces").code == 0
    assert cli("task", "create", "row_scale", "--gpu", "h200", "--language", "python").code == 0
    with pytest.raises(StoreError, match=r"attempts\.jsonl.*FIFO"):
        journaled(Attempt, home)  # numbering attempts needs all of them
