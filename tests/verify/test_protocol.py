from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegym_db.verify.sandbox.protocol import MAX_LINE, ProtocolError, decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@given(st.dictionaries(st.text(), values), st.integers())
def test_a_message_survives_the_pipe_as_one_line(content, number):
    message = {**content, "id": number}
    line = encode(message)
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    assert decode(line) == message


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_a_message_and_nothing_else(line):
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode(line)["id"], int)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"hello", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[1]", "not a message with an id"),
        (b"{}", "not a message with an id"),
        (b'{"id": true}', "not a message with an id"),
        (b'{"id": "1"}', "not a message with an id"),
        (b'{"id": 1, "x": "' + b"x" * MAX_LINE + b'"}', "a message of 10485"),
    ],
)
def test_a_line_that_is_no_message_says_why(line, message):
    with pytest.raises(ProtocolError, match=message):
        decode(line)
