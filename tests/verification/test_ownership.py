"""Whose kernels the device time went to."""

from __future__ import annotations

from typing import Any

import pytest
from torch.autograd import DeviceType

from tilegym_db.measurement.audit import check_ownership, kernel_names, own_kernel
from tilegym_db.records import Solution
from tilegym_db.sandbox.program import KernelProfiler, Worker, uses_of_events
from tilegym_db.sandbox.protocol import (
    CLIPPED,
    MAX_KINDS,
    MAX_LINE,
    MAX_NAME,
    OTHERS,
    KernelUse,
    decode,
    encode,
    sum_uses,
)

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


def test_only_marked_functions_with_their_own_names_are_kernels():
    assert kernel_names(SOURCE) == {"_norm", "norm", "norm_kernel"}


@pytest.mark.parametrize(
    "name", ["_norm", "norm_kernel", "norm_kernel_1", "_norm_KcT2f32s8_1", "void norm_kernel(float*, int)"]
)
def test_each_language_names_kernels_after_source_functions(name):
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


def test_foreign_time_of_a_tenth_is_allowed_and_clearing_is_free():
    used = [KernelUse("_norm", 95.0, 7), KernelUse(ATEN, 5.0, 7), KernelUse("Memset (Device)", 500.0, 7)]
    found = check_ownership(solution("triton"), SOURCE, used)
    assert found.problem is None
    assert found.share == pytest.approx(0.95)


def test_a_library_that_does_the_work_is_named():
    used = [KernelUse("_norm", 1.0, 7), KernelUse("nvjet_hsh_128x128", 30.0, 7)]
    found = check_ownership(solution("triton"), SOURCE, used)
    assert found.problem is not None
    assert "3%" in found.problem
    assert "nvjet_hsh_128x128" in found.problem


def test_nothing_on_the_device_is_no_work():
    assert check_ownership(solution("cutile"), SOURCE, []).problem == "nothing ran on the device"


def test_python_solutions_may_call_anything_on_their_stream():
    assert check_ownership(solution("python"), SOURCE, [KernelUse(ATEN, 5.0, 7)]).problem is None
    found = check_ownership(solution("python"), SOURCE, [KernelUse(ATEN, 5.0, 7), KernelUse(ATEN, 5.0, 23)])
    assert found.problem is not None
    assert "2 streams" in found.problem


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {"name": 3, "us": 1.0, "stream": 7, "count": 1},
        {"name": "k", "us": "1"},
        {"name": "k", "us": float("nan"), "stream": 7, "count": 1},
        {"name": "k", "us": -1.0, "stream": 7, "count": 1},
        {"name": "k", "us": 10**400, "stream": 7, "count": 1},
        {"name": "k", "us": 1.0, "stream": True, "count": 1},
        {"name": "k", "us": 1.0, "stream": 7},
        {"name": "k", "us": 1.0, "stream": 7, "count": True},
        {"name": "k", "us": 1.0, "stream": 7, "count": 0},
        {"name": "k", "us": 1.0, "stream": 7, "count": 1.5},
        {"name": "k", "us": 1.0, "stream": 7, "count": 10**9},
    ],
)
def test_what_is_not_a_profile_is_not_taken_for_one(message):
    assert KernelUse.from_message(message) is None


class Event:
    """As the profiler lists them."""

    def __init__(self, name: str, ns: int, stream: int) -> None:
        self.name, self.duration_ns, self.device_resource_id = (lambda: name), (lambda: ns), (lambda: stream)

    def device_type(self) -> object:
        return DeviceType.CUDA


def profiled(events: list[Event]) -> bytes:
    """The worker's answer to a request for a profile, where these ran on the device."""

    class Profiler(KernelProfiler):
        def __init__(self) -> None: ...

        def activities(self, calls: object) -> list[KernelUse]:
            return uses_of_events(events)

    worker = Worker("cpu")
    worker.profiler = Profiler()
    return encode(worker.serve({"id": 1, "op": "profile", "slots": []}))


def believed(line: bytes) -> list[KernelUse]:
    used = [KernelUse.from_message(item) for item in decode(line)["activities"]]
    assert None not in used
    return [use for use in used if use is not None]


def test_profile_of_many_launches_is_as_short_as_of_a_hundred():
    names = [f"void at::native::kernel_{number}<{'int, ' * 300}>" for number in range(100)]
    events = [Event(names[number % 100], 1500, 7) for number in range(100_000)]
    lines = [profiled(events[:number]) for number in (100, 100_000)]
    assert len(lines[1]) < len(lines[0]) + 100 * 10 < MAX_LINE // 10
    found = check_ownership(solution("python"), SOURCE, believed(lines[1]))
    assert found.problem is None
    assert (found.activities, found.total_us) == (100_000, pytest.approx(150_000))
    assert 0 < len(found.kernels) < 100
    assert max(map(len, found.kernels)) == 120


def test_the_longest_profile_of_one_stream_fits_in_a_message():
    events = [Event(f"\N{SNOWMAN}{number}" * MAX_NAME, 1000, 7) for number in range(3 * MAX_KINDS)]
    line = profiled(events)
    assert len(line) < MAX_LINE
    used = believed(line)
    assert used[-1] == KernelUse(OTHERS, 2.0 * MAX_KINDS, 7, 2 * MAX_KINDS)
    assert check_ownership(solution("triton"), SOURCE, used).share == 0


def test_a_kernel_is_judged_by_all_its_launches():
    own, foreign = [Event("_norm", 90, 7)] * 1000, [Event(ATEN, 11, 7)] * 1000
    found = check_ownership(solution("triton"), SOURCE, believed(profiled([*own, *foreign])))
    assert found.problem is not None
    assert found.share == pytest.approx(90 / 101)
    assert ATEN in found.problem


def test_launches_left_out_of_a_profile_keep_their_stream():
    many = [(f"_norm_K{number}", 1.0, 7) for number in range(MAX_KINDS)]
    used = sum_uses([*many, ("_norm", 5.0, 7), ("_norm", 5.0, 23), ("_norm", 5.0, 7)])
    assert used[MAX_KINDS:] == [KernelUse(OTHERS, 10.0, 7, 2), KernelUse(OTHERS, 5.0, 23, 1)]
    found = check_ownership(solution("triton"), SOURCE, used)
    assert found.problem is not None
    assert "2 streams" in found.problem
    assert check_ownership(solution("triton"), SOURCE, used[:-1]).share == pytest.approx(500 / 510)


@pytest.mark.parametrize("end", ["x" * MAX_NAME, "(" + "int, " * MAX_NAME + ")"])
def test_a_name_that_was_shortened_is_not_an_own_one(end: str):
    (use,) = sum_uses([("_norm_K" + end, 1.0, 7)])
    assert len(use.name) == MAX_NAME + len(CLIPPED)
    assert check_ownership(solution("triton"), SOURCE, [use]).share == 0


def test_of_many_foreign_kernels_the_first_are_named():
    used = [KernelUse(f"aten_{number}", 1.0, 7, 3) for number in range(100)]
    problem = check_ownership(solution("triton"), SOURCE, used).problem
    assert problem is not None
    assert "aten_39 and 60 more" in problem
