"""transformers' own tests of architectures, stock and patched: does a test that passes stock fail patched?

Needs the folder ``tests`` of a checkout of transformers, of about the installed version. Every architecture's tests run twice,
each time in another process. In the patched run, each model is patched when it first generates, with what is published for the
machine and CUDA graphs on, and stays patched. Counts kernel calls, replays, and why generations ran stock. With ``--training``
these are the tests that train, and a model is patched when it is first set to training mode.

    git clone --depth 1 --branch v5.17.0 https://github.com/huggingface/transformers /tmp/transformers
    python benchmarks/transformers_tests.py /tmp/transformers llama qwen3_moe --out tests.json    # tests of generation
    python benchmarks/transformers_tests.py /tmp/transformers llama -k "" --jobs 2                # every test
    python benchmarks/transformers_tests.py /tmp/transformers llama gpt_oss --training            # tests of training

Exits with 1 where a test that passes stock does not pass patched.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GENERATION = "generat or cache or left_padding or assisted or prompt_lookup or decoding"
"""Words of the names of tests that generate."""
TRAINING = "train or grad"
"""Words of the names of tests that train."""
PATCHES = "TILEGYM_DB_TESTS_PATCHES"
"""Environment variable: the method of a model whose first call patches it, generate or train."""
COUNTS = "TILEGYM_DB_TESTS_COUNTS"
"""Environment variable: the file for the counts of a patched run."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
WHAT_COUNTS = {
    "kernel_calls": "kernel calls",
    "backward_calls": "of them backward",
    "graphs": "graphs",
    "replays": "replays",
}
SHOWN = 4000
"""Characters at the end of a failure that are kept."""


def outcomes(report: Path) -> dict[str, str]:
    """Return test -> passed, failed or skipped, from a JUnit file."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        status = FAILED if kinds & {"failure", "error"} else SKIPPED if "skipped" in kinds else PASSED
        found[f"{case.get('classname')}::{case.get('name')}"] = status
    return found


def failures(report: Path) -> dict[str, str]:
    """Return test -> the end of its failure, from a JUnit file."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        texts = [child.text or child.get("message") or "" for child in case if child.tag in ("failure", "error")]
        if texts:
            found[f"{case.get('classname')}::{case.get('name')}"] = texts[0][-SHOWN:]
    return found


