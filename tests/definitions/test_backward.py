"""Every backward Definition is the derivative of the Definition that it names, and so is its stock code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition, Workload
from tilegym_db.records.call import backward_problem, differentiated, gradient_outputs
from tilegym_db.records.definition_rules import GRADIENT
from tilegym_db.records.workload import Case
from tilegym_db.resolver.loader import load_verified
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import Lifted, load_function, name_outputs, run_lifted

BACKWARDS = [
    "rms_norm_backward", "rms_norm_backward_x", "layer_norm_backward", "swiglu_backward", "rope_neox_backward",
    "gelu_backward", "gelu_new_backward", "gelu_tanh_backward", "gelu_tanh_and_mul_backward", "quick_gelu_backward",
    "relu_squared_backward", "rms_norm_fp32_backward", "rms_norm_gemma_backward",
    "layer_norm_no_bias_backward", "group_norm_backward",
]  # fmt: skip
OF_SUMS = [
    "add_rms_norm_backward", "add_rms_norm_fp32_backward", "add_rms_norm_gemma_backward", "add_layer_norm_backward",
]  # fmt: skip
OF_MIXTURES = ["moe_experts_backward", "moe_experts_oai_backward", "topk_softmax_backward"]
"""tests/definitions/test_mixture_gradients.py"""
WITH_SAVED_TENSORS = [
    *OF_SUMS,
    "attention_bidirectional_backward",
    "softmax_backward", "cross_entropy_backward", "cross_entropy_smoothed_backward", "attention_prefill_backward",
    "attention_sink_prefill_backward",
]  # fmt: skip
"""tests/verification/test_saved_tensors.py, and attention below"""
OF_LOSSES = ["kl_div_backward", "jsd_backward", "grpo_loss_backward", "dpo_loss_backward", "dropout_backward"]
"""tests/definitions/test_losses.py and test_dropout.py"""
OF_TABLES = ["embedding_backward"]
"""tests/definitions/test_embedding.py"""
HYPER_CONNECTIONS = [
    "mhc_expand_backward", "mhc_head_compute_mix_backward", "mhc_norm_fn_backward", "mhc_post_backward",
    "mhc_pre_apply_mix_backward", "mhc_pre_split_mixes_backward", "mhc_sinkhorn_backward",
]  # fmt: skip
"""tests/definitions/test_hyper_connections.py"""

Run = Callable[..., Any]


def test_every_backward_is_listed_here_and_fits_its_forward(catalog: Catalog) -> None:
    found = {name: record for name, record in catalog.definitions.items() if record.backward_of}
    listed = BACKWARDS + WITH_SAVED_TENSORS + OF_MIXTURES + OF_LOSSES + OF_TABLES + HYPER_CONNECTIONS
    assert sorted(found) == sorted(listed)
    for record in found.values():
        assert record.backward_of is not None
        assert backward_problem(catalog.definition(record.backward_of), record) == ""


def drawn(catalog: Catalog, backward: Definition) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Random inputs of the forward in its tiny float32 size, and gradients of its outputs."""
    forward = catalog.definition(str(backward.backward_of))
    (workload,) = (item for item in catalog.workloads_for(backward.name) if is_tiny_float32(item))
    case = Case.of_workload(backward, workload, distribution="normal", seed=3)
    given = draw_inputs(backward, case, "cpu")
    generator = torch.Generator().manual_seed(5)
    inputs = {
        name: given[name] if name in given else torch.randn(forward.shape_of(name, case.call.axes), generator=generator)
        for name in forward.inputs
    }
    grads = {name: value for name, value in given.items() if name.startswith(GRADIENT)}
    return inputs, grads  # type: ignore[return-value]


def is_tiny_float32(workload: Workload) -> bool:
    return "tiny" in workload.tags and workload.dtypes["T"] == "float32"


def derivative(
    forward: Definition, run: Run, inputs: Mapping[str, Any], grads: Mapping[str, torch.Tensor], wanted: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """What autograd says of a formulation of the forward."""
    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    for name in wanted:
        given[name].requires_grad_()
    outputs = name_outputs(forward, run(*given.values()), given, forward.name)
    found = torch.autograd.grad(
        list(outputs.values()), [given[name] for name in wanted], [grads[GRADIENT + name] for name in outputs]
    )
    return {GRADIENT + name: value for name, value in zip(wanted, found, strict=True)}


@pytest.mark.records("name")
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_is_the_derivative_of_its_forward_in_fp64(name: str, catalog: Catalog) -> None:
    backward = catalog.definition(name)
    forward = catalog.definition(str(backward.backward_of))
    inputs, grads = drawn(catalog, backward)
    lift = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    run = load_function(forward.reference, forward.name)
    mode: Any = Lifted
    with mode():
        want = derivative(
            forward, run, lift, {key: value.double() for key, value in grads.items()}, differentiated(backward)
        )
    found = run_lifted(backward, {key: {**inputs, **grads}[key] for key in backward.inputs})
    assert found.keys() == want.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, want[key], rtol=1e-9, atol=1e-9)


