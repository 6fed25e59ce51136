"""The other dialects: what tells them, what they may lack, and what they may not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_sets import DEFINITION, Tree, definition, lines, solution, trace, workload
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.interchange.adapt import Adapted, adapted_definition
from tilegym_db.interchange.importing import import_data_set, recognise
from tilegym_db.store.imported import counted

NewTree = Callable[[str], Tree]


@pytest.fixture
def dumps(new_tree: NewTree) -> Tree:
    """``fi_trace`` dumps with what FlashInfer-Bench would not take."""
    in_place = definition(
        name="in_place", tags=["fi_api:flashinfer.x"], outputs={"x": {"shape": ["M", "N"], "dtype": "float32"}}
    )
    in_place["outputs"]["x"]["param"] = "x"
    valueless = definition(
        name="valueless", axes={"M": {"type": "var"}, "N": {"type": "const"}}, check="def check(): ..."
    )
    text = definition(name="text", init="def init(): ...")
    text["inputs"]["mode"] = {"shape": None, "dtype": "string", "optional": True}
    renamed = definition(
        name="renamed", tags=["fi_api:flashinfer.y"], reference="def _scale(x, w, eps):\n    return x * w + eps\n"
    )
    without = {key: value for key, value in definition(name="without", tags=["fi_api:z"]).items() if key != "reference"}
    undeclared = definition(name="undeclared", tags=["fi_api:u"], outputs={"out": {"shape": ["K"], "dtype": "uint8"}})
    tree = new_tree("dumps")
    for record in (in_place, valueless, text, renamed, without, undeclared):
        tree.write(f"{record['name']}.json", record)
    return tree


def test_fi_trace_dumps_come_in_with_what_they_lack(dumps: Tree, home: Path) -> None:
    found = import_data_set(dumps.root).data_set
    assert found.origin == "fi-trace:dumps"
    findings = {item.name: " ".join(item.findings) for item in found.records}
    assert "overwrites the input" in findings["in_place"]
    assert "a const axis without a value" in findings["valueless"]
    assert "dtype 'string'" in findings["text"]
    assert "not called 'run' but _scale" in findings["renamed"]
    assert "no reference" in findings["without"]
    assert [(item.path, item.key) for item in found.refused] == [("undeclared.json", "outputs.out.shape")]


def test_one_dump_alone_can_be_imported(dumps: Tree, home: Path) -> None:
    found = import_data_set(dumps.root / "renamed.json").data_set
    assert (found.origin, counted(found.records)) == ("fi-trace:renamed", {"definition": 1})


@pytest.mark.timeout(20)
def test_a_fifo_among_dumps_is_refused_and_not_waited_for(dumps: Tree, home: Path) -> None:
    os.mkfifo(dumps.root / "a.json")
    found = import_data_set(dumps.root).data_set
    assert ("a.json", "a broken link, or not a regular file") in {(item.path, item.reason) for item in found.refused}


def test_destination_passing_defaults_to_false_in_dumps(dumps: Tree, home: Path) -> None:
    record = solution()
    del record["spec"]["destination_passing_style"]
    dumps.write("solution.json", record)
    (read,) = import_data_set(dumps.root).data_set.of_kind("solution")
    assert read.record["spec"]["destination_passing_style"] is False


@pytest.fixture
def problems(new_tree: NewTree) -> Tree:
    """SOL-ExecBench: two folders with one problem, an expression of axes, custom inputs, and a separate tolerance."""
    record = definition(name="sol", op_type=None, hf_id="a/b")
    record["axes"]["R"] = {"type": "expr", "expression": "M * 2"}
    record["inputs"]["y"] = {"shape": ["R"], "dtype": "float32"}
    record["reference"] = "def run(x, w, eps, y):\n    return x * w + eps\n"
    other = {**definition(name="custom"), "custom_inputs_entrypoint": "get_inputs"}
    answer = {**solution("sol_torch"), "definition": "sol"}
    answer["spec"] = {**answer["spec"], "languages": ["pytorch"], "compile_options": {"cflags": []}}
    del answer["spec"]["language"]
    call = workload("s-1", y={"type": "random"}) | {"tolerance": {"max_atol": 0.5}}
    custom = {"uuid": "c", "axes": {"M": 2}, "inputs": {name: {"type": "custom"} for name in ("x", "w")}}
    custom["inputs"]["eps"] = {"type": "scalar", "value": 1}
    mixed = {"uuid": "m", "axes": {"M": 2}, "inputs": {"x": {"type": "custom"}, "w": {"type": "random"}}}
    hacked = trace("sol_torch", "TIMEOUT", call)
    hacked["evaluation"]["status"] = "REWARD_HACK"
    return (
        new_tree("problems")
        .write("one/definition.json", record)
        .write("one/workload.jsonl", lines(call, end=""))
        .write("one/solution_python.json", answer)
        .write("one/traces.jsonl", lines({**hacked, "definition": "sol"}))
        .write("two/definition.json", record)
        .write("two/workload.jsonl", lines(call))
        .write("three/definition.json", other)
        .write("three/workload.jsonl", lines(custom, mixed))
    )  # fmt: skip


def test_sol_execbench_problems_come_in(problems: Tree, home: Path) -> None:
    found = import_data_set(problems.root).data_set
    assert found.origin == "sol-execbench:problems"
    assert counted(found.records) == {"definition": 2, "solution": 1, "trace": 1, "workload": 3}
    assert [(item.path, item.key) for item in found.refused] == [("three/workload.jsonl:2", "inputs")]
    first = found.of_kind("workload")[0]
    assert (first.record["tolerance"]["max_atol"], first.record["tolerance"]["max_rtol"]) == (0.5, 0.01)


@pytest.mark.parametrize(
    ("tolerance", "key", "reason"),
    [
        ([1], "tolerance", "must be an object"),
        ({"max_atol": "x"}, "tolerance.max_atol", ">= 0"),
        ({"max_rtol": -1}, "tolerance.max_rtol", ">= 0"),
        ({"max_rtol": None}, "tolerance.max_rtol", ">= 0"),
        ({"max_error_cap": [1]}, "tolerance.max_error_cap", ">= 0"),
        ({"required_matched_ratio": 99}, "tolerance.required_matched_ratio", "from 0 to 1"),
        ({"allow_negative_inf": "no"}, "tolerance.allow_negative_inf", "true or false"),
    ],
)
def test_a_tolerance_that_cannot_be_one_is_refused(
    problems: Tree, home: Path, tolerance: object, key: str, reason: str
) -> None:
    bad = workload("bad", y={"type": "random"}) | {"tolerance": tolerance}
    problems.write("one/workload.jsonl", lines(bad, workload("good", y={"type": "random"})))
    problems.write("one/traces.jsonl", lines({**trace("sol_torch", of=bad), "definition": "sol"}))
    refused = {(item.path, item.key): item.reason for item in import_data_set(problems.root).data_set.refused}
    assert reason in refused["one/workload.jsonl:1", key]
    assert reason in refused["one/traces.jsonl:1", f"workload.{key}"]


@pytest.mark.parametrize("languages", ["triton", None, {"triton": 1}])
def test_languages_of_a_problem_are_a_list(problems: Tree, home: Path, languages: object) -> None:
    record = {**solution("one"), "definition": "sol"}
    record["spec"]["languages"] = languages
    problems.write("one/solution_one.json", record)
    (refused,) = [item for item in import_data_set(problems.root).data_set.refused if "solution" in item.path]
    assert (refused.path, refused.key) == ("one/solution_one.json", "spec.languages")
    assert "must be a list of texts" in refused.reason


def test_tilegym_sources_are_read_from_the_repository(new_tree: NewTree, home: Path, tmp_path: Path) -> None:
    path = "src/pkg/kernels/scale.py"
    record = {**solution(), "sources": {"path": [path]}}
    record["spec"] |= {"language": "cuda-tile", "entry_point": f"{path}::run"}
    outside = {**record, "name": "outside", "sources": {"path": ["../secret.py"]}}
    absent = {**record, "name": "absent", "sources": {"path": ["src/none.py"]}}
    tree = new_tree("repo").write(path, "def run(x, w, eps):\n    return x\n")
    (tmp_path / "secret.py").write_text("key")
    tree.write("src/pkg/kernel_definitions/scale_n8.json", definition())
    for item in (record, outside, absent):
        tree.write(f"src/pkg/kernel_solutions/{item['name']}.json", item)
    found = import_data_set(tree.root).data_set
    assert (found.origin, counted(found.records)) == ("tilegym:repo", {"definition": 1, "solution": 1})
    assert found.of_kind("solution")[0].record["sources"][0]["content"].startswith("def run")
    assert path in found.files_by_path
    assert {(item.path.rpartition("/")[2], item.key) for item in found.refused} == {
        ("outside.json", "sources.path[0]"),
        ("absent.json", "sources.path[0]"),
    }


def test_links_of_a_checkout_do_not_concern_its_inventory(new_tree: NewTree, home: Path) -> None:
    tree = new_tree("repo").write("src/pkg/kernel_definitions/scale_n8.json", definition())
    (tree.root / "third_party").symlink_to("/nowhere")
    (tree.root / "CLAUDE.md").symlink_to("/etc/hostname")
    (tree.root / "src/pkg/kernel_definitions/other.json").symlink_to("/etc/hostname")
    found = import_data_set(tree.root).data_set
    assert counted(found.records) == {"definition": 1}
    assert [item.path for item in found.refused] == ["src/pkg/kernel_definitions/other.json"]


def test_dump_with_a_number_or_a_part_of_an_axis_is_adapted(new_tree: NewTree, home: Path) -> None:
    record = definition(
        name="parts",
        tags=["fi_api:p"],
        axes={"M": {"type": "var"}, "K": {"type": "var"}},
        inputs={"x": {"shape": ["M", "K_div_2", "1"], "dtype": "float32"}},
        outputs={"out": {"shape": ["M", "K_div_2", "1"], "dtype": "float32"}},
        reference="def run(x):\n    return x + 1\n",
    )
    undeclared = {**record, "name": "undeclared", "inputs": {"x": {"shape": ["M", "J_div_2"], "dtype": "float32"}}}
    tree = new_tree("dumps").write("parts.json", record).write("undeclared.json", undeclared)
    found = import_data_set(tree.root).data_set
    assert [(item.path, item.key) for item in found.refused] == [("undeclared.json", "inputs.x.shape")]
    adapted = adapted_definition(found, found.of_kind("definition")[0])
    assert isinstance(adapted, Adapted)
    assert adapted.definition.shape_of("x", {"M": 3, "K": 8}) == (3, 4, 1)


def test_membership_of_a_size_is_a_constraint_on_sizes(tree: Tree, home: Path) -> None:
    tree.write(DEFINITION, definition(constraints=["M in (2, 4)", "N not in [3]"]))
    found = import_data_set(tree.root).data_set
    adapted = adapted_definition(found, found.of_kind("definition")[0])
    assert isinstance(adapted, Adapted)
    assert adapted.tensor_constraints == ()
    assert adapted.definition.bind_axes({"M": 4}) == {"M": 4, "N": 8}
    with raises(RecordError, "constraint_broken", "M"):
        adapted.definition.bind_axes({"M": 3})


def test_each_dialect_is_recognised_by_its_files(tree: Tree, dumps: Tree, problems: Tree) -> None:
    told = [recognise(item.root).DIALECT for item in (tree, dumps, problems)]
    assert told == ["flashinfer-trace", "fi-trace", "sol-execbench"]


@pytest.mark.parametrize("fixture", ["dumps", "problems"])
def test_every_dialect_comes_out_byte_for_byte(fixture: str, home: Path, request: pytest.FixtureRequest) -> None:
    from tilegym_db.interchange.importing import imported_files

    given: Tree = request.getfixturevalue(fixture)
    found = import_data_set(given.root).data_set
    damaged = {item.path.partition(":")[0] for item in found.refused}
    wanted = {path: content for path, content in given.bytes().items() if path not in damaged}
    files = imported_files(found)
    assert {path: files[path] for path in wanted} == wanted
