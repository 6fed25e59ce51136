"""Codes of quantised outputs: which must all be equal, and how those lie in bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.call import Call, TensorInfo, solve_axes
from tilegym_db.records.definition import limits_for
from tilegym_db.records.workload import Case
from tilegym_db.verification.comparison import check_outputs
from tilegym_db.verification.expected import make_oracle_case
from tilegym_db.verification.gates import EXACTLY
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import as_written

CODES = {"shape": ["M", "N"], "dtype": "float8_e4m3fn"}
INPUTS = {"x": {"shape": ["M", "N"], "dtype": "T"}, "rounded": {"shape": None, "dtype": "bool"}}
CAST = "# Source: https://example.org\nimport torch\n\n\ndef run(x, rounded):\n    return x.to(torch.float8_e4m3fn)\n"
SIZES = {"M": 64, "N": 64}


@pytest.fixture
def cast(definition_record: Any) -> Any:
    """Make a cast to float8_e4m3fn, exact by the text given."""

    def make(exact: str | None, **changes: Any) -> Definition:
        record = definition_record(
            inputs=INPUTS, outputs={"out": CODES}, oracle="as_written", reference=CAST, cost=None
        )
        return Definition.from_dict({**record, "codes": {"out": exact} if exact else {}, **changes})

    return make


def gate(definition: Definition, rounded: bool, change: Any) -> str | None:
    """The gate that refuses the reference's own codes, changed."""
    case = Case(Call(definition.name, SIZES, {"T": "float32"}, scalars={"rounded": rounded}), seed=3)
    inputs = draw_inputs(definition, case, "cpu")
    truth = as_written(definition, inputs)
    outputs = {name: value.clone() for name, value in truth.items()}
    change(outputs["out"].view(torch.uint8))
    return check_outputs(definition, case.call.dtypes, inputs, truth, outputs, {"out": EXACTLY})["out"].gate


@pytest.mark.parametrize(("contents", "is_tried"), [("normal", True), ("max_quarter", False), ("small_integers", True)])
def test_case_in_which_the_reference_overflows_is_dropped(cast: Any, contents: str, is_tried: bool) -> None:
    definition = cast(None, reference=CAST.replace("x.to(", "(x * 8 - x * 8).to("))
    case = Case(
        Call(definition.name, SIZES, {"T": "float32"}, scalars={"rounded": True}), distribution=contents, seed=3
    )
    assert (make_oracle_case(definition, case, "cpu") is not None) is is_tried


def one_code_on(codes: torch.Tensor) -> None:
    codes[3, 5] += 1 if int(codes[3, 5]) & 0x7F < 0x7E else -1


@pytest.mark.parametrize(
    ("codes", "rounded", "refused_by"),
    [
        (None, True, None),
        ("exact", False, "codes"),
        ("exact when rounded", True, "codes"),
        ("exact when rounded", False, None),
    ],
)
def test_one_code_of_thousands_may_differ_if_codes_are_not_exact(codes, rounded, refused_by, cast):
    assert gate(cast(codes), rounded, lambda codes: None) is None
    assert gate(cast(codes), rounded, one_code_on) == refused_by


def test_the_sign_of_a_zero_is_part_of_an_exact_code(cast):
    definition = cast("exact")
    inputs = {"x": torch.zeros(64, 64), "rounded": True}
    truth = as_written(definition, inputs)
    negative = torch.full((64, 64), 0x80, dtype=torch.uint8).view(torch.float8_e4m3fn)
    verdict = check_outputs(definition, {"T": "float32"}, inputs, truth, {"out": negative}, {"out": EXACTLY})["out"]
    assert verdict.gate == "codes"
    assert "4096 of 4096" in verdict.reason


def test_zeros_of_either_sign_are_equal_if_codes_are_not_exact(cast):
    # A fused multiply-add keeps the sign of a product that underflows; multiplied first and then added to 0, it is +0.
    tiny = torch.full((64, 64), -1e-30)
    inputs = {"x": tiny * 0 + 0.0, "rounded": True}
    negative = {"out": tiny.to(torch.float8_e4m3fn)}
    assert bool((negative["out"].view(torch.uint8) == 0x80).all())
    for exact, gate in ((None, None), ("exact", "codes"), ("exact when rounded", "codes")):
        definition = cast(exact)
        truth = as_written(definition, inputs)
        verdict = check_outputs(definition, {"T": "float32"}, inputs, truth, negative, {"out": EXACTLY})["out"]
        assert verdict.gate == gate, exact


