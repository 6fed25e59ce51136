"""A call in a separate process: what it prints, and how much of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tilegym_db.errors import RecordError
from tilegym_db.verification.admission import MAX_PRINTED_BYTES, run_in_child


def says_something() -> int:
    print("on stdout")
    print("on stderr", file=sys.stderr)
    os.write(1, b"past Python\n")
    return 7


def prints_without_end() -> None:
    while True:
        os.write(2, b"x" * 1000 + b"\n")


@pytest.fixture
def run() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a call of this file in a process whose output is known from its start, as that of the server of such calls."""

    def start(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=120)

    return start


def test_what_a_call_prints_comes_on_stderr(run: Callable[[str], subprocess.CompletedProcess[str]]):
    done = run("says_something")
    assert done.stdout == "returned 7\n"
    assert {"on stdout", "on stderr", "past Python"} <= set(done.stderr.splitlines())


def test_call_that_prints_without_end_is_ended_and_cut(
    run: Callable[[str], subprocess.CompletedProcess[str]],
):
    done = run("prints_without_end")
    assert done.stdout == "time_limit_exceeded\n"
    assert MAX_PRINTED_BYTES <= len(done.stderr) < MAX_PRINTED_BYTES + 200
    assert done.stderr.endswith("(what it prints further is left out)\n")


if __name__ == "__main__":
    try:
        print("returned", run_in_child(globals()[sys.argv[1]], (), "it", 2))
    except RecordError as error:
        print(error.code)
