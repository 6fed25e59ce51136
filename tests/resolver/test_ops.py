"""The operators of the catalog as plain functions: tilegym_db.ops."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from docs_site import function_page
from raising import raises
from shipped_records import CATALOG
from torch.fx.experimental.proxy_tensor import make_fx

import tilegym_db
from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import NoSolutionError, NotFoundError, UsageError
from tilegym_db.ops.function import CatalogOperator, define, operator_function
from tilegym_db.records import Definition
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.shared_buffers import storage_dtype
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import run_reference

Shop = Any
X, WEIGHT = torch.arange(6.0).view(2, 3), torch.tensor([1.0, 2.0, 3.0])


def function_of(name: str, catalog: Catalog = CATALOG) -> Callable[..., Any]:
    return operator_function(catalog.definition(name), catalog)


def tiny(definition: Definition) -> tuple[Case, dict[str, Any]]:
    workload = next(item for item in CATALOG.workloads_for(definition.name) if "tiny" in item.tags)
    case = Case.of_workload(definition, workload, distribution="normal", seed=3)
    return case, draw_inputs(definition, case, "cpu")


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.records("name")
@pytest.mark.parametrize("name", CATALOG.definitions)
def test_operators_agree_with_references_in_value_and_layout(name: str) -> None:
    definition = CATALOG.definition(name)
    case, inputs = tiny(definition)
    wanted = run_reference(definition, inputs)
    given = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    outputs = dict(zip(definition.outputs, as_tuple(function_of(name)(*given.values())), strict=True))
    for key, value in outputs.items():
        assert value.shape == definition.shape_of(key, case.call.axes)
        assert value.dtype == storage_dtype(definition.dtype_of(key, case.call.dtypes))
        assert same_bytes(value, wanted[key])
        if key in definition.layouts:
            assert value.stride() == definition.strides_of(key, case.call.axes)
    for source, target in definition.in_place.items():
        assert outputs[target] is given[source]
    unchanged = [key for key in definition.tensor_inputs if key not in definition.in_place]
    assert all(same_bytes(given[key], inputs[key]) for key in unchanged)
    addresses = {given[key].untyped_storage().data_ptr() for key in unchanged if given[key].numel()}
    assert not addresses & {value.untyped_storage().data_ptr() for value in outputs.values() if value.numel()}


def test_a_function_says_what_it_takes_and_gives() -> None:
    function = tilegym_db.ops.fused_add_rms_norm
    assert str(inspect.signature(function)) == (
        "(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: str = 'auto') "
        "-> tuple[torch.Tensor, torch.Tensor]"
    )
    assert "residual_out: [M, N] of T = " in str(function.__doc__)
    assert "(residual, overwritten)" in str(function.__doc__)
    assert "h200: " in str(function.__doc__).partition("Fastest verified kernels:")[2]
    assert function is tilegym_db.ops.fused_add_rms_norm
    assert pickle.loads(pickle.dumps(function)) is function
    assert {"rms_norm", "gemm", "topk_gate"} <= set(dir(tilegym_db.ops))
    assert inspect.signature(tilegym_db.ops.topk_gate).parameters["top_k"].annotation is int


@pytest.mark.turn("tilegym_db/ops/")  # compiles, or starts a process
def test_help_of_an_open_operator_names_the_reference() -> None:
    served = {"rms_norm", "topk_gate", "gemm_fp8_blockwise"}
    unserved = {name for name, definition in Catalog.default().definitions.items() if definition.is_open}
    texts = {name: getattr(tilegym_db.ops, name).__doc__ for name in served | unserved}
    assert {name for name, text in texts.items() if "none yet; the reference runs" in text} == unserved


def test_page_of_operators_has_each_with_its_arguments() -> None:
    text = function_page.page_text()
    for name, definition in CATALOG.definitions.items():
        section = text.partition(f"\n### {name}\n\n```text\n{name}(")[2].partition("\n### ")[0]
        signature = section.partition("\n```\n")[0]
        assert [part.partition(":")[0] for part in signature.partition(")")[0].split(", ")] == list(definition.inputs)
        assert definition.description in section
        for tensor in (*definition.inputs, *definition.outputs):
            assert f"\n- `{tensor}`: " in section


def test_a_name_that_is_no_operator_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"'rms_nrom'.*'rms_norm'"):
        _ = tilegym_db.ops.rms_nrom
    assert not hasattr(tilegym_db.ops, "__wrapped__")


BAD_CALLS = {
    "dimensions": ((X[0], WEIGHT, 0.5), "'x' of scale_rows"),
    "size": ((X, WEIGHT[:2], 0.5), "'weight' has size 2.*N = 3"),
    "dtype": ((X, WEIGHT.double(), 0.5), "'weight'.*float32.*float64"),
    "no tensor": ((None, WEIGHT, 0.5), "'x'.*NoneType"),
    "no number": ((X, WEIGHT, "half"), "'eps'.*float.*str"),
    "a list": ((X, WEIGHT, [0.5]), "'eps'.*float.*list"),
    "a flag": ((X, WEIGHT, True), "'eps'.*float.*bool"),
    "a tensor": ((X, WEIGHT, X), "'eps'.*float.*Tensor"),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("call", BAD_CALLS)
def test_an_argument_that_does_not_fit_is_named(shop: Shop, published: None, call: str, backend: str) -> None:
    arguments, facts = BAD_CALLS[call]
    with pytest.raises(UsageError, match=facts):
        function_of("scale_rows", shop.catalog)(*arguments, backend=backend)


def test_a_size_that_is_a_scalar_binds_its_axis() -> None:
    scores = torch.randn(3, 8)
    assert tilegym_db.ops.topk_gate(scores, 2).shape == (3, 2)
    for wrong, facts in ((-1, "'top_k' of topk_gate.*'K'"), (9, "E >= K")):
        with pytest.raises(UsageError, match=facts):
            tilegym_db.ops.topk_gate(scores, wrong)
    with raises(UsageError, "scalar_type", "'top_k'", "int", "float"):
        tilegym_db.ops.topk_gate(scores, 2.0)


# -- kernels ---------------------------------------------------------------------------------------------------------------

NINE = "def run(x, weight, eps, out, *, BIAS=0):\n    out.fill_(9 + BIAS)\n"


@pytest.fixture
def published(shop: Shop) -> SolutionFiles:
    """A kernel that is verified at 2x3 and writes what no reference would."""
    files = shop.add("scale_rows", "scale_rows_nine", NINE)
    shop.publish(
        [
            shop.entry(
                "scale_rows", {"M": 2, "N": 3}, [shop.candidate(files, config={"BIAS": 1})], dtypes={"T": "float32"}
            )
        ]
    )
    return files


def test_verified_kernel_serves_the_calls_it_is_verified_for(shop: Shop, published: SolutionFiles) -> None:
    function = function_of("scale_rows", shop.catalog)
    assert function(X, WEIGHT, 0.5).eq(10).all()
    wanted = X * WEIGHT + 0.5
    assert torch.equal(function(X, WEIGHT, 0.5, backend="reference"), wanted)
    assert torch.equal(function(X.repeat(8, 1), WEIGHT, 0.5), wanted.repeat(8, 1))
    half = function(X.bfloat16(), WEIGHT.bfloat16(), 0.5)
    assert torch.equal(half, (X * WEIGHT + 0.5).bfloat16())
    assert function(X.t().contiguous().t(), WEIGHT, 0.5).eq(wanted).all()  # columns: it was verified for rows


def test_a_backend_by_name_is_that_solution_or_an_error(shop: Shop, published: SolutionFiles) -> None:
    other = shop.add("scale_rows", "scale_rows_other", NINE)
    function = function_of("scale_rows", shop.catalog)
    assert function(X, WEIGHT, 0.5, backend=published.name).eq(10).all()
    for name, value in ((published.name, X.repeat(8, 1)), (other.name, X)):
        with raises(NoSolutionError, "call_unsupported", name, "scale_rows"):
            function(value, WEIGHT, 0.5, backend=name)
    with pytest.raises(NotFoundError, match=r"'scale_rows_nin'.*'scale_rows_nine'"):
        function(X, WEIGHT, 0.5, backend="scale_rows_nin")
    elsewhere = shop.add("halves", "halves_own", "def run(x, swap, out): ...\n")
    with raises(UsageError, "solution_of_other_definition", elsewhere.name, "halves"):
        function_of("scale_rows", shop.catalog)(X, WEIGHT, 0.5, backend=elsewhere.name)


def test_a_kernel_whose_source_changed_is_not_run(shop: Shop, published: SolutionFiles) -> None:
    shop.add("scale_rows", published.name, NINE + "# changed\n")
    function = function_of("scale_rows", shop.catalog)
    assert torch.equal(function(X, WEIGHT, 0.5), X * WEIGHT + 0.5)
    with raises(NoSolutionError, "call_unsupported"):
        function(X, WEIGHT, 0.5, backend=published.name)


def test_a_kernel_that_fails_leaves_the_call_to_the_reference(shop: Shop) -> None:
    files = shop.add("scale_rows", "scale_rows_broken", "def run(x, weight, eps, out):\n    raise ValueError('no')\n")
    shop.publish([shop.entry("scale_rows", {"M": 2, "N": 3}, [shop.candidate(files)], dtypes={"T": "float32"})])
    function = function_of("scale_rows", shop.catalog)
    with pytest.warns(RuntimeWarning, match="scale_rows_broken"):
        found = function(X, WEIGHT, 0.5)
    assert torch.equal(found, X * WEIGHT + 0.5)


def test_in_place_output_is_the_input_for_every_backend(shop: Shop) -> None:
    files = shop.add(
        "add_into", "add_into_own", "def run(x, total, out):\n    total.add_(x)\n    out.copy_(2 * total)\n"
    )
    shop.publish([shop.entry("add_into", {"M": 2}, [shop.candidate(files)])])
    function = function_of("add_into", shop.catalog)
    for size in (2, 7):  # a kernel, the reference
        x, total = torch.ones(size), torch.arange(float(size))
        out, after = function(x, total)
        assert after is total
        assert torch.equal(total, torch.arange(float(size)) + 1)
        assert torch.equal(out, 2 * total)


def test_operator_with_only_in_place_outputs_returns_them(shop: Shop) -> None:
    shop.define(
        "double",
        axes={"M": {"type": "var"}},
        inputs={"x": {"shape": ["M"], "dtype": "float32"}},
        outputs={"x_out": {"shape": ["M"], "dtype": "float32"}},
        in_place={"x": "x_out"},
        reference="def run(x):\n    return 2 * x\n",
    )
    files = shop.add("double", "double_own", "def run(x):\n    x.mul_(2)\n")
    shop.publish([shop.entry("double", {"M": 2}, [shop.candidate(files)])])
    function = function_of("double", shop.catalog)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for call in (function, compiled):
        for size in (2, 5):
            x = torch.ones(size)
            assert call(x) is x or torch.equal(call(torch.ones(size)), 2 * torch.ones(size))
            assert x.eq(2).all()


# -- derivatives and transforms ------------------------------------------------------------------------------------------


def test_call_that_may_need_a_derivative_runs_the_reference(shop: Shop, published: SolutionFiles) -> None:
    function = function_of("scale_rows", shop.catalog)
    weight = WEIGHT.clone().requires_grad_()
    found = function(X, weight, 0.5)
    assert torch.equal(found, X * weight + 0.5)
    found.sum().backward()
    assert torch.equal(weight.grad, X.sum(0))
    with torch.no_grad():
        assert function(X, weight, 0.5).eq(10).all()
    with raises(NoSolutionError, "derivative_missing", "scale_rows_nine"):
        function(X, weight, 0.5, backend=published.name)
    derivative = torch.func.grad(lambda value: function(X, value, 0.5).sum())(WEIGHT)
    assert torch.equal(derivative, X.sum(0))
    _, tangent = torch.func.jvp(lambda value: function(X, value, 0.5), (WEIGHT,), (torch.ones(3),))
    assert torch.equal(tangent, X)
    batched = torch.func.vmap(lambda value: function(value, WEIGHT, 0.5))(torch.stack([X, X + 1]))
    assert torch.equal(batched[1], (X + 1) * WEIGHT + 0.5)


# -- compiled code ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> tuple[list[torch.fx.GraphModule], Callable[..., Any]]:
    """The graphs that were made, and a backend that keeps them."""
    seen: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    return seen, keep


def targets(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_compiled_code_has_one_operator_that_a_kernel_serves(shop: Shop, published: SolutionFiles, graphs) -> None:
    seen, keep = graphs
    function = function_of("scale_rows", shop.catalog)
    compiled = torch.compile(lambda x, weight: function(x, weight, 0.5) + 1, fullgraph=True, backend=keep)
    assert compiled(X, WEIGHT).eq(11).all()
    (graph,) = seen
    assert [name for name in targets(graph) if "tilegym_db_ops.scale_rows" in name]
    assert torch.equal(compiled(X.repeat(8, 1), WEIGHT), (X * WEIGHT + 1.5).repeat(8, 1))  # the reference, at run time
    compiled(X.repeat(9, 1), WEIGHT)
    assert len(seen) == 2  # the second one is for any number of rows


@pytest.mark.turn("tilegym_db/ops/")  # compiles, or starts a process
def test_transform_in_compiled_code_equals_the_eager_one(shop: Shop, published: SolutionFiles) -> None:
    function = function_of("scale_rows", shop.catalog)
    torch._dynamo.reset()

    def slope(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda value: function(X, value, 0.5).sum())(weight)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda value: function(value, WEIGHT, 0.5))(x)

    stacked = torch.stack([X.repeat(2, 1), X.repeat(2, 1) + 1])  # no kernel is published for four rows
    assert torch.equal(torch.compile(slope, backend="aot_eager")(WEIGHT), X.sum(0))
    assert torch.equal(torch.compile(rows, backend="aot_eager")(stacked), stacked * WEIGHT + 0.5)


@pytest.mark.parametrize("how", ["reference", "gradient"])
def test_compiled_code_looks_into_the_reference(shop: Shop, published: SolutionFiles, graphs, how: str) -> None:
    seen, keep = graphs
    function = function_of("scale_rows", shop.catalog)
    weight = WEIGHT.clone().requires_grad_(how == "gradient")
    backend = "reference" if how == "reference" else "auto"
    compiled = torch.compile(lambda x, w: function(x, w, 0.5, backend=backend), fullgraph=True, backend=keep)
    found = compiled(X, weight)
    assert torch.equal(found, X * WEIGHT + 0.5)
    assert not [name for name in targets(seen[0]) if "tilegym_db_ops" in name]
    if how == "gradient":
        found.sum().backward()
        assert torch.equal(weight.grad, X.sum(0))


def test_compiled_code_sees_what_is_overwritten(shop: Shop, graphs) -> None:
    function = function_of("add_into", shop.catalog)

    def step(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        before = total + 0
        out, after = function(x, total)
        return out + after - before

    total = torch.arange(4.0)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(torch.ones(4), total)
    assert torch.equal(total, torch.arange(4.0) + 1)
    assert torch.equal(found, 2 * total + 1)


@pytest.mark.parametrize(
    "name", ["rms_norm", "fused_add_rms_norm", "topk_gate", "per_token_cast_ue8m0", "inplace_unique_group_indices"]
)
def test_the_operator_in_a_graph_keeps_what_it_promises(name: str) -> None:
    definition = CATALOG.definition(name)
    _, inputs = tiny(definition)
    defined = define(CatalogOperator(definition, CATALOG))
    torch.library.opcheck(defined, (*inputs.values(), "auto"), test_utils=("test_schema", "test_faketensor"))


def test_a_tracer_sees_the_operator(shop: Shop, published: SolutionFiles) -> None:
    function = function_of("scale_rows", shop.catalog)
    graph = make_fx(lambda x, weight: function(x, weight, 0.5))(X, WEIGHT)
    assert any("tilegym_db_ops.scale_rows" in name for name in targets(graph))
    assert graph(X, WEIGHT).eq(10).all()


def test_a_torchscript_trace_records_the_operator(shop: Shop, published: SolutionFiles) -> None:
    function = function_of("scale_rows", shop.catalog)
    traced = torch.jit.trace(lambda x: function(x, WEIGHT, 0.5), (X,), check_trace=False)
    assert "tilegym_db_ops::scale_rows" in str(traced.graph)  # a kernel would leave a constant


def test_an_input_that_is_called_as_the_option_is_refused(shop: Shop) -> None:
    shop.define(
        "odd",
        axes={"M": {"type": "var"}},
        inputs={"backend": {"shape": ["M"], "dtype": "float32"}},
        outputs={"out": {"shape": ["M"], "dtype": "float32"}},
        reference="def run(backend):\n    return backend + 1\n",
    )
    with raises(UsageError, "input_name_reserved", "'backend'"):
        function_of("odd", shop.catalog)
