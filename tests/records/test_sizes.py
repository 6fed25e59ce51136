"""Axes whose size is the value of a scalar: one size, wherever a call is described."""

from __future__ import annotations

import pytest
from raising import raises

from tilegym_db.errors import RecordError, UsageError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import TensorInfo as Info
from tilegym_db.records.call import axes_with_scalars, bind_arguments, is_code_selecting, scalars_with_axes

AXES = {"M": {"type": "var"}, "E": {"type": "var"}, "K": {"type": "var", "scalar": "top_k"}}
INPUTS = {
    "z": {"shape": ["M", "E"], "dtype": "float32"},
    "top_k": {"shape": None, "dtype": "int64"},
    "flag": {"shape": None, "dtype": "bool"},
}
LOGITS = Info((4, 16), (16, 1), "float32")


@pytest.fixture
def make(definition_record):
    def record(**changes):
        base = {
            "axes": AXES,
            "dtypes": {},
            "inputs": INPUTS,
            "outputs": {"ids": {"shape": ["M", "K"], "dtype": "int64"}},
            "constraints": ["E >= K"],
            "cost": {"flops": "M * E * K", "bytes": "4 * M * E + 8 * M * K"},
            "reference": "# Source: https://example.org\ndef run(z, top_k, flag):\n    return z.topk(top_k).indices\n",
        }
        return Definition.from_dict(definition_record(**{**base, **changes}))

    return record


def test_a_call_without_outputs_has_the_size_of_its_scalar(make):
    binding = bind_arguments(make(), {"z": LOGITS, "top_k": 3, "flag": True})
    assert binding.axes == {"M": 4, "E": 16, "K": 3}
    assert make().cost_of(binding.axes, {}) == (4 * 16 * 3, 4 * 4 * 16 + 8 * 4 * 3)
    assert make().shape_of("ids", binding.axes) == (4, 3)


@pytest.mark.parametrize(
    ("top_k", "code", "name"),
    [
        (17, "constraint_broken", "E >= K"),
        (-1, "size_scalar_invalid", "'top_k'"),
        (2.0, "size_scalar_invalid", "2.0"),
        (True, "size_scalar_invalid", "True"),
        (None, "size_scalar_invalid", "None"),
    ],
)
def test_a_scalar_that_is_no_size_is_refused(make, top_k, code, name):
    with raises(UsageError, code, name):
        bind_arguments(make(), {"z": LOGITS, "top_k": top_k, "flag": True})


def test_output_of_another_size_than_its_scalar_is_refused(make):
    with raises(UsageError, "size_differs", "dimension 1 of 'ids'", "K = 3"):
        bind_arguments(make(), {"z": LOGITS, "top_k": 3, "flag": True, "ids": Info((4, 5), (5, 1), "int64")})


def test_a_size_selects_no_code_beside_its_axis_and_a_flag_does(make):
    assert not is_code_selecting(make(), "top_k")
    assert is_code_selecting(make(), "flag")


def test_axis_and_scalar_complete_each_other_and_must_agree(make):
    assert axes_with_scalars(make(), {"M": 4, "E": 16}, {"top_k": 3}) == {"M": 4, "E": 16, "K": 3}
    assert scalars_with_axes(make(), {"flag": True}, {"M": 4, "E": 16, "K": 3}) == {"flag": True, "top_k": 3}
    with raises(UsageError, "size_scalar_differs", "K=4", "'top_k'"):
        axes_with_scalars(make(), {"K": 4}, {"top_k": 3})


def test_a_workload_states_both_alike(make):
    def workload(size, value):
        inputs = {"top_k": {"type": "scalar", "value": value}, "flag": {"type": "scalar", "value": True}}
        axes = {"M": 4, "E": 16, "K": size}
        return Workload.from_dict({"definition": "row_scale", "axes": axes, "inputs": inputs})

    workload(3, 3).check_against(make())
    with raises(RecordError, "size_scalar_differs", "inputs.top_k", "'K'"):
        workload(3, 4).check_against(make())


@pytest.mark.parametrize(
    ("axis", "code", "name"),
    [
        ({"type": "var", "scalar": "k"}, "size_scalar_not_input", "axes.K: scalar 'k'"),
        ({"type": "var", "scalar": "z"}, "size_scalar_not_input", "axes.K: scalar 'z'"),
        ({"type": "var", "scalar": "flag"}, "size_scalar_not_whole", "axes.K: scalar 'flag'"),
        ({"type": "const", "value": 8, "scalar": "top_k"}, "axis_scalar_const", "axes.K: "),
    ],
)
def test_an_axis_that_no_size_can_come_from_is_refused(make, axis, code, name):
    with raises(RecordError, code, name):
        make(axes={**AXES, "K": axis})


def test_a_scalar_is_the_size_of_one_axis(make):
    with raises(RecordError, "size_scalar_repeated", "axes.L: ", "'K'"):
        make(axes={**AXES, "L": {"type": "var", "scalar": "top_k"}})


def test_which_scalar_states_a_size_is_part_of_the_meaning(make):
    assert make().digest != make(axes={**AXES, "K": {"type": "var"}}).digest
