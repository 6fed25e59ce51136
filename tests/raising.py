"""Expect an error by its kind and its code; tests/messages.txt has the wording of every message in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tilegym_db.errors import RecordError, TilegymDBError


@contextmanager
def raises(kind: type[TilegymDBError], code: str, *names: str) -> Iterator[pytest.ExceptionInfo[TilegymDBError]]:
    """Expect an error of ``kind`` with ``code``, or a record's error that has it among its ``codes``.

    ``names`` are what the message must contain because the user cannot act without it: a key, a path, a command.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    codes = {error.code, *(error.codes if isinstance(error, RecordError) else ())}
    assert code in codes, f"{sorted(codes)}: {error}"
    for name in names:
        assert name in str(error)
