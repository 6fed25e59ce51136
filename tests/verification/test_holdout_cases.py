"""Mistakes that depend on strides and sizes are exposed by a promotion's cases, whatever the strides and sizes are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition
from tilegym_db.records.definition_parts import shared_place
from tilegym_db.records.workload import Case
from tilegym_db.verification.cases import fuzz_cases
from tilegym_db.verification.large import large_cases

CATALOG = Catalog((shipped_root(),))
MEMBERS = 200
PROMOTIONS = 12
"""Number of promotions that the members are spread over; drawing the cases of one takes up to 60 ms."""
SHARE = 0.95
TENSORS = {
    "attention_prefill_triton": {"q": 4, "k": 4, "v": 4},
    "qk_rms_norm_triton": {"q": 3, "k": 3},
    "swiglu_triton": {"a": 2, "b": 2},
    "gemm_triton": {"a": 2, "b": 2},
}
LARGE = ("rms_norm_triton", "swiglu_triton", "gemm_triton", "attention_decode_triton")


@functools.cache
def promotion(name: str, seed: int) -> tuple[Definition, list[Case]]:
    record = CATALOG.solution(name).record
    definition = CATALOG.definition(record.definition)
    anchors = [workload.axes for workload in CATALOG.workloads_for(definition.name)]
    dtypes = {name: record.spec.dtypes.get(name, choices)[0] for name, choices in definition.dtypes.items()}
    return definition, fuzz_cases(definition, record, anchors, dtypes, {}, count=24, seed=seed)


@functools.cache
def large_of(name: str, seed: int) -> list[dict[str, int]]:
    record = CATALOG.solution(name).record
    definition = CATALOG.definition(record.definition)
    dtypes = {name: record.spec.dtypes.get(name, choices)[0] for name, choices in definition.dtypes.items()}
    found = large_cases(definition, record, dtypes, {}, seed=seed, budget_bytes=24 << 20, on_gpu=False)
    return [dict(large.case.call.axes) for large in found]


def share(exposed: Callable[..., bool], **members: st.SearchStrategy) -> float:
    """The share of members that a promotion exposes."""
    found: list[bool] = []

    @settings(max_examples=MEMBERS, derandomize=True, database=None, deadline=None)
    @given(**members)
    def run(**member: object) -> None:
        found.append(exposed(**member))

    run()
    print(f"{sum(found)} of {len(found)}")
    return sum(found) / len(found)


def properties(definition: Definition, case: Case, tensor: str) -> set[tuple[int, str]]:
    """The dimensions of more than one index that are expanded, enlarged in memory, or not in their place there."""
    shape, strides = definition.shape_of(tensor, case.call.axes), case.strides(definition, tensor)
    long = [d for d, size in enumerate(shape) if size > 1]
    in_place = [d for d in long if strides[d]]
    in_memory = sorted(in_place, key=lambda d: -strides[d])
    found = {(d, "expanded") for d in long if strides[d] == 0}
    found |= {(d, "permuted") for d, other in zip(in_memory, in_place, strict=True) if d != other}
    pairs = itertools.pairwise(in_memory)
    return found | {(inner, "enlarged") for outer, inner in pairs if strides[outer] > strides[inner] * shape[inner]}


@st.composite
def places(draw: st.DrawFn) -> tuple[str, str, tuple[int, str]]:
    name = draw(st.sampled_from(sorted(TENSORS)))
    tensor = draw(st.sampled_from(sorted(TENSORS[name])))
    last = TENSORS[name][tensor] - 1
    kind = draw(st.sampled_from(["permuted", "enlarged", "expanded"] if last > 1 else ["enlarged", "expanded"]))
    if kind == "enlarged" and last == 1:
        return name, tensor, (1, kind)  # more memory for the outermost dimension does not show
    return name, tensor, (draw(st.integers(0, last if kind == "enlarged" else last - 1)), kind)


SEEDS = st.integers(0, PROMOTIONS - 1)


@pytest.mark.turn("tilegym_db/verification/cases.py")  # drawn properties
def test_any_property_of_strides_is_met_by_some_case():
    def exposed(place: tuple[str, str, tuple[int, str]], seed: int) -> bool:
        definition, cases = promotion(place[0], seed)
        return any(place[2] in properties(definition, case, place[1]) for case in cases)

    assert share(exposed, place=places(), seed=SEEDS) >= SHARE


def test_inputs_share_memory_in_every_way_that_there_is():
    def exposed(name: str, way: str, seed: int) -> bool:
        found = {
            "same" if place[1] == 0 else "beside"
            for case in promotion(name, seed)[1]
            for text in case.call.layouts.values()
            if (place := shared_place(text))
        }
        return way in found

    names = st.sampled_from(["attention_prefill_triton", "qk_rms_norm_triton", "swiglu_triton"])
    assert share(exposed, name=names, way=st.sampled_from(["same", "beside"]), seed=SEEDS) >= SHARE


@pytest.mark.turn("tilegym_db/verification/cases.py")  # drawn numbers
def test_any_number_of_rows_up_to_65536_is_exceeded():
    def exposed(name: str, rows: int, seed: int) -> bool:
        definition = CATALOG.definition(CATALOG.solution(name).record.definition)
        repeated = definition.independent_axes[0]
        return any(axes[repeated] > rows for axes in large_of(name, seed))

    names = st.sampled_from(LARGE)
    assert share(exposed, name=names, rows=st.integers(1 << 10, 1 << 16), seed=st.integers(0, 99)) >= SHARE


def test_any_remainder_of_a_size_is_met():
    def exposed(name: str, divisor: int, whole: bool, seed: int) -> bool:
        cases = promotion(name, seed)[1]
        return all(
            any((case.call.axes[axis] % divisor == 0) == whole and case.call.axes[axis] > 1 for case in cases)
            for axis in ("M", "I" if name == "swiglu_triton" else "N")
        )

    names = st.sampled_from(["swiglu_triton", "gemm_triton"])
    divisors = st.integers(1, 5).map(lambda power: 2**power)
    assert share(exposed, name=names, divisor=divisors, whole=st.booleans(), seed=SEEDS) >= SHARE
