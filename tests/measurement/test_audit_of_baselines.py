"""The clock audit on a GPU of stock code whose time depends on contents: rejected, but not as a lie, unlike a kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilegym_db.catalog import Catalog
from tilegym_db.measurement import audit
from tilegym_db.measurement.audit import GPU_CLOCK_ATTEMPTS, audit_clock, check_fresh_contents
from tilegym_db.measurement.runner import WallRun
from tilegym_db.records import Workload
from tilegym_db.verification.expected import ExpectedCache, OracleCase, WorkloadContents
from tilegym_db.verification.session import Verification
from tilegym_db.verification.verifier import Failure

CLAIMED_US, UNSEEN_US = 11_060.0, 28_100.0


class Audited:
    """A Solution on a GPU that says ``claimed_us`` of contents it has seen and ``unseen_us`` of others."""

    device = "cuda:0"

    def __init__(self, role: str, unseen_us: float) -> None:
        self.solution = SimpleNamespace(record=SimpleNamespace(spec=SimpleNamespace(role=role)))
        self.unseen_us = unseen_us
        self.timed: list[tuple[int, ...]] = []
        self.filled: list[int] = []

    def time_block(self, slots: range) -> tuple[list[float], list[float]]:
        self.timed.append(tuple(slots))
        return [self.unseen_us for _ in slots], [self.unseen_us for _ in slots]

    def audited(self, monkeypatch: pytest.MonkeyPatch, *wall_us: float) -> float | Failure:
        """The audit's outcome where the harness's clock says these times of a call, attempt by attempt."""

        def run(*arguments: Any) -> WallRun:
            us = wall_us[min(arguments[5], len(wall_us) - 1)]
            return WallRun(1, short_us=100.0 + us, long_us=100.0 + 3 * us, null_us=100.0, noise_us=30.0)

        monkeypatch.setattr(audit, "_run", run)
        monkeypatch.setattr(audit.time, "sleep", lambda seconds: pytest.fail("a GPU's host is not waited for"))
        contents: Any = SimpleNamespace(is_fixed=False, fresh=lambda attempt, count: [attempt] * count)
        pool: Any = SimpleNamespace(slots=4, fill_with=lambda unseen: self.filled.append(unseen[0]))
        performance: Any = SimpleNamespace(latency_us=CLAIMED_US, host_us=CLAIMED_US)
        return audit_clock(self, None, pool, contents, performance)  # type: ignore[arg-type]


def test_baseline_with_a_confirmed_clock_is_only_unsupported(monkeypatch):
    stock = Audited("baseline", UNSEEN_US)
    outcome = stock.audited(monkeypatch, UNSEEN_US)
    assert isinstance(outcome, Failure)
    assert (outcome.status, outcome.gate) == ("UNSUPPORTED", None)
    assert "1.106e+04 us per call on the timed contents, 2.81e+04 us on others" in outcome.reason
    assert stock.timed == [(1, 2, 3)]
    assert stock.filled == [GPU_CLOCK_ATTEMPTS]  # contents of no attempt's run


def test_baseline_that_repeats_its_false_time_is_rejected(monkeypatch):
    outcome = Audited("baseline", CLAIMED_US).audited(monkeypatch, UNSEEN_US)
    assert isinstance(outcome, Failure)
    assert (outcome.status, outcome.gate) == ("REJECTED", "wall clock")


def test_kernel_that_owns_up_is_rejected_unasked(monkeypatch):
    kernel = Audited("kernel", UNSEEN_US)
    outcome = kernel.audited(monkeypatch, UNSEEN_US)
    assert isinstance(outcome, Failure)
    assert (outcome.status, outcome.gate) == ("REJECTED", "wall clock")
    assert kernel.timed == []


def test_a_baseline_passes_only_by_the_harness_clock(monkeypatch):
    assert Audited("baseline", UNSEEN_US).audited(monkeypatch, UNSEEN_US, CLAIMED_US) == CLAIMED_US


@pytest.fixture
def eight_contents() -> list[OracleCase]:
    definition = Catalog.default().definitions["silu_and_mul"]
    sizes = {"definition": definition.name, "axes": {"M": 3, "I": 16}, "dtypes": {"T": "float16"}, "inputs": {}}
    workload = Workload.from_dict(sizes, "a test")
    contents = WorkloadContents.draw(definition, workload, 7, ExpectedCache(definition, "cpu"))
    return list(contents.fresh(0, 8))


class Stock:
    """Stock code that gives the oracle's outputs, but for some contents; there it gives ``wrong``."""

    def __init__(self, wrong_on: list[OracleCase], wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.wrong_on, self.wrong, self.asked = wrong_on, wrong, 0

    def outputs(self, expected: OracleCase) -> dict[str, torch.Tensor]:
        self.asked += 1
        is_wrong = any(expected is other for other in self.wrong_on)
        return {name: (self.wrong(truth) if is_wrong else truth).half() for name, truth in expected.outputs.items()}


@pytest.mark.parametrize(
    ("provides", "wrong_at", "stock_wrong_at", "stock_gives", "refused", "asked"),
    [
        ("stock", [2, 5], [], 0.0, False, 0),
        ("stock", [1, 2, 5], [], 0.0, True, 0),
        ("stock", [], [], 0.0, False, 0),
        ("other", [5], [], 0.0, True, 1),
        ("other", [5], [4], 0.0, True, 1),
        ("other", [2, 5], [2, 5], 0.0, False, 2),
        ("other", [2, 5], [2, 5], 0.5, True, 1),  # as wrong, and otherwise
        ("other", [2, 5], [2], 0.0, True, 2),
        ("other", [1, 2, 5], [1, 2, 5], 0.0, True, 0),
    ],
)
def test_unseen_contents_that_stock_code_zeroes_prove_nothing(
    provides: str,
    wrong_at: list[int],
    stock_wrong_at: list[int],
    stock_gives: float,
    refused: bool,
    asked: int,
    eight_contents: list[OracleCase],
):
    definition = Catalog.default().definitions["silu_and_mul"]
    solution = SimpleNamespace(record=SimpleNamespace(spec=SimpleNamespace(provides=provides, math="ieee")))
    stock: Any = Stock([eight_contents[number] for number in stock_wrong_at], lambda truth: truth * stock_gives)
    handle: Any = SimpleNamespace(solution=solution)
    runner: Any = SimpleNamespace(
        definition=definition, solution=solution, verification=Verification(handle, baseline_check=stock)
    )
    found = [
        {name: (truth * (number not in wrong_at)).half() for name, truth in expected.outputs.items()}
        for number, expected in enumerate(eight_contents)
    ]
    outcome = check_fresh_contents(runner, eight_contents, found)
    assert (outcome is not None) == refused
    assert stock.asked == asked
    if outcome is not None:
        assert (outcome.status, outcome.gate) == ("REJECTED", "fresh contents")
