"""Every shipped Definition says where its maths comes from, runs, and agrees with its independent formulation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from tilegym_db.catalog import Catalog
from tilegym_db.records import Definition, Workload
from tilegym_db.verify.comparison import base_errors, check_lifted, check_outputs
from tilegym_db.verify.ranking import followed
from tilegym_db.verify.reference import Lifted, oracle, run_reference
from tilegym_db.verify.torch_dtypes import storage_dtype

Draw = Callable[[Definition, Workload], dict[str, Any]]
Tiny = tuple[Definition, Workload]

PERMALINK = re.compile(r"^# Source: https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/[\w./-]+#L\d+(-L\d+)?$")
CORE = {
    "rms_norm", "rms_norm_fp32", "rms_norm_gemma", "qk_rms_norm", "fused_add_rms_norm", "silu_and_mul", "swiglu",
    "gelu_tanh_and_mul", "rope_neox", "rope_partial", "softmax", "gemm", "rms_norm_backward", "rms_norm_backward_x",
    "swiglu_backward", "rope_neox_backward",
}  # fmt: skip
PLANNED = {
    "topk_gate", "topk_softmax", "topk_then_softmax", "topk_softmax_groups", "topk_sigmoid_bias_groups",
    "per_token_cast", "per_block_cast", "per_channel_cast", "batched_transpose", "engram_gate_fwd", "mhc_sinkhorn",
    "per_token_cast_ue8m0", "per_token_cast_fp4", "per_token_cast_e5m6", "softmax_backward", "moe_experts",
}  # fmt: skip

BY_LIBRARIES = {"attention_prefill", "attention_decode"}  # by libraries first, and in Triton; not in every language


def test_catalog_holds_the_core_operators_and_lists_the_planned_ones_as_open(catalog: Catalog) -> None:
    open_ones = {name for name, record in catalog.definitions.items() if record.is_open}
    verified = {name for name, record in catalog.definitions.items() if "status:verified" in record.tags}
    assert verified >= CORE
    assert open_ones >= PLANNED
    assert open_ones | verified | BY_LIBRARIES == set(catalog.definitions)
    assert {name for name, record in catalog.definitions.items() if "status:library" in record.tags} == BY_LIBRARIES
    assert not open_ones & verified


def test_lock_matches_every_definition(catalog: Catalog) -> None:
    assert catalog.lock_findings() == []


def test_reference_names_its_upstream_source_at_a_fixed_commit(definition: Definition) -> None:
    sources = [line for line in definition.reference.splitlines() if line.startswith("# Source:")]
    assert sources
    assert [line for line in sources if not PERMALINK.match(line)] == []


def test_axes_and_tensors_are_described(definition: Definition) -> None:
    described = {name: axis.description for name, axis in definition.axes.items()}
    described |= {name: spec.description for name, spec in (*definition.inputs.items(), *definition.outputs.items())}
    assert [name for name, text in described.items() if not text] == []
    assert definition.description


def test_every_planted_error_changes_the_reference(definition: Definition) -> None:
    assert definition.self_test is not None
    changed = {definition.reference.replace(error.find, error.replace) for error in definition.self_test.planted_errors}
    assert len(changed) == len(definition.self_test.planted_errors)
    assert definition.reference not in changed


def test_reference_gives_the_declared_shapes_and_dtypes(tiny: Tiny, drawn: Draw) -> None:
    definition, workload = tiny
    axes, dtypes = definition.bind_axes(workload.axes), definition.bind_dtypes(workload.dtypes)
    for name, value in run_reference(definition, drawn(definition, workload)).items():
        assert tuple(value.shape) == definition.shape_of(name, axes)
        assert value.dtype == storage_dtype(definition.dtype_of(name, dtypes))


def test_independent_formulation_agrees_in_the_dtype(tiny: Tiny, drawn: Draw) -> None:
    definition, workload = tiny
    inputs, dtypes = drawn(definition, workload), definition.bind_dtypes(workload.dtypes)
    truth = oracle(definition, inputs)
    e_base = base_errors(definition, dtypes, run_reference(definition, inputs), truth)
    assert definition.self_test is not None
    found = run_reference(definition, inputs, source=definition.self_test.independent)
    for verdict in check_outputs(definition, dtypes, inputs, truth, found, e_base).values():
        assert verdict.passed, verdict.reason


def test_independent_formulation_agrees_in_fp64(lifted_tiny: Tiny, drawn: Draw) -> None:
    definition, workload = lifted_tiny
    inputs = drawn(definition, workload)
    lifted = {name: value.double() if _is_float(value) else value for name, value in inputs.items()}
    assert definition.self_test is not None
    with Lifted():
        values = run_reference(definition, lifted, source=definition.self_test.independent)
    truth = oracle(definition, inputs)
    if definition.follows:
        assert all(verdict.passed for verdict in check_lifted(definition, inputs, truth, values).values())
        truth = followed(definition, inputs, truth, values)
    for name in set(truth) - set(definition.gathers if definition.follows else ()):
        torch.testing.assert_close(values[name].double(), truth[name].double(), rtol=1e-6, atol=1e-9)


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
