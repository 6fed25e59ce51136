"""Products of FP8 codes may have a few strays: what a kernel leaves out or gets wrong is refused as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from verification.low_precision import LAYER, RECORD, SOURCE, TENSOR_CORE, TOLERANCE

from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import Call
from tilegym_db.records.definition import LIMITS, Limits, limits_for
from tilegym_db.records.workload import Case
from tilegym_db.verification.comparison import check_lifted, check_outputs
from tilegym_db.verification.expected import OracleCase, make_oracle_case
from tilegym_db.verification.gates import CAP, OutputComparison, check_output
from tilegym_db.verification.oracle import run_reference
from tilegym_db.verification.self_test import self_test

DEFINITION = Definition.from_dict(RECORD)
STRICT = Definition.from_dict(
    {**RECORD, "tolerance": {"bfloat16": {key: value for key, value in TOLERANCE.items() if key != "share"}}}
)
SHAPE = {"M": 256, "K": 512, "I": 128, "N": 256}
SMALL = {"M": 40, "K": 64, "I": 32, "N": 25}
Plant = Callable[[torch.Tensor], None]


def expected(axes: dict[str, int] = SHAPE, contents: str = "normal") -> OracleCase:
    found = make_oracle_case(DEFINITION, Case(Call(DEFINITION.name, axes), distribution=contents, seed=5), "cpu")
    assert found is not None
    return found


def judge(
    given: OracleCase, plant: Plant | None = None, *, source: str = TENSOR_CORE, definition: Definition = DEFINITION
) -> OutputComparison:
    outputs = run_reference(definition, given.inputs, source=source)
    if plant is not None:
        plant(outputs["out"])
    return check_outputs(definition, {}, given.inputs, given.outputs, outputs, given.e_base)["out"]


@pytest.mark.parametrize("contents", ["normal", "row_scale", "outliers"])
def test_codes_a_step_off_fail_elementwise_and_pass_with_a_share(contents):
    given = expected(contents=contents)
    assert judge(given, definition=STRICT).gate == "elementwise"
    verdict = judge(given)
    assert verdict.passed, verdict.reason
    assert 0.98 < verdict.matched_ratio < 1


@pytest.mark.parametrize("axes", [SMALL, {"M": 1, "K": 64, "I": 32, "N": 64}, {"M": 17, "K": 100, "I": 50, "N": 1}])
@pytest.mark.parametrize("contents", ["normal", "row_scale", "outliers", "small_integers", "constant_rows"])
def test_the_same_kernel_passes_at_odd_sizes(axes, contents):
    verdict = judge(expected(axes, contents))
    assert verdict.passed, verdict.reason


def zeroed(*where: slice | int) -> Plant:
    def plant(out: torch.Tensor) -> None:
        out[where] = 0

    return plant


def scaled(factor: float, *where: slice | int) -> Plant:
    def plant(out: torch.Tensor) -> None:
        out[where] *= factor

    return plant


def largest_missing(out: torch.Tensor) -> None:
    out.view(-1)[out.abs().argmax()] = 0


def strays_everywhere(out: torch.Tensor) -> None:
    out.view(-1)[::13] *= 1.1


def not_a_number(out: torch.Tensor) -> None:
    out[3, 5] = torch.nan


ALL = slice(None)
PLANTED: dict[str, tuple[Plant, set[str]]] = {
    "the last row dropped": (zeroed(-1), {"rel_fro", "worst_row"}),
    "a head of every row dropped": (zeroed(ALL, slice(64, 128)), {"rel_fro"}),
    "a head of one row dropped": (zeroed(7, slice(64, 128)), {"rel_fro", "worst_row"}),
    "the last column dropped": (zeroed(ALL, -1), {"rel_fro", "worst_row", "elementwise"}),
    "a tile dropped": (zeroed(slice(-16, None), slice(-16, None)), {"rel_fro", "worst_row"}),
    "a tile off by a tenth": (scaled(1.1, slice(64, 96), slice(0, 48)), {"share"}),
    "the edge of a tile off by a tenth": (scaled(1.1, slice(60, 84), slice(-20, None)), {"share"}),
    "a column off by a tenth": (scaled(1.1, ALL, 11), {"share"}),
    "a row off by a tenth": (scaled(1.1, 11), {"worst_row"}),
    "one element missing": (largest_missing, {"elementwise", "worst_row"}),
    "one element of the wrong sign": (scaled(-1, 0, 0), {"elementwise", "worst_row"}),
    "one element in thirteen off": (strays_everywhere, {"share"}),
    "a NaN": (not_a_number, {"nan_inf_mask"}),
}


@pytest.mark.parametrize(("plant", "gates"), PLANTED.values(), ids=PLANTED.keys())
def test_what_is_left_out_or_wrong_is_refused(plant, gates):
    verdict = judge(expected(), plant)
    assert verdict.gate in gates, verdict.reason


IN_SMALL = ("the last row dropped", "the last column dropped", "a row off by a tenth", "one element missing", "a NaN")


@pytest.mark.parametrize("name", IN_SMALL)
def test_outputs_with_a_share_are_judged_elementwise_when_small(name):
    assert SMALL["M"] * SMALL["N"] < 1024
    assert not judge(expected(SMALL), PLANTED[name][0]).passed


MISTAKES = {
    "the last channels left out": (
        "codes.float() @ weight.float().T",
        "codes[:, :-16].float() @ weight[:, :-16].float().T",
    ),
    "e5m2": (".to(torch.float8_e4m3fn), amax", ".to(torch.float8_e5m2), amax"),
    "no cast": (".to(torch.float8_e4m3fn), amax", ", amax"),
    "cut off": (
        "(x * (limit / amax))",
        "(x * (limit / amax)).view(torch.int32).bitwise_and(-1048576).view(torch.float32)",
    ),
    "no activation": ("torch.nn.functional.silu", ""),
}


@pytest.mark.parametrize(("find", "replace"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_in_the_maths_are_refused(find, replace):
    assert LAYER.count(find) == 1
    assert not judge(expected(), source=LAYER.replace(find, replace)).passed


def test_a_verdict_says_which_share_was_reached():
    verdict = judge(expected(), strays_everywhere)
    assert verdict.matched_ratio < 0.95
    assert (
        f"{verdict.matched_ratio:.3%} of 65536 elements are within the bound; at least 0.95 of them must be"
        in verdict.reason
    )
    passed = judge(expected())
    assert passed.matched_ratio == pytest.approx(0.9944, abs=2e-3)


def test_a_verdict_says_where_strays_lie_too_close_together():
    verdict = judge(expected(), scaled(1.1, slice(64, 96), slice(0, 48)))
    assert "strays must lie apart" in verdict.reason
    assert 64 <= verdict.index[0] < 96
    assert verdict.index[1] < 48


# -- the gate alone --------------------------------------------------------------------------------------------------------

WITH_SHARE = Limits(0.03, 1.6e-2, 3e-2, share=0.95)


def flat(rows: int = 128, columns: int = 256) -> torch.Tensor:
    """Values of size one and either sign, so that the bound is the same everywhere."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).sign()


