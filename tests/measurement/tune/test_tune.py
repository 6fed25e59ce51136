"""Whole searches on this machine's processor: real workers, real times, a real database; also one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.measurement.benchmark import verify
from tilegym_db.measurement.local_executor import LocalExecutor
from tilegym_db.measurement.plan import BenchReport, DefinitionPlan
from tilegym_db.measurement.tune.search import ConfigCandidate
from tilegym_db.measurement.tune.tune import TuneObserver, TuneReport, tune
from tilegym_db.records.solution import config_id
from tilegym_db.resolver.resolve import resolve
from tilegym_db.store.opening import open_store
from tilegym_db.store.publish import publish
from tilegym_db.store.queries.measured import best_rows, tuned_configs
from tilegym_db.store.queries.publishing import publishable_rows
from tilegym_db.store.side_files import TuningStep, read_tuning_steps

STOCK = """def run(x, weight, factor, out):
    for row in range(x.shape[0]):
        out[row] = x[row] * weight * factor
"""
# The more rows at once, the faster. 0: fastest of all, but right at the workload's own shape only. -1: writes nothing at all,
# in no time. 7: fails.
BLOCKED = """def run(x, weight, factor, out, *, ROWS=2):
    if ROWS == 7:
        raise ValueError("seven rows do not fit")
    if ROWS == 0 and x.shape[0] == 128:
        out.copy_(x * weight * factor)
    for row in range(0, x.shape[0] if ROWS > 0 else 0, max(ROWS, 1)):
        out[row : row + ROWS] = x[row : row + ROWS] * weight * factor
"""
TUNABLE = {"tunables": {"ROWS": [1, 16, 48, 8, 0, -1, 7]}}
SIZE = {"axes": {"M": 128, "N": 64}}
OTHER_SIZE = {"axes": {"M": 96, "N": 64}}

# 9: takes its process down at once. 5: later, when the race is on.
CRASHING = """import os
CALLS = []
def run(x, weight, factor, out, *, ROWS=2):
    CALLS.append(ROWS)
    if ROWS == 9 or CALLS.count(5) > 12:
        os._exit(7)
    for row in range(0, x.shape[0], ROWS):
        out[row : row + ROWS] = x[row : row + ROWS] * weight * factor
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tune")


@pytest.fixture(scope="module")
def catalog(folder, make_catalog) -> Catalog:
    solutions = {
        "row_scale_stock": (STOCK, {"role": "baseline", "provides": "stock"}),
        "row_scale_blocked": (BLOCKED, TUNABLE),
        "row_scale_fixed": "def run(x, weight, factor, out): out.copy_(x * weight * factor)\n",
    }
    return make_catalog(folder / "catalog", solutions, (SIZE,))


@pytest.fixture(scope="module")
def first(catalog, folder) -> TuneReport:
    return tune(devices="cpu", catalog=catalog, store_home=folder / "home")


def outcomes(steps: list[TuningStep]) -> dict[object, list[str]]:
    """Value of ROWS -> what became of it, in order; None is the default."""
    found: dict[object, list[str]] = {}
    for step in steps:
        found.setdefault(step.config.get("ROWS"), []).append(step.outcome)
    return found


def test_the_fastest_config_that_is_right_everywhere_wins(first):
    (result,) = first.results
    assert (result.solution, result.config, result.left) == ("row_scale_blocked", {"ROWS": 48}, 0)
    assert result.gain > 3


def test_config_right_only_at_one_shape_leads_until_its_screen(first):
    of_trick = [step for step in first.steps if step.config == {"ROWS": 0}]
    assert [step.outcome for step in of_trick] == ["leads", "failed"]
    assert of_trick[-1].reason.startswith("its screen says INCORRECT_NUMERICAL: out: ")
    assert of_trick[-1].status == "INCORRECT_NUMERICAL"
    # What had lost to it, or could not be distinguished from it on a busy machine, was tried again, and nothing else.
    before, after = outcomes(first.steps)[48]
    assert (before in ("slower", "tie"), after) == (True, "leads")


def test_every_other_config_has_its_reason(first):
    found = {step.config.get("ROWS"): step for step in first.steps}
    assert found[-1].reason.startswith("INCORRECT_NUMERICAL: ")
    assert "seven rows do not fit" in found[7].reason
    assert (found[1].outcome, found[None].outcome) == ("slower", "slower")
    assert found[1].ratio < 0.5


def test_verdicts_are_traces_of_their_config_at_the_screen_tier(first):
    found = {(trace.solution, trace.config.get("ROWS"), trace.status) for trace in first.traces}
    assert found == {
        ("row_scale_stock", None, "PASSED"),
        ("row_scale_blocked", None, "PASSED"),
        ("row_scale_blocked", 48, "PASSED"),
        ("row_scale_blocked", 0, "INCORRECT_NUMERICAL"),
        ("row_scale_blocked", -1, "INCORRECT_NUMERICAL"),
        ("row_scale_blocked", 7, "RUNTIME_ERROR"),
    }
    assert {trace.tier for trace in first.traces} == {"screen"}
    winner = next(trace for trace in first.traces if trace.config == {"ROWS": 48})
    assert winner.envelope is not None
    assert winner.envelope.cases > 4  # fuzzed as that config, beside the four content sets of the workload's shape
    assert winner.performance.comparisons[0].provides == "stock"


