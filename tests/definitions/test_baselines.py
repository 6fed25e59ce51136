"""The PyTorch baselines compute what their Definitions say, also on the strided tensors they accept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_db.backends.load import load_entry, unload_entry
from tilegym_db.catalog import Catalog, stock_of
from tilegym_db.records import Definition, Workload
from tilegym_db.records.definition import limits_for
from tilegym_db.records.workload import Case
from tilegym_db.verification.comparison import check_outputs, followed, reference_errors
from tilegym_db.verification.distributions import DISTRIBUTIONS
from tilegym_db.verification.gates import check_output
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import name_outputs, oracle, run_reference

EAGER = [
    "rms_norm_stock", "rms_norm_aten", "fused_add_rms_norm_stock", "fused_add_rms_norm_fp32_stock",
    "fused_add_rms_norm_gemma_stock", "silu_and_mul_stock", "swiglu_stock", "rope_neox_stock",
    "softmax_stock", "gemm_cublas", "rms_norm_fp32_stock", "rms_norm_fp32_aten", "rms_norm_gemma_stock", "qk_rms_norm_stock",
    "qk_rms_norm_aten", "gelu_tanh_and_mul_stock", "rope_partial_stock", "rms_norm_backward_stock", "rms_norm_backward_x_stock",
    "swiglu_backward_stock", "rope_neox_backward_stock", "attention_prefill_stock", "attention_decode_stock",
    "attention_prefill_math", "attention_decode_math", "topk_softmax_stock", "topk_then_softmax_stock",
    "topk_sigmoid_bias_groups_stock", "topk_softmax_groups_stock", "topk_sqrtsoftplus_bias_stock", "table_router_stock",
    "rope_half_tables_stock", "rope_pairs_stock", "rope_pairs_to_halves_stock", "rope_complex_pairs_stock",
    "rope_tail_pairs_stock", "attention_sink_prefill_stock", "attention_sink_decode_stock",
    "rms_norm_gated_silu_stock", "sigmoid_mul_stock", "causal_conv1d_stock", "causal_conv1d_bias_stock",
    "causal_conv1d_update_stock", "gdn_gates_stock",
]  # fmt: skip


def test_core_operator_has_one_baseline_for_all_model_calls(core: Definition, catalog: Catalog) -> None:
    stock = [entry for entry in catalog.solutions_for(core.name) if entry.record.spec.provides == "stock"]
    assert {entry.record.spec.role for entry in stock} == {"baseline"}
    (anything,) = [entry for entry in stock if not entry.record.spec.constraints]
    assert stock_of(stock) == anything
    for workload in catalog.workloads_for(core.name):
        dtypes, layouts = core.bind_dtypes(workload.dtypes), workload.layout_classes(core)
        assert anything.record.unsupported(core.bind_axes(workload.axes), dtypes, layouts) is None, workload


@pytest.mark.parametrize("name", ["rms_norm_compile", "rms_norm_gemma_compile", "swiglu_compile"])
def test_torch_compile_is_a_baseline_only(name: str, catalog: Catalog) -> None:
    spec = catalog.solution(name).record.spec
    assert (spec.role, spec.provides) == ("baseline", "compile")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["rms_norm_compile", "swiglu_compile"])
def test_torch_compile_runs_a_static_graph_of_every_shape(
    name: str, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PyTorch's own cache and its own limit of graphs; only the code generation is left out."""
    compiled: list[tuple[int, ...]] = []
    runs = 0

    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        compiled.append(
            tuple(next(item for item in inputs if isinstance(item, torch.Tensor) and item.dim() == 2).shape)
        )

        def run_graph(*arguments: Any) -> Any:
            nonlocal runs
            runs += 1
            return graph(*arguments)

        return run_graph

    torch.compiler.reset()
    entry = catalog.solution(name)
    unload_entry(entry)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        run = load_entry(entry)
    definition = catalog.definition(entry.record.definition)
    shapes = [(rows, 8 * rows) for rows in range(1, 21)]
    for shape in (*shapes, shapes[0]):
        tensors = {inputs: torch.randn(shape) for inputs in definition.tensor_inputs}
        if "weight" in tensors:
            tensors["weight"] = torch.randn(shape[1])
        given = [tensors.get(item, 1e-5) for item in definition.inputs]
        for _ in range(3):
            run(*given)
    unload_entry(entry)
    assert compiled == [*shapes, shapes[0]]  # once each, never for sizes in general
    assert runs == 3 * len(compiled)  # and never the eager code instead


@pytest.mark.records("name")
@pytest.mark.parametrize("distribution", sorted(DISTRIBUTIONS))
@pytest.mark.parametrize("name", EAGER)
def test_baseline_matches_the_oracle(name: str, distribution: str, catalog: Catalog) -> None:
    entry = catalog.solution(name)
    definition = catalog.definition(entry.record.definition)
    run = load_entry(entry)
    for workload in catalog.workloads_for(definition.name):
        if "tiny" in workload.tags:
            case = Case.of_workload(definition, workload, distribution=distribution, seed=7)
            _check(definition, workload, run, draw_inputs(definition, case, "cpu"))


def test_stock_norm_reads_padded_rows(catalog: Catalog) -> None:
    run = load_entry(catalog.solution("rms_norm_stock"))
    wide, weight = torch.randn(5, 96), torch.randn(64)
    assert torch.equal(run(wide[:, :64], weight, 1e-5), run(wide[:, :64].contiguous(), weight, 1e-5))


def _check(definition: Definition, workload: Workload, run: Callable[..., Any], inputs: dict[str, Any]) -> None:
    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    found = name_outputs(definition, run(*given.values()), given, definition.name)
    as_written, truth = run_reference(definition, inputs), oracle(definition, inputs)
    dtypes = definition.bind_dtypes(workload.dtypes)
    if definition.gathers or definition.sampled:
        e_base, _ = reference_errors(definition, dtypes, as_written, followed(definition, inputs, truth, as_written))
        for verdict in check_outputs(definition, dtypes, inputs, truth, found, e_base).values():
            assert verdict.passed, f"{workload.dtypes} {verdict.reason}"
        return
    for name, value in found.items():
        limits = limits_for(definition, definition.dtype_of(name, dtypes))
        if check_output(
            name, as_written[name], truth[name], limits
        ).passed:  # a case that defeats the reference proves nothing
            verdict = check_output(name, value, truth[name], limits)
            assert verdict.passed, f"{workload.dtypes} {verdict.reason}"
