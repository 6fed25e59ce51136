"""What comes into the parsers may come from anywhere: only the documented error ever comes out."""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.published.input_files import read_traces
from tilegym_db.records import Definition, Solution, Trace, Workload, axes_key
from tilegym_db.records.base import Record
from tilegym_db.records.definition_parts import layout_class, layout_strides, parse_layout
from tilegym_db.records.expressions import evaluate, names_in
from tilegym_db.records.solution import Family, expanded

# Python's own parser remarks on texts such as '0or 1'; a record with one is refused or means what it says.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")

EXAMPLES = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["contiguous", "float32", "M", "1.0.0", 2**63, -(2**63) - 1, 10**400, "\ud800", "\x00", "nan"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)

LIKE: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers() | st.sampled_from([0, -1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400]),
    float: st.floats() | st.integers(),
    str: st.text(max_size=8)
    | st.sampled_from(["", "\ud800", "\x00", "M", "2", "1970-01-01", "9" * 30, "a\nb", "(" * 300]),
    list: st.lists(scalars, max_size=2),
    dict: st.dictionaries(st.text(max_size=4), scalars, max_size=2),
}
"""Another value of the same type, which gets past the checks that a value of another type does not."""

FAILED = {
    "status": "INCORRECT_NUMERICAL",
    "reason": "off",
    "performance": None,
    "failure": {"gate": "g", "axes": {"M": 4}, "contents": "normal", "seed": "7", "command": "c", "index": [1, 2]},
}


def _valid_records() -> list[tuple[type[Record], dict[str, Any]]]:
    """One rich record of each kind from the catalog, and a trace with every part."""
    root = shipped_root()
    definition = json.loads((root / "definitions/norm/rms_norm.json").read_text())
    family = json.loads((root / "solutions/norm/rms_norm_triton/family.json").read_text())
    workload = json.loads((root / "workloads/norm/rms_norm.jsonl").read_text().splitlines()[0])
    path = root / "traces/h200/norm/rms_norm.jsonl.gz"
    passed = read_traces(path.read_bytes(), path)[0].to_dict() | {
        "audit": {"wall_us": 1.5, "owned_share": 1.0, "profiled_us": 12.5, "kernels": ["k"], "notes": ["n"]},
        "layouts": {"x": "row_contiguous"},
        "config": {"BLOCK_M": 4, "fast": True},
    }
    return [
        (Definition, definition),
        (Solution, expanded(family, family["solutions"][0])),
        (Family, family),
        (Workload, workload | {"layouts": {"x": "strided(2 * N, 1)"}, "uuid": ""}),
        (Trace, passed),
        (Trace, passed | FAILED),
    ]


VALID = _valid_records()


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a JSON value something can be changed."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _paths(item, (*at, key))
    return found


@st.composite
def mutated(draw: st.DrawFn) -> tuple[type[Record], dict[str, Any]]:
    """A valid record with one to three places replaced, removed, renamed or copied from elsewhere in it."""
    kind, original = draw(st.sampled_from(VALID))
    record: dict[str, Any] = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        paths = _paths(record)
        path = draw(st.sampled_from(paths))
        parent: Any = record
        for step in path[:-1]:
            parent = parent[step]
        change = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "copy"]))
        if change == "replace":
            like = LIKE.get(type(parent[path[-1]]), values)
            parent[path[-1]] = draw(like | values)
        elif change == "copy":
            source: Any = record
            for step in draw(st.sampled_from(paths)):
                source = source[step]
            parent[path[-1]] = copy.deepcopy(source)
        elif change == "remove" or not isinstance(parent, dict):
            del parent[path[-1]]
        else:
            parent[draw(st.text(max_size=8))] = parent.pop(path[-1])
        if not isinstance(record, dict) or not record:
            break
    return kind, record


def parsed(make: Callable[[], Record]) -> Record | None:
    """The record, or None where it is refused."""
    try:
        return make()
    except RecordError:
        return None


def survives(record: Record) -> None:
    """A record that was accepted can be written, read again, and is the same one with the same identity."""
    text = record.to_json()
    again = type(record).from_json(text.encode())
    assert again == record
    assert again.to_json() == text
    assert parsed(lambda: type(record).from_dict(record.to_dict())) == record
    if isinstance(record, Definition):
        assert isinstance(again, Definition)
        assert again.digest == record.digest
    if isinstance(record, Solution):
        assert isinstance(again, Solution)
        assert again.digest({}) == record.digest({})
    if isinstance(record, Workload):
        assert isinstance(again, Workload)
        assert again.uuid == record.uuid


@pytest.mark.parametrize(("kind", "record"), VALID, ids=lambda value: getattr(value, "kind", ""))
def test_the_examples_that_are_mutated_below_are_valid(kind, record):
    survives(kind.from_dict(record))


@EXAMPLES
@given(mutated())
def test_a_mutated_record_is_refused_or_survives(example):
    kind, record = example
    accepted = parsed(lambda: kind.from_dict(record, "f.json"))
    if accepted is not None:
        survives(accepted)


@EXAMPLES
@given(mutated(), st.data())
def test_a_mutated_text_is_refused_or_survives(example, data):
    kind, record = example
    text = json.dumps(record)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    changed = (
        text[:start]
        + data.draw(st.text(max_size=5) | st.sampled_from(["NaN", "Infinity", "1e999", "{", '"']))
        + text[end:]
    )
    accepted = parsed(lambda: kind.from_json(changed, "f.json"))
    if accepted is not None:
        survives(accepted)


