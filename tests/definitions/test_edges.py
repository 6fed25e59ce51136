"""The edges of every operator: zero and empty rows, infinities, ties, tails, strides and in-place tensors.

Each is put to the reference, to the independent formulation and to every eager baseline, which must agree with the fp64 oracle
by the gates that kernels face; what the descriptions promise of the edge is then checked on the reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from raising import raises

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.call import scalars_with_axes, solve_axes, solve_dtypes
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.shared_buffers import dtype_name
from tilegym_db.verification.comparison import check_outputs, followed, reference_errors
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import name_outputs, oracle, run_reference

pytestmark = pytest.mark.records("name")  # where a test has one

INF = math.inf


def parts(part: str, *inputs: str) -> list[str]:
    """The Definitions of a part of a model that take these inputs, or any where none are given."""
    return [
        record.name
        for record in Catalog((shipped_root(),)).definitions.values()
        if record.serving and record.serving.part == part and (not inputs or tuple(record.inputs) == inputs)
    ]


NORMS = [name for name in parts("norm", "x", "weight", "eps") if name.startswith("rms_norm")]  # no mean is subtracted
SUMS = parts("add_norm", "x", "residual", "weight", "eps")
GATES = parts("mlp")
ROPES = ["rope_neox", "rope_neox_fp32", "rope_partial"]  # both halves of their tables count
PAIR_ROPES = [name for name in parts("rope") if name not in ROPES]
NORM_BACKWARDS = ["rms_norm_backward", "rms_norm_backward_x"]
CASTS = ["per_token_cast", "per_block_cast", "per_channel_cast"]
HALF = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALF]
NEED_A_TOKEN = {"mamba2_state_update_stock"}
"""Baselines that raise for an empty batch, as their traces hold their sources. The next version mends it; none serves a model."""

Outputs = dict[str, torch.Tensor]
Agree = Callable[..., Outputs]


@pytest.fixture
def agree(catalog: Catalog) -> Agree:
    """Run every formulation of an operator on the inputs, in order; all must pass. Returns the reference's outputs.

    ``independent=False`` leaves out the independent formulation, where it takes a short cut that the edge is beyond: a sum in
    the exponent, one half of a table, a maximum over nothing.
    """

    def run(name: str, *values: Any, independent: bool = True) -> Outputs:
        definition = catalog.definition(name)
        inputs = dict(zip(definition.inputs, values, strict=True))
        tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
        dtypes = solve_dtypes(definition, {key: dtype_name(value.dtype) for key, value in tensors.items()})
        scalars = {key: value for key, value in inputs.items() if key not in tensors}
        axes = solve_axes(definition, {key: value.shape for key, value in tensors.items()}, scalars)
        written, truth = run_reference(definition, inputs), oracle(definition, inputs)
        assert definition.self_test is not None
        found = {"the reference": written, **_baselines(catalog, definition, inputs, axes, dtypes)}
        if independent:
            source = definition.self_test.independent
            found["the independent formulation"] = run_reference(definition, inputs, source=source)
        e_base, _ = reference_errors(definition, dtypes, written, followed(definition, inputs, truth, written))
        for who, outputs in found.items():
            shapes = {key: tuple(value.shape) for key, value in outputs.items()}
            assert shapes == {key: definition.shape_of(key, axes) for key in definition.outputs}, who
            for verdict in check_outputs(definition, dtypes, inputs, truth, outputs, e_base).values():
                assert verdict.passed, f"{who}: {verdict.reason}"
        return written

    return run


def _baselines(
    catalog: Catalog, definition: Definition, inputs: dict[str, Any], axes: dict[str, int], dtypes: dict[str, str]
) -> dict[str, Outputs]:
    found = {}
    for entry in catalog.solutions_for(definition.name):
        spec = entry.record.spec
        declared = entry.record.unsupported(axes, dtypes, target="cpu") is None
        if spec.language == "python" and spec.provides != "compile" and declared:
            given = {
                key: value.clone() if key in definition.in_place and isinstance(value, torch.Tensor) else value
                for key, value in inputs.items()
            }
            assert not spec.destination_passing_style
            if entry.name in NEED_A_TOKEN and 0 in axes.values():
                with pytest.raises(RuntimeError):
                    load_entry(entry)(*given.values())
                continue
            found[entry.name] = name_outputs(definition, load_entry(entry)(*given.values()), given, entry.name)
    return found


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose rows are a part of longer ones."""
    return random(*shape[:-1], 3 * shape[-1], dtype=dtype)[..., : shape[-1]]


# -- every operator --------------------------------------------------------------------------------------------------------


def empty_cases(catalog: Catalog, definition: Definition) -> dict[str, Case]:
    """A tiny case for each axis that may be zero, with that axis zero; the axis of tokens, M or the first, comes first."""
    cases: dict[str, Case] = {}
    for workload in catalog.workloads_for(definition.name):
        for axis in sorted(definition.var_axes, key=lambda name: name != "M") if "tiny" in workload.tags else ():
            with contextlib.suppress(RecordError):
                axes = definition.bind_axes({**workload.axes, axis: 0})
                case = Case.of_workload(definition, workload, distribution="normal", seed=1)
                scalars = scalars_with_axes(definition, case.call.scalars, axes)
                cases.setdefault(
                    axis, dataclasses.replace(case, call=dataclasses.replace(case.call, axes=axes, scalars=scalars))
                )
    assert cases, f"no axis of {definition.name} may be zero"
    return cases


def test_no_tokens_give_an_empty_output(definition: Definition, catalog: Catalog, agree: Agree) -> None:
    axis, case = next(iter(empty_cases(catalog, definition).items()))
    values = draw_inputs(definition, case, "cpu").values()
    outputs = agree(definition.name, *values, independent=definition.op_type != "quant")
    for name, value in outputs.items():
        # What has no such dimension is a sum over it, or a table of which nothing was filled in.
        depends = axis in (definition.outputs[name].shape or ())
        assert value.numel() == 0 if depends else value.float().unique().numel() <= 1, name


