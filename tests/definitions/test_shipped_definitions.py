"""Every shipped Definition says where its maths comes from, runs, and agrees with its independent formulation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from tilegym_db.catalog import Catalog, writers
from tilegym_db.published.input_files import read_lines, shipped_traces
from tilegym_db.records import Definition, Workload
from tilegym_db.sandbox.shared_buffers import same_bytes, storage_dtype
from tilegym_db.verification.comparison import check_lifted, check_outputs, followed, reference_errors
from tilegym_db.verification.oracle import Lifted, lift, oracle, run_lifted, run_reference
from tilegym_db.verification.self_test import self_test, tiny_workloads

Draw = Callable[[Definition, Workload], dict[str, Any]]
Tiny = tuple[Definition, Workload]

PERMALINK = re.compile(r"^# Source: https://github\.com/[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/[\w./-]+#L\d+(-L\d+)?$")
CITING_A_WHOLE_FILE = {
    "fused_add_layer_norm", "gelu", "gelu_new", "layer_norm", "layer_norm_backward",
    "mla_expanded_decode", "quick_gelu", "relu_squared", "sparsemixer_top2", "topk_softmax_rounded",
}  # fmt: skip
"""Operators whose traces were measured before their source named lines; their next version names them."""
STATUS = re.compile(r"status:(open|library|verified)")


def test_operator_is_open_unless_it_has_published_traces(
    catalog: Catalog,
) -> None:
    stated = {
        name: [match[1] for tag in record.tags if (match := STATUS.fullmatch(tag))]
        for name, record in catalog.definitions.items()
    }
    assert {name: status for name, status in stated.items() if len(status) != 1} == {}
    measured = set()
    for path in shipped_traces(catalog):
        traces = read_lines(path.read_bytes(), path)
        failed = {trace["solution_digest"] for trace in traces if trace["status"] != "PASSED"}
        kernels = [trace for trace in traces if trace.get("role", "kernel") == "kernel" and trace["status"] == "PASSED"]
        measured |= {trace["definition"] for trace in kernels if trace["solution_digest"] not in failed}
    assert {name for name, status in stated.items() if status != ["open"]} == measured
    assert {name for name, record in catalog.definitions.items() if record.is_open} == set(stated) - measured


def test_lock_matches_every_definition(catalog: Catalog) -> None:
    assert writers.lock_findings(catalog) == []


# These rules cost milliseconds an operator, so each test reads all of them every day and lists those that break it.


def test_reference_names_its_upstream_source_at_a_fixed_commit(catalog: Catalog) -> None:
    faults = {}
    for name, definition in catalog.definitions.items():
        sources = [line for line in definition.reference.splitlines() if line.startswith("# Source:")]
        lines = "#L1" if name in CITING_A_WHOLE_FILE else ""
        others = [line for line in sources if not PERMALINK.match(line + lines)]
        if others or not sources:
            faults[name] = others
    assert faults == {}


def test_axes_and_tensors_are_described(catalog: Catalog) -> None:
    faults = {}
    for name, record in catalog.definitions.items():
        described = {axis_name: axis.description for axis_name, axis in record.axes.items()}
        described |= {key: spec.description for key, spec in (*record.inputs.items(), *record.outputs.items())}
        missing = [key for key, text in {**described, "operator": record.description}.items() if not text]
        if missing:
            faults[name] = missing
    assert faults == {}


def test_every_planted_error_changes_the_reference(catalog: Catalog) -> None:
    faults = []
    for name, definition in catalog.definitions.items():
        assert definition.self_test is not None, name
        errors = definition.self_test.planted_errors
        changed = {definition.reference.replace(error.find, error.replace) for error in errors}
        if len(changed) != len(errors) or definition.reference in changed:
            faults.append(name)
    assert faults == []


def test_the_self_test_finds_nothing(definition: Definition, catalog: Catalog) -> None:
    workloads = tiny_workloads(definition, catalog.workloads_for(definition.name))
    assert [str(finding) for finding in self_test(definition, workloads)] == []


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
    e_base, _ = reference_errors(definition, dtypes, run_reference(definition, inputs), truth)
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
    if definition.follows or definition.sampled:
        assert all(verdict.passed for verdict in check_lifted(definition, inputs, truth, values).values())
        truth = followed(definition, inputs, truth, values)
    for name in set(truth) - set(definition.gathers if definition.follows else ()) - set(definition.sampled):
        torch.testing.assert_close(values[name].double(), truth[name].double(), rtol=1e-6, atol=1e-9)


def test_lifted_calls_give_the_bits_of_the_dispatch_mode(lifted_tiny: Tiny, drawn: Draw) -> None:
    definition, workload = lifted_tiny
    inputs = drawn(definition, workload)
    found = run_lifted(definition, inputs)
    with Lifted():
        values = run_reference(definition, lift(inputs))
    for name, value in values.items():
        assert (found[name].dtype, found[name].stride()) == (value.dtype, value.stride())
        assert same_bytes(found[name], value)


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