def test_what_declares_no_tunables_is_left_out_with_the_reason(first):
    assert [(item.solution, item.reason) for item in first.skipped] == [("row_scale_fixed", "it declares no tunables")]


def test_a_second_run_tries_nothing_and_gives_the_same_answer(first, catalog, folder):
    again = tune(devices="cpu", catalog=catalog, store_home=folder / "home")
    assert (again.steps, again.traces) == ([], [])
    assert [result.config for result in again.results] == [{"ROWS": 48}]
    assert len(list((folder / "home" / "tuning").iterdir())) == 1  # no empty file


@pytest.fixture(scope="module")
def promoted(first, catalog, folder) -> BenchReport:
    return verify(("row_scale_blocked",), devices="cpu", catalog=catalog, store_home=folder / "home")


@pytest.mark.turn("tilegym_db/measurement/tune/")  # a search and a promotion
def test_promotion_takes_the_tuned_config_beside_the_defaults(promoted, catalog, folder):
    assert sorted((trace.solution, trace.config.get("ROWS", 0), trace.status) for trace in promoted.traces) == [
        ("row_scale_blocked", 0, "PASSED"),
        ("row_scale_blocked", 48, "PASSED"),
        ("row_scale_stock", 0, "PASSED"),
    ]
    with open_store(folder / "home", catalog=catalog) as store:
        assert [row["config"] for row in best_rows(store, "row_scale", gpu="cpu")] == [{"ROWS": 48}]
        kernels = [row for row in publishable_rows(store, "cpu") if row["role"] == "kernel"]
    assert [row["config"] for row in kernels] == [{"ROWS": 48}]


@pytest.mark.turn("tilegym_db/measurement/tune/", "tilegym_db/resolver/")  # searches configs and verifies
def test_the_resolver_launches_the_tuned_config(promoted, catalog, folder, checkout):
    with open_store(folder / "home", catalog=catalog) as store:
        publish(store, "cpu", checkout)
    x, weight, out = torch.randn(128, 64), torch.randn(64), torch.empty(128, 64)
    resolved = resolve("row_scale", like=(x, weight, 0.5), gpu="cpu", catalog=catalog)
    assert (resolved.solution.name, resolved.config) == ("row_scale_blocked", {"ROWS": 48})
    resolved(x, weight, 0.5, out)
    assert torch.equal(out, x * weight * 0.5)
    (key,) = resolved.report().keys
    assert (key.solution, key.kernel_calls) == ("row_scale_blocked[ROWS=48]", 1)


@pytest.mark.turn("tilegym_db/measurement/tune/")  # two promotions
def test_published_config_is_judged_elsewhere_without_a_search(promoted, catalog, folder, tmp_path):
    with open_store(folder / "home", catalog=catalog) as store:
        publish(store, "cpu", tmp_path / "published")
    elsewhere = Catalog((*catalog.roots, tmp_path / "published"), trust_foreign=True)
    found = tune(devices="cpu", catalog=elsewhere, store_home=tmp_path / "home")
    assert found.steps == []
    assert [(result.config, result.tried) for result in found.results] == [({"ROWS": 48}, 0)]
    assert {trace.config.get("ROWS") for trace in found.traces if trace.status == "PASSED"} == {None, 48}


@pytest.mark.turn("tilegym_db/measurement/tune/", "tilegym_db/resolver/")  # searches configs and verifies
def test_small_budget_tries_nearby_winners_and_no_known_failures(first, make_catalog, folder):
    larger = make_catalog(folder / "larger", {"row_scale_blocked": (BLOCKED, TUNABLE)}, (SIZE, OTHER_SIZE))
    seen: list[TuningStep] = []
    report = tune(
        workload="M=96,*",
        quick=True,
        budget_s=0.001,
        devices="cpu",
        catalog=larger,
        store_home=folder / "home",
        observer=TuneObserver(stepped=seen.append),
    )
    (result,) = report.results
    # One wave of four: the defaults, what won at M=128, and two of the rest, which is 1, 8 and 16.
    assert (result.config, result.tried, result.left) == ({"ROWS": 48}, 4, 1)
    assert {-1, 0}.isdisjoint(step.config.get("ROWS") for step in seen)