@pytest.mark.parametrize(("code", "steps"), [(0x00, 0), (0x80, 0), (0x01, 1), (0x81, 1), (0x02, 2), (0x82, 2)])
def test_steps_between_codes_are_counted_across_unsigned_zero(code, steps, cast):
    inputs = {"x": torch.zeros(64, 64), "rounded": True}
    definition = cast(None)
    truth = as_written(definition, inputs)
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[3, 5] = code
    given = {"out": codes.view(torch.float8_e4m3fn)}
    verdict = check_outputs(definition, {"T": "float32"}, inputs, truth, given, {"out": EXACTLY})["out"]
    assert verdict.gate == (None if steps <= 1 else "codes")
    assert verdict.matched_ratio == (1.0 if steps == 0 else 1 - 1 / 4096)


def test_sums_whose_products_keep_their_sign_at_underflow_pass():
    definition = Catalog((shipped_root(),)).definition("reduce_fused_to_fp8")
    axes = definition.bind_axes({"M": 17, "K": 2, "P": 48, "H": 16})
    case = Case(Call(definition.name, axes, {"T": "bfloat16"}), distribution="subnormals", seed=3)
    inputs = draw_inputs(definition, case, "cpu")
    truth = as_written(definition, inputs)
    codes = truth["out"].view(torch.uint8)
    fused = {"out": torch.where(codes == 0, 0x80, codes).to(torch.uint8).view(torch.float8_e4m3fn)}
    assert int((codes == 0).sum()) > 0.01 * codes.numel()
    assert check_outputs(definition, case.call.dtypes, inputs, truth, fused, {"out": EXACTLY})["out"].gate is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": {"other": "exact"}}, "codes names the undeclared output 'other'"),
        ({"codes": {"out": "mostly"}}, "must be 'exact' or 'exact when <flag>', not 'mostly'"),
        ({"codes": {"out": "exact when x"}}, "'x' must be an input that is a Python bool"),
        ({"codes": {"out": "exact when neither"}}, "'neither' must be an input that is a Python bool"),
        ({"codes": {"out": "exact"}, "oracle": "lifted"}, "set 'oracle': 'as_written'"),
        (
            {"codes": {"out": "exact"}, "outputs": {"out": {**CODES, "dtype": "int32"}}},
            "integers, which are always exact",
        ),
    ],
)
def test_exactness_that_cannot_be_judged_is_refused_with_its_key(changes, message, cast):
    with pytest.raises(RecordError, match="codes") as error:
        cast(None, **changes)
    assert message in str(error.value)


def test_exactness_is_part_of_what_an_operator_means(cast):
    assert cast("exact").digest != cast("exact when rounded").digest != cast(None).digest


@pytest.mark.parametrize("name", ["per_token_cast", "per_block_cast", "per_channel_cast"])
def test_shipped_casts_are_exact_if_scales_are_powers_of_two(name):
    definition = Catalog((shipped_root(),)).definition(name)
    assert definition.codes == {"out": "exact when round_scale"}


# -- packed codes -----------------------------------------------------------------------------------------------------

NIBBLES = {"shape": ["M", "N // 2"], "dtype": "float4_e2m1"}
TWELVE_BITS = {"shape": ["M", "3 * N // 2"], "dtype": "uint8"}
BYTES = "# Source: https://example.org\ndef run(x, rounded):\n    return x\n"


@pytest.mark.parametrize(("spec", "constraint"), [(NIBBLES, "N % 2 == 0"), (TWELVE_BITS, "3 * N % 2 == 0")])
def test_packed_row_of_half_a_byte_names_the_missing_constraint(spec, constraint, cast):
    with pytest.raises(RecordError, match="leaves out part of a byte at N=1") as error:
        cast(None, outputs={"out": spec}, constraints=["N >= 1"])
    assert f"add the constraint '{constraint}'" in str(error.value)
    for allowed in ([constraint], ["N % 8 == 0"]):
        assert cast(None, outputs={"out": spec}, constraints=allowed).constraints == tuple(allowed)