@EXAMPLES
@given(
    st.sampled_from([Definition, Solution, Family, Workload, Trace]),
    values | st.dictionaries(st.text(max_size=8), values),
)
def test_any_value_is_refused_or_survives(kind, value):
    accepted = parsed(lambda: kind.from_dict(value))
    if accepted is not None:
        survives(accepted)


@EXAMPLES
@given(
    st.sampled_from([Definition, Solution, Family, Workload, Trace]), st.binary(max_size=200) | st.text(max_size=200)
)
def test_any_text_is_refused(kind, text):
    assert parsed(lambda: kind.from_json(text)) is None


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"axes": ' + "9" * 5000 + "}", "\ufeff{}", "", "null"]
)
@pytest.mark.parametrize("kind", [Definition, Solution, Family, Workload, Trace])
def test_a_hostile_text_is_refused(kind, text):
    with pytest.raises(RecordError):
        kind.from_json(text, Path("f.json"))


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)


@given(st.dictionaries(names, st.integers(0, 2**40), max_size=5))
def test_an_axes_key_says_all_of_the_axes_in_one_way(axes):
    key = axes_key(axes)
    assert {name: int(size) for name, _, size in (part.partition("=") for part in key.split(",") if part)} == axes
    assert axes_key(dict(reversed(axes.items()))) == key


@EXAMPLES
@given(st.text(max_size=40) | st.text(alphabet="strided(),MN*+ 12", max_size=30).map(lambda inner: f"strided({inner})"))
def test_any_layout_is_refused_or_gives_strides(text):
    try:
        entries = parse_layout(text)
    except ValueError:
        return
    assert entries is None or all(entries)
    shape = (4, 8) if entries is None else (4,) * len(entries)
    try:
        strides = layout_strides(text, shape, {"M": 4, "N": 8})
    except RecordError:
        return
    assert len(strides) == len(shape)
    assert all(isinstance(stride, int) and stride >= 0 for stride in strides)
    assert layout_class(shape, strides) in ("contiguous", "row_contiguous", "strided")


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_strides_written_as_a_layout_are_those_strides(strides):
    text = f"strided({', '.join(map(str, strides))})"
    assert layout_strides(text, (2,) * len(strides), {}) == tuple(strides)


AXES = {"M": 7, "N": 4096, "K": 0, "D": 2**40}
OPERATORS = ["+", "-", "*", "/", "//", "%", "<", "<=", "==", "!=", ">", ">="]
operands = st.integers(0, 70).map(str) | st.sampled_from([*AXES, "0.5", "1e9", "True"])


def _grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from(OPERATORS), inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(inner, st.integers(0, 5)).map(lambda parts: f"({parts[0]} ** {parts[1]})"),
        st.tuples(inner, inner, inner).map(lambda parts: f"({' < '.join(parts)})"),
        st.tuples(inner, inner).map(lambda parts: f"ceil_div({', '.join(parts)})"),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"max({', '.join(parts)})"),
        inner.map(lambda part: f"(-{part})"),
    )


@EXAMPLES
@given(st.recursive(operands, _grow, max_leaves=10).filter(lambda text: len(text) <= 400))
def test_expression_has_pythons_value_unless_it_leaves_the_range(text):
    try:
        found: Any = evaluate(text, AXES)
    except RecordError as error:
        found = str(error)
    try:
        # The texts are made above, of nothing but arithmetic.
        expected = eval(text, {"__builtins__": {}, "max": max, "ceil_div": lambda a, b: -(-a // b)}, dict(AXES))
    except (ZeroDivisionError, OverflowError):
        assert "divides by zero" in found or "out of range" in found
        return
    if isinstance(found, str) and "divides by zero" in found:
        assert "<" in text or "=" in text  # Python stops at a comparison that is false; here every operand has a value
    elif isinstance(found, str):
        assert "out of range" in found
        assert "*" in text  # nothing else makes numbers so large
    else:
        assert found == expected


tokens = st.sampled_from(
    [
        "M",
        "N",
        "(",
        ")",
        "-",
        "not ",
        "**",
        "*",
        "9" * 30,
        "1e300",
        ",",
        "min(",
        "ceil_div(",
        "sizeof(",
        "T",
        " < ",
        "[",
        ".",
    ]
)


@EXAMPLES
@given(st.lists(tokens, max_size=40).map("".join) | st.text(max_size=40), st.sampled_from([0, 700]))
def test_any_text_has_a_value_or_is_refused_at_any_stack_depth(text, depth):
    def deeper(left: int) -> object:
        if left:
            return deeper(left - 1)
        try:
            return evaluate(text, AXES, {"T": "bfloat16"}), names_in(text)
        except RecordError as error:
            return error

    assert deeper(depth) is not None


@pytest.mark.parametrize(
    "text",
    [
        "9 ** 9 ** 9 ** 9",
        "(((9 ** 64) ** 64) ** 64) ** 64",
        "-" * 399 + "1",
        "not " * 99 + "M",
        "M" + " + M" * 90,
        "(" * 150 + "1" + ")" * 150,
        "min(1," * 50 + "1" + ")" * 50,
        "[" * 190 + "]" * 190,
        "M" + ".a" * 190,
        "lambda:" * 50 + "1",
        "1" + "0" * 390 + "1",
    ],
)
def test_a_hostile_expression_is_settled_at_once(text):
    started = time.process_time()
    with contextlib.suppress(RecordError):
        assert evaluate(text, AXES) == 1
    assert time.process_time() - started < 1.0
