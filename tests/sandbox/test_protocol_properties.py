"""A worker may answer anything: what reaches the verdict is a documented error, or plain text and numbers."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from tilegym_db.records import Trace
from tilegym_db.records.trace import clip_log
from tilegym_db.sandbox.protocol import ProtocolError, Reply, decode, encode, storable

EXAMPLES = settings(max_examples=150)

any_text = st.text(st.characters(), max_size=20) | st.sampled_from(
    ["\ud800", "\x00", "\x1b[2J", "a\nb", "\x9b2J", "\u202e"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | any_text
    | st.sampled_from([10**400, "compile", "memory", "dtype"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3), max_leaves=8
)
keys = (
    st.sampled_from(["id", "ok", "error", "kind", "mismatch", "what", "device_us", "host_us", "activities"]) | any_text
)
messages = st.dictionaries(keys, values | st.fixed_dictionaries({"kind": scalars, "what": values}), max_size=6)


@pytest.mark.turn("tilegym_db/sandbox/protocol.py")  # many examples
@EXAMPLES
@given(messages, st.integers(0, 2**53))
def test_any_message_is_one_line_and_comes_back(content, number):
    line = encode({**content, "id": number})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    found = decode(line)
    assert json.dumps(found, sort_keys=True) == json.dumps({**content, "id": number}, sort_keys=True)


@pytest.mark.turn("tilegym_db/sandbox/protocol.py")  # many examples
@EXAMPLES
@given(messages, st.integers(0, 2**53), st.data())
def test_tampered_message_is_refused_or_still_a_message(content, number, data):
    line = encode({**content, "id": number})
    start = data.draw(st.integers(0, len(line)))
    end = data.draw(st.integers(start, min(len(line), start + 12)))
    piece = data.draw(
        st.binary(max_size=6) | st.sampled_from([b"NaN", b"1e999", b'"id":true,', b"{" * 50, b"\xed\xa0\x80"])
    )
    with contextlib.suppress(ProtocolError):
        found = decode(line[:start] + piece + line[end:])
        assert isinstance(found, dict)
        assert type(found["id"]) is int


@EXAMPLES
@given(st.binary(max_size=300) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_refused_or_a_message(line):
    with contextlib.suppress(ProtocolError):
        assert type(decode(line)["id"]) is int


@pytest.mark.parametrize(
    "line", [b'{"id":1,"x":' + b"[" * 50_000, b'{"a":' * 10_000, b'{"id":1,"x":' + b"9" * 100_000 + b"}"]
)
def test_a_message_made_to_break_the_parser_is_refused(line):
    with raises(ProtocolError, "message_not_json"):
        decode(line)


TRACE: dict[str, Any] = {
    "trace_id": "t",
    "run_id": "r",
    "timestamp": "2026-11-01T00:00:00Z",
    "definition": "d",
    "definition_version": "1.0.0",
    "definition_digest": "d",
    "op_type": "norm",
    "solution": "s",
    "solution_digest": "s",
    "language": "triton",
    "workload_uuid": "w",
    "axes": {},
    "gpu": "cpu",
    "gpu_name": "cpu",
    "tier": "screen",
    "status": "RUNTIME_ERROR",
}


@pytest.mark.turn("tilegym_db/sandbox/protocol.py")  # many examples
@EXAMPLES
@given(messages)
def test_the_texts_of_any_answer_can_be_stored_and_shown(content):
    reply = Reply(False, decode(encode({**content, "id": 1})))
    texts = [reply.error, reply.summary, *([reply.mismatch[1]] if reply.mismatch else [])]
    assert reply.failed_as in ("COMPILE_ERROR", "RUNTIME_ERROR", "UNSUPPORTED")
    for text in texts:
        assert all(c.isprintable() or c in "\n\t" for c in text)
    trace = Trace.from_dict({**TRACE, "reason": " ".join(texts) + "x", "log": clip_log(reply.error)})
    assert Trace.from_json(trace.to_json().encode()) == trace


@given(st.text(st.characters()))
def test_text_that_is_made_fit_to_store_stays_so(text):
    once = storable(text)
    assert storable(once) == once
    assert len(once) == len(text)
    once.encode()
