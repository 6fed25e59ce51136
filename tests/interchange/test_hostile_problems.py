"""Files that look like problems of KernelBench or GPU MODE and are not good: each is refused alone, with its reason."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from problem_texts import ADD, SOFTMAX, SUBMISSION, TASK, record_of, written
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.interchange.adapt import draft_of
from tilegym_db.judging import describing
from tilegym_db.judging.problems import cases_of, import_data_set, read_description, without_harness
from tilegym_db.judging.sandboxed import compared_draft
from tilegym_db.store.imported import DataSet

SMALL = SOFTMAX.replace("393216", "64")
NUMBER = ", {}]\n\ndef get_init".join(SMALL.replace("(self, x)", "(self, x, y)").split("]\n\ndef get_init"))
OUTSIDE = SMALL + "\nopen({!r}, 'w')\n"
DEEP = f"\nz = {' + '.join(['1'] * 2500)}\n"
LATIN = "# -*- coding: latin-1 -*-\n# \xfc\n"
BAD = {
    "syntax.py": (SMALL + "def (:\n", "no Python source"),
    "latin.py": ((LATIN + SMALL).encode("latin-1"), "not UTF-8"),
    "deep.py": (SMALL + DEEP, "nested too deeply"),
    "exit.py": (SMALL + "raise SystemExit(3)\n", "status 3"),
    "exit_late.py": (SMALL.replace("return torch.softmax(x, dim=1)", "raise SystemExit"), "status 0"),
    "os_exit.py": (SMALL + "import os\nos._exit(0)\n", "status 0"),
    "unprintable.py": (SMALL + "class E(Exception):\n    def __str__(self): raise SystemExit(4)\nraise E\n", "status 4"),
    "lines.py": (SMALL + "raise ValueError('one\\ntwo')\n", "ValueError: one two"),
    "no_json.py": (SMALL + "import json\njson.dumps = lambda *_: 'no json'\n", "not valid JSON"),
    "no_keys.py": (SMALL + "import json\njson.dumps = lambda *_: '{\"tensors\": [{}]}'\n", "missing key"),
    "numpy_.py": (SMALL.replace("torch.rand(rows, columns)", "__import__('numpy').ones(3)"), "numpy"),
    "nothing.py": (SMALL.replace("[torch.rand(rows, columns)]", "[]"), "missing 1 required"),
    "number.py": (SMALL.replace("[torch.rand(rows, columns)]", "[2.0]").replace("torch.softmax(x, dim=1)", "torch.ones(3)"),
                  "none of its inputs is a tensor"),
    "in_place.py": (SMALL.replace("return torch.softmax(x, dim=1)", "return x.mul_(2)"), "writes to its input x"),
    "infinite.py": (NUMBER.format("float('inf')"), "finite"),
    "double.py": (SMALL + "torch.set_default_dtype(torch.float64)\n", "float64"),
    "软件.py": (SMALL, "Rename it"),
}  # fmt: skip
GOOD = {
    "a_first.py": SMALL,
    "bom.py": "\ufeff" + SMALL,
    "prints.py": SMALL + "print('x' * 100_000)\n",
    "huge.py": SMALL.replace("    def f", "    def __init__(self):\n        super().__init__()\n"
                             "        self.w = nn.Linear(1_000_000, 1_000_000)\n    def f"),
    "z_last.py": SMALL,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    root = tmp_path_factory.mktemp("hostile")
    folder = written(root / "set", GOOD | {name: text for name, (text, _) in BAD.items() if isinstance(text, str)})
    (folder / "latin.py").write_bytes(BAD["latin.py"][0])  # type: ignore[arg-type]
    (root / "outside.py").write_text(OUTSIDE.format(str(root / "written")))
    (folder / "link.py").symlink_to(root / "outside.py")
    (folder / "writes.py").write_text(OUTSIDE.format(str(root / "written")))
    return import_data_set(folder, home=root / "home").data_set


@pytest.mark.turn("tilegym_db/judging/", "tilegym_db/sandbox/worker.py")  # a worker for each problem
@pytest.mark.slow
def test_each_bad_file_is_refused_alone_with_its_reason(found: DataSet) -> None:
    reasons = {item.path: item.reason for item in found.refused}
    assert set(reasons) == {*BAD, "link.py", "writes.py"}
    assert {name for name, (_, words) in BAD.items() if words not in reasons[name]} == set()
    assert {item.name for item in found.of_kind("definition")} == {name.removesuffix(".py") for name in GOOD}


@pytest.mark.turn("tilegym_db/judging/", "tilegym_db/sandbox/worker.py")  # a worker for each problem
@pytest.mark.slow
def test_problem_sees_nothing_that_another_did_to_pytorch(found: DataSet) -> None:
    assert record_of(found, "z_last")["inputs"]["x"]["dtype"] == "float32"  # double.py came before


@pytest.mark.turn("tilegym_db/judging/", "tilegym_db/sandbox/worker.py")  # a worker for each problem
@pytest.mark.slow
def test_no_file_of_a_data_set_runs_unconfined(found: DataSet) -> None:
    assert not (found.home.parent / "written").exists()


@pytest.mark.parametrize("dialect", ["kernelbench", "gpu-mode"])
def test_file_that_is_no_python_is_named_as_such(dialect: str, tmp_path: Path) -> None:
    text = {"kernelbench": SMALL, "gpu-mode": ADD}[dialect]
    (tmp_path / "one.py").write_text(text + "def (:\n")
    with raises(RecordError, "records_refused", "no Python source"):
        import_data_set(tmp_path / "one.py", home=tmp_path / "home")


@pytest.mark.turn("tilegym_db/judging/", "tilegym_db/sandbox/worker.py")  # a worker for each problem
def test_second_problem_of_one_name_is_refused_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "set", {"a b.py": SMALL, "a-b.py": SMALL.replace("dim=1", "dim=0")})
    found = import_data_set(folder, home=tmp_path / "home").data_set
    assert [(item.name, item.path) for item in found.of_kind("definition")] == [("a_b", "a b.py")]
    reasons = {item.path: item.reason for item in found.refused}
    assert "'a_b' is that of a b.py too" in reasons["a-b.py"]


def test_a_problem_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describing, "MAX_SECONDS", 1)
    begun = time.monotonic()
    answer = describing.described([(describing.KERNELBENCH, "while True:\n    pass\n", "{}")], 0)
    assert "does not end within 1 s" in read_description(bytes(answer.tolist())).reason
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"[" * 100_000, b'{"tensors": 1}', b"{}", b'{"reason": "", "tensors": []}',
     b'{"tensors": [{"role": "input", "name": "x) + f(", "dtype": "float32", "shape": []}]}',
     b'{"tensors": [{"role": "input", "name": "x", "dtype": "float32", "shape": ["__import__(\'os\')"]}]}',
     b'{"tensors": [{"role": "input", "name": "x", "dtype": "float32", "shape": null}]}',
     b'{"axes": {"m": 1e400}}'],
)  # fmt: skip
def test_answer_that_is_no_description_is_a_reason(content: bytes) -> None:
    assert read_description(content).reason.startswith("it does not run in the sandbox")


# ---- GPU MODE --------------------------------------------------------------------------------------------

ONE = ADD.replace("a, b, c = data\n        c[...] = a - 2 * b\n        return c", "return data[0].sum()")
ONE = ONE.replace('return a, b, torch.empty(m, n, device="cuda", dtype=torch.float16)', "return (a,)")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    root = tmp_path_factory.mktemp("hostile_gpu_mode")
    files = {
        "one/reference.py": ONE, "one/task.yml": TASK, "one/submission.py": SUBMISSION.replace(
            "a, b, c = data\n    c.copy_(a - 2 * b)\n    return c", "return data[0].sum()"),
        "nan/reference.py": ONE.replace("seed: int)", "seed: int, p: float)"),
        "nan/task.yml": TASK.replace('"seed": 1', '"seed": 1, "p": NaN').replace("- {m", "- {p: 1.0, m"),
        "feed/reference.py": ONE.replace("import torch\n", "import torch\n# \u2028 \x0c a line that some split here\n"),
        "feed/task.yml": TASK,
        "link/reference.py": ONE,
        "number/reference.py": ONE.replace("(a,)", "(5,)").replace("data[0].sum()", "torch.ones(data[0])"),
        "number/task.yml": TASK,
    }  # fmt: skip
    folder = written(root, {f"set/{path}": text for path, text in files.items()}) / "set"
    (root / "task.yml").write_text(TASK)
    (folder / "link" / "task.yml").symlink_to(root / "task.yml")
    return import_data_set(folder, home=root / "home").data_set


@pytest.mark.turn("tilegym_db/judging/", "tilegym_db/sandbox/worker.py")  # a worker for each problem
@pytest.mark.slow
def test_bad_problem_of_gpu_mode_is_refused_alone(given: DataSet) -> None:
    reasons = {item.path: item.reason for item in given.refused if item.path.endswith(".py")}
    assert set(reasons) == {"link/reference.py", "number/reference.py"}
    assert "none of its inputs is a tensor" in reasons["number/reference.py"]
    assert {item.name for item in given.of_kind("definition")} == {"one", "nan", "feed"}


@pytest.mark.turn("tilegym_db/judging/", "tilegym_db/sandbox/worker.py")  # a worker for each problem
@pytest.mark.slow
def test_data_that_is_a_tuple_of_one_stays_a_tuple(given: DataSet) -> None:
    draft = compared_draft(given, "one")
    assert (draft.solutions, draft.left_out) == (["solutions/one_original", "solutions/one_submission"], [])
    names: dict[str, Any] = {}
    import torch

    for file in ("reference.py", "solutions/one_submission/main.py"):
        exec(draft.files[file].decode(), names)
        assert float(names["run"](torch.ones(2, 3))) == 6.0


def test_harness_is_taken_off_by_its_own_lines() -> None:
    text = without_harness("import torch\n# \x0c \u2028\n" + ADD)
    assert "check_implementation" not in text
    assert "c[...] = a - 2 * b" in text


def test_line_of_a_task_that_is_too_deep_is_passed_by() -> None:
    assert cases_of(f"tests:\n  - {{a: {'[' * 50_000}{']' * 50_000}}}\n  - {{a: 1}}\n") == [{"a": 1}]


@pytest.mark.turn("tilegym_db/judging/", "tilegym_db/sandbox/worker.py")  # a worker for each problem
def test_draft_of_an_imported_problem_is_json(found: DataSet) -> None:
    assert json.loads(draft_of(found, "a_first").files["definition.json"])["op_type"] == "kernelbench"


@pytest.mark.parametrize("name", ["exit.py", "os_exit.py", "lines.py", "in_place.py"])
def test_bad_problem_has_its_reason_when_it_is_described(name: str) -> None:
    text, reason = BAD[name]
    answer = describing.described([(describing.KERNELBENCH, str(text), "{}")], 0)
    assert reason in read_description(bytes(answer.tolist())).reason


def test_description_sees_nothing_of_the_problem_before_it() -> None:
    forms = [(describing.KERNELBENCH, str(BAD["double.py"][0]), "{}"), (describing.KERNELBENCH, SMALL, "{}")]
    answers = [json.loads(bytes(describing.described(forms, number).tolist())) for number in (0, 1)]
    assert [answer["tensors"][0]["dtype"] for answer in answers] == ["float64", "float32"]
