"""The rules of the loop: what earns an award, what of it stands, and what stays of an experiment."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from shipped_records import CATALOG as SHIPPED

from tilegym_db.catalog import Catalog, writers
from tilegym_db.loop.architecture import above_light, definition_findings, shared_tokens
from tilegym_db.loop.from_model import Piece, coverage_of, decide, next_piece, why_stop
from tilegym_db.measurement.awards import claim_of, record_awards
from tilegym_db.paths import shipped_root
from tilegym_db.published.input_files import loop_folder
from tilegym_db.records import Solution, Trace, Workload, axes_key
from tilegym_db.records.loop import Award, Estimate, Experiment
from tilegym_db.records.trace import new_trace_id
from tilegym_db.store.filling import ingest
from tilegym_db.store.journal import Journal
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.loop import award_rows
from tilegym_db.store.side_files import journaled, read_patterns
from tilegym_db.verification.check import pattern_findings

MakeTrace = Callable[..., Trace]


@pytest.fixture
def make_trace(row_scale: Path, solution_record: Callable[..., dict[str, Any]]) -> MakeTrace:
    """A trace of a kernel of the small operator: ``make_trace(minute, ci_low=1.5, tier="promotion", status="PASSED")``."""
    writers.add_solution(
        Catalog.default(),
        Solution.from_dict(solution_record(name="row_scale_mine")),
        {"kernel.py": b"def run(x, weight, factor, out):\n    out.copy_(x * weight * factor)\n"},
    )
    catalog = Catalog.default()
    definition, solution = catalog.definition("row_scale"), catalog.solution("row_scale_mine")
    (workload,) = catalog.workloads_for("row_scale")

    def make(minute: int = 0, *, ci_low: float = 1.5, status: str = "PASSED", **changes: Any) -> Trace:
        tier = changes.get("tier", "promotion")
        passed = status == "PASSED"
        comparison = {
            "with": "row_scale_stock",
            "provides": "stock",
            "ratio": ci_low + 0.05,
            "ci_low": ci_low,
            "ci_high": ci_low + 0.1,
        }
        performance = {
            "latency_us": 10.0, "ci_low_us": 9.9, "ci_high_us": 10.1, "samples": 50, "timer": "wall", "comparisons": [comparison],
        }  # fmt: skip
        return Trace.from_dict(
            {
                "trace_id": new_trace_id(f"run-{minute}", tier, 0, solution.digest, {}, workload.uuid),
                "run_id": f"run-{minute}",
                "timestamp": datetime(2026, 11, 1, tzinfo=UTC) + timedelta(minutes=minute),
                "definition": definition.name, "definition_version": definition.version,
                "definition_digest": definition.digest, "op_type": definition.op_type, "solution": solution.name,
                "solution_digest": solution.digest, "language": "python", "role": "kernel",
                "workload_uuid": workload.uuid, "axes": workload.axes, "dtypes": workload.dtypes,
                "scalars": {"factor": 0.5}, "gpu": "cpu", "gpu_name": "a CPU", "tier": "promotion", "sandbox_level": 3,
                "status": status, "reason": "" if passed else "wrong",
                "correctness": {"rel_fro": 1e-7, "cases": 3} if passed else None,
                "performance": performance if passed else None,
                **changes,
            }
        )  # fmt: skip

    return make


def awarded(*traces: Trace, home: Path) -> tuple[list[Award], dict[str, str]]:
    with Journal(traces[0].run_id) as journal:
        for trace in traces:
            journal.append(trace)
    with open_store() as store:
        ingest(store)
        return record_awards(store, traces, home)


def statuses() -> dict[str, str]:
    with open_store() as store:
        ingest(store)
    with open_store(read_only=True) as store:
        return {row["id"]: row["status"] for row in award_rows(store)}


V1, V2 = (f"python_row_scale_cpu_float32_M4-N8_v{number}" for number in (1, 2))


# -- awards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tier": "screen"}, "a screen trace with the status PASSED earns nothing"),
        ({"role": "baseline"}, "a baseline earns no award"),
        ({"sandbox_level": 1}, "sandbox level 1"),
        ({"ci_low": 1.09}, "the lower end must reach 1.10x"),
    ],
)
def test_a_trace_that_does_not_clear_the_bar_earns_nothing(
    make_trace: MakeTrace, changes: dict[str, Any], reason: str
) -> None:
    claim = claim_of(make_trace(**changes), {})
    assert claim.baseline is None
    assert reason in claim.reason


def test_slow_baseline_does_not_replace_an_absent_fast_one(make_trace: MakeTrace) -> None:
    trace = make_trace(ci_low=3.0)
    assert claim_of(trace, {"row_scale_stock": 31.0, "row_scale_slow_library": 40.0}).baseline is not None
    claim = claim_of(trace, {"row_scale_stock": 31.0, "row_scale_library": 9.0})
    assert claim.baseline is None
    assert "row_scale_library, verified here at 9 us, took no part in its rounds" in claim.reason


def test_ids_are_counted_and_the_same_source_keeps_its_own(make_trace: MakeTrace, home: Path) -> None:
    (first,), _ = awarded(make_trace(0), home=home)
    assert (first.id, first.ci_low, first.baseline) == (V1, 1.5, "row_scale_stock")
    assert awarded(make_trace(1), home=home)[0] == [first]
    assert [one.id for one in journaled(Award, home)] == [V1]
    assert statuses() == {V1: "standing"}


@pytest.mark.turn("tilegym_db/measurement/awards.py", "tilegym_db/store/queries/publishing.py")  # ingests several runs
def test_later_failure_revokes_and_a_new_pass_gets_a_new_number(make_trace: MakeTrace, home: Path) -> None:
    awarded(make_trace(0), home=home)
    awarded(make_trace(1, status="RUNTIME_ERROR"), home=home)
    assert statuses() == {V1: "revoked"}
    awarded(make_trace(2), home=home)
    assert statuses() == {V1: "revoked", V2: "standing"}


def test_a_pass_that_a_wrong_number_outweighs_earns_nothing(make_trace: MakeTrace, home: Path) -> None:
    wrong = make_trace(0, status="INCORRECT_SHAPE")
    awarded(wrong, home=home)
    awards, reasons = awarded(make_trace(1), home=home)
    assert awards == []
    assert "takes the pass back" in next(iter(reasons.values()))
    assert statuses() == {}


@pytest.mark.turn("tilegym_db/measurement/awards.py", "tilegym_db/store/queries/publishing.py")  # ingests several runs
def test_lucky_run_does_not_outlive_one_that_does_not_repeat_it(make_trace: MakeTrace, home: Path) -> None:
    awarded(make_trace(0, ci_low=2.0), home=home)
    _, reasons = awarded(make_trace(1, ci_low=0.9), home=home)
    assert "the lower end must reach 1.10x" in next(iter(reasons.values()))
    assert statuses() == {V1: "not repeated"}


def test_award_written_by_hand_has_no_evidence(make_trace: MakeTrace, home: Path) -> None:
    awarded(make_trace(0, ci_low=1.0), home=home)
    real = make_trace(0)
    content = {
        "id": V1, "trace_id": real.trace_id, "baseline": "row_scale_stock", "ratio": 3.0, "ci_low": 2.9, "ci_high": 3.1,
        "created": datetime.now(UTC).isoformat(),
        **{name: getattr(real, name) for name in (
            "solution", "solution_digest", "definition", "definition_digest", "language", "gpu",
            "workload_uuid", "axes", "dtypes")},
    }  # fmt: skip
    path = loop_folder(home) / "promotions.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n")
    assert statuses() == {V1: "no evidence"}


# -- experiments ------------------------------------------------------------------------------------------------------

LOW, HIGH = coverage_of([0.10, 0.11, 0.10, 0.12, 0.11], "gpu"), coverage_of([0.30, 0.31, 0.30, 0.32, 0.31], "gpu")
SAME = Estimate(median=1.0, ci_low=0.998, ci_high=1.01)


@pytest.mark.parametrize(
    ("before", "after", "total", "proofs", "decision", "reason"),
    [
        (LOW, HIGH, SAME, [], "keep", "11.0% -> 31.0%"),
        (LOW, HIGH, SAME, ["k: wrong"], "discard", "a proof on the model's own calls failed: k: wrong"),
        (LOW, coverage_of([0.11, 0.14], "gpu"), SAME, [], "discard", "rose by no more than its spread"),
        (
            LOW,
            HIGH,
            Estimate(median=0.99, ci_low=0.98, ci_high=1.0),
            [],
            "discard",
            "the lower end must be at least 0.995",
        ),
        (LOW, HIGH, Estimate(median=1.2), [], "discard", "too few rounds"),
        (LOW, coverage_of([0.5], "cpu"), SAME, [], "discard", "cannot be compared"),
    ],
)
def test_an_experiment_is_kept_by_rule(
    before: Any, after: Any, total: Estimate, proofs: list[str], decision: str, reason: str
) -> None:
    found = decide(before, after, total, proofs)
    assert found.decision == decision
    assert reason in found.reason


def test_costliest_unserved_and_untried_piece_is_next(workload_record: Any) -> None:
    calls = (Workload.from_dict(workload_record()),)
    pieces = [
        Piece("Experts", 0.5, 2),
        Piece("Norm", 0.2, 5, "rms_norm", "exact", calls, served=True),
        Piece("Layer", 0.1, 2, "fused_add_rms_norm", "exact", calls),
        Piece("Rope", 0.05, 2, "rope_neox", "exact", calls),
        Piece("Act", 0.001, 2, "swiglu", "exact", calls),
    ]
    assert next_piece(pieces, set()) == pieces[2]
    assert next_piece(pieces, {"fused_add_rms_norm"}) == pieces[3]
    assert next_piece(pieces, {"fused_add_rms_norm", "rope_neox"}) is None


def test_loop_stops_after_five_discards_in_a_row_or_its_budget() -> None:
    def ended(decision: str, seconds: float = 0.5) -> Experiment:
        return Experiment.model_construct(decision=decision, seconds=seconds)

    assert why_stop([ended("discard")] * 4, 1.0) is None
    assert why_stop([ended("keep"), *[ended("crash")] * 5], 1.0) == "5 experiments in a row were not kept"
    assert why_stop([*[ended("discard")] * 4, ended("keep")], 1.0) is None
    assert why_stop([], 0.0) == "the budget is spent"
    assert why_stop([ended("keep", 40.0), ended("discard", 20.0)], 20.0) is None
    assert why_stop([ended("keep", 40.0), ended("discard", 20.0)], 19.0) == (
        "19 s of the budget are left, and the quickest experiment of this run took 20 s"
    )


# -- patterns and architecture ----------------------------------------------------------------------------------------

PAGE = (
    "# Patterns\n\n## A\n\n```toml\n"
    'name = "a"\napplies_to = ["{of}"]\nevidence = ["{evidence}"]\nversions = {{ triton = "{version}" }}\n'
    "```\n\nText.\n"
)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"evidence": "trace:00000000-0000-0000-0000-000000000000"}, "is no trace that is here"),
        ({"evidence": "trace:h200/nobody/M=1"}, "is no GPU/SOLUTION/AXES that was verified"),
        ({"evidence": "search:h200/nobody"}, "is no search that is recorded"),
        ({"evidence": "hearsay"}, "must read trace:ID"),
        ({"of": "nothing"}, "applies_to names 'nothing'"),
        ({"version": ">=9"}, "3.9.0 is pinned"),
        ({"version": "new"}, "must read as a requirement does"),
        ({}, None),
    ],
)
def test_a_pattern_whose_evidence_is_gone_is_found(
    row_scale: Path, changes: dict[str, str], reason: str | None
) -> None:
    page = row_scale / "docs" / "patterns" / "triton.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE.format(**{"of": "row_scale", "evidence": "unmeasured", "version": ">=3.4", **changes}))
    (row_scale / "constraints.txt").write_text("triton==3.9.0\n")
    with open_store(read_only=True) as store:
        found = pattern_findings(Catalog.default(), store)
    assert len(found) == (reason is not None)
    assert reason is None or reason in found[0]


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("# Patterns\n", "triton.md: each pattern on this page needs a section '## TITLE'"),
        ("## B\n\nText.\n", "triton.md:1: a pattern begins with '## TITLE'"),
        ('## B\n\n```toml\nname = "b\n```\n', "triton.md:1: its keys are not valid TOML"),
        ('## B\n\n```toml\nname = "b"\nlanguage = "triton"\n```\n', "triton.md:1: 'language' follows from the page"),
        ('## B\n\n```toml\nname = "b"\nevidence = ["unmeasured"]\n```\n\nText.\n', "applies_to"),
        (PAGE.format(of="*", evidence="unmeasured", version=">=3.4"), "the page has a pattern triton/a already"),
    ],
)
def test_a_broken_section_leaves_the_other_patterns(row_scale: Path, page: str, reason: str) -> None:
    patterns = row_scale / "docs" / "patterns"
    patterns.mkdir(parents=True)
    whole = PAGE.format(of="*", evidence="unmeasured", version=">=3.4")
    (patterns / "triton.md").write_text(page if page == "# Patterns\n" else f"{page}\n{whole}")
    (patterns / "any.md").write_text(whole)
    found, refused = read_patterns(Catalog((row_scale,)))
    assert {item.id for item in found} == {"any/a"} | ({"triton/a"} if page != "# Patterns\n" else set())
    assert len(refused) == 1
    assert reason in refused[0]


def test_a_section_is_a_pattern_of_the_language_of_its_page(row_scale: Path) -> None:
    page = row_scale / "docs" / "patterns" / "cutile.md"
    page.parent.mkdir(parents=True)
    section = PAGE.format(of="row_scale", evidence="unmeasured", version=">=3.4").partition("\n\n")[2]
    code = "\n```python\n## a comment\n```\n"
    other = section.replace("## A", "## B").replace('"a"', '"b"')
    page.write_text(f"# Patterns\n\n{section}{code}\n{other}")
    (first, second), refused = read_patterns(Catalog((row_scale,)))
    assert refused == []
    assert (first.id, first.title, first.language, first.text) == ("cutile/a", "A", "cutile", f"Text.\n{code.rstrip()}")
    assert (second.id, second.title, second.text) == ("cutile/b", "B", "Text.")
    assert first.digest != second.digest


@pytest.mark.turn("tilegym_db/measurement/awards.py", "tilegym_db/store/queries/publishing.py")  # ingests several runs
@pytest.mark.parametrize("cites", ["trace:{0.trace_id}", "trace:{0.gpu}/{0.solution}/{axes}"])
def test_evidence_that_a_later_failure_took_back_is_found(
    cites: str, make_trace: MakeTrace, row_scale: Path, home: Path
) -> None:
    trace = make_trace(0)
    awarded(trace, home=home)
    cited = cites.format(trace, axes=axes_key(trace.axes))
    page = row_scale / "docs" / "patterns" / "triton.md"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE.format(of="row_scale", evidence=cited, version=">=3.4"))
    with open_store(read_only=True) as store:
        assert pattern_findings(Catalog.default(), store) == []
    awarded(make_trace(1, status="RUNTIME_ERROR"), home=home)
    with open_store(read_only=True) as store:
        (found,) = pattern_findings(Catalog.default(), store)
    assert "was taken back by a failure" in found


def test_shipped_patterns_cite_cases_that_survive_new_traces() -> None:
    patterns, refused = read_patterns(Catalog((shipped_root(),)))
    assert refused == []
    assert {item.language for item in patterns} == {"any", "triton", "tilelang", "cutile"}
    assert len({item.id for item in patterns}) == len(patterns) >= 36
    cited = [text.removeprefix("trace:") for one in patterns for text in one.evidence if text.startswith("trace:")]
    assert len(cited) >= 40
    assert [text for text in cited if text.count("/") != 2] == []


def test_what_a_definition_lacks_is_listed(row_scale: Path) -> None:
    catalog = Catalog.default()
    found = definition_findings(catalog.definition("row_scale"), [], 0, {"0" * 64})
    assert [line.partition(": ")[2].partition(".")[0] for line in found] == [
        "it has no workload",
        "no solution provides the stock code",
        "no kernel in triton, tilelang, cutile, and no tag 'status:open'",
        "every trace belongs to an older version",
    ]


def test_the_share_of_tokens_is_that_of_the_smaller_source() -> None:
    assert shared_tokens(frozenset({1, 2}), frozenset({1, 2, 3, 4})) == 1.0
    assert shared_tokens(frozenset({1, 2}), frozenset({3})) == 0.0


def test_pass_above_the_speed_of_light_is_a_finding() -> None:
    definition = SHIPPED.definition("rms_norm")
    row = {"solution": "rms_norm_triton", "gpu": "h200", "axes": {"M": 4096, "N": 4096}, "dtypes": {"T": "bfloat16"}}
    assert above_light(definition, [{**row, "latency_us": 14.1}, {**row, "latency_us": 1.0, "gpu": "toy"}]) == []
    (finding,) = above_light(definition, [{**row, "latency_us": 13.9}])
    assert finding.startswith("rms_norm_triton: 13.9 us at M=4096,N=4096 on h200 are 1.01 of the speed of light")
