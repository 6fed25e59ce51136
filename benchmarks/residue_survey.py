"""How many successive sizes of each axis a promotion tries, for every Definition, with its reference as the kernel.

    PYTHONPATH=tests python benchmarks/residue_survey.py                       # every Definition, on a CPU
    PYTHONPATH=tests python benchmarks/residue_survey.py gemm moe_experts --seed 3

An axis has as many sizes as its constraints allow, at most 128. The last lines name the axes that got to fewer than 120 of 128,
or than the same share of what is allowed, and references that were refused, which no honest source may be.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from pathlib import Path

import torch
from exploits.mutant_judge import REFERENCE, WHOLE, Judge, Target, targets_of

from tilegym_db.catalog import Catalog
from tilegym_db.paths import scratch_folder
from tilegym_db.records import Definition
from tilegym_db.records.workload import Case
from tilegym_db.verification.cases import fuzz_cases
from tilegym_db.verification.expected import ExpectedCache
from tilegym_db.verification.residues import SIZES, check_residues, successive
from tilegym_db.verification.verifier import Failure

ENOUGH = 120 / SIZES
_LINE = re.compile(r"sequence: (\d+) of (\d+) successive sizes of (\w+) ")


def survey(catalog: Catalog, definition: Definition, seed: int, folder: Path) -> tuple[dict[str, tuple[int, int]], str]:
    """Return the sizes that were tried and allowed of each axis, and why the reference was refused or \"\"."""
    (target,) = (one for one in targets_of(catalog, definition) if one.name == REFERENCE)
    judge = Judge(target, tuple(catalog.workloads_for(definition.name)), "cpu", folder, seed)
    handle = judge._handle
    handle.solution, handle.policy = judge._written(target.source), WHOLE
    failure = handle.load()
    if failure is not None:
        return {}, failure.reason
    try:
        cases = _cases(catalog, target, seed)
        found = check_residues(handle, cases, seed, ExpectedCache(definition, "cpu"))
        if isinstance(found, Failure):
            return {}, found.reason
        matches = [match for line in found if (match := _LINE.match(line))]
        tried = {match[3]: (int(match[1]), int(match[2])) for match in matches}
        drawn = random.Random(seed)
        left = [axis for axis in definition.var_axes if axis not in tried]
        return tried | {axis: (0, count) for axis in left if (count := len(successive(handle, cases, axis, drawn)))}, ""
    finally:
        judge.close()


def _cases(catalog: Catalog, target: Target, seed: int) -> list[Case]:
    definition, workload = target.definition, target.workload
    anchors = [one.axes for one in catalog.workloads_for(definition.name)]
    dtypes = definition.bind_dtypes(workload.dtypes)
    return fuzz_cases(definition, target.record, anchors, dtypes, workload.scalars(), count=WHOLE.fuzz_cases, seed=seed)


def main() -> None:
    """Print a line for each Definition, then what got to too few sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="0/1", help="only this part of the Definitions, as 0/2")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no other Definition after these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    catalog, start = Catalog.default(), time.monotonic()
    part, parts = map(int, options.part.split("/"))
    axes, few, refused = 0, list[str](), list[str]()
    with scratch_folder() as scratch:
        for name in (options.names or sorted(catalog.definitions))[part::parts]:
            if time.monotonic() - start > options.seconds:
                print(f"ended before {name}")
                break
            began = time.monotonic()
            found, reason = survey(catalog, catalog.definition(name), options.seed, scratch / name)
            sizes = ", ".join(f"{axis} {tried} of {allowed}" for axis, (tried, allowed) in found.items())
            print(f"{name}: {reason or sizes}; {time.monotonic() - began:.1f} s", flush=True)
            axes += len(found)
            few += [f"{name} {axis}: {t} of {n}" for axis, (t, n) in found.items() if t < ENOUGH * n]
            refused += [f"{name}: {reason}"] * bool(reason)
    print(f"\n{axes - len(few)} of {axes} axes got to enough sizes; {len(refused)} references refused")
    print("\n".join([*few, *refused]))


if __name__ == "__main__":
    main()
