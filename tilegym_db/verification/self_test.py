"""The admission test of a Definition: correct results must pass the verifier, and known kinds of wrong ones must fail.

A verifier that misses a dropped row or an omitted epsilon would accept any kernel, so this test comes before admission.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tilegym_db.errors import RecordError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.definition import MIN_ELEMENTS_FOR_NORMS, limits_for
from tilegym_db.records.definition_parts import PlantedError, SelfTest
from tilegym_db.records.workload import Case
from tilegym_db.sandbox.shared_buffers import same_bytes
from tilegym_db.verification.comparison import check_lifted, check_outputs
from tilegym_db.verification.conditioning import excuse_ill_conditioned
from tilegym_db.verification.distributions import DISTRIBUTIONS, RANGES
from tilegym_db.verification.expected import OracleCase, broken_constraint, make_oracle_case
from tilegym_db.verification.gates import OutputComparison
from tilegym_db.verification.inputs import draw_inputs
from tilegym_db.verification.oracle import run_lifted, run_reference
from tilegym_db.verification.verifier import judge_draws

SEEDS = (20_240_229, 77_003)
DRAWS = 8192
"""Number of draws of a planted mistake that are checked together, for operators that draw at random."""

# One step down in precision, like a kernel that computes in the wrong format and widens the result.
_COARSER: dict[torch.dtype, torch.dtype] = {
    torch.float32: torch.bfloat16,
    torch.float16: torch.float8_e4m3fn,
    torch.bfloat16: torch.float8_e4m3fn,
}

DRAW_SO = "say how they are drawn in 'input_generators' or 'joint_inputs'"

_OTHER_CONTENTS = tuple(name for name in (*DISTRIBUTIONS, *RANGES) if name != "normal")

Outputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SelfTestFinding:
    """A problem that a Definition's self-test found."""

    definition: str
    check: str
    what: str

    def __str__(self) -> str:
        """Return one line for a report."""
        return f"{self.definition}: {self.check}: {self.what}"


def self_test(definition: Definition, workloads: list[Workload]) -> list[SelfTestFinding]:
    """Return every finding about a Definition; empty if it may be admitted."""
    findings: list[SelfTestFinding] = []
    if definition.self_test is None:
        missing = "the record has none; add an independent formulation and planted errors"
        findings.append(SelfTestFinding(definition.name, "self_test", missing))
    if not workloads:
        findings.append(SelfTestFinding(definition.name, "self_test", "it has no workload tagged 'tiny' to run on"))
    harmless: list[dict[str, SelfTestFinding]] = []
    for workload in workloads:
        # Draw contents even if a file holds them: the test needs two calls that differ.
        case = replace(Case.of_workload(definition, workload, distribution="normal", seed=SEEDS[0]), files={})
        try:
            found, without_effect = _test_case(definition, case)
        except RecordError as error:
            findings.append(SelfTestFinding(definition.name, f"at {case}", _in_one_line(error)))
        else:
            findings += found
            harmless.append(without_effect)
    # A planted missing rounding has no effect in the dtype that it rounds to, but must have one in another.
    for label, finding in harmless[0].items() if harmless else ():
        if all(label in other for other in harmless):
            findings.append(finding)
    return findings


def _in_one_line(error: RecordError) -> str:
    """Return the error of a traceback with its line in the source text."""
    lines = str(error).splitlines()
    places = [match[1] for line in lines if (match := re.search(r"line (\d+), in ", line))]
    place = f" line {places[-1]}:" if places else ""
    return str(error) if len(lines) == 1 else f"{lines[0]}{place} {lines[-1]}"


