"""What a search tries, in which order, and what it does not try again. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tilegym_db.measurement.tune.search import Neighbour, candidate_order, history_of, is_faulty, nearest_winners
from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.solution import config_id
from tilegym_db.records.verdicts import STATUSES
from tilegym_db.store.side_files import TuningStep

START = datetime(2026, 1, 1, tzinfo=UTC)
BLOCK = [1, 2, 4, 8]


@pytest.fixture
def solution(solution_record) -> Solution:
    return Solution.from_dict(solution_record(spec={"tunables": {"BLOCK": BLOCK, "FAST": [False, True]}}))


def config(block: int, fast: bool = False) -> dict[str, Any]:
    return {"BLOCK": block, "FAST": fast}


def step(number: int, of: dict[str, Any], outcome: str, against: dict[str, Any] | None = None) -> TuningStep:
    return TuningStep.from_dict(
        {
            "run_id": "a",
            "timestamp": (START + timedelta(seconds=number)).isoformat(),
            "gpu": "h200",
            "solution": "s",
            "solution_digest": "d",
            "definition_digest": "e",
            "workload_uuid": "w",
            "config": of,
            "outcome": outcome,
            "reason": f"step {number}",
            "against": against,
        }
    )


def steps(*given: tuple[Any, ...]) -> list[TuningStep]:
    return [step(number, *item) for number, item in enumerate(given)]


def test_defaults_come_first_then_nearby_winners_then_the_rest(solution):
    near = [Neighbour(config(8, True), "M=2", 1.0), Neighbour(config(2), "M=9", 3.0)]
    order = candidate_order(solution, near, history_of([]), "seed")
    assert [item.config for item in order[:3]] == [{}, config(8, True), config(2)]
    assert [item.reason for item in order[:2]] == ["the source's own defaults", "won on M=2"]
    assert sorted(item.id for item in order) == sorted(["{}", *map(config_id, solution.configs())])


def test_a_search_that_was_cut_short_goes_on_in_the_same_order(solution):
    whole = [item.id for item in candidate_order(solution, [], history_of([]), "seed")]
    tried = [step(0, {}, "leads")] + [step(1, item, "slower", {}) for item in (config(1), config(4, True))]
    rest = [item.id for item in candidate_order(solution, [], history_of(tried), "seed")]
    assert rest == [key for key in whole if key not in ("{}", config_id(config(1)), config_id(config(4, True)))]
    assert whole != [item.id for item in candidate_order(solution, [], history_of([]), "another seed")]


def test_nearby_winner_that_left_the_space_is_not_tried(solution):
    order = candidate_order(solution, [Neighbour(config(16), "M=2", 1.0)], history_of([]), "seed")
    assert config(16) not in [item.config for item in order]


def test_the_last_leader_that_did_not_fail_leads():
    history = history_of(steps(({}, "leads"), (config(1), "leads"), ({}, "slower", config(1)), (config(2), "leads")))
    assert history.leader == config(2)
    fallen = history_of(steps(({}, "leads"), (config(1), "leads"), (config(2), "leads"), (config(2), "failed")))
    assert fallen.leader == config(1)
    assert history_of([]).leader is None


def test_loser_to_a_config_that_failed_later_is_open_again():
    lost = steps(
        (config(2), "leads"),
        (config(1), "slower", config(2)),
        (config(4), "slower", config(1)),
        (config(8), "compile"),
        (config(2), "failed"),
    )
    history = history_of(lost)
    assert set(history.settled) == {config_id(item) for item in (config(2), config(4), config(8))}
    assert history.leader is None


def test_a_trace_that_is_no_pass_settles_a_config_too():
    history = history_of(steps((config(1), "leads")), {config_id(config(1)): "TIMEOUT"})
    assert history.leader is None
    assert history.settled == {config_id(config(1)): "its trace says TIMEOUT"}


def test_only_three_statuses_concern_one_workload_alone():
    own_workload = {"PASSED", "COMPILE_ERROR", "UNSUPPORTED"}
    assert {status for status in STATUSES if not is_faulty(status)} == own_workload


def test_the_nearest_winner_of_the_same_dtypes_comes_first(definition_record, workload_record):
    definition = Definition.from_dict(definition_record())

    def workload(m: int, dtype: str = "float32") -> Workload:
        return Workload.from_dict(workload_record(axes={"M": m, "N": 8}, dtypes={"T": dtype}))

    here, near, far, other = workload(16), workload(64), workload(1), workload(17, "bfloat16")
    won = {item.uuid: config(block) for item, block in ((far, 1), (near, 2), (other, 4), (here, 8))}
    found = nearest_winners(definition, here, [far, other, near, here, workload(5)], won)
    assert [(item.config["BLOCK"], item.workload, round(item.distance, 1)) for item in found] == [
        (8, "this workload", 0.0),
        (2, "M=64,N=8", 2.0),
        (1, "M=1,N=8", 4.0),
        (4, "M=17,N=8", 0.1),
    ]
