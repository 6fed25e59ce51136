"""Asks two checkouts of the repository the same questions about the shipped traces, and says where the answers differ.

``python tools/compare_answers.py OLD NEW``: every column of the views that both have, best, leaderboard, explanations, what
would be publishable, and what the searches found. Digits that a published trace does not keep (errors beyond three, times below a
nanosecond, an envelope's digest beyond eight) are left out of the comparison. Exit status 1 where an answer differs.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ASK = r"""
import json, sys
from tilegym_db.catalog import Catalog
from tilegym_db.errors import UsageError
from tilegym_db.resolver.resolve import decide_request, make_request
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.measured import best_rows, leaderboard_rows, tuned_configs
from tilegym_db.store.queries.publishing import publishable_rows, revoking_rows

try:
    from tilegym_db.records.call import Call
except ImportError:  # a checkout from before there were calls
    ask = make_request
else:
    def ask(definition, *, axes, dtypes, layouts, scalars, **where):
        return make_request(definition, Call(definition.name, axes, dtypes, layouts, scalars), **where)

catalog = Catalog.default()
answers = {}
with open_store(read_only=True) as store:
    for view in ("traces", "verified", "best", "leaderboard", "searches", "peaks", "promotable", "revocations"):
        answers[view] = store.rows(f"FROM {view}")
    answers["best_rows"], answers["leaderboard_rows"] = best_rows(store), leaderboard_rows(store)
    answers["publishable"], answers["revoking"] = publishable_rows(store, "h200"), revoking_rows(store, "h200")
    answers["tuned"] = [{"pair": key, "config": value} for key, value in tuned_configs(store, "h200").items()]
answers["explain"] = []
place = ("definition", "axes_key", "dtypes_key", "scalars_key", "layouts_key")
points = {tuple(row[key] for key in place): row for row in answers["traces"]}
for _, row in sorted(points.items()):
    definition = catalog.definition(row["definition"])
    axes = {name: row["axes"][name] for name in definition.var_axes}
    for scale in (1, 3):  # at the measured point, and between points
        sizes = {name: size * scale if name == definition.var_axes[0] else size for name, size in axes.items()}
        layouts = {name: row["layouts"][name] for name in definition.tensor_inputs if name in row["layouts"]}
        try:
            request = ask(definition, axes=sizes, dtypes=row["dtypes"], layouts=layouts,
                scalars=json.loads(row["scalars"]), gpu="h200", sm="sm_90", unavailable={})
        except UsageError:
            continue  # the sizes in between break a constraint
        decision, _ = decide_request(request, catalog)
        asked = [row["definition"], sizes, row["dtypes"], row["scalars_key"], row["layouts_key"]]
        answers["explain"].append({"of": asked, "solution":
            decision.solution.name if decision.solution else None, "config": decision.config,
            "source": decision.evidence.source, "rejected": [list(item) for item in decision.rejected]})
json.dump(answers, open(sys.argv[1], "w"), default=str)
"""
ADDED = {"origin", "trusted", "doubt", "gpu_family", "run_id"}
THREE_DIGITS = {"rel_fro", "worst_row_rel", "max_abs"}


def answers_of(checkout: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what a checkout says, from a fresh store."""
    home, output = folder / f"home-{checkout.name}", folder / f"{checkout.name}.json"
    environment = {**os.environ, "PYTHONPATH": str(checkout), "TILEGYM_DB_HOME": str(home)}
    subprocess.run([sys.executable, "-c", ASK, str(output)], env=environment, cwd=checkout, check=True)
    found: dict[str, list[dict[str, Any]]] = json.loads(output.read_text())
    return found


def equal(name: str, old: Any, new: Any) -> bool:
    """Return whether two values are the same but for digits that are not kept."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(equal(key, old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(equal(name, *pair) for pair in zip(old, new, strict=True))
    if isinstance(old, float) and isinstance(new, float):
        slack = (
            {"rel_tol": 6e-3}
            if name in THREE_DIGITS
            else {"rel_tol": 1e-6, "abs_tol": 5.1e-4 if name.endswith("_us") else 0}
        )
        return math.isclose(old, new, **slack)
    if name == "envelope_digest" and isinstance(old, str) and isinstance(new, str):
        return old.startswith(new)
    return bool(old == new)


def differences(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """Return rows that differ, each with the columns that do. Both sides are in one order."""
    if len(old) != len(new):
        return [f"{len(old)} rows before, {len(new)} after"]
    found = []
    for first, second in zip(sorted(old, key=identity), sorted(new, key=identity), strict=True):
        columns = [key for key in first if key not in ADDED and not equal(key, first[key], second.get(key))]
        if columns:
            found.append(
                f"{identity(first)[:120]}: {', '.join(f'{key}: {first[key]!r} -> {second.get(key)!r}' for key in columns)}"
            )
    return found


def identity(row: dict[str, Any]) -> str:
    """Return what distinguishes a row from the others, whatever its figures."""
    keys = ("trace_id", "pair", "of", "definition", "gpu", "solution", "workload_uuid", "axes_key", "timestamp")
    return json.dumps([row.get(key) for key in keys])


def main() -> int:
    """Compare the two checkouts named on the command line."""
    old, new = (Path(name).resolve() for name in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as name:
        before, after = answers_of(old, Path(name)), answers_of(new, Path(name))
    failed = False
    for question, rows in before.items():
        found = differences(rows, after[question])
        failed |= bool(found)
        print(f"{question}: {len(rows)} rows, {len(found)} differ")
        for line in found[:5]:
            print(f"  {line[:400]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
