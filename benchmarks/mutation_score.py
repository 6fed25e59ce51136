"""Which share of the mutants of stock code the verifier catches, per Definition, on a CPU: the table of docs/trust.md.

    PYTHONPATH=tests python benchmarks/mutation_score.py rms_norm softmax

Mutants of the reference's own formulation run in this process, against fuzz cases and their siblings, by the gates on outputs.
"""

from __future__ import annotations

import sys

from exploits.mutants import mutants_of

from tilegym_db.catalog import Catalog
from tilegym_db.errors import RecordError
from tilegym_db.records import Definition
from tilegym_db.verify.comparison import check_outputs
from tilegym_db.verify.reference import run_reference
from tilegym_db.verify.shapes import fuzz_cases, sibling_of
from tilegym_db.verify.verifier import Expected, expect

CASES = 24


def expectations(catalog: Catalog, definition: Definition, seed: int) -> list[Expected]:
    """Fuzz cases and their siblings with the oracle."""
    workloads = catalog.workloads_for(definition.name)
    dtypes = {variable: choices[-1] for variable, choices in definition.dtypes.items()}
    stock = next(
        files.record for files in catalog.solutions_for(definition.name) if files.record.spec.provides == "stock"
    )
    scalars = workloads[0].scalars()
    drawn: list[Expected] = []
    anchors = [workload.axes for workload in workloads]
    found = fuzz_cases(definition, stock, anchors, dtypes, scalars, count=CASES, seed=seed, max_rows=160)
    for number, case in enumerate(found):
        for one in (case, sibling_of(definition, case, number, scalars)):
            expected = expect(definition, one, "cpu")
            drawn += [] if expected is None else [expected]
    return drawn


def is_caught(definition: Definition, source: str, cases: list[Expected]) -> bool:
    """True where some case refuses the mutant."""
    for expected in cases:
        try:
            outputs = run_reference(definition, expected.inputs, source=source)
            if any(value.shape != expected.outputs[name].shape for name, value in outputs.items()):
                return True
            verdicts = check_outputs(
                definition, expected.case.dtypes, expected.inputs, expected.outputs, outputs, expected.e_base,
                exact=expected.exact, conditioned=expected.conditioned,
            )  # fmt: skip
        except (RecordError, RuntimeError):
            return True
        if not all(verdict.passed for verdict in verdicts.values()):
            return True
    return False


def main() -> None:
    """Print one row per Definition, and the survivors below it."""
    catalog = Catalog.default()
    print("| definition | mutants | caught | survivors |\n|---|---|---|---|")
    for name in sys.argv[1:]:
        definition = catalog.definition(name)
        cases = expectations(catalog, definition, seed=20_261_122)
        mutants = list(mutants_of(definition.reference))
        survivors = [what for what, source in mutants if not is_caught(definition, source, cases)]
        share = 1 - len(survivors) / max(len(mutants), 1)
        print(f"| {name} | {len(mutants)} | {share:.0%} | {'; '.join(survivors) or 'none'} |", flush=True)


if __name__ == "__main__":
    main()
