"""The clock audit on a machine that changes its speed between timing and audit, which an honest Solution cannot help.

The Solution looks for a file beside its source to know how fast the machine is; the static scan is out of the way for that.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import pytest
from verdicts import conclusive

from tilegym_db.catalog import Catalog
from tilegym_db.measurement import audit, runner
from tilegym_db.measurement.benchmark import verify
from tilegym_db.records import Trace

pytestmark = pytest.mark.alone

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
import tilegym_db.sandbox.timing as timing
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
) -> Callable[..., tuple[Trace, int]]:
    """(the Solution's trace, attempts) of a promotion during which the machine is slow for so many attempts."""
    numbers = itertools.count()

    def run(source: str, slow_attempts: int, rows: int = 40) -> tuple[Trace, int]:
        root = tmp_path / str(next(numbers))
        axes = {"axes": {"M": rows, "N": 32}}
        catalog = make_catalog(root / "catalog", {"of_this_machine": source}, workloads=(axes,))
        file = catalog.solution("of_this_machine").folder / "slow"
        attempts = 0

        def run_attempt(of, *rest):
            nonlocal attempts
            if of.solution.name == "of_this_machine":
                attempts += 1
                file.touch() if attempts <= slow_attempts else file.unlink(missing_ok=True)
            return original(of, *rest)

        original = audit._run
        monkeypatch.setattr(audit, "_run", run_attempt)
        monkeypatch.setattr(audit, "PAUSE_S", 0.01)
        monkeypatch.setattr("tilegym_db.sandbox.scan.scan_sources", lambda solution, sources: ())
        report = verify(devices="cpu", catalog=catalog, store_home=root / "home", quick=True)
        (trace,) = (trace for trace in report.traces if trace.solution == "of_this_machine")
        return trace, attempts

    return run


def test_a_machine_that_is_slow_for_a_while_refuses_nobody(promoted):
    trace, attempts = conclusive(lambda: promoted(OF_THIS_MACHINE, 2), itemgetter(0))
    assert trace.status == "PASSED", trace.reason
    assert attempts > 2


def test_a_machine_that_stays_slow_is_named_and_proves_nothing_against_the_solution(promoted):
    trace, attempts = promoted(OF_THIS_MACHINE, audit.CLOCK_ATTEMPTS)
    assert trace.status == "UNSUPPORTED"
    assert "the machine became slower while this was measured" in trace.reason
    assert attempts == audit.CLOCK_ATTEMPTS


def test_a_clock_that_goes_on_saying_what_it_said_is_refuted(promoted):
    trace, attempts = conclusive(lambda: promoted(OF_A_LIAR, audit.CLOCK_ATTEMPTS), itemgetter(0))
    assert (trace.status, trace.failure.gate) == ("REJECTED", "wall clock"), trace.reason
    assert attempts == audit.CLOCK_ATTEMPTS


def test_while_the_host_of_a_virtual_machine_takes_its_processors_away_nothing_is_proved(promoted, monkeypatch):
    monkeypatch.setattr(runner, "stolen_us", lambda: [time.perf_counter_ns() / 1e3, 0.0])
    # Calls that take long enough for the processor time of being watched over a few of them to be nothing.
    trace, attempts = promoted(OF_A_LIAR, audit.CLOCK_ATTEMPTS, rows=1 << 13)
    assert trace.status == "UNSUPPORTED", trace.reason
    assert "its host ran something else on its processors" in trace.reason
    assert attempts == audit.CLOCK_ATTEMPTS
