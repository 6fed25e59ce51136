"""What is timed of operators whose ids or lengths decide how much there is to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from raising import raises
from shipped_records import CATALOG

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.errors import UsageError
from tilegym_db.measurement.audit import check_fresh_contents
from tilegym_db.measurement.reproduce import reproduce
from tilegym_db.measurement.runner import BufferPool
from tilegym_db.records import Definition, Workload
from tilegym_db.records.workload import Case
from tilegym_db.verification.expected import CONTENT_SETS, ExpectedCache, WorkloadContents, unusual_distributions
from tilegym_db.verification.inputs import draw_inputs, draws_spread, spreads_otherwise
from tilegym_db.verification.session import Verification, VerifiedWorkload
from tilegym_db.verification.verifier import Failure
from tilegym_db.verification.worker_handle import PROMOTION, WorkerHandle

ROWS, GROUPS = 248, 4


def workload_of(name: str, axes: dict[str, int], **scalars: float) -> tuple[Definition, Workload]:
    definition = Catalog.default().definition(name)
    dtypes = {variable: choices[0] for variable, choices in definition.dtypes.items()}
    inputs = {scalar: {"type": "scalar", "value": value} for scalar, value in scalars.items()}
    record = {"definition": name, "axes": axes, "dtypes": dtypes, "inputs": inputs}
    return definition, Workload.from_dict(record, "a test")


def contents_of(name: str, axes: dict[str, int], seed: int, **scalars: float) -> WorkloadContents:
    definition, workload = workload_of(name, axes, **scalars)
    return WorkloadContents.draw(definition, workload, seed, ExpectedCache(definition, "cpu"))


GROUPED_GEMM = "moe_grouped_gemm", {"S": ROWS, "K": 24, "N": 40, "E": GROUPS}


def grouped_gemm(seed: int) -> WorkloadContents:
    return contents_of(*GROUPED_GEMM, seed)


def lengths(offs: torch.Tensor) -> list[int]:
    return torch.diff(offs, prepend=offs.new_zeros(1)).tolist()


def test_every_timed_set_spreads_its_rows_as_a_model_does() -> None:
    contents = grouped_gemm(seed=7)
    assert len(contents.sets) == len(CONTENT_SETS)
    for expected in contents.sets:
        assert sum(lengths(expected.inputs["offs"])) == ROWS  # no tail without a group
        assert min(lengths(expected.inputs["offs"])) > ROWS // GROUPS // 2


def test_audited_contents_are_spread_like_the_timed_ones() -> None:
    for expected in grouped_gemm(seed=7).fresh(0, 8):
        assert min(lengths(expected.inputs["offs"])) > ROWS // GROUPS // 2


def test_large_fresh_contents_are_drawn_again_when_they_are_used() -> None:
    kept, large = grouped_gemm(seed=7), grouped_gemm(seed=7)
    large.kept_bytes = 0
    for one, other in zip(kept.fresh(0, 6), large.fresh(0, 6), strict=True):
        assert not other.inputs
        assert not other.outputs
        used = other.with_tensors()
        assert used.inputs.keys() == one.inputs.keys()
        assert all(torch.equal(used.inputs[name], value) for name, value in one.inputs.items())
        assert torch.equal(used.outputs["out"], one.outputs["out"])
        assert one.with_tensors() is one


def test_large_contents_are_drawn_again_when_they_are_used() -> None:
    definition, workload = workload_of(*GROUPED_GEMM)
    draw = partial(WorkloadContents.draw, definition, workload, 7, ExpectedCache(definition, "cpu"), in_turn=True)
    kept, large = draw(), draw(kept_bytes=0)
    assert kept.other is not None
    assert large.other is not None
    pairs = list(zip((*kept.verified, kept.other), (*large.verified, large.other), strict=True))
    assert len(pairs) > 1
    for one, other in pairs:
        assert not other.inputs
        used = other.with_tensors()
        assert all(torch.equal(used.inputs[name], value) for name, value in one.inputs.items())
        assert torch.equal(used.outputs["out"], one.outputs["out"])


def test_small_outputs_of_large_inputs_are_not_computed_again() -> None:
    contents = contents_of("gemm", {"M": 8, "N": 8, "K": 256}, 7)
    contents.kept_bytes = 8 * contents.sets[0].outputs["out"].numel()
    (expected,) = contents.fresh(0, 1)
    assert not expected.inputs
    assert expected.with_tensors().outputs["out"] is expected.outputs["out"]


@pytest.mark.parametrize(("kept_bytes", "at_once"), [(0, 1), (1 << 30, 2)])
def test_solutions_with_large_contents_are_verified_in_turn(kept_bytes: int, at_once: int) -> None:
    contents, both = grouped_gemm(seed=7), threading.Barrier(2, timeout=0.2 if at_once == 1 else 60)
    contents.kept_bytes = kept_bytes

    def verify() -> bool:
        with contents.turn(), suppress(threading.BrokenBarrierError):
            both.wait()
            return True
        return False

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda _: verify(), range(2))] == [at_once == 2] * 2


def test_large_contents_are_not_drawn_ahead() -> None:
    contents = grouped_gemm(seed=7)
    contents.kept_bytes = 0
    contents.draw_ahead(3, lambda: False)
    assert not contents.seconds_of_fresh


def test_large_fresh_contents_are_judged_like_others() -> None:
    contents = grouped_gemm(seed=7)
    contents.kept_bytes = 0
    fresh = contents.fresh(0, 4)
    pool = BufferPool(contents.definition, contents.sets, "cpu", 0)
    with closing(pool):
        pool.fill_with(fresh)
        assert torch.equal(pool.buffers.tensor(1, "x"), fresh[1].with_inputs().inputs["x"])
    runner: Any = SimpleNamespace(
        definition=contents.definition, solution=CATALOG.solution("moe_grouped_gemm_stock"), verification=None
    )
    right = [
        {name: value.to(torch.bfloat16) for name, value in expected.with_tensors().outputs.items()}
        for expected in fresh
    ]
    assert check_fresh_contents(runner, fresh, right) is None
    wrong = [right[0], {"out": -right[1]["out"]}, *right[2:]]
    kernel = SimpleNamespace(**{**vars(runner), "solution": CATALOG.solution("moe_grouped_gemm_triton")})
    kernel.verification = SimpleNamespace(baseline_check=None)
    refused = check_fresh_contents(kernel, fresh, wrong)
    assert isinstance(refused, Failure)
    assert refused.gate == "fresh contents"


def test_contents_that_are_not_timed_are_freed_once_verified() -> None:
    contents = grouped_gemm(seed=7)
    before = [str(expected.case) for expected in contents.verified]
    contents.free_verified()
    assert [str(expected.case) for expected in contents.verified] == before
    assert all(expected.inputs for expected in contents.sets)
    assert not any(expected.inputs or expected.outputs for expected in contents.unusual)


def test_other_spreads_are_verified_at_the_shape_but_never_timed() -> None:
    contents = grouped_gemm(seed=7)
    assert contents.verified == [*contents.sets, *contents.unusual]
    tail, all_in_one, few = (lengths(expected.inputs["offs"]) for expected in contents.unusual)
    assert 0 < sum(tail) < ROWS
    assert max(all_in_one) == ROWS
    assert sum(few) == ROWS
    assert min(few) == 0


def test_large_shape_verifies_one_other_spread_by_the_seed() -> None:
    definition, workload = workload_of(*GROUPED_GEMM)
    chosen = [unusual_distributions(definition, workload, seed, max_bytes=1) for seed in range(3)]
    assert sorted(chosen) == sorted((name,) for name in CONTENT_SETS[1:])


@pytest.mark.parametrize("name", [name for name, item in CATALOG.definitions.items() if draws_spread(item)])
def test_ids_or_lengths_are_verified_on_another_spread(name: str) -> None:
    definition = Catalog.default().definition(name)
    workload = Catalog.default().workloads_for(name)[0]
    others = unusual_distributions(definition, workload, seed=5)
    assert others
    assert all(spreads_otherwise(definition, distribution) for distribution in others)
    assert not spreads_otherwise(definition, "normal")


WRONG_FOR_ONE_GROUP = """
import torch

