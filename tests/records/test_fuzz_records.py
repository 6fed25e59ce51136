"""Thousands of damaged records: each is read or refused by one of this package's errors, soon, and the message names the file.

Valid records are mutated as values (types, keys, numbers, texts, nesting), as text (a key twice, a cut) and as bytes (encodings).
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shipped_records import CATALOG as SHIPPED

from tilegym_db.catalog import SolutionFiles
from tilegym_db.catalog.record_files import family_places, file_of
from tilegym_db.catalog.writers import read_lock
from tilegym_db.errors import TilegymDBError
from tilegym_db.files import read_bytes
from tilegym_db.paths import shipped_root
from tilegym_db.published.input_files import read_lines
from tilegym_db.records import Definition, Trace, Workload
from tilegym_db.records.loop import ModelRun
from tilegym_db.records.roofline import GpuPeaks
from tilegym_db.store.journal import read_journal
from tilegym_db.store.side_files import TuningStep

EXAMPLES, SOME_EXAMPLES = 400, 100
LIMIT_S = 5.0
DEFINITION = SHIPPED.definition("fused_add_rms_norm")
SOLUTION = next(files for files in SHIPPED.solutions_for("fused_add_rms_norm") if files.record.spec.tunables)


TRACES = shipped_root() / "traces" / "h200"


def first_trace() -> dict[str, Any]:
    return read_journal(TRACES / "norm" / "rms_norm.jsonl.gz").traces[0].to_dict()


def first_step() -> dict[str, Any]:
    path = TRACES / "softmax" / "tuning" / "softmax.jsonl.gz"
    return read_lines(path.read_bytes(), path)[0]


ESTIMATE = {"median": 2.0, "ci_low": 1.9, "ci_high": 2.1}
TIMING = {"ttft_ms": ESTIMATE, "total_ms": ESTIMATE, "peak_memory_bytes": 10}
BASES: dict[str, dict[str, Any]] = {
    "definition": DEFINITION.to_dict(),
    "solution": SOLUTION.record.to_dict(),
    "family": json.loads(file_of(SOLUTION.path).read_bytes()),
    "workload": SHIPPED.workloads_for("fused_add_rms_norm")[0].to_dict() | {"layouts": {"x": "strided(2 * N, 1)"}, "uuid": ""},
    "trace": first_trace(),
    "peaks": json.loads(next(iter(shipped_root().glob("traces/*/peaks.json"))).read_bytes()),
    "tuning step": first_step(),
    "lock": {name: versions for name, versions in itertools.islice(read_lock(shipped_root()).items(), 3)},
    "model run": {
        "run_id": "run", "timestamp": "2026-11-01T00:00:00Z", "model": "tiny", "model_class": "Tiny", "config_digest": "0" * 64,
        "layers": 1, "parameters": 10, "dtype": "bfloat16", "batch": 1, "prompt_tokens": 4, "new_tokens": 0, "rounds": 8,
        "gpu": "h200", "gpu_name": "NVIDIA H200", "timer": "events", "stock": TIMING, "patched": TIMING,
        "ttft_speedup": ESTIMATE, "total_speedup": ESTIMATE, "equal_tokens": 1, "kernels": {"rms_norm": 3},
        "ways": {"static": {"timing": TIMING, "equal_tokens": 1,
                            "against": {"stock": {"ttft": ESTIMATE, "total": ESTIMATE}}}},
    },
}  # fmt: skip


# -- reading, as the package does it, with the questions that it asks of what it read -------------------------------------


def read_definition(path: Path) -> None:
    record = Definition.from_json(read_bytes(path, "definition"), path)
    assert len(record.digest) == 64
    axes = {name: 64 for name in record.var_axes}
    for question in (
        lambda: record.bind_axes(axes),
        lambda: record.bind_dtypes({}),
        lambda: record.cost_of(record.bind_axes(axes), {name: choices[0] for name, choices in record.dtypes.items()}),
        lambda: [record.shape_of(name, record.bind_axes(axes)) for name in record.outputs],
    ):
        answer_or_refuse(question)
    assert Definition.from_json(record.to_json(), path) == record


def read_solution(path: Path) -> None:
    folder = path.parent
    for name, content in SOLUTION.sources.items():
        (folder / name).write_bytes(content)
    path.rename(folder / "solution.json")
    files = SolutionFiles.read(folder)
    assert len(files.digest) == 64
    try:
        files.record.check_against(DEFINITION)
    except ValueError:  # which the catalog makes a RecordError of
        return
    answer_or_refuse(lambda: files.record.unsupported({name: 64 for name in DEFINITION.axes}, {"T": "bfloat16"}))
    assert len(list(itertools.islice(files.record.configs(), 50))) >= 1


def read_family(path: Path) -> None:
    for name, content in SOLUTION.sources.items():
        (path.parent / name).write_bytes(content)
    file = path.rename(path.with_name("family.json"))
    for place in family_places(file):
        SolutionFiles.read(place)


def read_workload(path: Path) -> None:
    record = Workload.from_json(read_bytes(path, "workload"), path)
    answer_or_refuse(lambda: record.check_against(DEFINITION))
    answer_or_refuse(lambda: record.layout_classes(DEFINITION))


def read_the_lock(path: Path) -> None:
    target = path.parent / "definitions" / "definitions.lock.json"
    target.parent.mkdir(exist_ok=True)
    path.rename(target)
    read_lock(path.parent)


def reads(record: Any) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        found = record.from_json(read_bytes(path, "record"), path)
        assert record.from_json(found.to_json(), path) == found

    return read


READERS: dict[str, Callable[[Path], None]] = {
    "definition": read_definition,
    "solution": read_solution,
    "family": read_family,
    "workload": read_workload,
    "trace": reads(Trace),
    "peaks": reads(GpuPeaks),
    "tuning step": reads(TuningStep),
    "lock": read_the_lock,
    "model run": reads(ModelRun),
}


def answer_or_refuse(question: Callable[[], Any]) -> None:
    message = refusal(question)
    assert message is None or 0 < len(message) < 20_000


def refusal(question: Callable[[], Any]) -> str | None:
    """The message of this package's error, or None; any other exception fails the test."""
    try:
        question()
    except TilegymDBError as error:
        return str(error)
    return None


