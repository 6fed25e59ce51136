from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from tilegym_db.sandbox.protocol import MAX_LINE, Channel, ProtocolError, decode, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@pytest.mark.turn("tilegym_db/sandbox/protocol.py")  # many messages through a pipe
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
    ("line", "code"),
    [
        (b"hello", "message_not_json"),
        (b"\xff\xfe", "message_not_json"),
        (b"[" * 100_000, "message_not_json"),
        (b'{"id": ' + b"9" * 5000 + b"}", "message_not_json"),
        (b"[1]", "message_without_id"),
        (b"{}", "message_without_id"),
        (b'{"id": true}', "message_without_id"),
        (b'{"id": "1"}', "message_without_id"),
        (b'{"id": 1, "x": "' + b"x" * MAX_LINE + b'"}', "message_too_long"),
    ],
)
def test_a_line_that_is_no_message_says_why(line, code):
    with raises(ProtocolError, code):
        decode(line)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """The harness's socket and the worker's channel."""
    here, there = socket.socketpair()
    with here, contextlib.closing(Channel(there.detach())) as channel:
        yield here, channel


@pytest.mark.turn("tilegym_db/sandbox/protocol.py")  # many messages through a pipe
@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(), values, max_size=3), min_size=1, max_size=3), st.integers(1, 50))
def test_requests_are_separated_however_they_are_cut(contents, size):
    messages = [{**content, "id": number} for number, content in enumerate(contents)]
    stream = b"".join(map(encode, messages))
    here, there = socket.socketpair()
    with here, contextlib.closing(Channel(there.detach())) as channel:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        for start in range(0, len(stream), max(size, len(stream) // 100)):
            here.sendall(stream[start : start + max(size, len(stream) // 100)])
        here.shutdown(socket.SHUT_WR)
        assert [channel.receive() for _ in messages] == [{**message, "descriptors": []} for message in messages]
        assert channel.receive() is None


@given(st.binary(max_size=200))
def test_garbage_on_the_channel_is_refused_or_a_message(garbage):
    here, there = socket.socketpair()
    with here, contextlib.closing(Channel(there.detach())) as channel:
        here.sendall(garbage + b"\n")
        with contextlib.suppress(ProtocolError):
            message = channel.receive()
            assert message is not None
            assert isinstance(message["id"], int)


def test_descriptors_go_with_the_request_that_they_came_with(ends, tmp_path):
    harness, worker = ends
    requests = []
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        file.write(b"content")
        for number, descriptors in enumerate(([], [file.fileno()] * 2, [])):
            socket.send_fds(harness, [encode({"id": number})], descriptors)
            requests.append(worker.receive()["descriptors"])
    assert [len(descriptors) for descriptors in requests] == [0, 2, 0]
    assert [os.pread(descriptor, 10, 0) for descriptor in requests[1]] == [b"content"] * 2
    assert not any(os.get_inheritable(descriptor) for descriptor in requests[1])
    for descriptor in requests[1]:
        os.close(descriptor)


def test_a_request_cannot_pass_descriptors_off_as_its_content(ends):
    harness, worker = ends
    harness.sendall(encode({"id": 1, "descriptors": [0, 1, 2]}))
    assert worker.receive()["descriptors"] == []
