"""What a notebook gets from ``open_store().sql(...)``."""

from __future__ import annotations

import importlib.util

import pytest

from tilegym_db.errors import MissingPackageError, QueryError, StoreError
from tilegym_db.store.connection import open_store


@pytest.fixture
def store(asked):
    home, catalog = asked
    with open_store(home, read_only=True, catalog=catalog) as opened:
        yield opened


def test_an_answer_is_a_sequence_of_rows(store):
    answer = store.sql("SELECT solution, latency_us FROM best WHERE gpu = $gpu", {"gpu": "h200"})
    assert (answer.columns, answer.types) == (("solution", "latency_us"), ("VARCHAR", "DOUBLE"))
    assert (len(answer), list(answer), answer[0]) == (1, [("scale_triton", 7.5)], ("scale_triton", 7.5))


def test_arrow_keeps_the_types_of_the_database(store):
    table = store.sql("SELECT axes, latency_us FROM traces").arrow()
    assert [str(kind) for kind in table.schema.types] == ["map<string, int64>", "double"]
    assert table.to_pylist()[0]["latency_us"] == 7.5


def test_a_notebook_shows_a_table_with_its_text_escaped_and_says_how_much_is_left_out(store):
    shown = store.sql("SELECT '<b>' || i AS label, NULL AS nothing FROM range(25) t(i)")._repr_html_()
    assert "<th>label</th>" in shown
    assert "<td>&lt;b&gt;19</td><td></td>" in shown
    assert "&lt;b&gt;20" not in shown
    assert shown.endswith("<p>5 more rows</p>")


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_data_frame_has_the_answer_or_its_package_is_named(store, package):
    answer = store.sql("SELECT solution FROM best")
    if importlib.util.find_spec(package) is None:
        with pytest.raises(MissingPackageError, match=f"pip install '{package}'"):
            getattr(answer, package)()
    else:
        assert getattr(answer, package)()["solution"].to_list() == ["scale_triton"]


def test_a_store_answers_reads_only_and_not_after_it_was_closed(asked):
    home, catalog = asked
    with open_store(home, catalog=catalog) as writable:
        with pytest.raises(QueryError, match="sql only reads"):
            writable.sql("DELETE FROM trace_records")
        answer = writable.sql("SELECT solution FROM best")
    assert answer.rows == [("scale_triton",)]
    with pytest.raises(StoreError):
        answer.arrow()
