"""Whose kernels the device time went to."""

from __future__ import annotations

from typing import Any

import pytest

from tilegym_db.records import Solution
from tilegym_db.verify.ownership import KernelUse, judge_ownership, kernel_names, own_kernel

SOURCE = {
    "kernel.py": b"@triton.jit(debug=True)\ndef _norm(): pass\n@tilelang.jit\ndef norm():\n    @T.prim_func\n"
    b"    def norm_kernel(): pass\n@triton.jit\ndef nvjet_hsh_128x128(): pass\ndef helper(): pass\ndef run(): pass\n"
}
ATEN = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"


def solution(language: str) -> Solution:
    spec: dict[str, Any] = {"language": language, "entry_point": "kernel.py::run"}
    return Solution.from_dict(
        {"name": "norm", "definition": "norm", "author": "tests", "spec": spec, "sources": [{"path": "kernel.py"}]}
    )


def test_only_functions_marked_as_kernels_count_and_none_with_a_librarys_name():
    assert kernel_names(SOURCE) == {"_norm", "norm", "norm_kernel"}


@pytest.mark.parametrize(
    "name", ["_norm", "norm_kernel", "norm_kernel_1", "_norm_KcT2f32s8_1", "void norm_kernel(float*, int)"]
)
def test_each_language_names_kernels_after_the_functions_of_the_source(name):
    assert own_kernel(kernel_names(SOURCE)).fullmatch(name)


@pytest.mark.parametrize(
    "name",
    [
        ATEN,
        "nvjet_hsh_128x128_64x6_TNT",
        "Memcpy DtoD (Device -> Device)",
        "normalize",
        "triton_poi_fused_norm_0",
        "other_norm_kernel",
        "helper",
    ],
)
def test_kernels_of_libraries_and_compilers_are_foreign(name):
    assert own_kernel(kernel_names(SOURCE)).fullmatch(name) is None


def test_a_tenth_of_foreign_time_is_allowed_and_cleared_memory_is_nobodys():
    used = [KernelUse("_norm", 95.0, 7), KernelUse(ATEN, 5.0, 7), KernelUse("Memset (Device)", 500.0, 7)]
    found = judge_ownership(solution("triton"), SOURCE, used)
    assert found.problem is None
    assert found.share == pytest.approx(0.95)


def test_a_library_that_does_the_work_is_named():
    used = [KernelUse("_norm", 1.0, 7), KernelUse("nvjet_hsh_128x128", 30.0, 7)]
    found = judge_ownership(solution("triton"), SOURCE, used)
    assert found.problem is not None
    assert "only 3% of the device time" in found.problem
    assert found.problem.endswith("the rest: nvjet_hsh_128x128")


def test_nothing_on_the_device_is_no_work():
    assert judge_ownership(solution("cutile"), SOURCE, []).problem == "nothing ran on the device"


def test_python_solutions_may_call_what_they_like_but_only_on_their_stream():
    assert judge_ownership(solution("python"), SOURCE, [KernelUse(ATEN, 5.0, 7)]).problem is None
    found = judge_ownership(solution("python"), SOURCE, [KernelUse(ATEN, 5.0, 7), KernelUse(ATEN, 5.0, 23)])
    assert found.problem == "work ran on 2 streams, not only on the one it was called on"


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {"name": 3, "us": 1.0, "stream": 7},
        {"name": "k", "us": "1"},
        {"name": "k", "us": float("nan"), "stream": 7},
        {"name": "k", "us": -1.0, "stream": 7},
        {"name": "k", "us": 10**400, "stream": 7},
        {"name": "k", "us": 1.0, "stream": True},
    ],
)
def test_what_is_not_a_profile_is_not_taken_for_one(message):
    assert KernelUse.from_message(message) is None
