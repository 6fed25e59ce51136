"""What a notebook or a prompt shows of each object: one short line, and a table of what has rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shipped_records import CATALOG

import tilegym_db
from tilegym_db.loop.fit import FitReport
from tilegym_db.measurement.machine import Machine
from tilegym_db.measurement.plan import BenchReport, Plan
from tilegym_db.measurement.regress import RegressionReport
from tilegym_db.measurement.tune.tune import TuneReport
from tilegym_db.models.report import CallSiteReport, PatchReport
from tilegym_db.store.opening import open_store

LONGEST = 400
CALL: dict[str, Any] = {
    "axes": {"M": 4096, "N": 4096}, "dtypes": {"T": "bfloat16"}, "scalars": {"eps": 1e-5}, "gpu": "h200",
}  # fmt: skip


def machine() -> Machine:
    fields = {field: "x" for field in Machine.__dataclass_fields__}
    made = object.__new__(Machine)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    object.__setattr__(made, "gpu", "cpu")
    return made


def answer(home: Path) -> Any:
    with open_store(home, read_only=True) as store:
        return store.sql("SELECT * FROM traces LIMIT 500")


def patch_report() -> PatchReport:
    site = CallSiteReport("norm", "LlamaRMSNorm", 5, "rms_norm", "nothing is published for cpu")
    return PatchReport((site,) * 60)


RESULTS: dict[str, Callable[[Path], Any]] = {
    "answer": answer,
    "resolved": lambda home: tilegym_db.resolve("rms_norm", **CALL),
    "explanation": lambda home: tilegym_db.explain("rms_norm", **CALL),
    "bench": lambda home: BenchReport("run", machine(), object.__new__(Plan)),
    "tune": lambda home: TuneReport("run", machine(), []),
    "fit": lambda home: FitReport("model", machine(), []),
    "patch": lambda home: patch_report(),
}
OTHERS: dict[str, Callable[[Path], Any]] = {
    "definition": lambda home: CATALOG.definition("rms_norm"),
    "solution": lambda home: CATALOG.solutions_for("rms_norm")[0].record,
    "files": lambda home: CATALOG.solutions_for("rms_norm")[0],
    "workload": lambda home: CATALOG.workloads_for("rms_norm")[0],
    "catalog": lambda home: CATALOG,
    "request": lambda home: tilegym_db.explain("rms_norm", **CALL).request,
    "regress": lambda home: RegressionReport("HEAD", machine()),
}


@pytest.mark.parametrize("make", [*RESULTS.values(), *OTHERS.values()], ids=[*RESULTS, *OTHERS])
def test_text_of_an_object_is_one_short_line(make: Callable[[Path], Any], tmp_path: Path) -> None:
    text = repr(make(tmp_path))
    assert len(text) <= LONGEST, text
    assert "\n" not in text


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
def test_result_displays_itself_as_a_table(make: Callable[[Path], Any], tmp_path: Path) -> None:
    shown = make(tmp_path)._repr_html_()
    assert shown.startswith("<table>")
    assert "</table>" in shown


def test_resolved_kernel_says_what_serves_and_why() -> None:
    found = tilegym_db.resolve("rms_norm", **CALL)
    assert "rms_norm M=4096,N=4096 bfloat16 on h200: " in repr(found)
    assert found.solution.name in repr(found)
    table = found._repr_html_()
    assert all(candidate.solution in table for candidate, _ in found.rejected[:10])


def test_record_names_itself() -> None:
    record = CATALOG.definition("rms_norm")
    assert repr(record) == f"<Definition rms_norm {record.version}>"
    assert repr(CATALOG.solution("rms_norm_triton")) == "<Solution rms_norm_triton of rms_norm, triton>"


def test_catalog_names_its_folders() -> None:
    assert repr(CATALOG) == f"<Catalog {', '.join(map(str, CATALOG.roots))}>"
