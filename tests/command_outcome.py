"""Runs a command in this process, for tests of any command line."""

from __future__ import annotations

import io

import pytest

from tilegym_db.cli.app import main

STATUSES = {0, 1, 2, 3, 4, 130}
"""Every documented exit status."""


def outcome(line: list[str]) -> tuple[int, str]:
    """Return the exit status, and what went to stderr; stdout may be given bytes."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["tilegym-db", *line])
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfeS\0")))
        patch.setattr("sys.stdout", streams[0])
        patch.setattr("sys.stderr", streams[1])
        with pytest.raises(SystemExit) as stopped:
            main()
    streams[1].flush()
    code = stopped.value.code
    assert isinstance(code, int)
    return code, streams[1].buffer.getvalue().decode(errors="replace")