def off(value: torch.Tensor, where: tuple[Any, ...], by: float) -> OutputComparison:
    wrong = value.clone()
    wrong[where] *= 1 + by
    return check_output("out", wrong.to(torch.bfloat16), value.double(), WITH_SHARE)


def test_no_element_may_be_further_off_than_the_cap():
    bound = WITH_SHARE.rtol + WITH_SHARE.a
    assert off(flat(), (3, 5), 0.98 * CAP * bound).passed
    assert off(flat(), (3, 5), 1.05 * CAP * bound).gate == "elementwise"


def test_missing_element_is_too_far_off_under_any_bound():
    value = flat(8, 4096)
    wrong = value.clone()
    wrong[0, 0] = 0
    wide = Limits(0.06, 0.05, 0.2, share=0.95)
    assert CAP * (wide.rtol + wide.a) > 1
    assert check_output("out", wrong.to(torch.bfloat16), value.double(), wide).gate == "elementwise"


def test_half_a_tile_may_lie_beyond_the_bound_and_no_more():
    assert off(flat(), (slice(0, 16), slice(16, 24)), 0.1).passed
    verdict = off(flat(), (slice(0, 16), slice(16, 25)), 0.1)
    assert verdict.gate == "share"
    assert all(fact in verdict.reason for fact in ("144 of the 256", "row 0", "column 16"))


@pytest.mark.parametrize("rows", [1, 2, 5, 20])
def test_of_few_rows_more_columns_are_looked_at_together(rows):
    value = flat(rows, 8192)
    assert off(value, (slice(None), slice(0, 8192, 40)), 0.1).passed
    assert off(value, (slice(None), slice(-64, None)), 0.1).gate == "share"


def test_a_few_elements_may_have_no_stray():
    assert off(flat(1, 19), (0, 3), 0.055).gate == "share"
    assert off(flat(4, 8), (0, 3), 0.055).passed


def test_without_a_share_every_element_counts():
    assert LIMITS["bfloat16"].share == 1.0
    assert check_output("out", (flat() * 1.0).bfloat16(), flat().double(), LIMITS["bfloat16"]).passed
    wrong = flat()
    wrong[3, 5] *= 1.1
    assert check_output("out", wrong.bfloat16(), flat().double(), LIMITS["bfloat16"]).gate == "elementwise"


# -- around it -------------------------------------------------------------------------------------------------------------


def test_a_definition_with_a_share_is_admitted():
    workload = Workload.from_dict(
        {"definition": "fp8_layer", "axes": {"M": 64, "K": 256, "I": 64, "N": 128}, "tags": ["tiny"]}
    )
    assert self_test(DEFINITION, [workload]) == []


def test_another_formulation_in_fp64_may_have_no_strays():
    reference = f"{SOURCE}import torch\ndef run(x, up, down):\n    return (x.float() @ up.float().T).bfloat16()\n"
    lifted = Definition.from_dict(
        {
            **{key: value for key, value in RECORD.items() if key not in ("oracle", "self_test")},
            "outputs": {"out": {"shape": ["M", "I"], "dtype": "bfloat16"}},
            "tolerance": {"bfloat16": TOLERANCE},
            "reference": reference,
        }
    )
    assert limits_for(lifted, "float32").share == 1.0
    truth = {"out": flat().double()}
    other = {"out": flat().double()}
    other["out"][0, 0] *= 1.001
    assert not check_lifted(lifted, {}, truth, other)["out"].passed


# -- each rule is needed ---------------------------------------------------------------------------------------------------


def test_without_its_windows_a_wrong_tile_passes_as_strays(monkeypatch):
    monkeypatch.setattr("tilegym_db.verification.gates.WINDOWS", ())
    assert off(flat(), (slice(0, 32), slice(0, 16)), 0.1).passed
    monkeypatch.undo()
    assert off(flat(), (slice(0, 32), slice(0, 16)), 0.1).gate == "share"


def test_element_of_the_wrong_size_is_a_stray_without_the_cap(monkeypatch):
    monkeypatch.setattr("tilegym_db.verification.gates.CAP", 1e9)
    assert off(flat(128, 4096), (3, 5), 0.7).passed
    monkeypatch.undo()
    assert off(flat(128, 4096), (3, 5), 0.7).gate == "elementwise"
