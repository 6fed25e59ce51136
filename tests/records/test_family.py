"""The record of a family: the keys that its Solutions share, and what each of them changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from raising import raises

from tilegym_db.errors import RecordError
from tilegym_db.records import Solution
from tilegym_db.records.solution import Family, expanded

SHARED = {
    "language": "triton",
    "dependencies": ["triton>=3.6"],
    "layouts": {"x": "row_contiguous", "out": "row_contiguous"},
    "tunables": {"BLOCK": [1, 2], "num_warps": [4]},
}
Make = Callable[..., Family]


@pytest.fixture
def family() -> Make:
    """Make a family of two Solutions: ``family(first={...}, key=value)`` changes the first one and the shared keys."""

    def make(first: dict[str, Any] | None = None, **changes: Any) -> Family:
        solutions = [
            {"name": "scale", "definition": "row_scale", **(first or {})},
            {"name": "shift", "definition": "row_shift", "spec": {"entry_point": "kernel.py::run_shift"}},
        ]
        record = {"author": "tests", "spec": SHARED, "solutions": solutions, **changes}
        return Family.from_dict({key: value for key, value in record.items() if value is not None}, "family.json")

    return make


def test_family_solution_equals_its_own_record(family: Make) -> None:
    spec = {**SHARED, "entry_point": "kernel.py::run_shift"}
    own = Solution.from_dict({"name": "shift", "definition": "row_shift", "author": "tests", "spec": spec})
    found = family().solution("shift")
    assert found == own
    assert found.to_json() == own.to_json()
    assert found.digest({"kernel.py": b""}) == own.digest({"kernel.py": b""})


def test_family_spec_key_of_a_solution_replaces_the_shared_one(family: Make) -> None:
    made = family({"spec": {"layouts": {"x": "strided"}, "tunables": {"BLOCK": [8]}}})
    spec = made.solution("scale").spec
    assert spec.layouts == {"x": "strided"}  # not merged with the shared layouts
    assert spec.tunables == {"BLOCK": (8,)}
    assert spec.dependencies == ("triton>=3.6",)
    assert made.solution("shift").spec.layouts == SHARED["layouts"]


def test_family_empty_value_replaces_the_shared_one(family: Make) -> None:
    assert family({"spec": {"tunables": {}}}).solution("scale").spec.tunables == {}


def test_family_sources_and_author_are_shared(family: Make) -> None:
    made = family(sources=[{"path": "kernel.py"}, {"path": "parts/tile.py"}])
    for name in ("scale", "shift"):
        record = made.solution(name)
        assert [source.path for source in record.sources] == ["kernel.py", "parts/tile.py"]
        assert record.author == "tests"


def test_family_description_is_the_shared_one_unless_stated(family: Make) -> None:
    made = family({"description": "Scales."}, description="One pass.")
    assert [made.solution(name).description for name in ("scale", "shift")] == ["Scales.", "One pass."]
    assert family({"description": ""}, description="One pass.").solution("scale").description == "One pass."


def test_family_without_a_shared_spec_is_valid(family: Make) -> None:
    solutions = [{"name": "scale", "definition": "row_scale", "spec": {"language": "python"}}]
    assert family(spec=None, solutions=solutions).solution("scale").spec.language == "python"


def test_family_survives_writing_and_reading(family: Make) -> None:
    made = family({"description": "Scales.", "spec": {"tunables": {}}}, description="One pass.")
    assert Family.from_json(made.to_json()) == made


def test_family_expansion_leaves_its_arguments() -> None:
    shared, own = {"author": "a", "spec": {"math": "ieee"}, "solutions": []}, {"name": "b", "spec": {"math": "tf32"}}
    assert expanded(shared, own) == {"author": "a", "name": "b", "description": "", "spec": {"math": "tf32"}}
    assert (shared["spec"], own["spec"]) == ({"math": "ieee"}, {"math": "tf32"})


@pytest.mark.parametrize(
    ("first", "changes", "code", "facts"),
    [
        ({}, {"language": "triton"}, "key_unknown", ("unknown key 'language'",)),
        ({}, {"author": None}, "key_missing", ("missing key 'author'",)),
        ({}, {"solutions": None}, "key_missing", ("missing key 'solutions'",)),
        ({}, {"solutions": []}, "list_too_short", ("solutions: ",)),
        ({}, {"spec": {"languages": "triton"}}, "key_unknown", ("spec: ", "'languages'", "'language'")),
        ({}, {"schema_version": 2}, "value_unknown", ("schema_version: ",)),
        ({}, {"sources": [{"path": "../kernel.py"}]}, "source_path_outside", ("../kernel.py",)),
        ({"author": "me"}, {}, "key_unknown", ("unknown key 'solutions.0.author'",)),
        ({"spec": {"tunable": {}}}, {}, "key_unknown", ("solutions.0.spec: ", "'tunable'", "'tunables'")),
        ({"name": "a/b"}, {}, "text_pattern", ("solutions.0.name: ",)),
        ({"name": "shift"}, {}, "solution_repeated", ("'shift' is listed twice",)),
        ({"spec": 3}, {}, "value_type", ("solutions.0.spec: ",)),
    ],
)
def test_family_fault_is_refused(
    first: dict[str, Any], changes: dict[str, Any], code: str, facts: tuple[str, ...], family: Make
) -> None:
    with raises(RecordError, code, "family.json: not a valid family: ", *facts):
        family(first, **changes)


def test_family_fault_of_a_whole_solution_names_it(family: Make) -> None:
    made = family({"spec": {"target_hardware": ["sm_13"]}})
    with raises(RecordError, "target_unknown", "family.json#scale: ", "'sm_13'"):
        made.solution("scale", "family.json#scale")
    assert made.solution("shift").name == "shift"


def test_family_solution_that_is_not_listed_is_refused(family: Make) -> None:
    with raises(RecordError, "solution_unlisted", "family.json: ", "'gone'"):
        family().solution("gone", "family.json")
