"""The baselines over torch._scaled_mm hand cuBLAS what it can read, at the layouts and addresses of a promotion's cases.

The function that PyTorch has on a GPU alone is stood in for by one that refuses what cuBLAS does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
from tilegym_db.records.call import Call
from tilegym_db.records.definition import limits_for
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.shared_buffers import SharedBuffers, fill_tensor, plan_slot, tensor_of_its_own, tensor_view
from tilegym_db.verification.cases import fuzz_cases
from tilegym_db.verification.gates import relative_error
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import load_function

Entries = dict[str, Callable[..., torch.Tensor]]
NAMES = ["gemm_fp8_blockwise_cublas", "gemm_fp8_blockwise_dynamic_cublas"]


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """a [M, K], b [K, N], scale_a [M, K / 128], scale_b [K / 128, N / 128] -> [M, N]."""
    for codes in (a, b.T):
        # ATen's cuBlasCommonArgs.h: dense ones are asked whether they are contiguous, others for their strides.
        if not (codes.is_contiguous() or (codes.stride(1) == 1 and codes.stride(0) >= codes.shape[1])):
            raise RuntimeError("Only multiplication of row-major and column-major matrices is supported by cuBLASLt")
        if codes.data_ptr() % 16 or codes.stride(0) % 16:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
    assert scale_a.stride() == (1, a.shape[0])
    assert scale_b.T.is_contiguous()
    assert (scale_a.data_ptr() | scale_b.data_ptr()) % 16 == 0
    wide = a.float() * scale_a.repeat_interleave(128, dim=1)
    spread = scale_b.T.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    return (wide @ (b.T.float() * spread).T).to(out_dtype)


@pytest.fixture
def catalog() -> Catalog:
    return Catalog.default()


@pytest.fixture
def entries(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> Entries:
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    return {name: load_entry(catalog.solution(name)) for name in NAMES}


def check(name: str, entry: Callable[..., torch.Tensor], case: Case, catalog: Catalog) -> None:
    definition = catalog.definition(name.removesuffix("_cublas"))
    inputs = draw_inputs(definition, case, "cpu")
    with SharedBuffers(plan_slot(definition, case), 1, "cpu") as buffers:
        for plan in buffers.plan.inputs:
            fill_tensor(tensor_view(buffers.slot(0), plan), inputs[plan.name])
        laid_out = [tensor_of_its_own(buffers.slot(0), plan) for plan in buffers.plan.inputs]
        out = entry(*laid_out)
    expected = load_function(definition.reference, definition.name)(*inputs.values())
    limits = limits_for(definition, "bfloat16", "ieee")
    assert limits is not None
    assert relative_error(out, expected) <= limits.tau


def repeats(layout: str) -> bool:
    """Return True for strides of zero and memory of another input, for which contents must repeat too."""
    return "@" in layout or "(0," in layout or " 0," in layout


@pytest.mark.parametrize("name", NAMES)
def test_what_lies_otherwise_is_copied_for_cublas(name: str, entries: Entries, catalog: Catalog) -> None:
    definition, record = catalog.definition(name.removesuffix("_cublas")), catalog.solution(name).record
    anchors = [{"M": 96, "N": 128, "K": 7168}, {"M": 16, "N": 256, "K": 512}]
    dtypes = definition.bind_dtypes({})
    cases = [
        case
        for seed in range(6)
        for case in fuzz_cases(definition, record, anchors, dtypes, {}, count=4, seed=seed)
        if "special" not in case.distribution and not any(map(repeats, case.call.layouts.values()))
    ]
    assert {case.offset for case in cases} == {0, 1}
    assert any(case.call.layouts for case in cases)
    for case in cases:
        check(name, entries[name], case, catalog)


def test_column_major_activations_are_cast_to_rows_of_codes(entries: Entries, catalog: Catalog) -> None:
    case = Case(Call("row_scale", {"M": 16, "N": 256, "K": 512, "G": 128}, {}, {"x": "strided(1, M)"}))
    check(NAMES[1], entries[NAMES[1]], case, catalog)


def test_what_cublas_can_read_is_not_copied(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def seen(a: torch.Tensor, b: torch.Tensor, **others: Any) -> torch.Tensor:
        given.extend(tensor.data_ptr() for tensor in (a, b, others["scale_a"], others["scale_b"]))
        return scaled_mm(a, b, **others)

    monkeypatch.setattr(torch, "_scaled_mm", seen)
    a, b = (torch.zeros(rows, 528).to(torch.float8_e4m3fn)[:, :512] for rows in (16, 256))
    scales = torch.ones(4, 16).T, torch.ones(2, 4)
    load_entry(catalog.solution(NAMES[0]))(a, b, *scales)
    assert given == [tensor.data_ptr() for tensor in (a, b, *scales)]
