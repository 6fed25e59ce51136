from __future__ import annotations

import json

import pytest
from raising import raises

from tilegym_db.errors import RecordError, UsageError
from tilegym_db.records import Definition
from tilegym_db.scaffold.definition_draft import draft_definition, open_places, parse_tensors, read_definition_file

SIGNATURES = {
    "a norm": ("x[M, N], weight[N], bias[N], eps", "out[M, N]"),
    "no scalar": ("a[M, I], b[M, I]", "out[M, I]"),
    "a product": ("a[M, K], b[N, K]", "out[M, N]"),
    "an expression": ("x[M, 2*I]", "out[M, I]"),
    "several outputs": ("q[B, H, S, D], k[B, H, S, D]", "q_out[B, H, S, D], k_out[B, H, S, D]"),
    "integers": ("scores[M, E]:float32", "chosen[M, 8]:int64"),
    "flags and vectors": ("x[N], flag:bool, count:int64", "out[N]"),
}


def write(folder, files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("inputs", "outputs"), SIGNATURES.values(), ids=SIGNATURES)
def test_draft_of_any_signature_is_valid_and_its_reference_runs(tmp_path, inputs, outputs):
    from tilegym_db.verification.admission import run_reference_once

    files = draft_definition("my_op", "mine", parse_tensors("--inputs", inputs), parse_tensors("--outputs", outputs))
    folder = write(tmp_path / "my_op", files)
    record = read_definition_file(folder)
    assert (record.name, record.op_type) == ("my_op", "mine")
    run_reference_once(record, folder)


@pytest.mark.parametrize("which", ["a norm", "no scalar", "several outputs"])
def test_draft_with_outputs_like_an_input_passes_its_self_test(which):
    from tilegym_db.records import Workload
    from tilegym_db.verification.self_test import self_test, tiny_workloads

    inputs, outputs = SIGNATURES[which]
    files = draft_definition("my_op", "mine", parse_tensors("--inputs", inputs), parse_tensors("--outputs", outputs))
    record = Definition.from_dict(
        {
            **json.loads(files["definition.json"]),
            "reference": files["reference.py"],
            "self_test": {
                "independent": files["independent.py"],
                "planted_errors": json.loads(files["planted_errors.json"]),
            },
        }
    )
    workloads = [Workload.from_json(line) for line in files["workloads.jsonl"].splitlines()]
    assert self_test(record, tiny_workloads(record, workloads)) == []


def test_a_draft_says_where_it_is_still_a_draft(tmp_path):
    files = draft_definition(
        "my_op", "mine", parse_tensors("--inputs", "x[M, N]"), parse_tensors("--outputs", "out[M, N]")
    )
    folder = write(tmp_path / "my_op", files)
    named = {line.rpartition("/")[2].partition(":")[0] for line in open_places(folder)}
    assert named == {"definition.json", "reference.py", "independent.py", "planted_errors.json"}
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("TODO", "done"))
    assert open_places(folder) == []


def test_a_draft_without_one_of_its_files_names_it(tmp_path):
    files = draft_definition("my_op", "mine", parse_tensors("--inputs", "x[M]"), parse_tensors("--outputs", "out[M]"))
    folder = write(tmp_path / "my_op", files)
    (folder / "independent.py").unlink()
    with raises(RecordError, "file_unreadable", "independent.py: "):
        read_definition_file(folder)
    with raises(RecordError, "draft_incomplete", "definition.json", "tilegym-db new definition"):
        read_definition_file(tmp_path)


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        ("", "tensor_missing", "--inputs"),
        ("x[M", "tensor_syntax", "--inputs"),
        ("x[M,,N]", "axis_empty", "--inputs"),
        ("x[,M]", "axis_empty", "--inputs"),
        ("x[M, ]", "axis_empty", "--inputs"),
        ("x[M], x[N]", "tensor_repeated", "'x'"),
        ("x[M]:float7", "dtype_unknown", "'float7'"),
        ("x y", "tensor_syntax", "--inputs"),
        ("1x[M]", "tensor_syntax", "--inputs"),
        ("x[]", "axis_empty", "'x[]'"),
    ],
)
def test_unreadable_signature_is_refused_with_the_spelling(text, code, name):
    with raises(UsageError, code, name):
        parse_tensors("--inputs", text)


def test_a_number_is_no_output():
    with raises(UsageError, "output_not_tensor", "'total'", "Try: total[1]"):
        draft_definition("mine", "mine", parse_tensors("--inputs", "x[M]"), parse_tensors("--outputs", "total"))
