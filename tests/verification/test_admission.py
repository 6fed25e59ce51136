"""References run apart: what one does to its process is a finding about its record."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition, Workload
from tilegym_db.verification.admission import (
    require_returning_reference,
    run_in_child,
    run_reference_once,
    run_self_test,
)

HEAD = "# Source: https://example.org/row_scale.py#L1\nimport os, sys, time\ndef run(x, weight, factor):\n    "
BAD = {
    "ends its process": ("os._exit(0)", "process_ended", "exit status 0"),
    "ends its process by a signal": ("os.kill(os.getpid(), 11)", "process_ended", "SIGSEGV"),
    "leaves": ("sys.exit(0)", "reference_raises", "SystemExit: 0"),
    "never ends": ("while True: pass", "time_limit_exceeded", "1 s"),
    "sleeps": ("time.sleep(1000)", "time_limit_exceeded", "1 s"),
    "closes every file": ("os.closerange(0, 4096)", "process_ended", "draft.json"),
    "raises": ("raise ArithmeticError('no')", "reference_raises", "ArithmeticError: no"),
}


@pytest.mark.parametrize(("body", "code", "fact"), BAD.values(), ids=BAD.keys())
def test_damage_of_a_reference_to_its_process_is_reported_on_it(
    body: str, code: str, fact: str, definition_record: Callable[..., dict[str, Any]]
):
    record = Definition.from_dict(definition_record(reference=HEAD + body + "\n    return x\n"))
    with raises(RecordError, code, "draft.json: reference", fact):
        run_reference_once(record, Path("draft.json"), limit_s=1.0)


def test_a_self_test_that_never_ends_is_one_finding(
    definition_record: Callable[..., dict[str, Any]], workload_record: Callable[..., dict[str, Any]]
):
    planted = [{"find": "factor", "replace": f"factor + {step}", "why": "a mistake"} for step in range(3)]
    test = {"independent": HEAD + "while True: pass\n", "planted_errors": planted}
    record = Definition.from_dict(definition_record(self_test=test))
    begun = time.monotonic()
    (finding,) = run_self_test(record, [Workload.from_dict(workload_record())], limit_s=1.0)
    assert all(fact in finding for fact in ("row_scale", "self_test", "1 s"))
    assert time.monotonic() - begun < 180


def start_a_child() -> int:
    child = os.fork()
    if child == 0:
        time.sleep(1000)
        os._exit(0)
    return child


def test_what_a_reference_started_ends_with_it():
    child = run_in_child(start_a_child, (), "a reference", 10.0)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("flops", "code", "fact"), [("-1", "cost_negative", "-1"), ("M // (N - N)", "cost_failed", "M=2,N=4")], ids=str
)
def test_a_cost_is_an_amount_of_work(
    flops: str, code: str, fact: str, definition_record: Callable[..., dict[str, Any]]
):
    record = Definition.from_dict(definition_record(cost={"flops": flops, "bytes": "M * N"}))
    with raises(RecordError, code, "cost", fact):
        run_reference_once(record, Path("draft.json"))


def test_only_references_changed_by_hand_must_be_tried_again(monkeypatch, tmp_path):
    """Eighty processes with PyTorch, one after the other, took a minute of a promotion's start."""
    tried: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(record: Definition, path: Path) -> None:
        tried.append(record.name)

    catalog = Catalog.default()
    assert catalog.write_root == shipped_root()
    for record in catalog.definitions.values():
        require_returning_reference(catalog, record, run=run)
    assert tried == []
    content = catalog.definition("rms_norm").to_dict()
    changed = Definition.from_dict(content | {"reference": content["reference"] + "\nwhile True: pass\n"})
    require_returning_reference(catalog, changed, run=run)
    assert tried == ["rms_norm"]
