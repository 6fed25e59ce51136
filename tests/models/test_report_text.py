"""The text of a patch report: a table where it fits, and lines with whole reasons where it does not."""

from __future__ import annotations

from tilegym_db.models.found import Undescribed
from tilegym_db.models.report import CallSiteReport, PatchReport

REASON = "no verified solution of swiglu is faster than stock anywhere on cpu"
REPORT = PatchReport(
    (
        CallSiteReport("mlp", "LlamaMLP", 2, "swiglu", REASON),
        CallSiteReport("norm", "LlamaRMSNorm", 5, "rms_norm", "nothing is published for cpu"),
    ),
    undescribed=(Undescribed("Linear", 15, "a library call; no definition describes it"),),
)


def test_narrow_report_has_whole_names_and_reasons() -> None:
    lines = REPORT.text(45).splitlines()
    assert max(map(len, lines)) <= 45
    assert "LlamaRMSNorm x5: stock" in lines
    assert "  rms_norm" in lines
    assert REASON in " ".join(" ".join(lines).split())


def test_table_leaves_out_columns_that_no_site_fills() -> None:
    shown = REPORT.text(100)
    assert "by kernel" not in shown
    assert REASON in " ".join(shown.replace("│", " ").split())


def test_report_without_a_site_has_no_table() -> None:
    assert PatchReport((), note="stock code runs").text(80).strip() == "stock code runs"