def _test_case(definition: Definition, case: Case) -> tuple[list[SelfTestFinding], dict[str, SelfTestFinding]]:
    """Return the findings at one case, and apart from them those about planted errors, by label.

    A planted error has such a finding if it has no effect at this case.
    """
    expected = make_oracle_case(definition, case, "cpu")
    if expected is None and (
        broken := broken_constraint(definition, case.call.axes, draw_inputs(definition, case, "cpu"))
    ):
        what = f"drawn inputs break {broken} at {case}; {DRAW_SO}"
        return [SelfTestFinding(definition.name, "content_constraints", what)], {}
    if expected is None:
        what = f"in its own dtype it fails its own comparison at {case}"
        return [SelfTestFinding(definition.name, "reference", what)], {}
    if definition.self_test is None:
        return [], {}
    findings = _must_agree(definition, definition.self_test, case, expected)
    for check, outputs in _made_wrong(definition, case, expected):
        if _accepted(definition, case, expected, outputs):
            findings.append(_is_accepted(definition, check, case))
    without_effect = {}
    for planted in definition.self_test.planted_errors:
        label = f"planted error ({planted.why})"
        try:
            effect = _effect_of(definition, planted, label, expected)
        except RecordError as error:
            fault = f"does not run, so it proves nothing: {_in_one_line(error)}"
            findings.append(SelfTestFinding(definition.name, label, f"{fault} at {case}"))
            continue
        if effect == "none":
            without_effect[label] = _is_accepted(definition, label, case)
        elif effect == "accepted":
            findings.append(_is_accepted(definition, label, case))
    return findings, without_effect


def _is_accepted(definition: Definition, check: str, case: Case) -> SelfTestFinding:
    return SelfTestFinding(definition.name, check, f"is accepted by the comparison at {case}")


def _effect_of(
    definition: Definition, planted: PlantedError, label: str, expected: OracleCase
) -> Literal["refused", "accepted", "none"]:
    """Return the effect of a planted error at a case and, if it is accepted there, with the other contents of fuzzing."""
    source = definition.reference.replace(planted.find, planted.replace)
    changes_something = False
    for given in _and_with_other_contents(definition, expected):
        found = run_reference(definition, given.inputs, source=source, label=label)
        drawn_rightly = _drawn_rightly(definition, given, found, source, label)
        if not drawn_rightly or not _accepted(definition, given.case, given, found):
            return "refused"
        right = run_reference(definition, given.inputs)
        changes_something |= any(not same_bytes(value, right[name]) for name, value in found.items())
    return "accepted" if changes_something else "none"


def _and_with_other_contents(definition: Definition, expected: OracleCase) -> Iterator[OracleCase]:
    """Yield the case with its oracle, then with each of the other contents on which the reference passes."""
    yield expected
    for contents in _OTHER_CONTENTS:
        if contents != expected.case.distribution:
            drawn = make_oracle_case(definition, replace(expected.case, distribution=contents), "cpu")
            if drawn is not None:
                yield drawn


INDEPENDENT = "independent formulation"


def _must_agree(definition: Definition, test: SelfTest, case: Case, expected: OracleCase) -> list[SelfTestFinding]:
    source, findings = test.independent, []
    try:
        in_dtype = run_reference(definition, expected.inputs, source=source, label=INDEPENDENT)
        lifted = {}
        if definition.oracle == "lifted":
            lifted = run_lifted(definition, expected.inputs, source=source, label=INDEPENDENT)
    except RecordError as error:
        return [SelfTestFinding(definition.name, INDEPENDENT, f"does not run: {_in_one_line(error)} at {case}")]
    drawn_rightly = _drawn_rightly(definition, expected, in_dtype, source, INDEPENDENT)
    if not drawn_rightly or not _accepted(definition, case, expected, in_dtype):
        findings.append(SelfTestFinding(definition.name, INDEPENDENT, f"disagrees in the dtype itself at {case}"))
    for verdict in check_lifted(definition, expected.inputs, expected.outputs, lifted).values():
        if not verdict.passed:
            findings.append(SelfTestFinding(definition.name, INDEPENDENT, f"{verdict.reason} (fp64) at {case}"))
    return findings


