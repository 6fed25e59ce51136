from __future__ import annotations

import json

import pytest

from tilegym_db.catalog import Catalog, SolutionFiles

RUN = """import triton
import triton.language as tl


@triton.jit
def scale_row(x, weight, factor, out, N, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0) * N
    value = tl.load(x + row + columns, mask=columns < N) * tl.load(weight + columns, mask=columns < N)
    tl.store(out + row + columns, value * factor, mask=columns < N)


def run(x, weight, factor, out):
    rows, width = x.shape
    scale_row[(rows,)](x, weight, factor, out, width, triton.next_power_of_2(width))
"""
EAGER = "def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"
CUTILE = """import cuda.tile as ct
import torch


@ct.kernel
def scale_row(x, out):
    pass


def run(x, weight, factor, out):
    ct.launch(torch.cuda.current_stream(), (1, 1, 1), scale_row, (x, out))
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "fused.py"
    path.write_text(RUN)
    return path


@pytest.fixture
def folder(tmp_path, solution_record):
    path = tmp_path / "mine"
    path.mkdir()
    (path / "kernel.py").write_text(EAGER)
    (path / "solution.json").write_text(json.dumps(solution_record(name="row_scale_mine")))
    return path


def rewrite(folder, record):
    (folder / "solution.json").write_text(json.dumps(record))


def test_one_file_becomes_a_solution_folder(cli, row_scale, source):
    result = cli("add-solution", source, "-d", "row_scale", "-l", "triton")
    added = row_scale / "solutions" / "elementwise" / "row_scale" / "row_scale_triton_fused"
    assert (result.code, result.out) == (0, f"{added}\n")
    assert "tilegym-db compile row_scale_triton_fused" in result.err
    assert (added / "fused.py").read_text() == RUN
    assert json.loads((added / "solution.json").read_text())["spec"]["entry_point"] == "fused.py::run"
    assert cli("show", "row_scale_triton_fused").code == 0


def test_python_function_of_only_the_inputs_returns_its_outputs(cli, row_scale, source):
    source.write_text("def run(x, weight, factor):\n    return x * weight * factor\n")
    assert cli("add-solution", source, "-d", "row_scale", "-l", "python", "--name", "mine").code == 0
    record = json.loads((row_scale / "solutions/elementwise/row_scale/mine/solution.json").read_text())
    assert record["spec"]["destination_passing_style"] is False


def test_cuda_tile_is_another_name_of_cutile(cli, row_scale, source):
    source.write_text(CUTILE)
    assert cli("add-solution", source, "-d", "row_scale", "-l", "cuda-tile").code == 0
    assert {row["language"] for row in cli("list", "--solutions", "--json").json()} == {"python", "cutile"}


def test_a_folder_is_copied_with_all_its_sources(cli, row_scale, folder, solution_record):
    (folder / "parts").mkdir()
    (folder / "parts" / "tile.py").write_text("WIDTH = 4\n")
    (folder / "notes.txt").write_text("not a source")
    rewrite(folder, solution_record(name="row_scale_mine", sources=[{"path": "kernel.py"}, {"path": "parts/tile.py"}]))
    added = row_scale / "solutions" / "elementwise" / "row_scale" / "renamed"
    assert cli("add-solution", folder, "--name", "renamed").code == 0
    found = sorted(str(path.relative_to(added)) for path in added.rglob("*") if path.is_file())
    assert found == ["kernel.py", "parts/tile.py", "solution.json"]


BAD_OPTIONS = {
    "unknown definition": (
        ["-d", "row_scael", "-l", "triton"],
        2,
        "",
        "'row_scale'",
    ),
    "unknown language": (["-d", "row_scale", "-l", "tritn"], 2, "language_unknown", "'triton'"),
    "no definition": (["-l", "triton"], 2, "options_missing", "needs a definition"),
    "no language": (["-d", "row_scale"], 2, "options_missing", "needs a language"),
    "bad name": (["-d", "row_scale", "-l", "triton", "--name", "a/b"], 1, "", "name: "),
    "duplicate name": (
        ["-d", "row_scale", "-l", "triton", "--name", "row_scale_stock"],
        1,
        "",
        "--name",
    ),
}


@pytest.mark.parametrize(("options", "code", "cause", "fact"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_wrong_options_are_refused_and_nothing_is_written(options, code, cause, fact, cli, row_scale, source, snapshot):
    before = snapshot(row_scale)
    result = cli("add-solution", source, *options)
    assert result.code == code
    assert cause in ("", result.cause)
    assert fact in result.err
    assert snapshot(row_scale) == before


BAD_SOURCES = {
    "async": ("async def run(x, weight, factor, out): pass\n", "async"),
    "no entry point": ("def go(x): pass\n", "defines go"),
    "not Python": ("def run(x:\n", "'fused.py'"),
    "too few arguments": ("def run(x, out): pass\n", "(x, weight, factor, out)"),
    "too many arguments": ("def run(x, weight, factor, out, extra): pass\n", "(x, weight, factor, out)"),
    "keyword without default": (
        "def run(x, weight, factor, out, *, B): pass\n",
        "argument 'B'",
    ),
}


@pytest.mark.parametrize(("text", "fact"), BAD_SOURCES.values(), ids=BAD_SOURCES.keys())
def test_a_source_that_cannot_be_called_is_refused(text, fact, cli, row_scale, source, snapshot):
    before = snapshot(row_scale)
    source.write_text(text)
    result = cli("add-solution", source, "-d", "row_scale", "-l", "triton")
    assert result.code == 1
    assert result.err.startswith(f"error: {source}: ")
    assert fact in result.err
    assert snapshot(row_scale) == before


REFUSED = {
    "a module that reaches the verdict": (
        "python",
        "import ctypes\n" + EAGER,
        "1: hard: imports-native-code: ",
    ),
    "a patch of torch": (
        "python",
        EAGER + "import torch\ntorch.equal = run\n",
        "4: hard: foreign-assignment: ",
    ),
    "torch's work under a tile language's name": (
        "triton",
        EAGER,
        "0: hard: no-kernel: ",
    ),
    "torch's work around a kernel": ("triton", RUN + "    out.mul_(2)\n", "16: hard: torch-compute: "),
}


@pytest.mark.parametrize(("language", "text", "finding"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_static_scan_refuses_is_not_added(language, text, finding, cli, row_scale, source, snapshot):
    before = snapshot(row_scale)
    source.write_text(text)
    result = cli("add-solution", source, "-d", "row_scale", "-l", language)
    assert result.code == 1
    assert result.cause == "scan_refused"
    assert str(source) in result.err
    assert f"\n  fused.py:{finding}" in result.err
    assert snapshot(row_scale) == before


def test_a_folder_is_scanned_with_all_its_sources(cli, row_scale, folder, solution_record, snapshot):
    (folder / "part.py").write_text("import threading\n")
    rewrite(folder, solution_record(name="row_scale_mine", sources=[{"path": "kernel.py"}, {"path": "part.py"}]))
    before = snapshot(row_scale)
    assert "part.py:1: hard: imports-concurrency: imports threading" in cli("add-solution", folder).err
    assert snapshot(row_scale) == before


def test_what_the_static_scan_only_notes_is_added(cli, row_scale, source):
    source.write_text("import os\n" + RUN)
    result = cli("add-solution", source, "-d", "row_scale", "-l", "triton")
    assert result.code == 0
    assert "the static scan has 1 notes" in result.err


BAD_RECORDS = {
    "parent folder": ({"sources": [{"path": "../kernel.py"}]}, "'../kernel.py'"),
    "absolute path": ({"sources": [{"path": "/etc/passwd"}]}, "'/etc/passwd'"),
    "missing file": (
        {"sources": [{"path": "kernel.py"}, {"path": "b.py"}]},
        "'b.py'",
    ),
    "no source": ({"sources": []}, "sources: "),
    "entry not a source": (
        {"spec": {"entry_point": "other.py::run"}},
        "'other.py'",
    ),
    "malformed entry": ({"spec": {"entry_point": "kernel.py"}}, "'<file>.py::<function>'"),
    "unknown language": (
        {"spec": {"language": "cuda"}},
        "python, triton, tilelang, cutile",
    ),
    "unknown target": ({"spec": {"target_hardware": ["sm_13"]}}, "'sm_13'"),
    "unknown key": ({"spec": {"warps": 4}}, "'spec.warps'"),
    "undeclared axis": ({"spec": {"constraints": ["K > 1"]}}, "'K'"),
    "undeclared tensor": (
        {"spec": {"layouts": {"y": "strided"}}},
        "spec.layouts names 'y'",
    ),
    "unknown tunable": ({"spec": {"tunables": {"BLOCK": [1]}}}, "tunable 'BLOCK'"),
    "unknown definition": ({"definition": "row_scael"}, "'row_scale'"),
    "returns in triton": (
        {"spec": {"language": "triton", "destination_passing_style": False}},
        "destination passing",
    ),
}


@pytest.mark.parametrize(("changes", "fact"), BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_an_invalid_folder_is_refused_and_nothing_is_written(
    changes, fact, cli, row_scale, folder, solution_record, snapshot
):
    before = snapshot(row_scale)
    rewrite(folder, solution_record(**{"name": "row_scale_mine", **changes}))
    result = cli("add-solution", folder)
    assert result.code in (1, 2)
    assert fact in result.err
    assert snapshot(row_scale) == before


def test_a_link_out_of_the_folder_is_refused(cli, row_scale, folder, tmp_path, snapshot):
    before = snapshot(row_scale)
    outside = tmp_path / "outside.py"
    outside.write_text(RUN)
    (folder / "kernel.py").unlink()
    (folder / "kernel.py").symlink_to(outside)
    result = cli("add-solution", folder)
    assert result.code == 1
    assert f"'kernel.py' is a link out of the folder ({outside})" in result.err
    assert snapshot(row_scale) == before


def test_a_folder_without_solution_json_is_refused(cli, row_scale, tmp_path):
    result = cli("add-solution", tmp_path)
    assert result.code == 1
    assert f"{tmp_path / 'solution.json'}: cannot read this solution" in result.err


def test_an_option_that_contradicts_the_folder_is_wrong_usage(cli, row_scale, folder):
    result = cli("add-solution", folder, "-l", "triton")
    assert result.code == 2
    assert "is 'python'" in result.err


def test_a_failing_write_leaves_nothing_behind(cli, row_scale, source, snapshot):
    before = snapshot(row_scale)
    target = row_scale / "solutions" / "elementwise" / "row_scale"
    (target / "row_scale_triton_fused").write_text("a file where the folder should go")
    result = cli("add-solution", source, "-d", "row_scale", "-l", "triton")
    assert result.code == 1
    assert "Nothing was added" in result.err
    (target / "row_scale_triton_fused").unlink()
    assert snapshot(row_scale) == before


@pytest.mark.parametrize("kind", ["a draft", "an empty folder"])
def test_a_folder_of_the_users_is_refused_and_stays_as_it_was(kind, cli, row_scale, source, snapshot):
    draft = row_scale / "solutions" / "elementwise" / "row_scale" / "draft"
    draft.mkdir()
    if kind == "a draft":
        (draft / "kernel.py").write_text("# months of work\n")
    before = snapshot(row_scale)
    result = cli("add-solution", source, "-d", "row_scale", "-l", "triton", "--name", "draft")
    assert result.code == 1
    assert f"{draft} exists and holds no solution.json. It was left as it is. Nothing was added." in result.err
    assert draft.is_dir()
    assert snapshot(row_scale) == before


@pytest.mark.parametrize(
    ("option", "value"), [("--name", ""), ("--name", "a\nb"), ("--author", ""), ("--author", " "), ("--author", "a\nb")]
)
def test_an_option_that_is_empty_or_no_line_is_refused(option, value, cli, row_scale, source, snapshot):
    before = snapshot(row_scale)
    result = cli("add-solution", source, "-d", "row_scale", "-l", "triton", option, value)
    assert result.code == 1
    assert f"{option.removeprefix('--')}: " in result.err
    assert snapshot(row_scale) == before


def test_add_solution_takes_one_of_a_family_file(cli, row_scale, tmp_path):
    (tmp_path / "kernel.py").write_text("def run_scale(x, weight, factor, out): out.copy_(x * weight * factor)\n")
    member = {"name": "scale", "definition": "row_scale", "spec": {"entry_point": "kernel.py::run_scale"}}
    file = tmp_path / "family.json"
    other = {"name": "other", "definition": "row_scale"}
    file.write_text(json.dumps({"author": "tests", "spec": {"language": "python"}, "solutions": [member, other]}))
    place = tmp_path / "family.json#scale"
    result = cli("add-solution", str(file))
    assert result.code == 1
    assert "family.json#scale" in result.err
    assert cli("add-solution", str(tmp_path / "gone" / "family.json#scale")).code == 2
    result = cli("add-solution", str(place))
    assert result.code == 0, result.err
    added = Catalog.default().solution("scale")
    assert added.path == row_scale / "solutions/elementwise/row_scale/scale/solution.json"
    assert added.digest == SolutionFiles.read(place).digest


def test_one_solution_of_a_family_is_added_alone(cli, row_scale, tmp_path):
    (tmp_path / "kernel.py").write_text("def run_scale(x, weight, factor, out): out.copy_(x * weight * factor)\n")
    spec = {"language": "python", "entry_point": "kernel.py::run_scale"}
    record = {"name": "scale", "definition": "row_scale", "author": "tests", "spec": spec}
    (tmp_path / "scale.json").write_text(json.dumps(record))
    (tmp_path / "other.json").write_text("{}")
    result = cli("add-solution", str(tmp_path / "scale.json"))
    assert result.code == 0, result.err
    added = Catalog.default().solution("scale")
    assert added.folder == row_scale / "solutions" / "elementwise" / "row_scale" / "scale"
    assert added.digest == SolutionFiles.read(tmp_path / "scale.json").digest
    assert {path.name for path in added.folder.iterdir()} == {"kernel.py", "solution.json"}
