from __future__ import annotations

import json
import os
import time

import pytest

BAD = {
    "unknown key": ({"axis": {}}, "'axes'"),
    "missing axis": ({"axes": {"M": 4}}, "axis 'N'"),
    "unknown axis": ({"axes": {"M": 4, "N": 8, "K": 1}}, "axis 'K'"),
    "negative axis": ({"axes": {"M": -4, "N": 8}}, "axis 'M'"),
    "fractional axis": ({"axes": {"M": 4.5, "N": 8}}, "axes.M: "),
    "broken constraint": ({"axes": {"M": 4, "N": 0}}, "N >= 1"),
    "dtype outside the set": (
        {"dtypes": {"T": "float16"}},
        "'float16'",
    ),
    "unknown dtype": ({"dtypes": {"T": "half"}}, "dtypes.T: "),
    "no dtype": ({"dtypes": {}}, "float32, bfloat16"),
    "no scalar": ({"inputs": {}}, "inputs.factor: "),
    "scalar tensor": (
        {"inputs": {"x": {"type": "scalar", "value": 1}}},
        "inputs.x ",
    ),
    "unknown input": ({"inputs": {"y": {"type": "random"}}}, "inputs.y: "),
    "outside the dataset": (
        {"inputs": {"x": {"type": "safetensors", "path": "../x", "tensor_key": "x"}}},
        "'../x'",
    ),
    "unknown layout": (
        {"layouts": {"x": "padded"}},
        "layout 'padded' must be 'contiguous' or 'strided(<stride>, ...)'",
    ),
    "wrong rank of strides": ({"layouts": {"x": "strided(1)"}}, "has 1 strides for 2 dimensions"),
    "another content's uuid": ({"uuid": "6f0e6f5e-5a0c-5d0b-9a53-5b8f7f0f6c11"}, "leave the key out to fill it in"),
    "unknown definition": ({"definition": "row_scael"}, "no definition 'row_scael'. Did you mean 'row_scale'?"),
}


@pytest.fixture
def lines(tmp_path):
    def write(*records):
        path = tmp_path / "workloads.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


@pytest.mark.parametrize(("changes", "fact"), BAD.values(), ids=BAD.keys())
def test_one_wrong_line_refuses_the_whole_file(changes, fact, cli, row_scale, workload_record, lines, snapshot):
    before = snapshot(row_scale)
    good = workload_record(axes={"M": 5, "N": 5})
    file = lines(good, workload_record(**changes))
    result = cli("add-workload", file)
    assert result.code in (1, 2)
    assert f"{file}:2: " in result.err
    assert fact in result.err
    assert snapshot(row_scale) == before


def test_new_workloads_are_appended_and_known_ones_left_alone(cli, row_scale, workload_record, lines):
    file = lines(workload_record(), workload_record(axes={"M": 5, "N": 5}))
    result = cli("add-workload", file)
    path = row_scale / "workloads" / "elementwise" / "row_scale.jsonl"
    assert (result.code, result.out) == (0, f"{path}\n")
    assert "added 1 workloads, 1 exist already" in result.err
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["axes"]["M"] for record in stored] == [4, 5]
    assert all(record["uuid"] for record in stored)
    assert len(cli("list", "--workloads", "--json").json()) == 2


def test_one_object_over_several_lines_is_read(cli, row_scale, workload_record, tmp_path):
    file = tmp_path / "one.json"
    file.write_text(json.dumps(workload_record(axes={"M": 7, "N": 7}), indent=2))
    assert cli("add-workload", file).code == 0


def test_malformed_json_names_the_line(cli, row_scale, tmp_path):
    file = tmp_path / "w.jsonl"
    file.write_text('{"definition": "row_scale"\n')
    result = cli("add-workload", file)
    assert result.code == 1
    assert f"{file}:1: not valid JSON" in result.err


def test_an_empty_file_is_refused(cli, row_scale, tmp_path):
    (tmp_path / "w.jsonl").touch()
    assert cli("add-workload", tmp_path / "w.jsonl").cause == "workload_missing"


@pytest.mark.turn("tilegym_db/catalog/writers.py")  # two thousand records
def test_two_thousand_workloads_take_seconds(cli, row_scale, workload_record, lines):
    file = lines(*(workload_record(axes={"M": size, "N": 8}) for size in range(1001, 3001)))
    begun = time.process_time()
    assert "added 2000 workloads" in cli("add-workload", file).err
    assert "added 0 workloads, 2000 exist already" in cli("add-workload", file).err
    assert time.process_time() - begun < 20
    assert len((row_scale / "workloads" / "elementwise" / "row_scale.jsonl").read_text().splitlines()) == 2001


def test_a_fifo_is_no_file_of_workloads(cli, row_scale, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    result = cli("add-workload", tmp_path / "fifo")
    assert result.code == 2
    assert "is neither a file nor a folder" in " ".join(result.err.split())


def test_scalar_excluded_by_its_name_is_refused_with_its_line(cli, home, tmp_path):
    file = tmp_path / "workloads.jsonl"
    scalar = {"eps": {"type": "scalar", "value": -1e-6}}
    file.write_text(
        json.dumps({"definition": "rms_norm", "axes": {"M": 4, "N": 8}, "dtypes": {"T": "float32"}, "inputs": scalar})
    )
    result = cli("add-workload", file)
    assert result.code == 1
    assert "inputs.eps: -1e-06" in result.err
    assert "workloads.jsonl" in result.err
