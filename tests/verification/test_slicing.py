from __future__ import annotations

from typing import Any

import pytest
import torch
from shipped_records import CATALOG

from tilegym_db.records import Definition
from tilegym_db.records.workload import Case
from tilegym_db.verification.gates import check_output
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import (
    ORACLE_BYTES,
    as_written,
    largest_inside,
    oracle,
    run_lifted,
    run_reference,
    sliced,
)

SLICED = [name for name, record in CATALOG.definitions.items() if record.independent_axes]
GROUPED = [
    name
    for name, record in CATALOG.definitions.items()
    if record.serving is not None and any({*group} - {*record.independent_axes} for group in record.serving.independent)
]
PART_BY_HEAD = ["attention_prefill", "attention_sink_prefill", "mla_prefill", "attention_masked_prefill"]
TINY_BYTES = 1_000


def tiny_inputs(definition: Definition, contents: str) -> list[dict[str, Any]]:
    return [
        draw_inputs(definition, Case.of_workload(definition, workload, distribution=contents, seed=5), "cpu")
        for workload in CATALOG.workloads_for(definition.name)
        if "tiny" in workload.tags
    ]


@pytest.mark.records("name")
@pytest.mark.parametrize("name", SLICED)
def test_what_a_shipped_definition_declares_independent_is_so(name):
    definition = CATALOG.definition(name)
    evaluate = run_reference if definition.oracle == "as_written" else run_lifted
    evaluations = cases = 0

    def counted(*arguments: Any) -> dict[str, torch.Tensor]:
        nonlocal evaluations
        evaluations += 1
        return evaluate(*arguments)

    for inputs in tiny_inputs(definition, "normal"):
        cases += 1
        whole, parts = oracle(definition, inputs), sliced(definition, inputs, counted, budget_bytes=TINY_BYTES)
        assert list(parts) == list(whole)
        for output, value in whole.items():
            # A sum over tensors of another size may be taken in another order, here in fp64.
            assert parts[output].dtype == value.dtype
            torch.testing.assert_close(parts[output].double(), value.double(), rtol=1e-12, atol=1e-13, equal_nan=True)
    assert evaluations > cases  # some of them in parts


def test_sums_that_round_nowhere_have_the_same_bits_in_slices():
    definition = CATALOG.definition("gemm")
    for inputs in tiny_inputs(definition, "small_integers"):
        parts = oracle(definition, inputs, budget_bytes=TINY_BYTES)["out"]
        assert torch.equal(parts, oracle(definition, inputs)["out"])


def test_slice_of_the_reference_as_written_equals_the_whole():
    definition = CATALOG.definition("fused_add_rms_norm")
    for inputs in tiny_inputs(definition, "outliers"):
        before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        whole = as_written(definition, inputs)
        parts = as_written(definition, inputs, budget_bytes=TINY_BYTES)
        for output, value in whole.items():
            assert torch.equal(parts[output], value)
            assert parts[output].dtype == inputs["x"].dtype
        assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.fixture
def shapes_seen(operator):
    """Evaluate the operator with these changes within a budget, and give the shapes of ``x`` that were evaluated."""

    def see(budget_bytes: int, rows: int = 8, columns: int = 16, **changes: Any) -> list[tuple[int, ...]]:
        definition = operator(**changes)
        x, weight = torch.randn(rows, columns), torch.randn(columns)
        seen = []

        def run(record: Definition, inputs: Any) -> dict[str, torch.Tensor]:
            seen.append(tuple(inputs["x"].shape))
            return run_lifted(record, inputs)

        inputs = {"x": x, "weight": weight, "factor": 2.0}
        out = sliced(definition, inputs, run, budget_bytes=budget_bytes)["out"]
        assert check_output("out", out, run_lifted(definition, inputs)["out"], None).passed
        return seen

    return see


def test_an_evaluation_within_the_budget_is_not_cut(shapes_seen):
    assert shapes_seen(ORACLE_BYTES, independent_axes=["M", "N"]) == [(8, 16)]


def test_without_an_independent_axis_the_whole_is_evaluated(shapes_seen):
    assert shapes_seen(1) == [(8, 16)]


def test_halves_are_cut_until_they_fit(shapes_seen):
    estimate = (8 * 16 + 16 + 8 * 16) * 32
    assert shapes_seen(estimate, independent_axes=["M"]) == [(8, 16)]
    assert shapes_seen(estimate - 1, independent_axes=["M"]) == [(4, 16), (4, 16)]
    assert shapes_seen(1, rows=3, independent_axes=["M"]) == [(1, 16), (1, 16), (1, 16)]


