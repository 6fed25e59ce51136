"""Problems of KernelBench and GPU MODE come in with what they are called with, observed in the sandbox, or with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from problem_texts import ADD, HEAD, SOFTMAX, SUBMISSION, TASK, written
from raising import raises

from tilegym_db.errors import UsageError
from tilegym_db.interchange.adapt import ORIGINAL_TEXT, draft_of
from tilegym_db.judging.problems import cases_of, import_data_set, without_harness
from tilegym_db.judging.sandboxed import compared_draft
from tilegym_db.records import Definition, Workload
from tilegym_db.store.imported import DataSet

LINEAR = (
    HEAD
    + """    def __init__(self, width, out):
        super().__init__()
        self.first = nn.Linear(width, out)

    def forward(self, x, scale):
        return self.first(x) * scale

batch = 128
width, out = 64, 32
sizes = (width,)

def get_inputs():
    return [torch.randn(batch, 64), 0.5]

def get_init_inputs():
    return [64, 32]
"""
)
CONVOLUTION = (
    HEAD
    + """    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 4, stride=2)

    def forward(self, x):
        return self.conv(x)

length = 1024

def get_inputs():
    return [torch.rand(2, 3, length)]

def get_init_inputs():
    return []
"""
)
NORM = CONVOLUTION.replace("nn.Conv1d(3, 5, 4, stride=2)", "nn.Sequential(nn.InstanceNorm1d(3), nn.BatchNorm1d(3))")
LOSS = (
    HEAD
    + """    def forward(self, scores, targets):
        return torch.nn.functional.cross_entropy(scores, targets)

batch = 512
classes = 1000

def get_inputs():
    return [torch.rand(batch, classes), torch.randint(0, classes, (batch,))]

def get_init_inputs():
    return []
"""
)
DROPOUT = LINEAR.replace("nn.Linear(width, out)", "nn.Dropout(0.1)")
RANDOM = SOFTMAX.replace("torch.softmax(x, dim=1)", "x + torch.rand(x.shape)")
NO_TENSOR = SOFTMAX.replace("return torch.softmax(x, dim=1)", "return {'y': x}")
FILES = SOFTMAX.replace("rows = 4096", "open('/tmp/written_by_a_problem', 'w')\nrows = 4096")
ANSWER = """import torch

class ModelNew(torch.nn.Module):
    def forward(self, x):
        e = torch.exp(x)
        return e / e.sum(1, keepdim=True)
