from __future__ import annotations

import json

import pytest


def with_reference(body: str, head: str = "def run(x, weight, factor):") -> str:
    return f"# Source: https://example.org/row_scale.py#L1\n{head}\n    {body}\n"


BAD = {
    "unknown key": ({"colour": "red"}, "'colour'"),
    "misspelt key": ({"constraint": []}, "'constraints'"),
    "missing key": ({"reference": None}, "'reference'"),
    "undeclared axis": (
        {"outputs": {"out": {"shape": ["M", "K"], "dtype": "T"}}},
        "axis 'K'",
    ),
    "undeclared dtype": ({"outputs": {"out": {"shape": ["M"], "dtype": "U"}}}, "dtype 'U'"),
    "unknown dtype": ({"dtypes": {"T": ["bfloat61"]}}, "dtypes.T.0: "),
    "no run": (
        {"reference": with_reference("return x", head="def go(x, weight, factor):")},
        "'run'",
    ),
    "wrong arity": ({"reference": with_reference("return x", head="def run(x):")}, "must take the inputs in order"),
    "not Python": ({"reference": "# Source: https://example.org\ndef run(:"}, "reference is not valid Python"),
    "no source line": ({"reference": "def run(x, weight, factor): return x"}, "must start with a '# Source:"),
    "raising": ({"reference": with_reference("raise ArithmeticError('no')")}, "ArithmeticError: no"),
    "too many outputs": ({"reference": with_reference("return x, x")}, "returns 2 values"),
    "no tensor": ({"reference": with_reference("return 3")}, "int for 'out'"),
    "wrong shape": (
        {"reference": with_reference("return x.T")},
        "(4, 2)",
    ),
    "wrong dtype": (
        {"reference": with_reference("return x.double()")},
        "outputs.out declares (2, 4) and torch.float32",
    ),
    "not arithmetic": (
        {"constraints": ["__import__('os')"]},
        "constraints.0: \"__import__('os')\" is not arithmetic over axes",
    ),
    "attribute": ({"constraints": ["M.real > 0"]}, "'M.real' is not allowed"),
    "undeclared in cost": ({"cost": {"flops": "K", "bytes": "1"}}, "cost.flops uses undeclared axis 'K'"),
    "unsatisfiable": ({"constraints": ["N > M", "M > N"]}, "constraints: no sizes among"),
    "not semver": ({"version": "1.0"}, "version: String should match pattern"),
}


@pytest.mark.parametrize(("changes", "fact"), BAD.values(), ids=BAD.keys())
def test_an_invalid_definition_is_refused_and_nothing_is_written(
    changes, fact, cli, checkout, snapshot, write_json, definition_record
):
    before = snapshot(checkout)
    file = write_json(definition_record(**changes))
    result = cli("add-definition", file)
    assert result.code == 1
    assert result.out == ""
    assert result.err.startswith(f"error: {file}: ")
    assert fact in result.err
    assert snapshot(checkout) == before


def test_malformed_json_is_refused_with_its_position(cli, checkout, tmp_path):
    file = tmp_path / "broken.json"
    file.write_text('{"name": "row_scale",\n "version": }')
    result = cli("add-definition", file)
    assert result.code == 1
    assert f"{file}: " in result.err
    assert "line 2 column 13" in result.err


def test_a_json_list_is_no_definition(cli, checkout, write_json):
    assert "not list" in cli("add-definition", write_json([1])).err


def test_a_missing_file_is_wrong_usage(cli, checkout, tmp_path):
    assert cli("add-definition", tmp_path / "nowhere.json").code == 2


def test_a_valid_definition_lands_in_its_place_and_in_the_lock(cli, checkout, write_json, definition_record):
    result = cli("add-definition", write_json(definition_record()))
    path = checkout / "definitions" / "elementwise" / "row_scale.json"
    assert (result.code, result.out) == (0, f"{path}\n")
    assert "tilegym-db check row_scale" in result.err
    lock = json.loads((checkout / "definitions" / "definitions.lock.json").read_text())
    assert list(lock["row_scale"]) == ["1.0.0"]
    again = cli("add-definition", path)
    assert (again.code, again.out) == (0, f"{path}\n")
    assert "has this already" in again.err


def test_same_version_with_other_words_is_a_conflict(cli, row_scale, write_json, definition_record):
    result = cli("add-definition", write_json(definition_record(description="Other words.")))
    assert (result.code, result.cause) == (1, "definition_exists")
    assert "'row_scale' 1.0.0" in result.err


def test_another_meaning_needs_a_higher_version(cli, row_scale, snapshot, write_json, definition_record):
    before = snapshot(row_scale)
    changed = definition_record(constraints=["N >= 2"])
    result = cli("add-definition", write_json(changed))
    assert result.code == 1
    assert "row_scale.json" in result.err
    assert "'version' above 1.0.0" in result.err
    assert snapshot(row_scale) == before
    assert cli("add-definition", write_json({**changed, "version": "1.0.1"})).code == 0


def test_overlay_is_written_if_the_checkout_is_not_writable(
    cli, checkout, home, write_json, definition_record, solution_record
):
    (checkout / "pyproject.toml").unlink()
    result = cli("add-definition", write_json(definition_record()))
    assert result.out.strip() == str(home / "catalog" / "definitions" / "elementwise" / "row_scale.json")
    assert [row["definition"] for row in cli("list", "--json").json()] == ["row_scale"]


def test_an_overlay_never_shadows_what_is_shipped(cli, row_scale, home, write_json, definition_record):
    (row_scale / "pyproject.toml").unlink()
    result = cli("add-definition", write_json(definition_record(version="2.0.0", constraints=[])))
    assert result.code == 1
    assert "is shipped in" in result.err
    assert not home.exists()
