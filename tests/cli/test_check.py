from __future__ import annotations

import json
import shutil

import pytest

SELF_TEST = {
    "independent": "def run(x, weight, factor):\n    return (x.float() * (weight.float() * factor)).to(x.dtype)\n",
    "planted_errors": [
        {"find": "* factor", "replace": "/ factor", "why": "divides by the factor"},
        {"find": "weight.float()", "replace": "weight.float().flip(0)", "why": "weights in reverse"},
        {"find": "* factor", "replace": "+ factor", "why": "adds the factor"},
    ],
}


@pytest.fixture
def edit(row_scale):
    """Change the definition's file in place: the lock knows nothing of it."""
    path = row_scale / "definitions" / "elementwise" / "row_scale.json"

    def change(**changes):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.fixture
def sound(edit):
    edit(self_test=SELF_TEST)  # not part of the meaning that is locked


def test_a_sound_catalog_has_no_findings(cli, sound):
    result = cli("check")
    assert (result.code, result.out) == (0, "")
    assert "checked 1 definitions: 0 findings" in result.err


def test_findings_are_printed_one_a_line_and_as_json(cli, row_scale):
    result = cli("check")
    assert result.code == 1
    assert result.out == (
        "row_scale: self_test: the record has none; add an independent formulation and planted errors\n"
    )
    assert cli("check", "row_scale", "--json").json() == [result.out.strip()]


def test_a_verifier_that_cannot_tell_is_found(cli, sound, edit):
    harmless = {"find": "* factor", "replace": "* factor * 1.0", "why": "changes nothing"}
    edit(self_test={**SELF_TEST, "planted_errors": [*SELF_TEST["planted_errors"], harmless]})
    result = cli("check")
    assert result.code == 1
    assert "row_scale: planted error (changes nothing): is accepted by the comparison at M=4,N=8" in result.out


def test_records_lock_and_sources_are_checked_without_running(cli, row_scale, edit):
    assert cli("check", "--static").code == 0  # although the definition has no self-test
    edit(constraints=["N >= 2"])
    (row_scale / "definitions" / "elementwise" / "broken.json").write_text("{}")
    found = cli("check", "--static")
    assert found.code == 1
    assert "its meaning changed" in found.out
    assert "broken.json: not a valid definition" in found.out


def test_a_change_of_meaning_without_a_new_version_is_found(cli, sound, edit):
    edit(constraints=["N >= 2"])
    assert "its meaning changed but its version is still 1.0.0" in cli("check", "--static").out
    assert "its meaning changed" in cli("check", "--static", "--update-lock").out  # a lock is never rewritten
    edit(version="1.0.1")
    unlocked = "version 1.0.1 is not in definitions.lock.json. Try: tilegym-db check --update-lock"
    assert unlocked in cli("check", "--static").out
    result = cli("check", "--update-lock")
    assert result.code == 0
    assert "locked row_scale 1.0.1" in result.err


def test_a_reference_that_raises_is_found(cli, sound, edit):
    source = "# Source: https://example.org/row_scale.py#L1\ndef run(x, weight, factor):\n    {}\n"
    edit(version="2.0.0", self_test=None, reference=source.format("return unknown"))
    edit(self_test={**SELF_TEST, "planted_errors": [{"find": "unknown", "replace": "x", "why": "works"}] * 3})
    result = cli("check")
    assert result.code == 1
    assert "NameError: name 'unknown' is not defined" in result.out


def test_operator_without_stock_code_is_found_unless_still_open(cli, sound, edit, row_scale):
    shutil.rmtree(row_scale / "solutions" / "elementwise" / "row_scale")
    assert "row_scale: no solution provides its stock code" in cli("check", "--static").out
    edit(tags=["status:open"])
    assert cli("check", "--static").code == 0


def test_a_solution_or_workload_that_is_not_valid_is_found(cli, sound, row_scale):
    source = row_scale / "solutions" / "elementwise" / "row_scale" / "row_scale_stock" / "kernel.py"
    source.write_text("def walk(): pass")
    assert "entry_point 'run' is missing in 'kernel.py', which defines walk" in cli("check").out
    (row_scale / "workloads" / "elementwise" / "row_scale.jsonl").write_text("{}")
    result = cli("check")
    assert result.code == 1
    assert "row_scale.jsonl:1: " in result.out


def test_a_source_that_the_static_scan_refuses_is_found(cli, sound, row_scale):
    source = row_scale / "solutions" / "elementwise" / "row_scale" / "row_scale_stock" / "kernel.py"
    source.write_text(f"import os\nimport gc\n{source.read_text()}")
    refused = "row_scale_stock: kernel.py:2: hard: imports-introspection: imports gc"
    quiet = cli("check", "--static")
    assert quiet.code == 1
    assert quiet.out.startswith(refused)
    assert "imports-os" not in quiet.out + quiet.err
    (listed,) = cli("check", "--static", "--verbose", "--json").json()
    assert listed.startswith(refused)


def test_what_the_static_scan_only_notes_is_no_finding(cli, sound, row_scale):
    source = row_scale / "solutions" / "elementwise" / "row_scale" / "row_scale_stock" / "kernel.py"
    source.write_text(f"import os\n{source.read_text()}")
    result = cli("check", "--verbose")
    assert (result.code, result.out) == (0, "")
    assert "note: row_scale_stock: kernel.py:1: soft: imports-os: imports os" in result.err
    assert "imports-os" not in cli("check", "--static").err


def test_a_definition_that_is_not_valid_is_an_error(cli, sound, edit):
    edit(colour="red")
    result = cli("check")
    assert result.code == 1
    assert "unknown key 'colour'" in result.out
    assert "checked 0 definitions: 2 findings" in result.err  # and its solution, which has no definition then


def test_an_unknown_name_suggests_the_nearest(cli, sound):
    result = cli("check", "row_scal")
    assert result.code == 2
    assert "'row_scale'" in result.err


def test_a_backward_that_fits_no_forward_is_found(cli, sound, edit, row_scale):
    tensor = {"shape": ["M", "N"], "dtype": "T"}
    path = row_scale / "definitions" / "elementwise" / "row_scale.json"
    record = json.loads(path.read_text())
    record |= {"name": "row_scale_backward", "backward_of": "row_scale", "inputs": {"x": tensor, "grad_y": tensor}}
    record |= {"outputs": {"grad_x": tensor}, "constraints": [], "self_test": None}
    record["reference"] = "# Source: https://example.org/row_scale.py#L1\ndef run(x, grad_y):\n    return grad_y\n"
    path.with_name("row_scale_backward.json").write_text(json.dumps(record))
    result = cli("check", "row_scale_backward")
    assert result.code == 1
    assert (
        "row_scale_backward: backward_of: row_scale_backward cannot be the backward of row_scale: inputs.grad_y"
        in result.out
    )
    path.with_name("row_scale_backward.json").write_text(json.dumps({**record, "backward_of": "row_scales"}))
    assert "row_scale_backward: backward_of: no definition 'row_scales'" in cli("check", "row_scale_backward").out


def test_draft_of_the_other_kind_is_named_as_one(cli, sound, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli("new", "solution", "row_scale", "--language", "python")
    cli("new", "definition", "row_shift")
    (solution,) = (path.parent.name for path in tmp_path.glob("*/solution.json"))
    wrong = cli("check", solution)
    assert (wrong.code, wrong.cause) == (2, "draft_of_solution")
    assert f"tilegym-db dev {solution}" in wrong.err
    wrong = cli("add-solution", "row_shift")
    assert (wrong.code, wrong.cause) == (2, "draft_of_definition")
    assert "tilegym-db add-definition row_shift/" in wrong.err