@pytest.mark.records("name")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BACKWARDS)
def test_stock_code_rounds_as_autograd_after_the_stock_forward(name: str, dtype: torch.dtype, catalog: Catalog) -> None:
    backward = catalog.definition(name)
    forward = catalog.definition(str(backward.backward_of))
    inputs, grads = (
        {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for values in drawn(catalog, backward)
    )
    stock = catalog.solution(f"{forward.name}_stock")
    want = derivative(forward, load_verified(stock, stock.digest), inputs, grads, differentiated(backward))
    given = {key: {**inputs, **grads}[key] for key in backward.inputs}
    found = load_entry(catalog.solution(f"{name}_stock"))(*given.values())
    for key, value in name_outputs(backward, found, given, name).items():
        assert value.dtype == dtype
        apart = (value.double() - want[key].double()).abs()
        # Sums in another order may end on the other side of a rounding boundary, here and there. Autograd's layer and group norm
        # on a CPU keep statistics in half precision, so no gradient is nearer to fp64 than that of the stock solution.
        is_exact = dtype != torch.float32 and not name.startswith(("layer_norm", "group_norm"))
        assert float((apart > 0).double().mean()) < (0.02 if is_exact else 1.0)
        assert float(apart.max()) <= 2 * torch.finfo(dtype).eps * float(want[key].abs().max())


@pytest.mark.parametrize("name", BACKWARDS + WITH_SAVED_TENSORS)
def test_the_reference_of_a_backward_can_be_differentiated(name: str, catalog: Catalog) -> None:
    backward = catalog.definition(name)
    (workload,) = (item for item in catalog.workloads_for(name) if is_tiny_float32(item))
    given = draw_inputs(backward, Case.of_workload(backward, workload, distribution="normal", seed=3), "cpu")
    values = [
        value.double().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in (given[key] for key in backward.inputs)
    ]
    run = load_function(backward.reference, name)
    mode: Any = Lifted
    with mode():
        assert torch.autograd.gradcheck(run, values, fast_mode=True)


@pytest.mark.parametrize(
    "name", ["attention_prefill_backward", "attention_sink_prefill_backward", "attention_bidirectional_backward"]
)
def test_gradients_of_attention_are_those_of_its_forward_in_fp64(name: str, catalog: Catalog) -> None:
    backward = catalog.definition(name)
    forward = catalog.definition(str(backward.backward_of))
    inputs, grads = drawn(catalog, backward)
    lift = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    run = load_function(forward.reference, forward.name)
    mode: Any = Lifted
    with mode():
        out = run(*lift.values())
        want = derivative(
            forward, run, lift, {key: value.double() for key, value in grads.items()}, differentiated(backward)
        )
    given = {**lift, "out": out, **{key: value.double() for key, value in grads.items()}}
    found = run_lifted(backward, {key: given[key] for key in backward.inputs})
    assert found.keys() == want.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, want[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OF_SUMS)
def test_both_operands_of_a_sum_have_one_gradient(name: str, catalog: Catalog) -> None:
    backward = catalog.definition(name)
    forward = catalog.definition(str(backward.backward_of))
    inputs, grads = drawn(catalog, backward)
    lift = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    grads = {key: value.double() for key, value in grads.items()}
    run, outputs = load_function(forward.reference, forward.name), gradient_outputs(backward)
    mode: Any = Lifted
    with mode():
        total = run(*lift.values())[1]
        want = derivative(forward, run, lift, grads, outputs)
    given = {**lift, "residual_out": total, **grads}
    found = run_lifted(backward, {key: given[key] for key in backward.inputs})
    assert outputs["residual"] == outputs["x"] == "grad_x"
    for key, output in outputs.items():
        torch.testing.assert_close(found[output], want[GRADIENT + key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OF_SUMS)
def test_stock_gradients_of_a_sum_round_as_autograd(name: str, dtype: torch.dtype, catalog: Catalog) -> None:
    backward = catalog.definition(name)
    forward = catalog.definition(str(backward.backward_of))
    inputs, grads = (
        {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for values in drawn(catalog, backward)
    )
    stock = catalog.solution(f"{forward.name}_stock")
    want = derivative(forward, load_verified(stock, stock.digest), inputs, grads, differentiated(backward))
    given = {**inputs, "residual_out": inputs["residual"] + inputs["x"], **grads}
    found = load_entry(catalog.solution(f"{name}_stock"))(*(given[key] for key in backward.inputs))
    for key, value in name_outputs(backward, found, given, name).items():
        assert value.dtype == dtype
        apart = (value.double() - want[key].double()).abs()
        assert float(apart.max()) <= 2 * torch.finfo(dtype).eps * float(want[key].abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forward", ["attention_prefill", "attention_bidirectional"])
def test_stock_gradients_of_attention_are_those_of_autograd(forward: str, dtype: torch.dtype, catalog: Catalog) -> None:
    backward = catalog.definition(f"{forward}_backward")
    inputs, grads = (
        {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for values in drawn(catalog, backward)
    )
    q, k, v = (inputs[name].clone().requires_grad_() for name in ("q", "k", "v"))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=forward == "attention_prefill", scale=inputs["scale"], enable_gqa=True
    )
    want = torch.autograd.grad(out, (q, k, v), grads["grad_out"])
    stock = catalog.solution(f"{forward}_backward_stock")
    found = load_verified(stock, stock.digest)(*inputs.values(), out.detach(), grads["grad_out"])
    for value, one in zip(found, want, strict=True):
        assert torch.equal(value, one)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_stock_gradients_of_sinks_are_near_those_of_autograd(
    dtype: torch.dtype, bound: float, catalog: Catalog
) -> None:
    """Both round scores, weights and their gradients, each at its own places."""
    backward = catalog.definition("attention_sink_prefill_backward")
    inputs, grads = (
        {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for values in drawn(catalog, backward)
    )
    forward, stock = (catalog.solution(f"attention_sink_prefill{way}_stock") for way in ("", "_backward"))
    run = load_verified(forward, forward.digest)
    want = derivative(catalog.definition("attention_sink_prefill"), run, inputs, grads, differentiated(backward))
    found = load_verified(stock, stock.digest)(*inputs.values(), run(*inputs.values()), grads["grad_out"])
    for value, one in zip(found, want.values(), strict=True):
        error = torch.linalg.vector_norm(value.double() - one.double()) / torch.linalg.vector_norm(one.double())
        assert float(error) <= bound