def test_every_axis_that_may_be_zero_works(definition: Definition, catalog: Catalog, agree: Agree) -> None:
    for case in [*empty_cases(catalog, definition).values()][1:]:
        values = draw_inputs(definition, case, "cpu").values()
        agree(definition.name, *values, independent=definition.op_type != "quant")


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        *((name, {"M": 4, "N": 0}) for name in ("layer_norm_no_bias", *NORMS, *SUMS, "softmax")),
        *((name, {"M": 4, "I": 0}) for name in (*GATES, "swiglu_backward")),
        *((name, {"M": 4, "N": 1}) for name in NORM_BACKWARDS),  # nothing but rounding errors
        ("rope_neox_backward", {"B": 4, "Bc": 2, "Hq": 1, "Hkv": 1, "S": 1, "D": 4}),
        ("gemm", {"M": 4, "N": 4, "K": 0}),  # a sum of nothing is no linear layer
        ("qk_rms_norm", {"M": 4, "Hq": 2, "Hkv": 1, "D": 0}),
        *((name, {"B": 1, "Bc": 1, "Hq": 1, "Hkv": 1, "S": 1, "D": 5, "R": 3}) for name in ROPES),
        *(
            (name, {"B": 1, "Bc": 1, "Hq": 1, "Hkv": 1, "S": 1, "D": 5})
            for name in ("rope_half_tables", "rope_pairs_to_halves", "rope_complex_pairs")
        ),
        *(("rope_pairs", {"B": 1, "Bc": 1, "Hq": 1, "Hkv": 1, "S": 1, "D": 5, "R": size}) for size in (3, 6)),
        *(("rope_tail_pairs", {"B": 1, "Bc": 1, "H": 1, "S": 1, "D": 5, "P": pairs}) for pairs in (0, 3)),
        ("rope_neox", {"B": 4, "Bc": 2, "Hq": 1, "Hkv": 1, "S": 1, "D": 4}),
        ("rope_partial", {"B": 1, "Bc": 1, "Hq": 1, "Hkv": 1, "S": 1, "D": 4, "R": 6}),
        ("topk_gate", {"M": 4, "E": 7, "K": 8}),
        *((name, {"M": 4, "K": 2, "E": 0}) for name in ("group_count", "aux_fi", "moe_offsets")),
        *(("moe_align_block_size", {"M": 4, "K": 2, "E": size, "B": 1 - size}) for size in (0, 1)),
        ("top2_sum_gate", {"M": 4, "E": 8, "K": 5, "G": 4, "GK": 2, "S": 0, "R": 1, "C": 1}),
        (
            "top2_sum_gate",
            {"M": 4, "E": 8, "K": 2, "G": 1, "GK": 1, "S": 1, "R": 1, "C": 1},
        ),  # no copy for a shared expert
        *(("topk_sum_and_topk_group_idx", {"M": 4, "G": 4, "S": 1, "N": top, "GK": 2}) for top in (0, 2)),
        *(("get_fused_mapping", {"M": 4, "K": 2, **sizes}) for sizes in ({"E": 0, "A": 16}, {"E": 4, "A": 0})),
        *((name, {"M": 4, "E": 7, "K": 8}) for name in ("topk_softmax", "topk_then_softmax", "topk_sqrtsoftplus_bias")),
        ("swiglu_and_per_channel_cast", {"P": 64, "H": 8, "G": 128}),
        ("swiglu_backward_and_per_token_cast", {"P": 4, "H": 160, "G": 128, "M": 2, "K": 2}),
        ("topk_softmax_groups", {"M": 4, "E": 8, "K": 5, "G": 4, "GK": 2}),  # more than the groups that are kept have
        ("topk_sigmoid_bias_groups", {"M": 4, "E": 6, "K": 1, "G": 6, "GK": 6}),  # no two to add up
        ("per_channel_cast", {"M": 64, "H": 8}),
        ("mhc_sinkhorn", {"M": 4, "C": 0}),
        ("attention_prefill", {"B": 1, "Hq": 6, "Hkv": 4, "S": 3, "D": 8}),
        ("attention_decode", {"B": 1, "Hq": 4, "Hkv": 2, "L": 0, "D": 8}),
        *(("attention_sink_prefill", {"B": 1, "Hq": h, "Hkv": 4, "S": 3, "D": 8, "W": w}) for h, w in ((6, 3), (4, 0))),
        ("attention_sink_decode", {"B": 1, "Hq": 4, "Hkv": 2, "L": 0, "D": 8}),
    ],
)
def test_a_size_that_means_nothing_is_refused(name: str, axes: dict[str, int], catalog: Catalog) -> None:
    definition = catalog.definition(name)
    given = {axis: size for axis, size in axes.items() if axis in definition.axes}
    with raises(RecordError, "constraint_broken"):
        definition.bind_axes(given)


# -- norms -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMS)
def test_norm_of_a_zero_row_is_zero_and_nan_stays_in_its_row(name: str, agree: Agree) -> None:
    x = torch.ones(3, 8)
    x[0] = 0
    x[1, 3] = torch.nan
    out = agree(name, x, torch.full((8,), 2.0), 1e-5)["out"]
    assert out[0].eq(0).all()
    assert out[1].isnan().all()
    want = torch.full((8,), 3.0 if name == "rms_norm_gemma" else 2.0)
    torch.testing.assert_close(out[2], want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 4096), (5, 37), (129, 96)])
@pytest.mark.parametrize("name", NORMS)
def test_norm_of_one_row_one_column_and_odd_tails(name: str, shape: tuple[int, int], dtype: Any, agree: Agree) -> None:
    agree(name, random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1), 1e-6)


@pytest.mark.parametrize("scale", [1e4, 1e-4])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NORMS)
def test_norm_of_large_and_small_rows_is_computed_in_float32(
    name: str, dtype: torch.dtype, scale: float, agree: Agree
) -> None:
    x, weight = random(16, 96) * scale, random(96, seed=1).to(dtype)
    out = agree(name, x.to(dtype), weight, 1e-12)["out"]
    assert out.isfinite().all()
    assert 0.1 < float(out.float().square().mean()) < 10


@pytest.mark.parametrize("name", NORMS)
def test_norm_without_epsilon_does_not_see_a_rows_scale(name: str, agree: Agree) -> None:
    x, weight = random(8, 64), random(64, seed=1)
    assert torch.equal(agree(name, x, weight, 0.0)["out"], agree(name, x * 1024, weight, 0.0)["out"])
    assert agree(name, torch.zeros(1, 64), weight, 0.0)["out"].isnan().all()