"""
PROBLEMS = {
    "1_Softmax.py": SOFTMAX, "2_Linear.py": LINEAR, "3_Conv.py": CONVOLUTION, "4_Loss.py": LOSS, "5_Dropout.py": DROPOUT,
    "6_Random.py": RANDOM, "7_Dict.py": NO_TENSOR, "8_Files.py": FILES, "answers/1_softmax.py": ANSWER,
    "9_Norm.py": NORM,
    "answers/9_none.py": ANSWER,
}  # fmt: skip


@pytest.fixture(scope="module")
def kernelbench(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    root = tmp_path_factory.mktemp("kernelbench")
    return import_data_set(written(root / "level1", PROBLEMS), home=root / "home").data_set


@pytest.fixture(scope="module")
def gpu_mode(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    root = tmp_path_factory.mktemp("gpu_mode")
    files = {
        "set/add_py/reference.py": ADD, "set/add_py/task.yml": TASK, "set/add_py/submission.py": SUBMISSION,
        "set/bare_py/reference.py": ADD, "set/there_py/reference.py": ADD.replace("c[...]", "c.cuda('cuda')[...]"),
        "set/there_py/task.yml": TASK, "set/far/submission.py": SUBMISSION,
    }  # fmt: skip
    return import_data_set(written(root, files) / "set", home=root / "home").data_set


def shapes(found: DataSet, name: str) -> dict[str, Any]:
    definition = drafted(found, name)[0]
    return {key: list(spec.shape or ()) for key, spec in (definition.inputs | definition.outputs).items()}


def drafted(found: DataSet, name: str) -> tuple[Definition, list[Workload]]:
    draft = draft_of(found, name)
    content = json.loads(draft.files["definition.json"]) | {"reference": draft.files["reference.py"].decode()}
    return Definition.from_dict(content, name), [
        Workload.from_json(line) for line in draft.files["workloads.jsonl"].splitlines()
    ]


@pytest.mark.slow
def test_sizes_of_a_problem_become_axes_or_arithmetic(kernelbench: DataSet) -> None:
    assert shapes(kernelbench, "1_softmax") == {"x": ["rows", "columns"], "out": ["rows", "columns"]}
    assert shapes(kernelbench, "3_conv") == {
        "x": [2, 3, "length"], "conv_weight": [5, 3, 4], "conv_bias": [5], "out": [2, 5, "(length // 2 - 1)"]
    }  # fmt: skip
    assert shapes(kernelbench, "4_loss") == {"scores": ["batch", "classes"], "targets": ["batch"], "out": []}


@pytest.mark.slow
def test_weights_and_numbers_of_a_module_become_inputs(kernelbench: DataSet) -> None:
    definition, workloads = drafted(kernelbench, "2_linear")
    assert list(definition.inputs) == ["x", "scale", "first_weight", "first_bias"]
    assert definition.inputs["scale"].is_scalar
    assert [row.scalars() for row in workloads] == [{"scale": 0.5}] * 2


@pytest.mark.slow
def test_workloads_are_the_given_size_and_a_small_one(kernelbench: DataSet) -> None:
    small, given = drafted(kernelbench, "1_softmax")[1]
    assert (given.axes, "tiny" in small.tags) == ({"rows": 4096, "columns": 393216}, True)
    assert small.axes["rows"] * small.axes["columns"] * 2 <= 1 << 16


@pytest.mark.slow
def test_inputs_are_drawn_as_the_problem_draws_them(kernelbench: DataSet, gpu_mode: DataSet) -> None:
    generators = drafted(kernelbench, "4_loss")[0].input_generators
    assert {name: (one.kind, one.low, one.high) for name, one in generators.items()} == {
        "scores": ("uniform", 0.0, 1.0),
        "targets": ("integers", 0, "classes"),
    }
    assert {name: one.high for name, one in drafted(gpu_mode, "add_py")[0].input_generators.items()} == {"b": 2.0}


@pytest.mark.slow
def test_problem_that_is_no_operator_is_refused_with_the_reason(kernelbench: DataSet) -> None:
    reasons = {item.path: item.reason for item in kernelbench.refused}
    assert set(reasons) == {"5_Dropout.py", "6_Random.py", "7_Dict.py", "8_Files.py", "answers/9_none.py"}
    assert "first: Dropout draws random numbers" in reasons["5_Dropout.py"]
    assert "forward() calls rand" in reasons["6_Random.py"]
    assert "returns a dict" in reasons["7_Dict.py"]
    assert "OSError" in reasons["8_Files.py"]
    assert "no problem of its file's name" in reasons["answers/9_none.py"]
    assert not Path("/tmp/written_by_a_problem").exists()


@pytest.mark.sweep(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["1_softmax", "2_linear", "3_conv", "4_loss", "9_norm"])
def test_draft_of_a_problem_agrees_with_the_original(name: str, kernelbench: DataSet) -> None:
    draft = compared_draft(kernelbench, name)
    answers = ["solutions/answers_1_softmax"] if name == "1_softmax" else []
    assert (draft.solutions, draft.left_out) == ([f"solutions/{name}_original", *answers], [])


@pytest.mark.slow
def test_draft_that_computes_something_else_is_not_written(
    kernelbench: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = next(item for item in kernelbench.of_kind("definition") if item.name == "1_softmax")
    other = str(item.record[ORIGINAL_TEXT]).replace("dim=1", "dim=0")
    monkeypatch.setitem(item.record, ORIGINAL_TEXT, other)  # type: ignore[arg-type]
    with raises(UsageError, "draft_differs", "1_softmax"):
        compared_draft(kernelbench, "1_softmax")


@pytest.mark.slow
def test_submission_is_called_with_a_tuple_and_its_buffer(gpu_mode: DataSet) -> None:
    definition, workloads = drafted(gpu_mode, "add_py")
    assert (list(definition.inputs), list(definition.outputs)) == (["a", "b"], ["out"])
    assert [row.axes for row in workloads][-1] == {"m": 1024, "n": 512}
    draft = compared_draft(gpu_mode, "add_py")
    assert (draft.solutions, draft.left_out) == (["solutions/add_py_original", "solutions/add_py_submission"], [])
    names: dict[str, Any] = {}
    exec(draft.files["solutions/add_py_submission/main.py"].decode(), names)
    assert names["run"](torch.full((1, 2), 8.0), torch.tensor([1.0, 2.0])).tolist() == [[6.0, 4.0]]


@pytest.mark.slow
def test_problem_of_gpu_mode_is_refused_with_the_reason(gpu_mode: DataSet) -> None:
    reasons = {item.path: item.reason for item in gpu_mode.refused}
    assert set(reasons) == {"bare_py/reference.py", "there_py/reference.py", "far/submission.py"}
    assert "task.yml" in reasons["bare_py/reference.py"]
    assert "names the device 'cuda'" in reasons["there_py/reference.py"]


def test_sizes_of_a_task_are_read_without_yaml() -> None:
    assert cases_of(TASK) == [
        {"m": 4, "n": 8, "seed": 1},
        {"m": 16, "n": 8, "seed": 2},
        {"m": 1024, "n": 512, "seed": 3},
    ]
    assert cases_of("description: |\n  - {a: 1}\ntests:\n  - [1]\n  - {broken\n") == []


def test_harness_of_gpu_mode_is_taken_off_a_reference() -> None:
    text = without_harness(ADD)
    assert "utils" not in text
    assert "check_implementation" not in text


def test_baseline_of_a_problem_is_stock_code(kernelbench: DataSet) -> None:
    record = json.loads(draft_of(kernelbench, "1_softmax").files["solutions/1_softmax_original/solution.json"])
    assert (record["spec"]["role"], record["spec"]["provides"]) == ("baseline", "stock")