# -- damage ---------------------------------------------------------------------------------------------------------------

nasty_texts = st.sampled_from([
    "", " ", "4", "true", "nan", "\n", "a\nb", "\x00", "\x1b[31m", "\u202e", "\U0001f600", "x" * 300, "x" * 70_000, "; rm -rf /",
    "../../etc/passwd", "/dev/zero", "N < 9**9**9**9", "9**9**9", "2**N", "N // 0", "1 << 99", "min(M)", "(" * 500,
    "-" * 399 + "N",     "not " * 90 + "N", "strided(", "strided(,)", "strided(M, N)", "__import__('os')", "def run(:",
    "lambda: 0", "N", "T", "x",
    "x @ https://example.org/x.zip", "triton>=", "kernel.py::", "::run", "solution.json", "2026-13-41T99:99:99Z", "0000-00-00",
    "9999-12-31T23:59:59-14:00", "1.0.0.0", "NaN", "sm_90", "float99", "\ud7ff", "\ufdd0",
])  # fmt: skip
nasty_numbers = st.sampled_from(
    [0, -1, 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 5e-324, 1e16]
)
plain_values = st.one_of(st.none(), st.booleans(), nasty_numbers, nasty_texts, st.integers(), st.text(max_size=20))
nested = st.integers(2, 400).map(lambda depth: json.loads("[" * depth + "1" + "]" * depth))
values = st.one_of(
    plain_values,
    plain_values,
    st.lists(plain_values, max_size=4),
    st.dictionaries(st.text(max_size=8), plain_values, max_size=4),
    nested,
    st.just(["x"] * 3000),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [path, *itertools.chain.from_iterable(places(item, (*path, key)) for key, item in inner)]


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], change)
    return copy


