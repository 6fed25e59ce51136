"""What a notebook gets from ``open_store().sql(...)``."""

from __future__ import annotations

import importlib.util
from xml.etree import ElementTree

import pytest
from raising import raises

from tilegym_db.errors import MissingPackageError, QueryError, StoreError, UsageError
from tilegym_db.store.opening import open_store


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


def test_notebook_table_escapes_text_and_says_how_much_is_cut(store):
    shown = store.sql("SELECT '<b>' || i AS label, NULL AS nothing FROM range(25) t(i)")._repr_html_()
    assert "<th>label</th>" in shown
    assert "<td>&lt;b&gt;19</td><td></td>" in shown
    assert "&lt;b&gt;20" not in shown
    assert shown.endswith("<p>5 more rows</p>")


def test_notebook_plot_points_say_the_numbers_of_the_rows(store):
    answer = store.sql("SELECT i AS size, 2.5 * i AS us, '<b>' || i % 2 AS label FROM range(1, 7) t(i)")
    plot = answer.plot("size", "us", line="label")
    assert plot.lines == {"<b>1": [(1, 2.5), (3, 7.5), (5, 12.5)], "<b>0": [(2, 5.0), (4, 10.0), (6, 15.0)]}
    root = ElementTree.fromstring(plot._repr_svg_())
    assert [item.text for item in root.iter("{http://www.w3.org/2000/svg}title")] == [
        f"<b>{name}: {size:g}, {size * 2.5:g}" for name, sizes in ((1, (1, 3, 5)), (0, (2, 4, 6))) for size in sizes
    ]
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2


@pytest.mark.parametrize(
    ("text", "x", "code", "names"),
    [
        ("SELECT 1 AS a, 2 AS b", "c", "column_unknown", ("'c'", "a, b")),
        ("SELECT 'x' AS a, 2 AS b", "a", "plot_empty", ("'a'", "'b'")),
        ("SELECT i AS a, 2 AS b, i AS line FROM range(13) t(i)", "a", "plot_lines_too_many", ("13", "12")),
    ],
)
def test_what_is_no_plot_is_refused(store, text, x, code, names):
    answer = store.sql(text)
    with raises(UsageError, code, *names):
        answer.plot(x, "b", "line" if "line" in answer.columns else None)


@pytest.mark.parametrize("values", ["(-5), (0), (7)", "(3)", "(1e-6), (1e9)", "(NULL), (2), (5)"])
def test_axes_take_zero_one_value_and_many_decades(store, values):
    plot = store.sql(f"SELECT v::DOUBLE AS a, v::DOUBLE AS b FROM (VALUES {values}) t(v)").plot("a", "b")
    assert "nan" not in plot.svg().lower()
    assert 1 <= plot.svg().count('text-anchor="end"') <= 12


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_data_frame_has_the_answer_or_its_package_is_named(store, package):
    answer = store.sql("SELECT solution FROM best")
    if importlib.util.find_spec(package) is None:
        with raises(MissingPackageError, "package_missing", f"pip install '{package}'"):
            getattr(answer, package)()
    else:
        assert getattr(answer, package)()["solution"].to_list() == ["scale_triton"]


def test_a_store_answers_reads_only_and_not_after_it_was_closed(asked):
    home, catalog = asked
    with open_store(home, catalog=catalog) as writable:
        with raises(QueryError, "statement_not_select"):
            writable.sql("DELETE FROM trace_records")
        answer = writable.sql("SELECT solution FROM best")
    assert answer.rows == [("scale_triton",)]
    with raises(StoreError, "store_closed"):
        answer.arrow()