def test_axis_that_saves_most_is_cut_first_and_then_the_other(shapes_seen):
    assert shapes_seen(5000, independent_axes=["M", "N"]) == [(8, 8), (8, 8)]  # the weight is cut along N too
    assert len(shapes_seen(1, rows=2, columns=2, independent_axes=["M", "N"])) == 4


def test_an_axis_inside_an_expression_is_never_cut(operator):
    packed = {"x": {"shape": ["M", "2*N"], "dtype": "T"}}
    body = "return x[:, : x.shape[1] // 2] * 1"
    definition = operator(body, inputs=packed, independent_axes=["N"], cost=None, self_test=None)
    x = torch.arange(24.0).reshape(2, 12)
    assert torch.equal(oracle(definition, {"x": x}, budget_bytes=1)["out"], x[:, :6].double())


def in_parts(definition: Definition, inputs: dict[str, Any], **budgets: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return the outputs, and the number of evaluations."""
    evaluations = 0

    def counted(record: Definition, part: Any) -> dict[str, torch.Tensor]:
        nonlocal evaluations
        evaluations += 1
        return (run_reference if record.oracle == "as_written" else run_lifted)(record, part)

    return sliced(definition, inputs, counted, **{"budget_bytes": ORACLE_BYTES, **budgets}), evaluations


@pytest.mark.records("name")
@pytest.mark.parametrize("name", GROUPED)
def test_shipped_axes_that_grow_together_are_independent(name):
    definition = CATALOG.definition(name)
    for inputs in tiny_inputs(definition, "normal"):
        whole, (parts, _) = oracle(definition, inputs), in_parts(definition, inputs, part_bytes=TINY_BYTES)
        for output, value in whole.items():
            assert parts[output].dtype == value.dtype
            torch.testing.assert_close(parts[output].double(), value.double(), rtol=1e-12, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("name", PART_BY_HEAD)
def test_attention_head_by_head_has_the_bits_of_the_whole(name):
    """With a key head for each query head, since the sums of a product depend on its number of rows."""
    definition = CATALOG.definition(name)
    for inputs in tiny_inputs(definition, "normal"):
        heads = inputs["q"].shape[1]
        inputs |= {key: inputs[key].repeat_interleave(heads // inputs[key].shape[1], dim=1) for key in ("k", "v")}
        whole, (parts, evaluations) = oracle(definition, inputs), in_parts(definition, inputs, part_bytes=TINY_BYTES)
        assert evaluations == inputs["q"].shape[0] * heads
        assert all(torch.equal(parts[output], value) for output, value in whole.items())
        written = sliced(definition, inputs, run_reference, budget_bytes=ORACLE_BYTES, part_bytes=TINY_BYTES)
        assert all(torch.equal(written[output], value) for output, value in as_written(definition, inputs).items())


def test_attention_within_the_bytes_of_its_scores_is_whole():
    definition = CATALOG.definition("attention_sink_prefill")
    q, k, v = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
    inputs = {"q": q, "k": k, "v": v, "sinks": torch.randn(4), "window": 9, "scale": 0.3}
    with_sink = 2 * 64 * 65
    assert largest_inside(definition, inputs) == with_sink
    assert in_parts(definition, inputs, part_bytes=32 * with_sink)[1] == 1
    assert in_parts(definition, inputs, part_bytes=32 * with_sink - 1)[1] == 4


def test_scores_of_a_long_prompt_are_seen_without_their_memory():
    definition, shape = CATALOG.definition("attention_sink_prefill"), (1, 8, 32768, 64)
    k = torch.empty(shape, device="meta")
    inputs = {"q": k.repeat(1, 8, 1, 1), "k": k, "v": k, "sinks": k[0, 0, :64, 0], "window": 128, "scale": 0.1}
    assert largest_inside(definition, inputs) == 8 * 32768 * 32769


OF_FOUR_ROWS = (
    "rows = x.unflatten(0, (-1, min(4, x.shape[0]))); return (rows - rows.sum(1, keepdim=True)).flatten(0, 1)"
)


@pytest.mark.parametrize(
    ("body", "evaluations"),
    [("return x * weight * factor", 8), ("return x - x.sum(0)", 1), (OF_FOUR_ROWS, 2)],
)
@pytest.mark.parametrize("scale", [1.0, 1e-20])
def test_group_is_parted_as_far_as_its_parts_are_independent(operator, body, evaluations, scale):
    serving = {"part": "norm", "code": [], "independent": [["M"]]}
    definition = operator(body, serving=serving, self_test=None)
    inputs = {"x": scale * torch.randn(8, 16), "weight": torch.randn(16), "factor": 2.0}
    found, times = in_parts(definition, inputs, part_bytes=1)
    assert torch.equal(found["out"], oracle(definition, inputs)["out"])
    assert times == evaluations