@pytest.mark.alone
def test_leader_of_several_workloads_is_screened_in_one_run(make_catalog, tmp_path, monkeypatch):
    runs: list[set[tuple[str, str]]] = []
    run = LocalExecutor.run

    def counted(executor: LocalExecutor, plans: list[DefinitionPlan]) -> None:
        runs.append({pair for plan in plans for pair in plan.tuned})
        run(executor, plans)

    monkeypatch.setattr(LocalExecutor, "run", counted)
    sizes = ({"axes": {"M": 120, "N": 64}, "tags": ["tiny"]}, {"axes": {"M": 128, "N": 64}})
    space = {"tunables": {"ROWS": [1, 3, 4, 5, 6, 7, 8, 48]}}
    catalog = make_catalog(tmp_path / "catalog", {"row_scale_blocked": (BLOCKED, space)}, sizes)
    steps: list[TuningStep] = []
    report = tune(
        devices="cpu", quick=True, budget_s=300, catalog=catalog, store_home=tmp_path / "home",
        observer=TuneObserver(stepped=steps.append),
    )  # fmt: skip
    assert [result.config for result in report.results] == [{"ROWS": 48}] * 2
    first, second = dict.fromkeys(step.workload_uuid for step in steps)
    assert runs == [{("row_scale_blocked", first), ("row_scale_blocked", second)}]
    leaders = [step.config for step in steps if (step.workload_uuid, step.outcome) == (second, "leads")]
    assert leaders == [{"ROWS": 48}]  # in its first wave, and nothing after it was faster


class RefusesThree:
    """In place of a compiler, which a processor has none of: says that ROWS=3 does not compile."""

    def __init__(self, *job: object) -> None:
        pass

    def start(self, candidates: list[ConfigCandidate]) -> None:
        assert len(candidates) == 5

    def refused(self, wave: list[ConfigCandidate]) -> dict[str, str]:
        return {item.id: "no room" for item in wave if item.config.get("ROWS") == 3}

    def __enter__(self) -> RefusesThree:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.turn("tilegym_db/measurement/tune/")  # a search with workers that die
def test_config_that_breaks_compiler_or_worker_costs_only_itself(make_catalog, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tilegym_db.sandbox.scan.scan_sources", lambda solution, sources: ()
    )  # it would refuse os._exit
    monkeypatch.setattr("tilegym_db.measurement.tune.tune.CompileAhead", RefusesThree)
    space = {"tunables": {"ROWS": [9, 5, 3, 64]}}
    catalog = make_catalog(tmp_path / "catalog", {"row_scale_crashing": (CRASHING, space)}, (SIZE,))
    report = tune(devices="cpu", quick=True, budget_s=300, catalog=catalog, store_home=tmp_path / "home")
    assert report.results[0].config == {"ROWS": 64}
    found = {step.config.get("ROWS"): (step.outcome, step.status) for step in report.steps}
    assert found == {
        9: ("failed", "RUNTIME_ERROR"),
        5: ("failed", "RUNTIME_ERROR"),
        3: ("compile", None),
        64: ("leads", None),
        None: ("slower", None),
    }
    assert {3}.isdisjoint(trace.config.get("ROWS") for trace in report.traces)


def test_a_budget_must_be_some_time(catalog, folder):
    with raises(UsageError, "budget_invalid", "--budget", "0"):
        tune(devices="cpu", budget_s=0, catalog=catalog, store_home=folder / "home")


MANY = """def run(x, weight, factor, out, *, ROWS=2, TAG=0):
    for row in range(0, x.shape[0], ROWS):
        out[row : row + ROWS] = x[row : row + ROWS] * weight * factor
"""


def started(home: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "tilegym_db.cli.app",
        "tune",
        "row_scale_many",
        "--gpu",
        "cpu",
        "--quick",
        "--json",
    ]
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home)}
    return subprocess.Popen(
        [*command, "--budget", "300"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_a_search_that_is_killed_goes_on_where_it_stopped(home, make_catalog):
    space = {"ROWS": [1, 3, 32], "TAG": [0, 1]}
    make_catalog(home / "catalog", {"row_scale_many": (MANY, {"tunables": space})}, (SIZE,))
    with started(home) as process:
        deadline = time.monotonic() + 120
        while len(read_tuning_steps(home, "cpu")) < 3 and process.poll() is None:
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    before = read_tuning_steps(home, "cpu")
    given_up = {config_id(step.config) for step in before if step.outcome != "leads"}
    assert 2 <= len(given_up) < 6

    with started(home) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err.decode()
    later = [step for step in read_tuning_steps(home, "cpu") if step.run_id != before[0].run_id]
    assert later
    assert not given_up & {config_id(step.config) for step in later}
    tried = Counter(config_id(step.config) for step in [*before, *later] if step.outcome != "leads")
    leaders = [config_id(step.config) for step in [*before, *later] if step.outcome == "leads"]
    assert len({*tried, leaders[-1]}) == 3 * 2 + 1  # the whole space and the defaults
    assert set(tried.values()) == {1}
    with open_store(home) as store:
        (winner,) = tuned_configs(store, "cpu").values()
    assert winner["ROWS"] == 32
    assert b'"config": {' in out
