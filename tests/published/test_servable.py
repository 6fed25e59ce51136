"""The one answer to "may this measurement serve?", by its codes. tests/resolver/test_decide.py has whole decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.published.entries import Candidate, why_not_served, why_not_trusted, why_unconfined
from tilegym_db.records.call import Call, Request

CATALOG = Catalog((shipped_root(),))
NORM = CATALOG.definition("rms_norm")
KERNEL = CATALOG.solution("rms_norm_triton")
CALL = Call("rms_norm", {"M": 64, "N": 4096}, {"T": "bfloat16"}, {}, {"eps": 1e-6})
GOOD = Candidate(
    KERNEL.name, KERNEL.digest, "triton", "kernel", latency_us=5.0, ci_low_us=4.9, ci_high_us=5.1, host_us=9.0,
    speedup=2.0, speedup_ci_low=1.9, tier="promotion", sandbox_level=3, envelope_cases=9,
    scalar_ranges={"eps": (1e-6, 1e-5)},
)  # fmt: skip


def code(
    candidate: Candidate = GOOD, *, stock: Candidate | None = None, exact: bool = False, **asked: Any
) -> str | None:
    files = CATALOG.solutions.get(candidate.solution)
    question = replace(Request(NORM, CALL, "h200", "sm_90"), **asked)
    refusal = why_not_served(candidate, files, question, is_exact=exact, scalar_ranges={}, stock=stock)
    return None if refusal is None else refusal.code


def test_verified_faster_kernel_is_served() -> None:
    assert code() is None
    assert why_not_trusted(GOOD, audience="others") is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"solution": "gone"}, "solution_missing"),
        ({"solution_digest": "0" * 64}, "source_changed"),
        ({"solution": "rms_norm_stock", "solution_digest": CATALOG.solution("rms_norm_stock").digest}, "baseline"),
        ({"tier": "screen"}, "unverified"),
        ({"tier": None}, "unverified"),
        ({"of_files": True}, "of_files"),
        ({"sandbox_level": 0}, "unconfined"),
        ({"envelope_cases": 0}, "shape_unverified"),
        ({"speedup_ci_low": 1.02}, "not_faster"),
        ({"speedup_ci_low": float("nan")}, "not_faster"),
        ({"speedup_ci_low": None}, "not_compared"),
        ({"latency_us": None}, "not_compared"),
        ({"host_us": 80.0}, "launch_bound"),
        ({"scalar_ranges": {"eps": (1e-5, 1e-3)}}, "scalar_outside"),
    ],
)
def test_refusal_has_the_code_of_its_cause(changes: dict[str, Any], expected: str) -> None:
    stock = replace(GOOD, solution="rms_norm_stock", provides="stock", latency_us=10.0, host_us=20.0)
    assert code(replace(GOOD, **changes), stock=stock) == expected


def test_call_decides_too() -> None:
    assert code(unavailable={"triton": "not here"}) == "language_unavailable"
    stock = replace(GOOD, solution="rms_norm_stock", provides="stock", latency_us=10.0, host_us=20.0)
    assert code(replace(GOOD, host_us=80.0), stock=stock, launch="replay") is None
    assert code(sm="sm_70") == "unsupported"
    assert code(replace(GOOD, envelope_cases=0), exact=True) is None
    assert code(call=replace(CALL, scalars={"eps": float("nan")})) == "scalar_outside"


@pytest.mark.parametrize(
    ("level", "is_shipped", "origin", "audience", "is_refused"),
    [
        (3, False, "local", "others", False),
        (2, False, "foreign", "others", False),
        (1, True, "local", "this user", False),
        (1, False, "local", "this user", True),
        (1, False, "local", "others", True),
        (1, True, "local", "others", True),
        (1, True, "foreign", "this user", True),
        (1, True, "shipped", "this user", True),
        (0, True, "local", "this user", True),
    ],
)
def test_unconfined_pass_of_shipped_source_serves_its_own_user(
    level: int, is_shipped: bool, origin: str, audience: Any, is_refused: bool
) -> None:
    refusal = why_unconfined(level, is_shipped=is_shipped, origin=origin, audience=audience)
    assert (refusal is not None) == is_refused
    assert refusal is None or refusal.code == "unconfined"
