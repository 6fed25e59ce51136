"""References run apart: what one does to its process is a finding about its record."""

from __future__ import annotations

import socket
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
from tilegym_db.sandbox.worker import best_level
from tilegym_db.verification import admission
from tilegym_db.verification.admission import (
    require_returning_reference,
    run_reference_once,
    run_self_test,
)

HEAD = "# Source: https://example.org/row_scale.py#L1\n{imports}def run(x, weight, factor):\n    {body}\n    return x\n"

BAD = {
    "never ends": ("while True: pass", "time_limit_exceeded", "2 s"),
    "writes its input": ("return x.mul_(2)", "reference_writes_input", "'x'"),
    "raises": ("raise ArithmeticError('no')", "reference_raises", "ArithmeticError: no"),
    "takes all memory": ("x = [b'x' * (1 << 28) for _ in range(1000)]", "process_ended", "of memory"),
    "writes a file": ("open('{tmp}/written', 'w')", "scan_refused", "reference.py:3: hard: reads-files"),
    "ends its process": ("exit(0)", "scan_refused", "raise ValueError where a call cannot be served"),
}
"""Body of a reference -> the code and a fact of the error."""

UNSEEN = {
    "writes a file": ("open('{tmp}/written', 'w')", "reference_raises", "written"),
    "reads the home folder": ("open('{tmp}/home/secret').read()", "reference_raises", "secret"),
    "asks for the home folder": ("raise ValueError(os.environ['HOME'])", "reference_raises", "/reference"),
    "opens a socket": ("socket.create_connection(('127.0.0.1', {port}))", "reference_raises", "Error"),
    "starts a program": ("subprocess.run(['/bin/touch', '{tmp}/written'], check=True)", "reference_raises", "Error"),
    "ends its process": ("os._exit(0)", "process_ended", "exit status 0"),
    "ends its process by a signal": ("os.kill(os.getpid(), 11)", "process_ended", "SIGSEGV"),
    "closes every file": ("os.closerange(0, 4096)", "process_ended", "draft.json"),
    "prints without end": ("while True: print('x' * 10000)", "process_ended", "of output"),
}
"""The same for bodies that the scan would refuse, as if it had overlooked them."""


def bad_record(record: Callable[..., dict[str, Any]], body: str, imports: str = "") -> Definition:
    return Definition.from_dict(record(reference=HEAD.format(imports=imports, body=body)))


@pytest.mark.parametrize(("body", "code", "fact"), BAD.values(), ids=BAD.keys())
def test_bad_reference_is_refused_with_a_finding(
    body: str, code: str, fact: str, definition_record: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(admission, "MAX_MEMORY_BYTES", 1 << 30)
    record = bad_record(definition_record, body.format(tmp=tmp_path))
    with raises(RecordError, code, "draft.json", fact):
        run_reference_once(record, Path("draft.json"), limit_s=2.0 if code == "time_limit_exceeded" else 60.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("body", "code", "fact"), UNSEEN.values(), ids=UNSEEN.keys())
def test_what_the_scan_overlooks_is_stopped_by_the_sandbox(
    body: str, code: str, fact: str, definition_record: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch
):
    if best_level("cpu").level < 2:
        pytest.skip("this machine has no sandbox of level 2")
    monkeypatch.setattr(admission, "scan_definition", lambda definition: ())
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").write_text("the secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        body = body.format(tmp=tmp_path, port=server.getsockname()[1])
        record = bad_record(definition_record, body, "import os, socket, subprocess\n")
        with raises(RecordError, code, fact) as caught:
            run_reference_once(record, Path("draft.json"), limit_s=60.0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "the secret" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_self_test_that_never_ends_is_one_finding(
    definition_record: Callable[..., dict[str, Any]], workload_record: Callable[..., dict[str, Any]]
):
    planted = [{"find": "return (", "replace": f"return {step} * (", "why": "a mistake"} for step in range(3)]
    never = HEAD.format(imports="", body="while True: pass")
    test = {"independent": never, "planted_errors": planted}
    record = Definition.from_dict(definition_record(self_test=test))
    begun = time.monotonic()
    (finding,) = run_self_test(record, [Workload.from_dict(workload_record())], limit_s=1.0)
    assert all(fact in finding for fact in ("row_scale", "self_test", "1 s"))
    assert time.monotonic() - begun < 180


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
        assert catalog.untried(record) is None
    content = catalog.definition("rms_norm").to_dict()
    changed = Definition.from_dict(content | {"reference": content["reference"] + "\nwhile True: pass\n"})
    file = catalog.untried(changed)
    assert file == catalog.definition_paths["rms_norm"]
    for _ in range(2):
        require_returning_reference(changed, file, run=run)
    assert tried == ["rms_norm"]
