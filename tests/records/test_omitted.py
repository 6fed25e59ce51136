"""Optional outputs: what may be one, what a Solution may omit, and that nothing shipped changed by there being such fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from raising import raises

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.paths import shipped_root
from tilegym_db.published.input_files import shipped_traces
from tilegym_db.records import Definition, Solution, Workload
from tilegym_db.records.solution import narrowed, signature_problem
from tilegym_db.store.journal import read_journal

TWO_MORE = {
    "outputs": {
        "out": {"shape": ["M", "N"], "dtype": "T"},
        "rms": {"shape": ["M"], "dtype": "float32"},
        "peak": {"shape": ["M"], "dtype": "float32"},
    }
}


def operator(make: Callable[..., dict[str, Any]], *optional: str, **changes: Any) -> Definition:
    return Definition.from_dict(make(**TWO_MORE, optional_outputs=optional, **changes))


@pytest.mark.parametrize(
    ("optional", "changes", "code"),
    [
        (["lse"], {}, "output_undeclared"),
        (["out", "rms", "peak"], {}, "optional_all"),
        (["rms"], {}, "optional_order"),
        (["peak", "rms"], {}, "optional_order"),
        (["peak"], {"in_place": {"x": "peak"}}, "optional_needed"),
    ],
)
def test_only_last_outputs_without_dependants_may_be_optional(
    definition_record: Callable[..., dict[str, Any]], optional: list[str], changes: dict[str, Any], code: str
) -> None:
    if changes:
        changes["outputs"] = {**TWO_MORE["outputs"], "peak": {"shape": ["M", "N"], "dtype": "T"}}
    record = definition_record(**{**TWO_MORE, "optional_outputs": optional, **changes})
    with raises(RecordError, code):
        Definition.from_dict(record)


@pytest.mark.parametrize(
    ("spec", "code", "name"),
    [
        ({"omits": ["out"]}, "omits_not_optional", "rms, peak"),
        ({"omits": ["rms"]}, "omits_order", "rms, peak"),
        ({"omits": ["peak"], "role": "baseline"}, "omits_of_baseline", "spec.omits"),
        ({"omits": ["peak"], "layouts": {"peak": "strided"}}, "layout_of_omitted", "'peak'"),
    ],
)
def test_a_solution_omits_the_last_optional_outputs_only(
    definition_record: Callable[..., dict[str, Any]],
    solution_record: Callable[..., dict[str, Any]],
    spec: dict[str, Any],
    code: str,
    name: str,
) -> None:
    solution = Solution.from_dict(solution_record(spec=spec))
    with raises(RecordError, code, name):
        solution.check_against(operator(definition_record, "rms", "peak"))


def test_an_entry_point_is_not_given_what_it_omits(
    definition_record: Callable[..., dict[str, Any]], solution_record: Callable[..., dict[str, Any]]
) -> None:
    definition = operator(definition_record, "rms", "peak")
    solution = Solution.from_dict(solution_record(spec={"omits": ["peak"]}))
    assert signature_problem(solution, "def run(x, weight, factor, out, rms): pass", definition) is None
    problem = signature_problem(solution, "def run(x, weight, factor, out, rms, peak): pass", definition)
    assert problem is not None
    assert "calls it with (x, weight, factor, out, rms)" in problem


def test_view_of_a_solution_has_the_digest_of_the_whole_operator(
    definition_record: Callable[..., dict[str, Any]],
) -> None:
    definition = operator(definition_record, "rms", "peak", codes={})
    view = narrowed(definition, ("peak",))
    assert tuple(view.outputs) == ("out", "rms")
    assert view.optional_outputs == ("rms",)
    assert view.digest == definition.digest
    assert tuple(definition.outputs) == ("out", "rms", "peak")
    assert narrowed(definition, ()) is definition


def test_both_fields_are_part_of_digests_where_they_are_set(
    definition_record: Callable[..., dict[str, Any]], solution_record: Callable[..., dict[str, Any]]
) -> None:
    assert operator(definition_record, "peak").digest != operator(definition_record).digest
    whole, part = (Solution.from_dict(solution_record(spec={"omits": omits})) for omits in ([], ["peak"]))
    assert whole.digest({"kernel.py": b""}) != part.digest({"kernel.py": b""})


def test_a_workload_leaves_an_optional_output_as_it_is(
    definition_record: Callable[..., dict[str, Any]], workload_record: Callable[..., dict[str, Any]]
) -> None:
    workload = Workload.from_dict(workload_record(layouts={"peak": "strided(2)"}))
    with raises(RecordError, "layout_of_optional", "layouts.peak: "):
        workload.check_against(operator(definition_record, "peak"))


def test_digests_of_all_shipped_records_are_as_they_were() -> None:
    """The lock has the Definitions' digests; the shipped measurements have those of Solutions, by which they stand."""
    catalog = Catalog((shipped_root(),))
    lock = json.loads((shipped_root() / "definitions" / "definitions.lock.json").read_text())
    for definition in catalog.definitions.values():
        assert definition.optional_outputs == ()
        assert "optional_outputs" not in definition.to_dict()
        assert lock[definition.name][definition.version] == definition.digest
    known = {files.digest for files in catalog.solutions.values()}
    norms = [path for path in shipped_traces(catalog) if path.parent.name == "norm"]
    measured = {trace.solution_digest for path in norms for trace in read_journal(path).traces}
    assert len(measured & known) > 10
