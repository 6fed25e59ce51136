"""A look-up gives what the long way gives, for tables and calls of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_tables import table_of as published_table

from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import UsageError
from tilegym_db.published.entries import why_outside_scalars
from tilegym_db.published.table import ResolverTable
from tilegym_db.records import Definition, Solution
from tilegym_db.records.call import LAUNCHES, Call
from tilegym_db.resolver.decide import Decision, decide
from tilegym_db.resolver.resolve import PointIndex, index_of, make_request

DEFINITION = Definition.from_dict(
    {
        "name": "halves",
        "version": "1.0.0",
        "op_type": "toy",
        "dtypes": {"T": ["bfloat16", "float32"], "C": ["float32"]},
        "axes": {"M": {"type": "var"}, "H": {"type": "const", "value": 2}, "I": {"type": "var"}},
        "inputs": {
            "x": {"shape": ["M", "H*I"], "dtype": "T"},
            "table": {"shape": ["I"], "dtype": "C"},
            "swap": {"shape": None, "dtype": "bool"},
            "eps": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"out": {"shape": ["M", "I"], "dtype": "T"}},
        "constraints": ["I <= 4"],
        "reference": "# Source: made up\ndef run(x, table, swap, eps):\n    return x[:, ::2] * table\n",
    }
)


def solution(name: str, language: str, **spec: Any) -> SolutionFiles:
    record = Solution.from_dict(
        {
            "name": name,
            "definition": "halves",
            "author": "tests",
            "spec": {"language": language, "entry_point": "kernel.py::run", **spec},
            "sources": [{"path": "kernel.py"}],
        }
    )
    return SolutionFiles(record, Path(name) / "solution.json", {"kernel.py": name.encode()})


SOLUTIONS = {
    files.name: files
    for files in (
        solution("plain", "triton"),
        solution("rows", "tilelang", layouts={"x": "row_contiguous", "out": "row_contiguous"}, constraints=["M >= 2"]),
        solution("any", "cutile", layouts={"x": "strided", "table": "strided", "out": "strided"}, dtypes={"T": ["bfloat16"]}),
        solution("elsewhere", "triton", target_hardware=["sm_100"]),
        solution("stock", "python", role="baseline", provides="stock"),
    )
}  # fmt: skip

LAYOUTS = ("contiguous", "row_contiguous", "strided")
layouts = st.dictionaries(st.sampled_from(["x", "table", "out"]), st.sampled_from(LAYOUTS), max_size=2)
sizes = st.sampled_from([1, 2, 4, 8])


@st.composite
def candidates(draw: st.DrawFn) -> dict[str, Any]:
    files = draw(st.sampled_from([*SOLUTIONS.values(), solution("gone", "triton")]))
    latency = draw(st.sampled_from([10.0, 10.05, 12.0]))
    spread = draw(st.sampled_from([0.001, 0.1]))
    speedup = draw(st.sampled_from([None, 0.9, 1.01, 1.5]))
    return {
        "solution": files.name,
        "solution_digest": draw(st.sampled_from([files.digest] * 3 + ["0" * 64])),
        "language": files.record.spec.language,
        "role": files.record.spec.role,
        "config": draw(st.sampled_from([{}, {"BLOCK": 1}])),
        "latency_us": latency,
        "ci_low_us": draw(st.sampled_from([None, latency * (1 - spread)])),
        "ci_high_us": draw(st.sampled_from([None, latency * (1 + spread)])),
        "host_us": draw(st.sampled_from([None, 5.0, 9.0])),
        "speedup": speedup,
        "speedup_ci_low": speedup,
        "tier": draw(st.sampled_from(["promotion"] * 3 + ["interpreter"])),
        "sandbox_level": draw(st.sampled_from([3, 3, 0])),
        "envelope_cases": draw(st.sampled_from([24, None])),
    }


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "definition": "halves",
        "definition_version": "1.0.0",
        "definition_digest": draw(st.sampled_from([DEFINITION.digest] * 5 + ["0" * 64])),
        "op_type": "toy",
        "axes": {"M": draw(sizes), "I": draw(sizes)},
        "dtypes": {"T": draw(st.sampled_from(["bfloat16", "float32", "float16"])), "C": "float32"},
        "scalars": draw(
            st.fixed_dictionaries({}, optional={"swap": st.booleans(), "eps": st.sampled_from([1e-5, 1e-6])})
        ),
        "layouts": draw(layouts),
        "candidates": draw(st.lists(candidates(), min_size=1, max_size=5)),
    }


@st.composite
def calls(draw: st.DrawFn, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """A call near a measured point: mostly it, now and then something else of it, or what no call may be."""
    entry = draw(st.sampled_from(measured))
    call: dict[str, Any] = {
        "axes": dict(entry["axes"]),
        "dtypes": dict(entry["dtypes"]),
        "scalars": {"swap": False, **entry["scalars"]},
        "layouts": dict(entry["layouts"]),
    }
    changes = {
        "axes": [{"H": 2}, {"H": 3}, {"M": 2}, {"M": True}, {"M": 2.0}, {"I": 8}, {"K": 1}],
        "dtypes": [{"T": "float32"}, {"T": "int8"}, {"U": "float32"}, {"T": ["float32"]}],
        "scalars": [{"swap": True}, {"swap": 0}, {"swap": None}, {"swap": []}, {"eps": 1e-6}, {"bias": 1}],
        "layouts": [{"out": "contiguous"}, {"x": "contiguous"}, {"x": "strided"}, {"x": "dense"}, {"z": "strided"}],
    }
    for part, choices in changes.items():
        if draw(st.integers(0, 3)) == 0:
            call[part].update(draw(st.sampled_from(choices)))
    left_out = draw(
        st.sampled_from([None] * 5 + [("dtypes", "C"), ("axes", "M"), ("scalars", "swap"), ("layouts", "x")])
    )
    if left_out:
        call[left_out[0]].pop(left_out[1], None)
    return call


def long_way(
    call: dict[str, Any], table: ResolverTable, serving: str | None, unavailable: dict[str, str], launch: Any
) -> Decision | None:
    """None where the call is refused."""
    try:
        request = make_request(
            DEFINITION,
            Call(DEFINITION.name, **call),
            gpu=table.gpu,
            sm="sm_90",
            serving=serving,
            unavailable=unavailable,
            launch=launch,
        )
    except UsageError:
        return None
    return decide(request, table, SOLUTIONS)


def is_outside(call: dict[str, Any], table: ResolverTable) -> bool:
    """Whether a continuous scalar is none that anybody verified: that is left to the long way."""
    return why_outside_scalars(DEFINITION, call["scalars"], table.scalar_hull(DEFINITION.name)) is not None


@pytest.mark.turn("tilegym_db/resolver/", "tilegym_db/published/")  # drawn tables; chosen ones are looked up daily
@given(st.data())
def test_a_look_up_is_the_long_way_made_short(data: st.DataObject) -> None:
    unavailable = data.draw(st.sampled_from([{}, {"triton": "triton cannot run here"}]))
    launch = data.draw(st.sampled_from(LAUNCHES))
    tables = {
        gpu: published_table(gpu, data.draw(st.lists(entries(), min_size=1, max_size=8))) for gpu in ("h100", "h200")
    }
    for table in tables.values():
        index = index_of(DEFINITION, table, SOLUTIONS, sm="sm_90", unavailable=unavailable, launch=launch)
        for _ in range(5):
            call = data.draw(calls([vars(entry.call) for entry in table]))
            serving = data.draw(st.sampled_from([None, *SOLUTIONS, "unknown"]))
            expected = long_way(call, table, serving, unavailable, launch)
            found = index.find(Call(DEFINITION.name, **call), serving)
            if found is not None:
                assert found == expected
            elif expected is not None and is_spelled_out(call) and not is_outside(call, table):
                assert expected.evidence.axes != {name: call["axes"][name] for name in DEFINITION.var_axes}


def is_spelled_out(call: dict[str, Any]) -> bool:
    """Sizes and dtypes are all there and are what a framework gives; anything else may take the long way."""
    return len(call["dtypes"]) == 2 and type(call["scalars"]["swap"]) in (bool, int, type(None))


ENTRY: dict[str, Any] = {
    "definition": "halves",
    "definition_version": "1.0.0",
    "definition_digest": DEFINITION.digest,
    "op_type": "toy",
    "dtypes": {"T": "bfloat16", "C": "float32"},
    "axes": {"M": 4, "I": 2},
    "scalars": {"swap": False},
}


def table_of(*found: dict[str, Any]) -> ResolverTable:
    return published_table("h200", [{**ENTRY, "candidates": list(found)}])


def verified(name: str, **changes: Any) -> dict[str, Any]:
    files = SOLUTIONS[name]
    return {
        "solution": name,
        "solution_digest": files.digest,
        "language": files.record.spec.language,
        "role": "kernel",
        "latency_us": 10.0,
        "speedup": 1.5,
        "speedup_ci_low": 1.45,
        "tier": "promotion",
        "sandbox_level": 3,
        **changes,
    }


CALL: dict[str, Any] = {
    "axes": {"M": 4, "I": 2},
    "dtypes": {"T": "bfloat16", "C": "float32"},
    "layouts": {"x": "contiguous", "table": "contiguous"},
    "scalars": {"swap": False, "eps": 1e-5},
}


def test_measured_point_has_a_reason_for_every_candidate() -> None:
    index = PointIndex(DEFINITION, table_of(verified("plain")), SOLUTIONS, sm="sm_90", unavailable={})
    decision = index.find(Call(DEFINITION.name, **CALL))
    assert decision is not None
    assert decision.solution is SOLUTIONS["plain"]
    assert {str(candidate) for candidate, _ in decision.rejected} == {"any", "elsewhere", "rows", "stock"}
    assert index.find(Call(DEFINITION.name, **{**CALL, "axes": {"M": 4, "H": 2, "I": 2}})) is decision


def test_what_is_serving_of_a_tie_keeps_its_place() -> None:
    table = table_of(verified("plain"), verified("any", latency_us=10.0))
    index = PointIndex(DEFINITION, table, SOLUTIONS, sm="sm_90", unavailable={})
    picked = {name: index.find(Call(DEFINITION.name, **CALL), name) for name in ("any", "plain", "rows")}
    assert [decision.solution.name for decision in picked.values() if decision and decision.solution] == [
        "any", "plain", "any",
    ]  # fmt: skip


def test_call_sites_of_one_table_share_an_index() -> None:
    table = table_of(verified("plain"))
    index = index_of(DEFINITION, table, SOLUTIONS, sm="sm_90", unavailable={})
    assert index_of(DEFINITION, table, dict(SOLUTIONS), sm="sm_90", unavailable={}) is index
    others = {name: files for name, files in SOLUTIONS.items() if name != "plain"}
    assert index_of(DEFINITION, table, others, sm="sm_90", unavailable={}) is not index
    assert index_of(DEFINITION, table, SOLUTIONS, sm="sm_90", unavailable={"triton": "not here"}) is not index
    assert index_of(DEFINITION, table, SOLUTIONS, sm="sm_90", unavailable={}, launch="replay") is not index


def test_index_prefers_the_point_with_an_equal_scalar() -> None:
    found = [
        {**ENTRY, "scalars": {"swap": False, "eps": eps}, "candidates": [verified(name)]}
        for eps, name in ((1e-6, "any"), (1e-5, "plain"))
    ]
    table = published_table("h200", found)
    index = PointIndex(DEFINITION, table, SOLUTIONS, sm="sm_90", unavailable={})
    for eps, name in ((1e-6, "any"), (1e-5, "plain"), (5e-6, "any")):
        decision = index.find(Call(DEFINITION.name, **{**CALL, "scalars": {"swap": False, "eps": eps}}))
        assert decision is not None
        assert decision.solution is SOLUTIONS[name]
    # An unverified size is no point of the index: each candidate is judged by the range that it was verified in.
    assert index.find(Call(DEFINITION.name, **{**CALL, "scalars": {"swap": False, "eps": 1.0}})) is None
