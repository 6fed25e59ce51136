"""Foreign work is usable here: adapted, drawn, run in the sandbox, judged by our gates and by its own rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_sets import (
    SCALE,
    SOLUTION,
    TRACES,
    WORKLOADS,
    Tree,
    definition,
    lines,
    of_workload,
    solution,
    trace,
    workload,
)
from raising import raises
from safetensors.torch import save_file

from tilegym_db.errors import RecordError
from tilegym_db.interchange.adapt import Adapted, adapted_definition, adapted_solution, native_name
from tilegym_db.interchange.importing import import_data_set
from tilegym_db.judging.judging import ForeignRule, compared, rule_for, summary
from tilegym_db.records.expressions import Unknown, holds
from tilegym_db.store.imported import DataSet, StoredRecord

TRITON = """import torch, triton
import triton.language as tl


@triton.jit
def kernel(x, w, out, eps, N: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, N)
    tl.store(out + row * N + column, tl.load(x + row * N + column) * tl.load(w + column) + eps)


def run(x, w, eps):
    out = torch.empty_like(x)
    kernel[(x.shape[0],)](x, w, out, eps, N=8)
    return out
"""


@pytest.mark.slow
def test_foreign_solutions_get_our_verdict_beside_theirs(tree: Tree, home: Path) -> None:
    """Python and returning Triton code, on a safetensors input under a constraint on contents, and CUDA that is not run."""
    from tilegym_db.judging.judging import judge_data_set, keep_judgements, kept_judgements
    from tilegym_db.measurement.machine import select_machine

    constrained = definition(constraints=["M >= 1", "x[0, 0].item() == 2"])
    tree.write("definitions/scale/scale_n8.json", constrained)
    (tree.root / "blob").mkdir()
    save_file({"x": torch.full((4, 8), 2.0)}, tree.root / "blob" / "x.safetensors")
    given = {"type": "safetensors", "path": "./blob/x.safetensors", "tensor_key": "x"}
    tree.write(WORKLOADS, lines(of_workload(workload(x=given)), of_workload(workload("random"))))
    sources: dict[str, tuple[str, dict[str, Any]]] = {
        "triton": (TRITON, {"language": "triton"}),
        "wrong": (SCALE.replace("* w", "* w * 1.001"), {}),
        "raises": ("def run(x, w, eps):\n    raise ValueError('no')\n", {}),
    }
    for name, (content, spec) in sources.items():
        tree.write(SOLUTION.replace("scale_torch", name), solution(name, content, **spec))
    cuda = solution("cuda", "void run();", language="cuda", entry_point="main.py::run")
    tree.write(SOLUTION.replace("scale_torch", "cuda"), cuda)
    tree.write(TRACES, lines(trace(), trace("wrong"), trace("raises", "RUNTIME_ERROR")))
    found = import_data_set(tree.root).data_set
    judgements = judge_data_set(found, select_machine("cpu"))
    on_file = {item.solution: item for item in judgements if item.workload == "w-1"}
    assert {name: item.status for name, item in on_file.items()} == {
        "scale_torch": "PASSED", "triton": "PASSED", "wrong": "INCORRECT_NUMERICAL", "raises": "RUNTIME_ERROR",
        "cuda": "NOT_RUN",
    }  # fmt: skip
    assert on_file["scale_torch"].latency_us
    assert on_file["scale_torch"].oracle == "fp64"
    assert on_file["triton"].adapted
    assert (on_file["wrong"].rule, on_file["wrong"].rule_passed) == ("flashinfer-bench default", True)
    assert "does not build C++ or CUDA" in on_file["cuda"].reason
    broken = {item.reason for item in judgements if item.workload == "random"}
    assert broken == {"the contents break the constraint x[0, 0].item() == 2."}

    keep_judgements(found, judgements)
    pairs = compared(found, kept_judgements(found))
    agreement = {pair.solution: pair.agreement for pair in pairs if pair.workload == "w-1"}
    assert agreement["scale_torch"] == agreement["raises"] == "agree"
    assert agreement["wrong"] == "we fail it"
    assert summary(pairs)["we fail it"] == 1


@pytest.mark.turn("tilegym_db/judging/")  # judges in workers
def test_solution_without_its_entry_function_stops_no_other(tree: Tree, home: Path) -> None:
    from tilegym_db.judging.judging import judge_data_set, keep_judgements, kept_judgements
    from tilegym_db.measurement.machine import select_machine

    bad = SOLUTION.replace("scale_torch", "bad")
    tree.write(bad, solution("bad", "def other(x, w, eps):\n    return x\n"))
    sources = [{"path": "main.py", "content": SCALE}, {"path": "main.py/x.py", "content": SCALE}]
    clash = SOLUTION.replace("scale_torch", "clash")
    tree.write(clash, {**solution("clash"), "sources": sources})
    found = import_data_set(tree.root).data_set
    judge_data_set(found, select_machine("cpu"), observer=lambda judgement: keep_judgements(found, [judgement]))
    judgements = {(item.solution, item.workload): item for item in kept_judgements(found)}
    assert judgements["scale_torch", "w-1"].status == "PASSED"
    assert judgements["bad", "w-1"].status == judgements["clash", "w-1"].status == "NOT_RUN"
    reason = judgements["bad", "w-1"].reason
    assert reason == f"{bad}: entry_point 'run' is missing in 'main.py', which defines other."
    assert judgements["clash", "w-1"].reason.startswith(f"{clash}: its sources cannot be written")


def test_an_input_that_cannot_be_allocated_is_named(tree: Tree, home: Path) -> None:
    from tilegym_db.judging.judging import draw_contents

    inputs = {**definition()["inputs"], "x": {"shape": ["M", "M"], "dtype": "float32"}}
    tree.write("definitions/scale/scale_n8.json", definition(inputs=inputs))
    found, given, _ = adapted(tree)
    assert isinstance(given, Adapted)
    with raises(RecordError, "inputs_not_drawable", "inputs.x", "[1099511627776, 1099511627776] float32"):
        draw_contents(found, given.definition, workload(m=1 << 40), 0, "cpu")


@pytest.mark.turn("tilegym_db/judging/")  # judges in workers
def test_workload_beyond_memory_leaves_the_others_judged(tree: Tree, home: Path) -> None:
    """Every tensor of the large one could be allocated; together, the kernel would end the process."""
    from tilegym_db.judging.judging import judge_data_set
    from tilegym_db.measurement.machine import select_machine
    from tilegym_db.sandbox.processes import free_memory

    tree.write(WORKLOADS, lines(of_workload(workload("large", free_memory() // 100)), of_workload(workload())))
    judgements = judge_data_set(import_data_set(tree.root).data_set, select_machine("cpu"))
    assert {item.workload: item.status for item in judgements} == {"large": "NOT_RUN", "w-1": "PASSED"}
    (reason,) = (item.reason for item in judgements if item.workload == "large")
    assert "GB of memory" in reason


def test_a_judgement_whose_reason_holds_a_line_separator_is_kept(tree: Tree, home: Path) -> None:
    from tilegym_db.judging.judging import Judgement, keep_judgements, kept_judgements

    found = import_data_set(tree.root).data_set
    judgement = Judgement("scale_n8", "scale_torch", "w-1", "cpu", "RUNTIME_ERROR", "first\u2028second\x85third")
    keep_judgements(found, [judgement])
    assert kept_judgements(found) == [judgement]


SAMPLER = "import torch\n\ndef run(probs, top_k):\n    return torch.multinomial(probs, 1)[:, 0]\n"


def test_honest_samplers_are_not_run_rather_than_failed(tree: Tree, home: Path) -> None:
    from tilegym_db.judging.judging import judge_data_set
    from tilegym_db.measurement.machine import select_machine

    record = definition(
        name="top_k_sampling_from_probs_v8",
        op_type="sampling",
        axes={"M": {"type": "var"}, "V": {"type": "const", "value": 8}},
        inputs={"probs": {"shape": ["M", "V"], "dtype": "float32"}, "top_k": {"shape": ["M"], "dtype": "int32"}},
        outputs={"samples": {"shape": ["M"], "dtype": "int64"}},
        reference=SAMPLER,
    )
    indexer = {**record, "name": "dsa_topk_indexer_fp8", "op_type": "dsa"}
    inputs = {"probs": {"type": "random"}, "top_k": {"type": "random"}}
    for item in (record, indexer):
        call = {**of_workload({"uuid": "p", "axes": {"M": 4}, "inputs": inputs}), "definition": item["name"]}
        tree.write(f"definitions/{item['op_type']}/{item['name']}.json", item)
        tree.write(f"workloads/{item['op_type']}/{item['name']}.jsonl", lines(call))
        answer = {**solution(f"of_{item['op_type']}", SAMPLER), "definition": item["name"]}
        tree.write(f"solutions/someone/{item['op_type']}/{item['name']}/{answer['name']}.json", answer)
    found = import_data_set(tree.root).data_set
    names = [record["name"], indexer["name"]]
    judgements = {item.solution: item for item in judge_data_set(found, select_machine("cpu"), names=names)}
    assert {item.status for item in judgements.values()} == {"NOT_RUN"}
    assert "as a distribution" in judgements["of_sampling"].reason
    assert "by their scores" in judgements["of_dsa"].reason


def adapted(tree: Tree) -> tuple[DataSet, Adapted | str, StoredRecord]:
    found = import_data_set(tree.root).data_set
    return found, adapted_definition(found, found.of_kind("definition")[0]), found.of_kind("solution")[0]


def test_constraints_over_sizes_and_contents_are_distinguished(tree: Tree, home: Path) -> None:
    tree.write(
        "definitions/scale/scale_n8.json",
        definition(constraints=["M >= 1", "M == x.shape[0]", "M <= 2 * len(x)", "M == x[0]"]),
    )
    _, given, _ = adapted(tree)
    assert isinstance(given, Adapted)
    assert given.definition.constraints == ("M >= 1", "M <= 2 * (M)")
    assert given.tensor_constraints == ("M == x[0]",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outputs": {"out": {"shape": None, "dtype": "float32"}}}, "is a Python scalar"),
        ({"outputs": {"out": {"shape": ["M"], "dtype": "float4_e2m1"}}}, "packing is not stated"),
        ({"inputs": {}}, "no inputs"),
    ],
)
def test_what_cannot_be_called_says_why(tree: Tree, home: Path, changes: dict[str, Any], reason: str) -> None:
    tree.write("definitions/scale/scale_n8.json", definition(**changes))
    _, given, _ = adapted(tree)
    assert isinstance(given, str)
    assert reason in given


def test_entry_point_is_added_only_if_the_calling_style_needs_it(tree: Tree, home: Path) -> None:
    found, given, item = adapted(tree)
    assert isinstance(given, Adapted)
    plain = adapted_solution(found, item, given)
    spec = {**item.record["spec"], "language": "triton"}
    returning = adapted_solution(found, dataclasses.replace(item, record={**item.record, "spec": spec}), given)
    assert not isinstance(plain, str)
    assert not isinstance(returning, str)
    assert (plain.added_entry, returning.added_entry) == (False, True)
    assert returning.record.spec.destination_passing_style


def test_cutile_kernel_exported_as_python_is_imported_as_cutile(tree: Tree, home: Path) -> None:
    found, given, item = adapted(tree)
    assert isinstance(given, Adapted)
    spec = {**item.record["spec"], "dependencies": ["cuda-tile"]}
    adapted_one = adapted_solution(found, dataclasses.replace(item, record={**item.record, "spec": spec}), given)
    assert not isinstance(adapted_one, str)
    assert adapted_one.record.spec.language == "cutile"


def test_names_that_our_records_cannot_have_stay_apart() -> None:
    assert native_name("gemm_n128") == "gemm_n128"
    assert len({native_name(name) for name in ("Gemm N", "gemm n", "gemm-n", "GEMM N")}) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("total == indptr[-1].item()", True),
        ("len(indptr) == batch + 1", True),
        ("indptr.shape[0] == batch + 1 and indptr[0] == 0", True),
        ("(indptr[1:] >= indptr[:-1]).all()", True),
        ("indptr.max() < total", False),
        ("table[1, 0] == 3 and table[:, 1].sum().item() == 6", True),
    ],
)
def test_constraints_on_contents_are_evaluated(text: str, expected: bool) -> None:
    values = {"indptr": torch.tensor([0, 3, 7]), "batch": 2, "total": 7, "table": torch.tensor([[1, 2], [3, 4]])}
    assert holds(text, values) is expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')",
        "x.__class__",
        "open('a')",
        "unknown == 1",
        "x.tolist()",
        "[y for y in x]",
        "x[",
        "x @ x",
    ],
)
def test_nothing_else_is_evaluated(text: str) -> None:
    with pytest.raises(Unknown):
        holds(text, {"x": torch.zeros(2)})


@pytest.mark.parametrize(
    ("rule", "found", "passes"),
    [
        (ForeignRule("both", 1e-2, 1e-2), 100.5, True),  # beyond the absolute bound, within the relative one
        (ForeignRule("both", 1e-2, 1e-2), 102.0, False),
        (ForeignRule("sum", 1e-2, 1e-2, both=False), 101.0, True),
        (ForeignRule("sum", 1e-2, 1e-2, both=False), 101.02, False),
        (ForeignRule("share", 1e-2, 1e-2, share=0.7), 200.0, True),
        (ForeignRule("cap", 1e-2, 1e-2, share=0.7, cap=50.0), 200.0, False),
        (ForeignRule("both", 1e9, 1e9), float("inf"), False),
        (ForeignRule("both", 1e9, 1e9), float("nan"), False),
    ],
)
def test_the_tolerances_of_others_mean_what_they_mean_there(rule: ForeignRule, found: float, passes: bool) -> None:
    wanted = {"out": torch.full((4,), 100.0)}
    given = {"out": torch.tensor([100.0, 100.0, 100.0, found])}
    assert (rule.problem(given, wanted) is None) == passes


def test_each_definition_has_the_rule_of_its_project(tree: Tree, home: Path) -> None:
    item = import_data_set(tree.root).data_set.of_kind("definition")[0]
    low_bit = dataclasses.replace(item, name="moe_fp8_block_scale_x")
    outputs = {"samples": {"shape": ["M"], "dtype": "int64"}}
    sampling = dataclasses.replace(item, record={**item.record, "op_type": "sampling", "outputs": outputs})
    masking = dataclasses.replace(item, record={**item.record, "op_type": "sampling"})
    names = [rule_for("flashinfer-trace", record, {}) for record in (item, low_bit)]
    assert [rule.name for rule in names if isinstance(rule, ForeignRule)] == [
        "flashinfer-bench default",
        "flashinfer-bench low-bit",
    ]
    assert isinstance(rule_for("flashinfer-trace", sampling, {}), str)
    assert isinstance(rule_for("flashinfer-trace", masking, {}), ForeignRule)
    sol = rule_for("sol-execbench", item, {"tolerance": {"max_atol": 0.5}})
    assert isinstance(sol, ForeignRule)
    assert (sol.name, sol.atol, sol.share) == ("sol-execbench", 0.5, 0.99)