def run_tests(checkout: Path, name: str, words: str, seconds: float, *, patched: bool, at: str) -> dict[str, Any]:
    """Run an architecture's tests in a process, and return their outcomes, the counts, and the last lines if none ran.

    Args:
        at: the method of a model whose first call patches it.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, counts = Path(folder) / "report.xml", Path(folder) / "counts.json"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        plugin: list[str] = []
        if patched:
            environment |= {COUNTS: str(counts), PATCHES: at}
            here = str(Path(__file__).parent)
            environment["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
            plugin = ["-p", Path(__file__).stem]
        tests = checkout / "tests" / "models" / name / f"test_modeling_{name}.py"
        command = [sys.executable, "-m", "pytest", str(tests), "-q", f"--junitxml={report}"]
        command += [*plugin, "-p", "no:cacheprovider", "-k", words]
        try:
            ran = subprocess.run(
                command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {"outcomes": {}, "error": f"longer than {seconds:.0f} s"}
        found = outcomes(report) if report.exists() else {}
        ran_any = PASSED in found.values()
        result: dict[str, Any] = {"outcomes": found, "error": "" if ran_any else (ran.stdout + ran.stderr)[-1000:]}
        result["failures"] = failures(report) if found else {}
        if counts.exists():
            result["counts"] = json.loads(counts.read_text())
        return result


def compared(name: str, stock: dict[str, Any], patched: dict[str, Any]) -> dict[str, Any]:
    """Return one row: how many tests passed each way, which regressed, and what the patched models did."""
    before, after = stock["outcomes"], patched["outcomes"]
    passed = [test for test, status in before.items() if status == PASSED]
    regressed = sorted(test for test in passed if after.get(test) != PASSED)
    return {
        "architecture": name,
        "passed_stock": len(passed),
        "passed_patched": sum(status == PASSED for status in after.values()),
        "failed_stock": sum(status == FAILED for status in before.values()),
        "regressed": regressed,
        "failures": {test: patched["failures"][test] for test in regressed if test in patched.get("failures", {})},
        "errors": [way["error"] for way in (stock, patched) if way["error"]],
        **patched.get("counts", {}),
    }


# ---- In the process of a patched run: a plugin of pytest ------------------------------------------


def write_counts(handles: Sequence[Any], unpatched: collections.Counter[str]) -> None:
    """Write the sums over the patched models of this process, and the errors of those that could not be patched."""
    reports = [handle.report() for handle in handles]
    graphs = [report.decoding for report in reports if report.decoding is not None]
    stock: collections.Counter[str] = collections.Counter()
    for one in graphs:
        stock.update(one.stock)
    counts = {
        "kernel_calls": sum(report.kernel_calls for report in reports),
        "backward_calls": sum(
            calls for report in reports for name, calls in report.hits().items() if "_backward" in name
        ),
        "graphs": sum(one.captured for one in graphs),
        "replays": sum(one.replayed for one in graphs),
        "models": len(handles) + sum(unpatched.values()),
        "stock": dict(stock),
        "unpatched": dict(unpatched),
    }
    Path(os.environ[COUNTS]).write_text(json.dumps(counts))


def pytest_configure() -> None:
    """Patch each model once: when it first generates, or when it is first set to training mode."""
    if COUNTS not in os.environ:
        return
    import torch
    from transformers import PreTrainedModel
    from transformers.generation import GenerationMixin

    from tilegym_db.models.patch import patch_what_fits

    stock = GenerationMixin.generate
    unpatched: collections.Counter[str] = collections.Counter()
    handles: list[Any] = []  # a model stays patched as long as its handle exists
    atexit.register(write_counts, handles, unpatched)
    known = "_tilegym_db_of_tests"
    entered: list[Any] = []

    def patch_once(model: Any) -> bool:
        """Return True if the model is patched now and was not before."""
        if known in model.__dict__:
            return False
        model.__dict__[known] = True
        try:
            handles.append(patch_what_fits(model))
        except Exception as error:
            unpatched[f"{type(error).__name__}: {error}"] += 1
            return False
        return True

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (type(self).generate if patch_once(self) else stock)(self, *args, **kwargs)

    def train(self: Any, mode: bool = True) -> Any:
        entered.append(self)
        try:
            torch.nn.Module.train(self, mode)  # and so that of every model inside, which the outermost patches
        finally:
            entered.pop()
        if mode and not entered:
            patch_once(self)
        return self

    if os.environ[PATCHES] == "train":
        PreTrainedModel.train = train
    else:
        GenerationMixin.generate = generate


# ---- The command ----------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> int:
    """Run the tests both ways, and print one row per architecture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of transformers")
    parser.add_argument("architectures", nargs="+", help="folders of tests/models")
    parser.add_argument("--training", action="store_true", help="the tests that train, and not those that generate")
    parser.add_argument("-k", help="expression of pytest over names of tests")
    parser.add_argument("--jobs", type=int, default=4, help="processes at the same time")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds of one process")
    parser.add_argument("--out", type=Path, help="JSON file of the rows")
    given = parser.parse_args(words)
    at, usual = ("train", TRAINING) if given.training else ("generate", GENERATION)
    words_of_tests = usual if given.k is None else given.k
    rows = []
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        runs = {
            (name, patched): pool.submit(
                run_tests, given.checkout.resolve(), name, words_of_tests, given.time_limit, patched=patched, at=at
            )
            for name in given.architectures
            for patched in (False, True)
        }
        for name in given.architectures:
            row = compared(name, runs[name, False].result(), runs[name, True].result())
            rows.append(row)
            counts = ", ".join(f"{row[key]} {what}" for key, what in WHAT_COUNTS.items() if key in row)
            print(
                f"{name}: {row['passed_stock']} pass stock, {row['passed_patched']} patched; {counts or 'no counts'}",
                flush=True,
            )
            for test in row["regressed"]:
                print("   ", test, row["failures"].get(test, ""))
            for error in row["errors"]:
                print("   ", error)
            if given.out:
                given.out.write_text(json.dumps(rows, indent=1))
    return 1 if any(row["regressed"] or row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
