from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from browser_page import HOSTILE

from tilegym_db.report.page import ReportData, page

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "link", "input", "br", "img"}


class Checked(HTMLParser):
    """Notes what is not closed, what is closed twice, ids given twice, and what the elements hold."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.addresses += [values[name] or "" for name in ("href", "src", "action") if name in values]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def checked(text: str) -> Checked:
    parser = Checked()
    parser.feed(text)
    parser.close()
    return parser


def test_page_of_the_shipped_data_is_whole_small_and_offline(shipped_report: ReportData):
    text = page(shipped_report, version="0.2.0")
    assert len(text.encode()) < 4_500_000
    found = checked(text)
    assert not found.wrong
    assert not found.open
    assert len(found.ids) == len(set(found.ids))
    assert all(address.startswith("#") or address == "data:," for address in found.addresses)
    assert all(address[1:] in found.ids for address in found.addresses if address.startswith("#"))
    # Names of XML's kinds of elements look like addresses; nothing asks for them.
    outside = re.sub(r"http://www\.w3\.org/[a-zA-Z0-9/]+", "", text.replace(found.scripts[0], ""))
    assert "http" not in outside.replace("http-equiv", "")
    assert "@import" not in outside


def test_the_data_of_the_page_are_the_rows(shipped_report: ReportData):
    evidence = json.loads(checked(page(shipped_report, version="0")).scripts[0])["evidence"]
    column = evidence["values"][evidence["columns"].index("latency_us")]
    assert column == [row["latency_us"] for row in shipped_report.evidence]
    name = evidence["columns"].index("solution")
    assert [evidence["texts"]["solution"][at] for at in evidence["values"][name]] == [
        row["solution"] for row in shipped_report.evidence
    ]


def test_a_hostile_name_source_and_title_stay_text(shipped_report: ReportData):
    hostile = {**shipped_report.solutions[0], "name": HOSTILE, "description": HOSTILE}
    report = replace(shipped_report, solutions=[hostile], sources={"a": HOSTILE}, files_of={HOSTILE: [(HOSTILE, "a")]})
    text = page(report, version=HOSTILE, title=HOSTILE)
    found = checked(text)
    assert len(found.scripts) == 4
    assert not found.wrong
    assert "<img" not in text
    sources = json.loads(found.scripts[0])["sources"]
    assert json.loads(zlib.decompress(base64.b64decode(sources))) == {"a": HOSTILE}


def test_an_empty_database_makes_a_page(shipped_report: ReportData):
    names = ("evidence", "coverage", "open", "changes", "definitions", "solutions", "peaks", "models")
    report = replace(shipped_report, newest=None, sources={}, files_of={}, **{name: [] for name in names})
    assert "newest measurement never" in page(report, version="0.2.0")


def test_page_has_its_plot_library_with_versions_and_licence(shipped_report: ReportData):
    library = checked(page(shipped_report, version="0")).scripts[1]
    locked = json.loads((ROOT / "tools" / "d3" / "package-lock.json").read_text())["packages"]
    licence = (ROOT / "tilegym_db" / "report" / "vendor" / "d3.LICENSE").read_text()
    assert licence in library  # the licence is sent along with the page
    assert "Permission to use, copy, modify, and/or distribute" in licence
    named = re.findall(r"(d3-[a-z]+|internmap) (\d+\.\d+\.\d+)", licence)
    assert {"d3-array", "d3-axis", "d3-format", "d3-scale", "d3-selection", "d3-shape"} <= {name for name, _ in named}
    assert {name: version for name, version in named} == {
        name: locked[f"node_modules/{name}"]["version"] for name, _ in named
    }
