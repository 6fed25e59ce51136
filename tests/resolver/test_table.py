"""Published snapshots: which file is read, what is refused, when it is read again."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
from published_tables import lock_folder, write_table
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.published.input_files import LOCK_NAME, packed
from tilegym_db.published.table import load_table


def test_nothing_published_is_no_table(shop: Any) -> None:
    assert load_table("h200") is None


def test_entries_are_found_by_definition_and_dtypes(shop: Any, kernel: Any) -> None:
    candidates = [shop.candidate(kernel, 5.0, config={"BIAS": 1})]
    shop.publish([shop.entry("scale_rows", {"M": 4, "N": 8}, candidates)], gpu="h200")
    table = load_table("h200")
    assert table is not None
    assert (table.gpu, table.sm, table.size, table.definitions) == ("h200", "sm_90", 1, ("scale_rows",))
    (entry,) = table.entries("scale_rows", {"T": "bfloat16"})
    assert str(entry.candidates[0]) == "scale_rows_kernel[BIAS=1]"
    assert table.entries("scale_rows", {"T": "float32"}) == ()
    assert table.entries("halves", {}) == ()
    assert list(table) == [entry]


def test_a_table_published_here_wins_over_the_shipped_one(shop: Any) -> None:
    write_table(shop.root / "traces" / "h200", [], shop.home, published="2020")
    shop.publish([], gpu="h200", published="2026")
    local = load_table("h200")
    assert local is not None
    assert local.published == "2026"
    shutil.rmtree(shop.home / "published" / "h200")
    fallback = load_table("h200")
    assert fallback is not None
    assert fallback.published == "2020"


def test_a_family_means_any_of_its_gpus(shop: Any) -> None:
    shop.publish([], gpu="h100-pcie")
    table = load_table("h100")
    assert table is not None
    assert table.gpu == "h100-pcie"
    assert load_table("h100-sxm") is None


def test_a_table_is_read_again_when_it_changes(shop: Any) -> None:
    lock = shop.publish([], gpu="h200", published="one") / LOCK_NAME
    first = load_table("h200")
    assert first is load_table("h200")
    shop.publish([], gpu="h200", published="two")
    os.utime(lock, ns=(1, 1))
    changed = load_table("h200")
    assert changed is not None
    assert changed.published == "two"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{}", "trace_file_damaged"),
        (packed(b'{"status": "PASSED"\n'), "trace_file_damaged"),
        (packed(b"[]\n"), "trace_file_damaged"),
        (packed(b'{"status": "PASSED", "performance": {}}\n'), "trace_file_damaged"),
        (packed(b'{"status": "PASSED", "performance": []}\n'), "trace_file_damaged"),
        (packed(b'{"status": "PASSED", "performance": {}, "dtypes": [1]}\n'), "trace_file_damaged"),
        (packed(b'{"status": "PASSED", "performance": {}, "scalars": 1}\n'), "trace_file_damaged"),
        (packed(b"{}\n")[:-9], "trace_file_damaged"),
    ],
)
def test_a_damaged_trace_file_is_named(shop: Any, content: bytes, code: str) -> None:
    folder = shop.publish([], gpu="h200")
    path = folder / "toy" / "halves.jsonl.gz"
    path.parent.mkdir()
    path.write_bytes(content)
    lock_folder(folder, shop.home, gpu="h200", sm="sm_90", published="2026")
    table = load_table("h200")
    assert table is not None
    with raises(RecordError, code, str(path)):
        table.entries("halves", {})


def test_published_tables_of_the_checkout_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TILEGYM_DB_HOME", str(tmp_path))
    for folder in (shipped_root() / "traces").iterdir():
        if folder.is_dir():
            table = load_table(folder.name)
            assert table is not None
            assert table.gpu == folder.name
            assert table.definitions
            assert {entry.call.definition for entry in table} == set(table.definitions)
