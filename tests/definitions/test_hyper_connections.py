"""What hyper-connections and the gate of n-gram memory promise: Sinkhorn's sums, gradients, and operators that agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition
from tilegym_db.records.call import differentiated
from tilegym_db.records.definition_rules import GRADIENT
from tilegym_db.records.workload import Case
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import Lifted, load_function, name_outputs, run_lifted, run_reference

BACKWARDS = [
    "mhc_expand_backward", "mhc_head_compute_mix_backward", "mhc_norm_fn_backward", "mhc_post_backward",
    "mhc_pre_apply_mix_backward", "mhc_pre_split_mixes_backward", "mhc_sinkhorn_backward",
]  # fmt: skip
GATES = ["engram_gate_backward", "engram_gate_backward_saved"]


def drawn(catalog: Catalog, definition: Definition) -> dict[str, Any]:
    """Random inputs of a tiny workload, float32 where the operator has it."""
    tiny = [item for item in catalog.workloads_for(definition.name) if "tiny" in item.tags]
    workload = next((item for item in tiny if item.dtypes.get("T") == "float32"), tiny[0])
    return draw_inputs(definition, Case.of_workload(definition, workload, distribution="normal", seed=3), "cpu")


def derivative(
    forward: Definition, given: dict[str, Any], grads: dict[str, torch.Tensor], wanted: tuple[str, ...]
) -> Any:
    """What autograd says in float64 of the forward's reference; outputs without a gradient have none to pass back."""
    lifted = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    for name in wanted:
        lifted[name] = lifted[name].clone().requires_grad_()
    mode: Any = Lifted
    with mode():
        outputs = name_outputs(
            forward, load_function(forward.reference, forward.name)(*lifted.values()), lifted, forward.name
        )
        used = [name for name in outputs if GRADIENT + name in grads]
        return torch.autograd.grad(
            [outputs[name] for name in used],
            [lifted[name] for name in wanted],
            [grads[GRADIENT + name].double() for name in used],
        )


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_is_the_derivative_of_its_forward_in_fp64(name: str, catalog: Catalog) -> None:
    backward = catalog.definition(name)
    forward = catalog.definition(str(backward.backward_of))
    inputs = drawn(catalog, backward)
    given = {
        key: inputs[key] if key in inputs else inputs["grad_out"].shape[1] if key == "streams" else 1e-3
        if spec.is_scalar else inputs[GRADIENT + "out"][:, 0]
        for key, spec in forward.inputs.items()
    }  # fmt: skip
    if backward.saved:  # the derivative is taken at what the forward gives in float64
        inputs |= {key: value for key, value in run_lifted(forward, given).items() if key in backward.saved}
    grads = {key: value for key, value in inputs.items() if key.startswith(GRADIENT)}
    want = derivative(forward, given, grads, differentiated(backward))
    found = run_lifted(backward, inputs)
    for value, expected in zip(found.values(), want, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", GATES)
def test_gradients_of_the_gate_equal_its_derivative_in_fp64(name: str, catalog: Catalog) -> None:
    forward, backward = catalog.definition("engram_gate_fwd"), catalog.definition(name)
    clamp = 1.0
    inputs = drawn(catalog, backward) | {"clamp": clamp}
    given = {key: inputs.get(key, 1e-20) for key in forward.inputs}
    wanted = tuple(key for key in given if isinstance(given[key], torch.Tensor))
    want = derivative(forward, given, {GRADIENT + "out": inputs["grad_out"]}, wanted)
    if name.endswith("saved"):
        saved = run_lifted(catalog.definition("engram_gate_fwd_save"), given)
        inputs |= {key: value for key, value in saved.items() if key in inputs}
    gates = run_lifted(catalog.definition("engram_gate_fwd_save"), given)["gate"]
    held = (gates - 0.5).abs() < torch.sigmoid(torch.tensor(clamp).double().sqrt()) - 0.5 + 1e-6
    assert 0 < int(held.sum()) < held.numel()  # some scores are held at the clamp, where nothing passes back
    for value, expected in zip(run_lifted(backward, inputs).values(), want, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("repeat", [1, 10, 20])
@pytest.mark.parametrize("size", [0.0, 1.0, 50.0])
def test_columns_sum_to_one_after_the_last_step_and_rows_nearly(repeat: int, size: float, catalog: Catalog) -> None:
    definition, eps = catalog.definition("mhc_sinkhorn"), 1e-6
    z = torch.randn(200, 4, 4, generator=torch.Generator().manual_seed(1)).sign() * size
    mixing = run_reference(definition, {"z": z, "repeat": repeat, "eps": eps})["out"]
    assert bool((mixing >= 0).all())
    columns = mixing.sum(dim=-2)
    assert float(columns.max()) <= 1 + 1e-6
    # A column that no row prefers holds 4 * eps before the only step, which then leaves it at 4 / 5.
    assert float(columns.min()) >= (0.8 if size == 50 and repeat == 1 else 1 - 4 * eps) - 1e-6
    if size <= 1 and repeat > 1:
        assert float((mixing.sum(dim=-1) - 1).abs().max()) <= 2e-3
    if size == 0:
        torch.testing.assert_close(mixing, torch.full_like(mixing, 0.25), rtol=1e-4, atol=0)


def test_the_fused_operator_is_its_four_parts(catalog: Catalog) -> None:
    inputs = drawn(catalog, catalog.definition("mhc_pre_fused"))
    want = run_reference(catalog.definition("mhc_pre_fused"), inputs)

    def stock(name: str, *values: Any) -> Any:
        return load_entry(catalog.solution(f"{name}_stock"))(*values)

    residual, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat = inputs.values()
    mixes, _ = stock("mhc_norm_fn", residual, fn, rms_eps)
    pre, post, comb = stock("mhc_pre_split_mixes", mixes, scale, base, residual.shape[1], post_mult, pre_eps)
    found = post, stock("mhc_sinkhorn", comb, repeat, sinkhorn_eps), stock("mhc_pre_apply_mix", residual, pre)
    for value, expected in zip(found, want.values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_score_of_zero_opens_the_gate_by_half_without_a_gradient(catalog: Catalog) -> None:
    hidden = torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    key, value, weight = torch.ones_like(hidden), torch.ones(1, 8).bfloat16(), torch.ones(2, 8).bfloat16()
    definition = catalog.definition("engram_gate_fwd_save")
    saved = run_reference(
        definition, dict(zip(definition.inputs, (hidden, key, value, weight, weight, 1e-6, 1e-20), strict=True))
    )
    assert saved["gate"].tolist() == [[0.5, 0.5]]
    backward = catalog.definition("engram_gate_backward")
    values = torch.ones_like(hidden), hidden, key, value, weight, weight, 1e-6, 1e-20
    found = run_reference(backward, dict(zip(backward.inputs, values, strict=True)))
    assert found["grad_hidden"].eq(1).all()
    assert found["grad_k"].eq(0).all()
    assert found["grad_weight_embed"].eq(0).all()
