"""The clock audit on a machine that changes its speed between timing and audit, which an honest Solution cannot help.

The Solution looks for a file beside its source to know how fast the machine is; the static scan is out of the way for that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tilegym_db.bench import audit
from tilegym_db.bench.session import promote
from tilegym_db.catalog import Catalog
from tilegym_db.records import Trace

OF_THIS_MACHINE = """
import os, time
FILE = os.path.join(os.path.dirname(__file__), "slow")
def run(x, weight, factor, out):
    if os.path.exists(FILE):
        time.sleep(0.004)
    out.copy_(x * weight * factor)
"""
OF_A_LIAR = """
import os, time
import tilegym_db.verify.sandbox.timing as timing
FILE = os.path.join(os.path.dirname(__file__), "slow")
clock, lost = timing._now_ns, 0
timing._now_ns = lambda: clock() - lost
def run(x, weight, factor, out):
    global lost
    if os.path.exists(FILE):
        before = clock()
        time.sleep(0.004)
        lost += clock() - before
    out.copy_(x * weight * factor)
"""


@pytest.fixture
def promoted(
    make_catalog: Callable[..., Catalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int], tuple[Trace, int]]:
    """(the Solution's trace, attempts) of a promotion during which the machine is slow for so many attempts."""

    def run(source: str, slow_attempts: int) -> tuple[Trace, int]:
        catalog = make_catalog(tmp_path / "catalog", {"of_this_machine": source})
        file = catalog.solution("of_this_machine").folder / "slow"
        attempts = 0

        def run_attempt(member, *rest):
            nonlocal attempts
            if member.solution.name == "of_this_machine":
                attempts += 1
                file.touch() if attempts <= slow_attempts else file.unlink(missing_ok=True)
            return original(member, *rest)

        original = audit._run
        monkeypatch.setattr(audit, "_run", run_attempt)
        monkeypatch.setattr(audit, "PAUSE_S", 0.01)
        monkeypatch.setattr("tilegym_db.verify.scan.scan_sources", lambda solution, sources: ())
        report = promote(gpu="cpu", catalog=catalog, store_home=tmp_path / "home", quick=True)
        (trace,) = (trace for trace in report.traces if trace.solution == "of_this_machine")
        return trace, attempts

    return run


def test_a_machine_that_is_slow_for_a_while_refuses_nobody(promoted):
    trace, attempts = promoted(OF_THIS_MACHINE, 2)
    assert trace.status == "PASSED", trace.reason
    assert attempts == 3


def test_a_machine_that_stays_slow_is_named_and_proves_nothing_against_the_solution(promoted):
    trace, attempts = promoted(OF_THIS_MACHINE, audit.CLOCK_ATTEMPTS)
    assert trace.status == "UNSUPPORTED"
    assert "the machine became slower while this was measured" in trace.reason
    assert attempts == audit.CLOCK_ATTEMPTS


def test_a_clock_that_goes_on_saying_what_it_said_is_refuted(promoted):
    trace, attempts = promoted(OF_A_LIAR, audit.CLOCK_ATTEMPTS)
    assert (trace.status, trace.failure.gate) == ("REJECTED", "wall clock"), trace.reason
    assert attempts == audit.CLOCK_ATTEMPTS