def _drawn_rightly(definition: Definition, expected: OracleCase, first: Outputs, source: str, label: str) -> bool:
    """Return True if many draws of a source match their distribution, or if nothing is drawn."""

    def call(other: OracleCase) -> dict[str, torch.Tensor]:
        return run_reference(definition, other.inputs, source=source, label=label)

    return judge_draws(definition, expected, first, call, DRAWS) is None


def _made_wrong(definition: Definition, case: Case, expected: OracleCase) -> list[tuple[str, Outputs]]:
    right = run_reference(definition, expected.inputs)
    other_case = Case(case.call, distribution=case.distribution, seed=SEEDS[1])
    other = run_reference(definition, draw_inputs(definition, other_case, "cpu"))
    wrong: list[tuple[str, Outputs]] = [("another seed's output", other)]
    for name, value in right.items():  # one output at a time, so that no other output hides its failure
        made = {
            "zeros": torch.zeros_like(value),
            "one dropped row": _without_last_row(value, -1 if name in definition.sampled else 0),
            "the input, copied": _copied_input(expected, value),
            "a lower-precision result": _coarser(value),
        }
        limits = limits_for(definition, definition.dtype_of(name, case.call.dtypes))
        if limits is not None and limits.share < 1:
            made |= {
                "one dropped column": _without_corner(value, 0, 1),
                "a dropped tile": _without_corner(value, 16, 16),
            }
        wrong += [
            (f"{check} as {name}", {**right, name: result}) for check, result in made.items() if result is not None
        ]
    return wrong


def _accepted(definition: Definition, case: Case, expected: OracleCase, outputs: Outputs) -> bool:
    if any(value.shape != expected.outputs[name].shape for name, value in outputs.items()):
        return False

    def check(outputs: Mapping[str, torch.Tensor]) -> dict[str, OutputComparison]:
        return check_outputs(definition, case.call.dtypes, expected.inputs, expected.outputs, outputs, expected.e_base)

    verdicts = excuse_ill_conditioned(definition, expected.inputs, expected.outputs, outputs, check)
    return all(verdict.passed for verdict in verdicts.values())


def _without_last_row(value: torch.Tensor, left: int) -> torch.Tensor:
    """Return the output with ``left`` in its last row, as if nothing had written there: -1 for drawn indices, else 0."""
    rows = value.clone().reshape(-1, value.shape[-1] if value.dim() else 1)
    flat = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    flat[-1] = left
    return rows.reshape(value.shape)


def _without_corner(value: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the output with zeros in its last rows (0: all of them) and columns, where strays are allowed."""
    kept = value.clone().reshape(-1, value.shape[-1] if value.dim() else 1)
    kept[-rows:, -columns:] = 0
    return kept.reshape(value.shape)


def _copied_input(expected: OracleCase, value: torch.Tensor) -> torch.Tensor | None:
    """Return the first input of an output's shape and dtype, or None."""
    for given in expected.inputs.values():
        if isinstance(given, torch.Tensor) and given.shape == value.shape and given.dtype == value.dtype:
            return given
    return None


def _coarser(value: torch.Tensor) -> torch.Tensor | None:
    """Return the output rounded to the next coarser format; None if there is none, or the output is too small for norms."""
    target = _COARSER.get(value.dtype)
    if target is None or value.numel() < MIN_ELEMENTS_FOR_NORMS:
        return None
    return value.to(target).to(value.dtype)


def tiny_workloads(definition: Definition, workloads: list[Workload]) -> list[Workload]:
    """Return the largest workload tagged ``tiny`` per dtype binding; the largest, so that every gate applies."""
    best: dict[str, tuple[float, Workload]] = {}
    for workload in workloads:
        if "tiny" in workload.tags:
            key = ",".join(definition.bind_dtypes(workload.dtypes).values())
            axes = definition.bind_axes(workload.axes)
            size = sum(math.prod(definition.shape_of(name, axes)) for name in definition.outputs)
            if key not in best or size > best[key][0]:
                best[key] = (size, workload)
    return [workload for _, workload in best.values()]