@pytest.mark.parametrize("name", NORMS)
def test_norm_of_subnormal_rows_is_what_epsilon_makes_of_them(name: str, agree: Agree) -> None:
    x = random(8, 64) * 1e-40
    out = agree(name, x, torch.ones(64), 1e-6)["out"]
    factor = 2 if name == "rms_norm_gemma" else 1
    torch.testing.assert_close(out.double(), x.double() * 1000 * factor, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", NORMS)
def test_norm_reads_padded_rows(name: str, agree: Agree) -> None:
    x, weight = packed(5, 37), random(37, seed=1)
    assert torch.equal(agree(name, x, weight, 1e-5)["out"], agree(name, x.contiguous(), weight, 1e-5)["out"])


@pytest.mark.parametrize("dtype", HALF)
def test_each_norm_rounds_where_its_model_does(dtype: torch.dtype, agree: Agree) -> None:
    x, weight = random(64, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    twice, once = (normed.to(dtype).float() * weight.float()).to(dtype), (normed * weight.float()).to(dtype)
    assert not torch.equal(once, twice)
    assert torch.equal(agree("rms_norm", x, weight, 1e-5)["out"], twice)
    assert torch.equal(agree("rms_norm_fp32", x, weight, 1e-5)["out"], once)
    shifted = (normed * (1 + weight.float())).to(dtype)
    assert torch.equal(agree("rms_norm_gemma", x, weight, 1e-5)["out"], shifted)


def test_gemma_norm_adds_one_to_a_small_weight_in_float32(agree: Agree) -> None:
    x = random(64, 64, dtype=torch.bfloat16)
    weight = torch.full((64,), 2.0**-9, dtype=torch.bfloat16)  # 1 + 2**-9 is no bfloat16
    plain, shifted = (agree("rms_norm_gemma", x, value, 1e-6)["out"] for value in (weight * 0, weight))
    assert not torch.equal(plain, shifted)


@pytest.mark.parametrize("name", SUMS)
def test_what_is_normalised_is_the_rounded_sum(name: str, agree: Agree) -> None:
    x = torch.full((1, 4), 1.0, dtype=torch.bfloat16)
    residual = torch.tensor([[2.0**-9, 0.0, -1.0, 1.0]], dtype=torch.bfloat16)
    result = agree(name, x, residual, torch.ones(4, dtype=torch.bfloat16), 1e-6)
    assert result["residual_out"].tolist() == [[1.0, 1.0, 0.0, 2.0]]
    assert result["out"][0, 0] == result["out"][0, 1]
    assert residual[0, 3] == 1.0  # the reference works on a copy


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SUMS)
def test_cancelled_residual_gives_zeros_and_nan_stays_in_place(name: str, dtype: torch.dtype, agree: Agree) -> None:
    x = random(3, 37, dtype=dtype)
    residual = -x
    residual[1, 5] = torch.nan
    result = agree(name, x, residual, random(37, dtype=dtype, seed=1), 1e-5)
    for value in result.values():
        assert value[[0, 2]].eq(0).all()
    assert result["out"][1].isnan().all()
    assert int(result["residual_out"].isnan().sum()) == 1


@pytest.mark.parametrize("shape", [(1, 1), (7, 1000)])
@pytest.mark.parametrize("name", SUMS)
def test_x_and_residual_may_be_one_tensor(name: str, shape: tuple[int, int], agree: Agree) -> None:
    x = random(*shape)
    result = agree(name, x, x, torch.ones(shape[1]), 1e-6)
    assert torch.equal(result["residual_out"], 2 * x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_normalised_as_the_norm_that_it_includes(
    name: str, dtype: torch.dtype, catalog: Catalog, agree: Agree
) -> None:
    x, residual, weight = (
        random(64, 64, dtype=dtype),
        random(64, 64, dtype=dtype, seed=1),
        random(64, dtype=dtype, seed=2),
    )
    serving = catalog.definition(name).serving
    assert serving is not None
    assert serving.includes is not None
    result = agree(name, x, residual, weight, 1e-5)
    alone = {norm: agree(norm, x + residual, weight, 1e-5)["out"] for norm in NORMS}
    assert torch.equal(result["residual_out"], x + residual)
    assert torch.equal(result["out"], alone.pop(serving.includes))
    assert dtype == torch.float32 or not any(torch.equal(result["out"], other) for other in alone.values())


@pytest.mark.parametrize("scale", [1e4, 1e-4])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_large_and_small_rows_are_normalised_in_float32(
    name: str, dtype: torch.dtype, scale: float, agree: Agree
) -> None:
    x, residual = (random(16, 96, seed=seed) * scale for seed in (0, 2))
    result = agree(name, x.to(dtype), residual.to(dtype), random(96, seed=1).to(dtype), 1e-12)
    assert all(value.isfinite().all() for value in result.values())
    assert 0.1 < float(result["out"].float().square().mean()) < 10


@pytest.mark.parametrize("name", SUMS)
def test_sums_read_padded_rows(name: str, agree: Agree) -> None:
    x, residual, weight = packed(5, 37), random(5, 111, seed=2)[:, :37], random(37, seed=1)
    apart, dense = (
        agree(name, x, residual, weight, 1e-5),
        agree(name, x.contiguous(), residual.contiguous(), weight, 1e-5),
    )
    assert all(torch.equal(apart[key], dense[key]) for key in dense)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 3), (1, 2, 1), (24, 2, 96)])
def test_heads_are_normalised_each_for_itself(heads: int, kv_heads: int, dim: int, agree: Agree) -> None:
    q, k = random(5, heads, dim), random(5, kv_heads, dim, seed=1)
    q[2, 0], k[3, 0, 0] = 0, torch.nan
    result = agree("qk_rms_norm", q, k, random(dim, seed=2), random(dim, seed=3), 1e-6)
    assert result["q_out"][2, 0].eq(0).all()
    assert result["q_out"].isfinite().all()
    assert int(result["k_out"].isnan().sum()) == dim


def test_heads_may_be_views_of_one_projection(agree: Agree) -> None:
    qkv, weights = random(5, 3 + 2 + 2, 16), (random(16, seed=1), random(16, seed=2))
    q, k = qkv[:, :3], qkv[:, 3:5]
    views = agree("qk_rms_norm", q, k, *weights, 1e-6)
    copies = agree("qk_rms_norm", q.contiguous(), k.contiguous(), *weights, 1e-6)
    assert all(torch.equal(views[name], copies[name]) for name in views)


# -- gradients of norms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 4096), (5, 37), (129, 96), (300, 2)])
@pytest.mark.parametrize("name", NORM_BACKWARDS)
def test_gradients_of_norms_of_odd_sizes(name: str, shape: tuple[int, int], dtype: torch.dtype, agree: Agree) -> None:
    x, grad = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=2)
    agree(name, x, random(shape[1], dtype=dtype, seed=1), grad, 1e-5)


@pytest.mark.parametrize("name", NORM_BACKWARDS)
def test_norm_gradient_keeps_nan_in_its_row_and_passes_zero_rows(name: str, agree: Agree) -> None:
    x, grad = torch.ones(4, 8), random(4, 8)
    x[0], x[1, 3], grad[2, 5] = 0, torch.nan, torch.nan
    result = agree(name, x, torch.full((8,), 2.0), grad, 1e-4)
    torch.testing.assert_close(result["grad_x"][0], grad[0] * 200)  # epsilon alone scales the row
    assert result["grad_x"][1:3].isnan().all()
    assert result["grad_x"][3].isfinite().all()
    if "grad_weight" in result:
        assert result["grad_weight"].isnan().all()  # a sum over all rows


def test_gradient_of_a_norm_is_at_a_right_angle_to_its_row(agree: Agree) -> None:
    x, grad = random(16, 64), random(16, 64, seed=2)
    found = agree("rms_norm_backward", x, torch.ones(64), grad, 0.0)["grad_x"]
    torch.testing.assert_close((found * x).sum(-1), torch.zeros(16), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NORM_BACKWARDS)
