from __future__ import annotations

import pytest

from tilegym_db.errors import RecordError
from tilegym_db.measurement.reproduce import reproduce

CALL = ("--axes", "M=4,N=8", "--dtype", "T=float32", "--gpu", "cpu")


@pytest.mark.parametrize("places", ["x=strided(1, 1)", "x=strided(4, 1)"])
def test_input_with_elements_at_one_address_is_refused_by_name(places, cli, row_scale):
    result = cli("debug", "reproduce", "row_scale_stock", *CALL, "--scalar", "factor=1", "--layout", places)
    assert result.code == 2
    assert f"layouts.x: {places.removeprefix('x=')}" in result.err


@pytest.mark.parametrize("place", ["x=strided(0, 1)", "x=strided(8, 1),weight=strided(1)@x+32"])
def test_expanded_inputs_and_shared_memory_are_reproduced(place, cli, row_scale):
    result = cli("debug", "reproduce", "row_scale_stock", *CALL, "--scalar", "factor=1", "--layout", place)
    assert (result.code, "status: PASSED" in result.out) == (0, True), result.err


def test_passing_case_names_the_run_that_may_have_failed(cli, row_scale):
    passed = cli("debug", "reproduce", "row_scale_stock", *CALL, "--scalar", "factor=1")
    assert "tilegym-db bench row_scale_stock --gpu cpu --force" in passed.err


def test_memory_of_an_unknown_tensor_is_refused_by_name(cli, row_scale):
    place = "x=strided(8, 1)@y+0"
    result = cli("debug", "reproduce", "row_scale_stock", *CALL, "--scalar", "factor=1", "--layout", place)
    assert result.code != 0
    assert "layouts.x: 'x' can lie in the memory of 'y'" in result.err


def test_such_an_input_is_refused_in_a_file_of_workloads_too(cli, row_scale, workload_record, write_json):
    result = cli("add-workload", write_json(workload_record(layouts={"x": "strided(0, 1)"})))
    assert result.code == 1
    assert "layouts.x: strided(0, 1)" in result.err
    assert len((row_scale / "workloads" / "elementwise" / "row_scale.jsonl").read_text().splitlines()) == 1


def test_a_flag_as_a_number_is_refused(cli, row_scale):
    result = cli("debug", "reproduce", "row_scale_stock", *CALL, "--scalar", "factor=true")
    assert (result.code, "inputs.factor: true" in result.err) == (2, True)


def test_a_negative_eps_is_refused(cli, home):
    result = cli("debug", "reproduce", "rms_norm_stock", *CALL, "--scalar", "eps=-1")
    assert (result.code, "inputs.eps: -1" in result.err) == (2, True)


@pytest.mark.parametrize(
    "layout", ["row_contiguous", "0", "padded", "strided(N/0 1)", "strided(N // 0, 1)", "strided(1)"]
)
@pytest.mark.parametrize("tensor", ["x", "out"])
def test_what_is_no_layout_is_refused_by_name(layout, tensor, cli, row_scale):
    result = cli(
        "debug", "reproduce", "row_scale_stock", *CALL, "--scalar", "factor=1", "--layout", f"{tensor}={layout}"
    )
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert f"layouts.{tensor}: " in result.err
    assert layout.removeprefix("strided(").partition(",")[0].rstrip(")") in result.err


def test_what_is_no_layout_is_a_record_error_of_the_api(row_scale):
    with pytest.raises(RecordError, match="'contiguous'"):
        reproduce(
            "row_scale_stock",
            axes={"M": 4, "N": 8},
            dtypes={"T": "float32"},
            scalars={"factor": 1.0},
            layouts={"x": "padded"},
            contents="normal",
            seed=0,
            gpu="cpu",
        )


def test_interleaved_elements_with_own_addresses_are_allowed(cli, row_scale):
    result = cli("debug", "reproduce", "row_scale_stock", *CALL, "--scalar", "factor=1", "--layout", "x=strided(3, 4)")
    assert (result.code, "status: PASSED" in result.out) == (0, True)
