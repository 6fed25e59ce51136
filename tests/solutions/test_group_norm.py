"""The Triton kernels of group norm compile for the smallest groups, whose sizes of one are constants to Triton."""

from __future__ import annotations

import pytest
from shipped_records import CATALOG

from tilegym_db.backends.aot import CompileJob, compile_many
from tilegym_db.records import Workload


@pytest.mark.turn("solutions/norm/group_norm_triton/")
def test_group_of_one_element_compiles() -> None:
    smallest = Workload.model_validate(
        {
            "definition": "group_norm",
            "axes": {"B": 3, "G": 2, "D": 1, "S": 1},
            "dtypes": {"T": "bfloat16"},
            "inputs": {"eps": {"type": "scalar", "value": 1e-5}},
        }
    )
    solution = CATALOG.solution("group_norm_triton")
    (compiled,) = compile_many([CompileJob(CATALOG.definition("group_norm"), solution, smallest, "sm_90")])
    assert compiled.status == "compiled"