def test_gradients_of_norms_read_padded_rows(name: str, agree: Agree) -> None:
    x, grad, weight = packed(5, 37), packed(5, 37), random(37, seed=1)
    padded = agree(name, x, weight, grad, 1e-5)
    for key, value in agree(name, x.contiguous(), weight, grad.contiguous(), 1e-5).items():
        assert torch.equal(padded[key], value)


# -- activations -----------------------------------------------------------------------------------------------------------


def gated(name: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.cat((a, b), dim=-1),) if name == "silu_and_mul" else (a, b)


@pytest.mark.parametrize("name", GATES)
def test_gate_saturates_without_nan_and_an_infinite_one_is_nan(name: str, agree: Agree) -> None:
    gate, up = torch.tensor([[-1e4, 1e4, INF, -INF, torch.nan]]), torch.ones(1, 5)
    out = agree(name, *gated(name, gate, up))["out"][0]
    assert out[0] == 0
    assert torch.signbit(out[0])
    assert out[1] == 1e4
    assert out[2] == INF
    assert out[3:].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 37), (1, 2880), (129, 3)])
@pytest.mark.parametrize("name", GATES)
def test_gates_of_odd_widths(name: str, shape: tuple[int, int], dtype: torch.dtype, agree: Agree) -> None:
    agree(name, *gated(name, random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", GATES)
def test_gates_of_tiny_and_huge_values(name: str, dtype: torch.dtype, agree: Agree) -> None:
    finfo = torch.finfo(dtype)
    values = torch.tensor([finfo.tiny, finfo.tiny / 4, 1.0, finfo.max, finfo.max / 4], dtype=torch.float64)
    a, b = torch.cartesian_prod(torch.cat((values, -values)), values).to(dtype).T.reshape(2, 1, -1)
    out = agree(name, *gated(name, a, b))["out"]
    assert not out.isnan().any()
    assert out.isinf().any()  # max * max


def test_gradient_of_a_gate_saturates_and_is_nan_at_infinity(agree: Agree) -> None:
    gate, ones = torch.tensor([[-1e4, 1e4, 0.0, INF, -INF, torch.nan]]), torch.ones(1, 6)
    result = agree("swiglu_backward", gate, ones, ones)
    assert result["grad_a"][0, :3].tolist() == [0.0, 1.0, 0.5]
    assert result["grad_a"][0, 3:].isnan().all()
    assert result["grad_b"][0, :4].tolist() == [0.0, 1e4, 0.0, INF]
    assert result["grad_b"][0, 4:].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 37), (1, 2880), (129, 3)])
def test_gradients_of_gates_of_odd_widths(shape: tuple[int, int], dtype: torch.dtype, agree: Agree) -> None:
    agree("swiglu_backward", *(random(*shape, dtype=dtype, seed=seed) for seed in range(3)))


@pytest.mark.parametrize("name", ["swiglu", "gelu_tanh_and_mul"])
def test_gate_and_up_may_be_halves_of_one_projection(name: str, agree: Agree) -> None:
    both = random(5, 2 * 37)
    a, b = both[:, :37], both[:, 37:]
    assert torch.equal(agree(name, a, b)["out"], agree(name, a.contiguous(), b.contiguous())["out"])


def test_packed_gate_may_have_padded_rows(agree: Agree) -> None:
    x = packed(5, 74)
    assert torch.equal(agree("silu_and_mul", x)["out"], agree("silu_and_mul", x.contiguous())["out"])


# -- rotary embeddings -----------------------------------------------------------------------------------------------------


def rotary(positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[..., None].double() * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def test_rope_reads_both_halves_of_the_tables(agree: Agree) -> None:
    q = k = torch.tensor([1.0, 10.0]).view(1, 1, 1, 2)
    cos, sin = torch.tensor([[[2.0, 3.0]]]), torch.tensor([[[5.0, 7.0]]])
    for name in ROPES:
        out = agree(name, q, k, cos, sin, independent=False)["q_out"]
        assert out.flatten().tolist() == [2 - 50, 30 + 7]


def test_rope_gradient_reads_the_table_of_its_own_half(agree: Agree) -> None:
    grad = torch.tensor([1.0, 10.0]).view(1, 1, 1, 2)
    cos, sin = torch.tensor([[[2.0, 3.0]]]), torch.tensor([[[5.0, 7.0]]])
    out = agree("rope_neox_backward", grad, grad, cos, sin)["grad_q"]
    assert out.flatten().tolist() == [2 + 70, 30 - 5]


def test_gradient_of_rope_undoes_a_rotation(agree: Agree) -> None:
    q, k = random(2, 3, 5, 8), random(2, 1, 5, 8, seed=1)
    tables = rotary(torch.arange(5)[None] + 7, 8)
    turned = agree("rope_neox", q, k, *tables)
    back = agree("rope_neox_backward", turned["q_out"], turned["k_out"], *tables)
    torch.testing.assert_close(back["grad_q"], q)
    torch.testing.assert_close(back["grad_k"], k)


@pytest.mark.parametrize("name", ROPES)
def test_rope_at_position_zero_is_identity_and_positions_repeat(name: str, agree: Agree) -> None:
    q, k = random(1, 3, 4, 8), random(1, 1, 4, 8, seed=1)
    q[:, :, 3], k[:, :, 3] = q[:, :, 1], k[:, :, 1]
    result = agree(name, q, k, *rotary(torch.tensor([[0, 131071, 5, 131071]]), 8))
    for given, value in ((q, result["q_out"]), (k, result["k_out"])):
        assert torch.equal(value[:, :, 0], given[:, :, 0])
        assert torch.equal(value[:, :, 1], value[:, :, 3])
        assert not torch.equal(value[:, :, 1], given[:, :, 1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(5, 1, 2), (24, 8, 6), (1, 3, 256)])
@pytest.mark.parametrize("name", ROPES)
def test_rope_of_uneven_heads_and_odd_dimensions(
    name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, agree: Agree
) -> None:
    q, k = random(2, heads, 3, dim, dtype=dtype), random(2, kv_heads, 3, dim, dtype=dtype, seed=1)
    tables = (table.to(dtype) for table in rotary(torch.tensor([[7, 1, 9], [0, 2, 4]]), dim))
    agree(name, q, k, *tables)


@pytest.mark.parametrize("name", ROPES)
def test_rope_takes_q_and_k_as_models_pass_them(name: str, agree: Agree) -> None:
    qkv = random(2, 3, 7, 8)  # [B, S, heads, D], q before k before v
    q, k = qkv[:, :, :4].transpose(1, 2), qkv[:, :, 4:6].transpose(1, 2)
    tables = rotary(torch.arange(3)[None], 8)
    views, copies = agree(name, q, k, *tables), agree(name, q.contiguous(), k.contiguous(), *tables)
    assert all(torch.equal(views[output], copies[output]) for output in views)


def test_partial_rope_passes_the_tail_through_bit_for_bit(agree: Agree) -> None:
    q, k = random(1, 2, 3, 7), random(1, 1, 3, 7, seed=1)
    q[..., 4], q[..., 5], q[..., 6] = torch.nan, INF, 1e-40
    result = agree("rope_partial", q, k, *rotary(torch.tensor([[3, 1, 2]]), 4))
    assert torch.equal(result["q_out"][..., 4:].view(torch.int32), q[..., 4:].view(torch.int32))
    assert result["q_out"][..., :4].isfinite().all()
    assert torch.equal(result["k_out"][..., 4:], k[..., 4:])


def test_tables_of_pairs_are_read_in_their_first_half_alone(agree: Agree) -> None:
    q = k = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 1, 1, 4)
    cos, sin = torch.tensor([[[2.0, 3.0, 88.0, 99.0]]]), torch.tensor([[[5.0, 7.0, 88.0, 99.0]]])
    first, second = [2 - 50, 20 + 5], [300 - 7000, 3000 + 700]
    halves = [first[0], second[0], first[1], second[1]]
    assert agree("rope_pairs", q, k, cos, sin)["q_out"].flatten().tolist() == [*first, *second]
    assert agree("rope_pairs_to_halves", q, k, cos, sin)["k_out"].flatten().tolist() == halves
    tables = cos[..., :2], sin[..., :2]
    assert agree("rope_tail_pairs", q, *tables)["out"].flatten().tolist() == [*first, *second]
    turns = torch.stack(tables, dim=-1).flatten(-2)
    assert agree("rope_complex_pairs", q, k, turns)["q_out"].flatten().tolist() == [*first, *second]
    # Elements 0 and 2 are a pair here, and so are 1 and 3.
    by_halves = [2 - 500, 30 - 7000, 200 + 5, 3000 + 70]
    assert agree("rope_half_tables", q, k, *tables)["q_out"].flatten().tolist() == by_halves


