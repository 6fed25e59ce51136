"""What parsing found is kept between commands: never for another text, and never in the way."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.catalog.record_files import ANY_PARSER, FILE_NAME, keeping_parsed_sources, shipped_file
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.records import expressions
from tilegym_db.records.expressions import (
    LARGE,
    forget_sources,
    headers_of_large_sources,
    parse_source,
    recall_headers,
)

FILLER = "# " + "x" * LARGE + "\n"
HEADERS = (
    "def run(x, /, out, *more, BLOCK=4, **rest):\n    return x\n",
    "def run(x,\n        out): return x\n",
    "def run(x): return x\n",
    'async def run(\n    x,  # why\n    out=(1,\n         2),\n) -> None:\n\n    # a comment\n    """Text."""\n',
    "@one\ndef run(x):\n    @two\n    def inner(y):\n        return y\n    return inner\n",
)


@pytest.fixture(autouse=True)
def another_process() -> Iterator[None]:
    known = headers_of_large_sources()
    forget_sources()
    yield
    forget_sources()
    recall_headers(known)


def signatures(source: bytes) -> list[str]:
    return [ast.dump(node.args) for node in parse_source(source).body if hasattr(node, "args")]


@pytest.mark.parametrize("text", HEADERS)
def test_a_source_that_was_parsed_before_has_the_same_functions(
    tmp_path: Path, text: str, ship: Callable[[Path], Path]
) -> None:
    ship(tmp_path / "nothing")
    source = (FILLER + text).encode()
    with keeping_parsed_sources(tmp_path):
        first = signatures(source)
    forget_sources()
    with keeping_parsed_sources(tmp_path):
        parsed = next(iter(headers_of_large_sources().values()))
        assert "xxx" not in parsed
        assert signatures(source) == first != []


def test_a_source_that_changed_is_parsed_again(tmp_path: Path) -> None:
    with keeping_parsed_sources(tmp_path):
        signatures((FILLER + "def run(x): pass\n").encode())
    forget_sources()
    with keeping_parsed_sources(tmp_path):
        with raises(RecordError, "python_syntax", "line 2"):
            signatures((FILLER + "def run(x) pass\n").encode())
        assert "y" in signatures((FILLER + "def run(y): pass\n").encode())[0]


@pytest.mark.parametrize(
    "damage", [b"", b"[1]", b'{"parser": "other", "headers": {}}', b"\xff\xfe", b'{"headers": 3}', b"[" * 9999]
)
def test_a_damaged_file_costs_time_and_nothing_else(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(damage)
    with keeping_parsed_sources(tmp_path):
        assert signatures((FILLER + "def run(x): pass\n").encode())
    assert json.loads((tmp_path / FILE_NAME).read_bytes())["headers"]


def test_a_header_that_was_damaged_is_parsed_from_the_source(tmp_path: Path) -> None:
    source = (FILLER + "def run(x): pass\n").encode()
    with keeping_parsed_sources(tmp_path):
        first = signatures(source)
    content = json.loads((tmp_path / FILE_NAME).read_bytes())
    content["headers"] = dict.fromkeys(content["headers"], "def run(x")
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    forget_sources()
    with keeping_parsed_sources(tmp_path):
        assert signatures(source) == first


def test_nothing_is_written_without_a_usable_home(tmp_path: Path) -> None:
    with keeping_parsed_sources(tmp_path / "home"):
        signatures((FILLER + "def run(x): pass\n").encode())
    assert not (tmp_path / "home").exists()
    (tmp_path / FILE_NAME).mkdir()
    with keeping_parsed_sources(tmp_path):
        signatures((FILLER + "def run(z): pass\n").encode())
    assert (tmp_path / FILE_NAME).is_dir()


def test_packaged_sources_are_what_parsing_finds_and_nearly_all(tmp_path: Path, ship: Callable[[Path], Path]) -> None:
    content = json.loads(shipped_file().read_bytes())
    shipped = content["headers"]
    assert content["parser"] == ANY_PARSER
    catalog = Catalog((shipped_root(),))
    ship(tmp_path / "nothing")
    _ = catalog.solutions  # parses all, since nothing was recalled
    found = headers_of_large_sources()
    known = found.keys() & shipped.keys()
    assert {key: found[key] for key in known} == {key: shipped[key] for key in known}
    assert len(known) > 0.75 * len(found), "run: python tools/write_parsed_sources.py"


def test_a_catalog_parses_no_shipped_source_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog((shipped_root(),))
    known = json.loads(shipped_file().read_bytes())["headers"].keys()
    parsed: list[str] = []
    found = expressions._functions
    monkeypatch.setattr(expressions, "_functions", lambda text, key="": (parsed.append(key), found(text, key))[1])
    for definition in ("rms_norm", "gemm"):
        assert catalog.solutions_for(definition)
    assert len(parsed) > 4
    assert not known & set(parsed)


def test_new_home_parses_no_shipped_source_and_keeps_its_own(tmp_path: Path) -> None:
    own = (FILLER + "def run(x): pass\n").encode()
    with keeping_parsed_sources(tmp_path):
        assert len(headers_of_large_sources()) == len(json.loads(shipped_file().read_bytes())["headers"])
        signatures(own)
    assert len(json.loads((tmp_path / FILE_NAME).read_bytes())["headers"]) == 1