def test_scales_and_other_divisions_need_no_such_constraint(cast):
    scales = {"shape": ["M", "N // 128"], "dtype": "float32"}
    assert cast(None, outputs={"out": scales}, constraints=[]).outputs["out"].shape == ("M", "N // 128")


def test_size_is_read_off_packed_codes_if_nothing_else_states_it(cast):
    packed = {"x": NIBBLES, "rounded": INPUTS["rounded"]}
    definition = cast(None, inputs=packed, outputs={"out": CODES}, constraints=["N % 2 == 0"], reference=BYTES)
    assert solve_axes(definition, {"x": (3, 32)}) == {"M": 3, "N": 64}
    twelve = cast(None, inputs={**packed, "x": TWELVE_BITS}, constraints=["N % 8 == 0"], reference=BYTES)
    assert solve_axes(twelve, {"x": (3, 96)}) == {"M": 3, "N": 64}
    assert TensorInfo((3, 32), (32, 1), "uint8").dtype == "uint8"


@pytest.mark.parametrize("spec", [NIBBLES, TWELVE_BITS])
def test_drawn_bytes_hold_every_nibble_in_both_halves(spec, cast):
    inputs = {"x": spec, "rounded": INPUTS["rounded"]}
    definition = cast(None, inputs=inputs, outputs={"out": spec}, constraints=["N % 8 == 0"], reference=BYTES)
    drawn = draw_inputs(
        definition,
        Case(Call(definition.name, {"M": 64, "N": 64}, {"T": "float32"}, scalars={"rounded": False}), seed=1),
        "cpu",
    )["x"]
    assert isinstance(drawn, torch.Tensor)
    assert drawn.dtype == torch.uint8
    assert set((drawn & 15).unique().tolist()) == set((drawn >> 4).unique().tolist()) == set(range(16))


def test_nibbles_compare_singly_and_twelve_bit_codes_as_bytes(cast):
    nibbles = cast(None, outputs={"out": NIBBLES}, constraints=["N % 2 == 0"])
    limits = limits_for(nibbles, "float4_e2m1")
    assert limits is not None
    assert limits.codes == 4
    truth = {"out": torch.full((64, 32), 0x32, dtype=torch.uint8)}
    few = {"out": truth["out"].clone()}
    few["out"][7, 9] = 0x42  # the next code in the high half
    inputs = {"rounded": True}
    assert check_outputs(nibbles, {}, inputs, truth, few, {"out": EXACTLY})["out"].gate is None
    exact = cast("exact", outputs={"out": NIBBLES}, constraints=["N % 2 == 0"])
    found = check_outputs(exact, {}, inputs, truth, few, {"out": EXACTLY})["out"]
    assert (found.gate, found.index) == ("codes", (7, 19))
    bytes_ = cast(None, outputs={"out": TWELVE_BITS}, constraints=["N % 8 == 0"])
    assert check_outputs(bytes_, {}, inputs, truth, few, {"out": EXACTLY})["out"].gate == "exact"


def test_a_scale_beside_packed_bytes_is_equal_bit_for_bit(cast):
    scale = {"shape": ["M", 1], "dtype": "float32"}
    definition = cast(None, outputs={"out": TWELVE_BITS, "scale": scale}, constraints=["N % 8 == 0"])
    assert limits_for(definition, "float32") is None


def test_bytes_of_packed_codes_are_counted_as_stored(cast):
    definition = cast(
        None,
        outputs={"out": NIBBLES},
        constraints=["N % 2 == 0"],
        cost={"flops": "M * N", "bytes": "M * N * (sizeof(T) + sizeof(float4_e2m1))"},
    )
    assert definition.cost_of({"M": 4, "N": 64}, {"T": "float32"}) == (256.0, 4 * 64 * 4.5)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", range(1152, 1168))
def test_equal_codes_pass_in_any_number_if_their_mean_is_inexact(cast, columns):
    definition = cast("exact")
    case = Case(Call(definition.name, {"M": 5, "N": columns}, {"T": "float32"}, scalars={"rounded": True}), seed=3)
    inputs = draw_inputs(definition, case, "cuda:0")
    truth = as_written(definition, inputs)
    assert check_outputs(definition, case.call.dtypes, inputs, truth, truth, {"out": EXACTLY})["out"].gate is None
