"""The log of a search: whole lines, whatever happens to the process that writes it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tilegym_db.errors import StoreError, UsageError
from tilegym_db.store.tuning import TuningLog, TuningStep, read_tuning_steps

START = datetime(2026, 1, 1, tzinfo=UTC)


def step(number: int, **changes: object) -> TuningStep:
    return TuningStep.from_dict(
        {
            "run_id": "run",
            "timestamp": (START + timedelta(seconds=number)).isoformat(),
            "gpu": "h200",
            "solution": "row_scale_triton",
            "solution_digest": "d",
            "definition_digest": "e",
            "workload_uuid": "w",
            "config": {"BLOCK": number, "FAST": True, "MODE": "a", "X": 0.5},
            "outcome": "slower",
            "reason": "0.50x as fast as the winner",
            "against": {},
            "ratio": 0.5,
            **changes,
        }
    )


def test_steps_come_back_as_they_were_oldest_first_whatever_run_wrote_them(home):
    with TuningLog("b", home) as log:
        log.append(step(1))
        log.append(step(3, outcome="failed", status="TIMEOUT", against=None, ratio=None))
    with TuningLog("a", home) as log:
        log.append(step(2))
        log.append(step(4, gpu="l4"))
    found = read_tuning_steps(home, "h200")
    assert found == [step(1), step(2), step(3, outcome="failed", status="TIMEOUT", against=None, ratio=None)]
    assert found[0].pair == ("d", "e", "w")


def test_a_line_that_was_cut_off_is_a_config_to_be_tried_again(home):
    with TuningLog("a", home) as log:
        log.append(step(1))
        log.append(step(2))
        path = log.path
    path.write_bytes(path.read_bytes()[:-20])
    assert read_tuning_steps(home, "h200") == [step(1)]
    with TuningLog("a", home) as log:
        log.append(step(3))
    assert read_tuning_steps(home, "h200") == [step(1), step(3)]


def test_a_search_that_tried_nothing_leaves_no_file(home):
    with TuningLog("a", home):
        pass
    assert list((home / "tuning").iterdir()) == []
    assert read_tuning_steps(home, "h200") == []


def test_one_process_writes_a_run_and_its_name_is_a_file_name(home):
    with TuningLog("a", home), pytest.raises(StoreError, match="being written by another process"):
        TuningLog("a", home)
    with pytest.raises(UsageError, match="run id"):
        TuningLog("../a", home)