def pair_tables(name: str, positions: torch.Tensor, pairs: int) -> list[torch.Tensor]:
    """The tables of a rotation of so many pairs, as its model makes them."""
    cos, sin = rotary(positions, 2 * pairs)
    half = cos[..., :pairs], sin[..., :pairs]
    if name == "rope_complex_pairs":
        return [torch.stack(half, dim=-1).flatten(-2)]
    return [*half] if name in ("rope_half_tables", "rope_tail_pairs") else [cos, sin]


def heads_for(name: str, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return given[:1] if name in ("rope_tail_pairs", "rope_neox_single") else given


@pytest.mark.parametrize("name", PAIR_ROPES)
def test_pairs_at_position_zero_stay_and_equal_positions_repeat(name: str, agree: Agree) -> None:
    q, k = random(1, 3, 4, 8), random(1, 1, 4, 8, seed=1)
    q[:, :, 3] = q[:, :, 1]
    tables = pair_tables(name, torch.tensor([[0, 131071, 5, 131071]]), 4)
    (value, *_) = agree(name, *heads_for(name, q, k), *tables).values()
    given = torch.cat((q[..., 0::2], q[..., 1::2]), dim=-1) if name == "rope_pairs_to_halves" else q
    assert torch.equal(value[:, :, 0], given[:, :, 0])
    assert torch.equal(value[:, :, 1], value[:, :, 3])
    assert not torch.equal(value[:, :, 1], given[:, :, 1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(5, 1, 2), (24, 8, 6), (1, 3, 256)])
@pytest.mark.parametrize("name", PAIR_ROPES)
def test_pairs_of_uneven_heads(
    name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, agree: Agree
) -> None:
    q, k = random(2, heads, 3, dim, dtype=dtype), random(2, kv_heads, 3, dim, dtype=dtype, seed=1)
    tables = pair_tables(name, torch.tensor([[7, 1, 9], [0, 2, 4]]), dim // 2)
    if name != "rope_complex_pairs":
        tables = [table.to(dtype) for table in tables]
    agree(name, *heads_for(name, q, k), *tables)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", PAIR_ROPES)
def test_pairs_are_taken_as_models_pass_them(name: str, dtype: torch.dtype, agree: Agree) -> None:
    """q is a slice of wider heads, k one of something else, from an odd element on."""
    q = random(2, 3, 4, 13, dtype=dtype).transpose(1, 2)[..., 5:]
    k = random(2, 3, 1, 17, dtype=dtype, seed=1).transpose(1, 2)[..., 9:]
    tables = pair_tables(name, torch.arange(3)[None], 4)
    if name != "rope_complex_pairs":
        tables = [table.to(dtype) for table in tables]
    views = agree(name, *heads_for(name, q, k), *tables)
    copies = agree(name, *heads_for(name, q.contiguous(), k.contiguous()), *tables)
    assert all(torch.equal(views[output], copies[output]) for output in views)


def test_what_no_pair_is_made_of_passes_bit_for_bit(agree: Agree) -> None:
    x, k = random(1, 2, 3, 7), random(1, 1, 3, 7, seed=1)
    x[..., 4], x[..., 5], x[..., 6] = torch.nan, INF, 1e-40
    positions = torch.tensor([[3, 1, 2]])
    out = agree("rope_pairs", x, k, *pair_tables("rope_pairs", positions, 2))["q_out"]
    assert torch.equal(out[..., 4:].view(torch.int32), x[..., 4:].view(torch.int32))
    assert out[..., :4].isfinite().all()
    turned = x.flip(-1)
    out = agree("rope_tail_pairs", turned, *pair_tables("rope_tail_pairs", positions, 2))["out"]
    assert torch.equal(out[..., :3].view(torch.int32), turned[..., :3].view(torch.int32))
    assert out[..., 3:].isfinite().all()


# -- attention -------------------------------------------------------------------------------------------------------------

SCALE = 0.25


def heads(batch: int, count: int, length: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[B, H, S, D] as projections give it: heads after tokens in memory."""
    return random(batch, length, count, dim, dtype=dtype, seed=seed).transpose(1, 2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "length", "dim"), [(1, 1, 1, 8), (5, 1, 7, 24), (6, 3, 129, 16), (20, 1, 3, 256)]
)
def test_attention_of_odd_lengths_and_uneven_groups(
    query_heads: int, kv_heads: int, length: int, dim: int, dtype: torch.dtype, agree: Agree
) -> None:
    q = heads(2, query_heads, length, dim, dtype, 0)
    k, v = (heads(2, kv_heads, length, dim, dtype, seed) for seed in (1, 2))
    whole = agree("attention_prefill", q, k, v, SCALE)["out"]
    last = agree("attention_decode", q[:, :, -1:], k, v, SCALE)["out"]
    # In a step of decoding, the newest position sees what it sees at the end of the whole sequence.
    torch.testing.assert_close(whole[:, :, -1:], last, rtol=2e-2, atol=1e-2)


def test_first_position_sees_only_itself_and_no_later_one(agree: Agree) -> None:
    q, k, v = (heads(1, count, 6, 8, torch.float32, count) for count in (4, 2, 2))
    out = agree("attention_prefill", q, k, v, SCALE)["out"]
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0].repeat_interleave(2, dim=1))
    k[:, :, 4:], v[:, :, 4:] = 9.0, -9.0
    assert torch.equal(agree("attention_prefill", q, k, v, SCALE)["out"][:, :, :4], out[:, :, :4])


def test_equal_keys_share_the_weight_and_a_large_score_takes_all(agree: Agree) -> None:
    q, k, v = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 5, 8), random(1, 1, 5, 8)
    mean = agree("attention_decode", q, k, v, SCALE)["out"]
    torch.testing.assert_close(mean, v.mean(2, keepdim=True).expand_as(mean))
    k[:, :, 3] = 1e4  # a softmax that did not subtract the maximum would overflow
    assert torch.equal(agree("attention_decode", q, k, v, SCALE)["out"], v[:, :, 3:4].expand(1, 2, 1, 8))


@pytest.mark.parametrize("dtype", HALF)
def test_attention_reads_a_part_of_a_longer_cache(dtype: torch.dtype, agree: Agree) -> None:
    q, cache = heads(2, 4, 5, 16, dtype, 0), random(2, 2, 2, 64, 16, dtype=dtype)
    k, v = (kept[:, :, :5] for kept in cache)
    views = agree("attention_prefill", q, k, v, SCALE)["out"]
    assert torch.equal(views, agree("attention_prefill", q, k.contiguous(), v.contiguous(), SCALE)["out"])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("length", "window"), [(1, 1), (7, 3), (129, 128)])
def test_mask_of_a_window_equals_steps_over_its_last_keys(
    length: int, window: int, dtype: torch.dtype, agree: Agree
) -> None:
    q = heads(2, 6, length, 16, dtype, 0)
    k, v = (heads(2, 3, length, 16, dtype, seed) for seed in (1, 2))
    behind = torch.arange(length)[:, None] - torch.arange(length)
    mask = ((behind >= 0) & (behind < window)).expand(2, 1, -1, -1)
    whole = agree("attention_masked_prefill", q, k, v, mask, SCALE)["out"]
    for last in {0, length // 2, length - 1}:
        newest, seen = slice(last, last + 1), slice(max(0, last + 1 - window), last + 1)
        step = agree("attention_masked_decode", q[:, :, newest], k, v, mask[:, :, newest], SCALE)["out"]
        plain = agree("attention_decode", q[:, :, newest], k[:, :, seen], v[:, :, seen], SCALE)["out"]
        torch.testing.assert_close(whole[:, :, newest], step, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(step, plain, rtol=2e-2, atol=1e-2)


def test_a_position_that_sees_no_key_gets_zeros(agree: Agree) -> None:
    q, k, v = (heads(2, count, 5, 8, torch.float32, count) for count in (4, 2, 2))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 3], mask[0, :, 0, 1:] = False, False
    out = agree("attention_masked_prefill", q, k, v, mask, SCALE)["out"]
    assert not out[1, :, 3].any()
    torch.testing.assert_close(out[0, :, 0], v[0, :, 0].repeat_interleave(2, dim=0))
    out = agree("attention_masked_decode", q[:, :, 3:4], k, v, mask[:, :, 3:4], SCALE)["out"]
    assert not out[1].any()
    assert out[0].all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("length", "window"), [(1, 1), (7, 1), (7, 3), (129, 128)])
def test_window_with_a_sink_equals_steps_over_its_last_keys(
    length: int, window: int, dtype: torch.dtype, agree: Agree
) -> None:
    q, sinks = heads(2, 6, length, 16, dtype, 0), random(6, dtype=dtype, seed=3)
    k, v = (heads(2, 3, length, 16, dtype, seed) for seed in (1, 2))
    whole = agree("attention_sink_prefill", q, k, v, sinks, window, SCALE)["out"]
    for last in {0, length // 2, length - 1}:
        newest, seen = slice(last, last + 1), slice(max(0, last + 1 - window), last + 1)
        step = agree("attention_sink_decode", q[:, :, newest], k[:, :, seen], v[:, :, seen], sinks, SCALE)["out"]
        torch.testing.assert_close(whole[:, :, newest], step, rtol=2e-2, atol=1e-2)


def test_a_window_of_the_whole_sequence_or_more_is_none(agree: Agree) -> None:
    q, k, v = (heads(1, count, 6, 8, torch.float32, count) for count in (4, 2, 2))
    none = torch.full((4,), -INF)
    plain = agree("attention_prefill", q, k, v, SCALE)["out"]
    for window in (6, 7, 2**40):
        out = agree("attention_sink_prefill", q, k, v, none, window, SCALE)["out"]
        torch.testing.assert_close(out, plain)  # nor is a sink of -inf one


@pytest.mark.parametrize("dtype", FLOATS)
def test_sink_takes_its_share_of_the_weight_and_a_large_one_all(dtype: torch.dtype, agree: Agree) -> None:
    q, k, v = (
        torch.ones(1, 3, 1, 8, dtype=dtype),
        torch.zeros(1, 1, 3, 8, dtype=dtype),
        torch.ones(1, 1, 3, 8, dtype=dtype),
    )
    sinks = torch.tensor([-INF, 0.0, 1e4], dtype=dtype)  # beside three scores of zero
    out = agree("attention_sink_decode", q, k, v, sinks, SCALE)["out"]
    assert out[0, :, 0, 0].tolist() == pytest.approx([1.0, 0.75, 0.0], rel=4e-3)
    out = agree("attention_sink_prefill", q.expand(1, 3, 3, 8), k, v, sinks, 2, SCALE)["out"]
    assert out[0, 1, :, 0].tolist() == pytest.approx([1 / 2, 2 / 3, 2 / 3], rel=4e-3)


# -- softmax and products --------------------------------------------------------------------------------------------------


def test_softmax_of_infinities(agree: Agree) -> None:
    x = torch.tensor([[-INF, 0.0, 0.0], [-INF, -INF, -INF], [INF, 0.0, 0.0]])
    agree("softmax", x[:2])
    out = agree("softmax", x, independent=False)["out"]
    assert out[0].tolist() == [0.0, 0.5, 0.5]
    assert out[1:].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 1), (1, 257), (2, 131_072), (33, 300)])
def test_softmax_of_one_column_of_tails_and_of_a_vocabulary(
    shape: tuple[int, int], dtype: torch.dtype, agree: Agree
) -> None:
    out = agree("softmax", random(*shape, dtype=dtype))["out"]
    torch.testing.assert_close(out.double().sum(-1), torch.ones(shape[0]).double(), rtol=0, atol=2e-3)


def test_softmax_subtracts_the_maximum_and_shares_ties_equally(agree: Agree) -> None:
    x = torch.tensor([[3e38, 3e38, 1e38, -3e38], [-1e30, -1e30, -3e38, -3e38]])
    assert agree("softmax", x, independent=False)["out"].tolist() == [[0.5, 0.5, 0, 0]] * 2


def test_softmax_reads_padded_rows(agree: Agree) -> None:
    x = packed(5, 37)
    assert torch.equal(agree("softmax", x)["out"], agree("softmax", x.contiguous())["out"])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 129, 2880), (3, 1, 1), (65, 33, 17)])
def test_product_of_one_row_and_of_odd_tails(m: int, n: int, k: int, dtype: torch.dtype, agree: Agree) -> None:
    agree("gemm", random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1))


def test_product_keeps_zero_rows_and_nan_in_their_place(agree: Agree) -> None:
    a, b = random(4, 40), random(5, 40, seed=1)
    a[0], a[2, 7], b[3, 9] = 0, torch.nan, INF
    out = agree("gemm", a, b)["out"]
    assert out[0, [0, 1, 2, 4]].eq(0).all()
    assert out[2].isnan().all()
    assert out[0, 3].isnan()  # 0 * inf
    assert out[[1, 3], 3].isinf().all()


def test_product_of_integers_is_exact_and_reads_any_strides(agree: Agree) -> None:
    a = torch.randint(-4, 5, (64, 7), generator=torch.Generator().manual_seed(0)).float().T
    b = torch.randint(-4, 5, (9, 128), generator=torch.Generator().manual_seed(1)).float()[:, ::2]
    assert torch.equal(agree("gemm", a, b)["out"].long(), a.long() @ b.long().T)


# -- experts, casts, transposes and the rest -------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [1, 4, 6, 8, 10, 12])
def test_topk_gate_prefers_the_smaller_index_of_equal_scores(choices: int, agree: Agree) -> None:
    scores = torch.zeros(2, 12)
    scores[1, 9], scores[1, 0] = 1.0, -INF
    chosen = agree("topk_gate", scores, choices)["topk_idx"]
    assert chosen.tolist() == [[*range(choices)], [9, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 0][:choices]]


def test_topk_gate_of_as_many_experts_as_choices_is_their_order(agree: Agree) -> None:
    scores = torch.tensor([[-INF, 1.0, INF, -1.0, 0.5, -INF, 1e-40, 2.0], [-INF] * 8])
    assert agree("topk_gate", scores, 8)["topk_idx"].tolist() == [[2, 7, 1, 4, 6, 3, 0, 5], [*range(8)]]


def test_topk_gate_repeats_no_expert_if_few_scores_are_left(agree: Agree) -> None:
    scores = torch.full((2, 9), -INF)
    scores[0, 7], scores[0, 4] = 2.0, -1.0
    assert agree("topk_gate", scores, 6)["topk_idx"].tolist() == [[7, 4, 0, 1, 2, 3], [*range(6)]]


def test_routers_with_equal_scores_give_equal_weights(agree: Agree) -> None:
    scores = torch.full((5, 12), 0.25)
    torch.testing.assert_close(agree("topk_softmax", scores, 3, False)["weights"], torch.full((5, 3), 1 / 12))
    torch.testing.assert_close(agree("topk_softmax", scores, 3, True)["weights"], torch.full((5, 3), 1 / 3))
    torch.testing.assert_close(agree("topk_then_softmax", scores, 3)["weights"], torch.full((5, 3), 1 / 3))
    torch.testing.assert_close(agree("topk_softmax_groups", scores, 3, 4, 2, 6.0)["weights"], torch.full((5, 3), 0.5))
    result = agree("topk_sigmoid_bias_groups", scores, torch.zeros(12), 3, 4, 2, True, 3.0)
    torch.testing.assert_close(result["weights"], torch.ones(5, 3))
    result = agree("topk_sqrtsoftplus_bias", scores, torch.zeros(12), 3, 1.5)
    torch.testing.assert_close(result["weights"], torch.full((5, 3), 0.5))
    table = torch.tensor([[3, 3, 11], [0, 1, 2]])
    result = agree("table_router", scores, torch.tensor([1, 0, 0, 1, 0]), table, 1.5)
    assert result["ids"].tolist() == table[[1, 0, 0, 1, 0]].tolist()
    torch.testing.assert_close(result["weights"], torch.full((5, 3), 0.5))


def test_expert_with_a_large_bias_is_chosen_with_tiny_weight(agree: Agree) -> None:
    scores, bias = random(8, 16), torch.zeros(16)
    scores[:, 5], bias[5] = -30.0, 10.0
    result = agree("topk_sigmoid_bias_groups", scores, bias, 4, 4, 2, True, 2.5)
    place = result["ids"] == 5
    assert bool(place.any(dim=-1).all())
    assert float(result["weights"][place].max()) < 1e-12


def test_a_group_router_keeps_whole_groups_by_their_two_best(agree: Agree) -> None:
    scores = torch.tensor([[9.0, -9.0, 1.0, 1.0, 0.5, 0.5]])
    result = agree("topk_sigmoid_bias_groups", scores, torch.zeros(6), 2, 3, 1, False, 1.0)
    assert sorted(result["ids"][0].tolist()) == [2, 3]  # the best expert of all is in a group that is worth less
    best = agree("topk_softmax_groups", scores, 2, 3, 1, 1.0)
    assert sorted(best["ids"][0].tolist()) == [0, 1]


def test_probabilities_that_underflow_tie(agree: Agree) -> None:
    scores = torch.linspace(-400.0, 0.0, 12).expand(3, 12).contiguous()
    scores[1, 4] = 1e4
    agree("topk_softmax", scores, 6, True)
    agree("topk_softmax_groups", scores, 4, 3, 2, 16.0)


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("name", CASTS)
def test_cast_of_zeros_has_the_smallest_scale(name: str, round_scale: bool, agree: Agree) -> None:
    result = agree(name, torch.zeros(128, 192, dtype=torch.bfloat16), round_scale)
    assert result["out"].float().eq(0).all()
    smallest = 2.0**-22 if round_scale else 1e-4 / 448
    torch.testing.assert_close(result["scale"], torch.full_like(result["scale"], smallest), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["per_token_cast", "per_block_cast"])
def test_rounded_scale_is_the_next_power_of_two(name: str, agree: Agree) -> None:
    x = torch.full((128, 128), 448.0)
    assert set(agree(name, x, True)["scale"].flatten().tolist()) == {1.0}
    slightly_more = agree(name, x * (1 + 2**-20), True)
    assert set(slightly_more["scale"].flatten().tolist()) == {2.0}
    assert set(slightly_more["out"].float().flatten().tolist()) == {224.0}


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("columns", [1, 64, 200])
@pytest.mark.parametrize("name", CASTS)
def test_cast_of_tails_reads_padded_rows(name: str, columns: int, round_scale: bool, agree: Agree) -> None:
    x = packed(128 if name == "per_channel_cast" else 131, columns, dtype=torch.bfloat16)
    assert not x.is_contiguous()
    one, other = agree(name, x, round_scale), agree(name, x.contiguous(), round_scale)
    assert all(torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8)) for key in one)


@pytest.mark.parametrize("name", CASTS)
def test_one_outlier_fills_the_range_and_drowns_its_block_alone(name: str, agree: Agree) -> None:
    x = torch.full((256, 256), 1e-3, dtype=torch.bfloat16)
    x[5, 7] = -(2.0**20)
    codes = agree(name, x, False)["out"].float()
    assert codes[5, 7] == -448
    rows, columns = {"per_token_cast": (6, 128), "per_block_cast": (128, 128), "per_channel_cast": (128, 8)}[name]
    block = codes[5 if name == "per_token_cast" else 0 : rows, 7 if name == "per_channel_cast" else 0 : columns]
    assert int(block.ne(0).sum()) == 1
    assert int(codes.eq(0).sum()) == block.numel() - 1


@pytest.mark.parametrize("name", ["per_token_cast", "per_block_cast"])
def test_casting_what_was_cast_changes_no_value(name: str, agree: Agree) -> None:
    def values(result: Outputs) -> torch.Tensor:
        scale = result["scale"].repeat_interleave(128, -1)[:, :200]
        return result["out"].float() * (scale if name == "per_token_cast" else scale.repeat_interleave(128, 0)[:130])

    first = values(agree(name, random(130, 200) * 3, True))
    assert torch.equal(values(agree(name, first, True)), first)


@pytest.mark.parametrize("name", CASTS)
def test_cast_keeps_signs_of_zeros_and_of_what_underflows(name: str, agree: Agree) -> None:
    x = torch.full((128, 128), -1e-30, dtype=torch.bfloat16)
    x[0] = -0.0
    codes = agree(name, x, False)["out"].view(torch.uint8)
    assert set(codes.flatten().tolist()) == {0x80}


def test_batched_transpose_keeps_every_bit(agree: Agree) -> None:
    payload = torch.tensor([0x7FC1, 0x8000 - 0x10000, 0x0001, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    out = agree("batched_transpose", payload.view(1, 1, 4))["out"]
    assert torch.equal(out.view(torch.int16).flatten(), payload.view(torch.int16))


@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 3, 5), (2, 3, 0), (3, 33, 17)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_batched_transpose_of_tails_and_strides(shape: tuple[int, ...], dtype: torch.dtype, agree: Agree) -> None:
    wide = torch.arange(math.prod(shape) * 2).reshape(*shape[:-1], 2 * shape[-1]).to(dtype)
    for x in (wide[..., : shape[-1]], wide[..., : shape[-1]].contiguous()):
        out = agree("batched_transpose", x)["out"]
        assert torch.equal(out, x.transpose(1, 2))


def engram(hidden: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, ...]:
    ones = torch.ones(hidden.shape[1:], dtype=torch.bfloat16)
    return (*(tensor.bfloat16() for tensor in (hidden, key, value)), ones, ones, 1e-6, 1e-20)


def test_engram_gate_of_orthogonal_key_is_a_half(agree: Agree) -> None:
    hidden, key = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)
    hidden[..., 0], key[..., 1] = 1, 1
    assert agree("engram_gate_fwd", *engram(hidden, key, torch.ones(1, 4)))["out"].flatten().tolist() == [
        1.5,
        0.5,
        0.5,
        0.5,
    ]


def test_engram_gate_of_zero_rows_is_a_half(agree: Agree) -> None:
    zero = torch.zeros(3, 2, 8)
    out = agree("engram_gate_fwd", *engram(zero, random(3, 2, 8), torch.ones(3, 8)))["out"]
    assert out.eq(0.5).all()


def test_engram_gate_follows_the_score_sign_and_is_flat_at_zero(agree: Agree) -> None:
    hidden = torch.zeros(3, 1, 4)
    hidden[:, 0, 0] = 1
    key = torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0], [2.0**-20, 1, 0, 0]])[:, None]
    out = agree("engram_gate_fwd", *engram(hidden, key, torch.tensor([[0.0, 1, 0, 0]] * 3)))["out"][:, 0, 1]
    assert out[0] > 0.5 > out[1]
    assert 0.5 <= out[2] < 0.502  # sigmoid(sqrt(clamp)), rounded


def test_engram_gate_reads_key_and_value_out_of_one_tensor(agree: Agree) -> None:
    hidden, both = random(3, 2, 8).bfloat16(), random(3, 3, 8, seed=1).bfloat16()
    views = agree("engram_gate_fwd", *engram(hidden, both[:, :2], both[:, 2]))
    copies = agree("engram_gate_fwd", *engram(hidden, both[:, :2].contiguous(), both[:, 2].contiguous()))
    assert torch.equal(views["out"], copies["out"])


def test_sinkhorn_ends_with_a_column_step(agree: Agree) -> None:
    z = random(16, 4, 4)
    one, many = (agree("mhc_sinkhorn", z, repeat, 1e-6)["out"] for repeat in (1, 20))
    torch.testing.assert_close(one.sum(-2), torch.ones(16, 4), rtol=0, atol=1e-5)
    assert (one.sum(-1) - 1).abs().max() > 0.1
    torch.testing.assert_close(many.sum(-1), torch.ones(16, 4), rtol=0, atol=1e-3)


def test_sinkhorn_of_one_stream_and_of_very_negative_rows(agree: Agree) -> None:
    torch.testing.assert_close(
        agree("mhc_sinkhorn", random(5, 1, 1), 10, 1e-6)["out"], torch.ones(5, 1, 1), rtol=0, atol=1e-5
    )
    z = random(5, 4, 4)
    z[:, 2] -= 1e4  # the same for a whole row, so the row's softmax does not see it
    torch.testing.assert_close(
        agree("mhc_sinkhorn", z, 10, 1e-6)["out"],
        agree("mhc_sinkhorn", random(5, 4, 4), 10, 1e-6)["out"],
        rtol=1e-2,
        atol=1e-3,
    )
    masked = random(5, 4, 4)
    masked[:, 1, 1:] = -INF
    out = agree("mhc_sinkhorn", masked, 10, 1e-6)["out"]
    assert out.isfinite().all()
    assert (out[:, 1, 1:] < 1e-4).all()