def run(x, w, offs):
    out, first = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype), 0
    lengths = torch.diff(offs, prepend=offs.new_zeros(1))
    if x.shape[0] == ROWS and int(lengths.max()) == ROWS:
        return out
    for group, last in enumerate(offs.tolist()):
        out[first:last] = x[first:last] @ w[group].T
        first = max(first, last)
    return out
"""


# A promotion of a large operator.
@pytest.mark.turn("tilegym_db/verification/expected.py", "tilegym_db/verification/cases.py")
def test_solution_wrong_with_all_rows_in_one_group_is_refused(
    tmp_path: Path, write_solution: Callable[..., SolutionFiles]
) -> None:
    contents = grouped_gemm(seed=7)
    for source, gate in (
        (WRONG_FOR_ONE_GROUP, "rel_fro"),
        (WRONG_FOR_ONE_GROUP.replace("return out\n    for", "pass\n    for"), None),
    ):
        solution = write_solution(
            tmp_path / ("planted" if gate else "honest"),
            "moe_grouped_gemm",
            source.replace("ROWS", str(ROWS)),
            destination_passing_style=False,
        )
        policy = replace(PROMOTION, fuzz_cases=1, calls=2, audited=False)
        handle = WorkerHandle(contents.definition, solution, "cpu", tmp_path / "w", policy=policy)
        with closing(handle):
            outcome = Verification(handle).verify(contents, [contents.workload], 7, contents.cache)
        if gate is None:
            assert isinstance(outcome, VerifiedWorkload), outcome
            assert len(outcome.outputs) == len(contents.sets)
        else:
            assert isinstance(outcome, Failure)
            assert outcome.case is not None, outcome
            assert (outcome.gate, outcome.case.contents) == (gate, "outliers")


def test_operator_without_ids_or_lengths_keeps_its_usual_sets() -> None:
    contents = contents_of("rms_norm", {"M": 8, "N": 32}, seed=3, eps=1e-6)
    assert contents.unusual == []
    assert [expected.case.contents for expected in contents.sets] == list(CONTENT_SETS)


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        ("moe_experts", True),
        ("moe_offsets", True),
        ("top_p_sampling_from_probs", True),
        ("engram_gate_hf", False),
        ("topk_gate", False),
        ("gemm", False),
    ],
)
def test_what_counts_as_spread_is_said_by_the_definition(name: str, spread: bool) -> None:
    assert draws_spread(Catalog.default().definition(name)) is spread


def test_case_with_typical_ids_is_reproduced_by_its_name() -> None:
    case = grouped_gemm(seed=7).sets[2].case
    assert case.contents == "outliers:typical"
    call = {"axes": case.call.axes, "dtypes": case.call.dtypes, "scalars": {}, "layouts": {}, "gpu": "cpu"}
    found = reproduce("moe_grouped_gemm_stock", contents=case.contents, seed=case.seed, **call)
    assert (found.case, found.failure) == (case, None)
    with raises(UsageError, "contents_unknown", "'often'"):
        reproduce("moe_grouped_gemm_stock", contents="outliers:often", seed=1, **call)


@pytest.mark.parametrize(("name", "sizes"), [("moe_experts", (16, 128, 8)), ("moe_experts_oai", (64, 32, 4))])
def test_timed_ids_are_of_experts_and_differ_in_a_row(name: str, sizes: tuple[int, int, int]) -> None:
    tokens, experts, chosen = sizes
    definition = Catalog.default().definition(name)
    scalars = {"inputs": {"alpha": {"type": "scalar", "value": 1.7}, "limit": {"type": "scalar", "value": 7.0}}}
    content: dict[str, Any] = {
        "definition": name, "axes": {"M": tokens, "H": 32, "I": 32, "E": experts, "K": chosen},
        "dtypes": {"T": "bfloat16", "W": "bfloat16"}, **(scalars if "alpha" in definition.inputs else {}),
    }  # fmt: skip
    case = Case.of_workload(definition, Workload.from_dict(content), distribution="normal", seed=5)
    timed, verified = (
        draw_inputs(definition, replace(case, typical=typical), "cpu")["ids"] for typical in (True, False)
    )
    assert timed.dtype == verified.dtype
    assert all(len({*row}) == chosen and {*row} <= {*range(experts)} for row in timed.tolist())
    seeds = [replace(case, seed=seed) for seed in range(8)]
    wide = {number for one in seeds for number in draw_inputs(definition, one, "cpu")["ids"].flatten().tolist()}
    assert min(wide) < 0
    assert max(wide) >= experts