@st.composite
def damaged(draw: st.DrawFn, kind: str) -> tuple[bytes, tuple[Any, ...]]:
    """(the bytes of a record that is damaged, the place where it was damaged first)."""
    value: Any = BASES[kind]
    first: tuple[Any, ...] = ()
    for number in range(draw(st.integers(1, 3))):
        known = places(value)
        path = draw(st.sampled_from(known if number else known[1:]))
        first = first or path
        parent_is_mapping = bool(path) and isinstance(path[-1], str)
        match draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "add"])):
            case "remove" if parent_is_mapping:
                value = changed(
                    value, path[:-1], lambda item, key=path[-1]: {k: v for k, v in item.items() if k != key}
                )
            case "rename" if parent_is_mapping:
                new = draw(st.one_of(nasty_texts, st.text(max_size=10)))
                value = changed(
                    value,
                    path[:-1],
                    lambda item, key=path[-1], new=new: {new if k == key else k: v for k, v in item.items()},
                )
            case "add":
                key, extra = draw(st.one_of(nasty_texts, st.text(max_size=10))), draw(values)
                value = changed(
                    value,
                    path,
                    lambda item, key=key, extra=extra: (
                        {**item, key: extra} if isinstance(item, dict) else [item, extra]
                    ),
                )
            case _:
                new = draw(values)
                value = changed(value, path, lambda item, new=new: new)
    return draw(st.sampled_from(DAMAGE))(json.dumps(value, ensure_ascii=draw(st.booleans()))), first


def twice(text: str) -> bytes:
    """The first key of the outermost object once more, at its end."""
    key = text[1:].partition(":")[0]
    return (text[:-1] + f", {key}: 1}}").encode() if text.startswith("{") and '"' in key else text.encode()


DAMAGE: list[Callable[[str], bytes]] = [
    *[str.encode] * 12,
    twice,
    lambda text: text.encode()[: len(text) // 2],
    lambda text: text.encode("utf-16"),
    lambda text: text.encode("utf-8-sig"),
    lambda text: text.encode().replace(b" ", b"\x00", 1),
    lambda text: text.encode()[:30] + b"\xff\xfe" + text.encode()[30:],
    lambda text: text.encode() + text.encode(),
    lambda text: text.replace("1", "NaN", 1).encode(),
]


@pytest.mark.sweep(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_damaged_record_is_read_or_refused_by_name(kind: str, tmp_path: Path, pytestconfig: pytest.Config):
    folders = (tmp_path / str(number) for number in itertools.count())
    examples = EXAMPLES if pytestconfig.option.all_records else SOME_EXAMPLES

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(damaged(kind))
    def check(case: tuple[bytes, tuple[Any, ...]]) -> None:
        content, _ = case
        path = next(folders) / "record.json"
        path.parent.mkdir()
        path.write_bytes(content)
        begun = time.process_time()
        message = refusal(partial(READERS[kind], path))
        if message is not None:
            assert str(path.parent) in message
            assert len(message) < 20_000
            assert "\n" not in message
        assert time.process_time() - begun < LIMIT_S

    check()


@pytest.mark.parametrize("kind", [kind for kind in BASES if kind not in ("lock",)])
def test_the_records_that_are_damaged_are_valid_to_begin_with(kind: str, tmp_path: Path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(BASES[kind]))
    READERS[kind](path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["definition", "solution", "workload", "peaks", "model run"])
def test_a_wrong_type_anywhere_is_named_by_its_key(kind: str, tmp_path: Path):
    for path in places(BASES[kind])[1:]:
        for wrong in ({"no": {"such": "thing"}}, [["no", "such"]], True, 10**30):
            file = tmp_path / "record.json"
            file.write_text(json.dumps(changed(BASES[kind], path, lambda item, wrong=wrong: wrong)))
            message = refusal(partial(READERS[kind], file))
            steps = [str(step) for step in path if isinstance(step, str)]
            assert message is None or any(step in message for step in steps), (path, wrong, message)
