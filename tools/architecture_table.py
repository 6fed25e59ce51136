"""Write docs/architectures.csv, with the recognised call sites of each architecture and a patched run beside stock.

A small random model of each architecture runs on the CPU in float32, as it is and patched. Every call site is forced to take a
kernel that computes what stock code does. So a difference between the two runs is an error of a call site and not of a kernel.

    python tools/architecture_table.py --out rows.jsonl     # all architectures, half an hour; skips those that have a row
    python tools/architecture_table.py --out rows.jsonl --write
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from marked_blocks import ROOT, with_block

PAGE = ROOT / "docs" / "architectures.md"
TABLE = PAGE.with_suffix(".csv")
POPULARITY = ROOT / "benchmarks" / "popularity.json"
LIMIT_S = 60
PROMPT, IMAGES, FRAMES = 12, 1, 3000
CLOSE = 1e-4
"""Relative error, over all outputs, up to which a float32 run counts as equal within rounding."""
SUMMARY = """A run with transformers {version} has {total} architectures. {with_sites} have recognised parts. {same} give the same
bits with forced kernels, and {close} more are within {bound:.0e}. {exact} are exact after `unpatch()`. The other {failed} model
types have no model class, or do not build or run at this size and input."""
COLUMNS = ("architecture", "model", "recognised", "ran", "forced", "unpatched")

Row = dict[str, Any]


class Late(Exception):
    """The limit of one architecture has passed."""


def forced_kernels(home: Path) -> Any:
    """Return a catalog with a kernel for each operator that computes what stock code does, published for the CPU."""
    os.environ["TILEGYM_DB_HOME"] = str(home)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
    spec = importlib.util.spec_from_file_location("model_fixtures", ROOT / "tests" / "models" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    fixtures = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = fixtures
    spec.loader.exec_module(fixtures)
    return fixtures.Shop(home / "catalog", home).offer()


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Return a prompt, images or sound for a small model."""
    import recognised_share

    recognised_share.PROMPT, recognised_share.IMAGES, recognised_share.FRAMES = PROMPT, IMAGES, FRAMES
    words = getattr(model.config.get_text_config(decoder=True), "vocab_size", 2)
    generator = torch.Generator().manual_seed(1)

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator)
        return torch.randint(0, max(2, min(words, 100)), tensor.shape, generator=generator)

    return {name: filled(tensor) for name, tensor in recognised_share.inputs_of(model).items()}


def outputs_of(model: Any, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run a model with the same random numbers; return all floating-point outputs, without caches."""
    torch.manual_seed(0)
    with torch.no_grad():
        out = model(**given)
    values = list(out.values()) if hasattr(out, "values") else list(out)
    flat = [one for value in values for one in (value if isinstance(value, tuple | list) else (value,))]
    return [one for one in flat if isinstance(one, torch.Tensor) and one.is_floating_point()]


def difference(found: list[torch.Tensor], stock: list[torch.Tensor]) -> float:
    """Return 0 for the same bits, or else the largest relative error of an output; infinity for other shapes."""
    if [one.shape for one in found] != [one.shape for one in stock]:
        return float("inf")
    largest = 0.0
    for one, other in zip(found, stock, strict=True):
        if not torch.equal(one.nan_to_num(), other.nan_to_num()) or not torch.equal(one.isnan(), other.isnan()):
            error = (one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30)
            largest = max(largest, float(error.nan_to_num(float("inf"))), 1e-12)
    return largest


def row(kind: str, catalog: Any) -> Row:
    """Return what the table says of one architecture."""
    import recognised_parts

    import tilegym_db

    model = next(recognised_parts.models(kind)).float()
    given = inputs_of(model)
    stock = outputs_of(model, given)
    again = difference(outputs_of(model, given), stock)
    classes = [type(module) for module in model.modules()]
    handle = tilegym_db.patch(model, catalog=catalog)
    try:
        forced = difference(outputs_of(model, given), stock)
        report = handle.report()
        sites = Counter[str]()
        for site in report.sites:
            if not site.reason:
                sites[site.definition] += site.modules
        ran = sum(count > 0 for count in report.hits().values())
    finally:
        handle.unpatch()
    after = difference(outputs_of(model, given), stock)
    return {
        "architecture": kind,
        "model": type(model).__name__,
        "sites": dict(sites.most_common()),
        "ran": ran,
        "again": again,
        "forced": forced,
        "after": after,
        "classes": classes == [type(module) for module in model.modules()],
    }


def survey(kinds: list[str], target: Path) -> None:
    """Append one line for each architecture that has none."""

    def late(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    lines = target.read_text(encoding="utf-8").splitlines() if target.exists() else []
    done = {json.loads(line)["architecture"] for line in lines}
    with tempfile.TemporaryDirectory() as home, target.open("a", encoding="utf-8") as out:
        catalog = forced_kernels(Path(home))
        for kind in kinds:
            if kind in done:
                continue
            signal.alarm(LIMIT_S)
            try:
                found = row(kind, catalog)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # code of models refuses small sizes in many ways
                found = {"architecture": kind, "problem": f"{type(error).__name__}: {str(error)[:200]}"}
            finally:
                signal.alarm(0)
            out.write(json.dumps(found) + "\n")
            out.flush()


def result(error: float, again: float = 0.0) -> str:
    """Return a difference in words."""
    if error == 0:
        return "same bits"
    text = f"{error:.0e}" if error < float("inf") else "other values"
    return f"{text} (stock repeats itself to {again:.0e})" if again else text


def table(rows: list[Row]) -> str:
    """Return the rows of architectures that ran as CSV."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    for one in sorted(rows, key=lambda one: one["architecture"]):
        sites = ", ".join(f"{name} {count}" for name, count in one["sites"].items()) or "none"
        after = result(one["after"], one["again"]) if one["classes"] else "other classes"
        forced = result(one["forced"], one["again"])
        lines.writerow((one["architecture"], one["model"], sites, one["ran"], forced, after))
    return text.getvalue()


def summary(good: list[Row], failed: int) -> str:
    """Return the sentences of the page on the rows of architectures that ran, and the number of those that did not."""
    import transformers

    return SUMMARY.format(
        version=transformers.__version__,
        total=len(good),
        with_sites=sum(bool(one["sites"]) for one in good),
        same=sum(one["forced"] == 0 for one in good),
        close=sum(0 < one["forced"] <= CLOSE for one in good),
        bound=CLOSE,
        exact=sum(one["after"] <= one["again"] and one["classes"] for one in good),
        failed=failed,
    )


def main() -> None:
    """Survey all architectures, or those named; write the table if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file with a line for each architecture; added to")
    parser.add_argument("--only", nargs="*", help="architectures; all by default")
    parser.add_argument("--write", action="store_true", help="write the table from the lines, and survey nothing")
    options = parser.parse_args()
    if options.write:
        rows = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
        good = [one for one in rows if "problem" not in one]
        TABLE.write_text(table(good), encoding="utf-8")
        text = summary(good, len(rows) - len(good))
        PAGE.write_text(with_block(PAGE.read_text(encoding="utf-8"), "architectures", text), encoding="utf-8")
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    from transformers import CONFIG_MAPPING

    popular = [kind for kind in json.loads(POPULARITY.read_text(encoding="utf-8")) if kind in CONFIG_MAPPING]
    torch.set_num_threads(1)
    survey(options.only or list(dict.fromkeys([*popular, *sorted(CONFIG_MAPPING)])), options.out)


if __name__ == "__main__":
    main()
