"""The documentation site builds without a warning or a network, and its generated pages say what the records and SQL say."""

from __future__ import annotations

import re
from pathlib import Path

import build_site
import pytest
from docs_site.latency_picture import latency_picture, series_of
from docs_site.links import broken_links
from docs_site.staging import as_page_of_docs, as_pattern_page
from shipped_records import CATALOG

import tilegym_db
from tilegym_db.cli.commands import COMMANDS
from tilegym_db.sandbox.scan import RULES
from tilegym_db.store.opening import open_store


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    assert build_site.build(folder) == []
    return folder


def text_of(page: Path) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page.read_text()))


@pytest.mark.nightly
@pytest.mark.slow
def test_every_operator_has_a_page_with_its_axes_and_mistakes(site: Path):
    for name, definition in CATALOG.definitions.items():
        page = text_of(site / "operators" / definition.op_type / f"{name}.html")
        for tensor in (*definition.axes, *definition.inputs, *definition.outputs):
            assert tensor in page
        if definition.self_test is not None:
            assert all(error.why.split("`")[0].split("'")[0] in page for error in definition.self_test.planted_errors)


@pytest.mark.nightly
@pytest.mark.slow
def test_an_operators_page_shows_the_times_that_sql_gives(site: Path, tmp_path: Path):
    with open_store(tmp_path, read_only=True, catalog=CATALOG) as store:
        (row,) = store.rows(
            "FROM best WHERE definition = 'softmax' AND gpu = 'h200' AND dtypes_key = 'T=bfloat16' "
            "ORDER BY axes['M'] * axes['N'] LIMIT 1"
        )
    page = text_of(site / "operators" / "softmax" / "softmax.html")
    assert f"{row['latency_us']:.4g}" in page
    assert row["solution"] in page
    assert 'alt="Latency by size of softmax on h200' in (site / "operators" / "softmax" / "softmax.html").read_text()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_references_have_every_command_and_every_public_name(site: Path):
    commands = (site / "reference" / "cli.html").read_text()
    assert all(f'id="{name}"' in commands for panel in COMMANDS.values() for name in panel)
    functions = (site / "reference" / "ops.html").read_text()
    assert all(f'id="{name.replace("_", "-")}"' in functions for name in CATALOG.definitions)
    rules = text_of(site / "reference" / "scan.html")
    assert all(f" {name} " in rules for name in RULES)
    python = (site / "reference" / "python.html").read_text()
    found = set(re.findall(r'id="(?:module-)?tilegym_db\.(\w+)"', python))
    assert set(tilegym_db.__all__) <= found


@pytest.mark.nightly
@pytest.mark.slow
def test_every_page_of_the_docs_is_reached_from_the_first(site: Path):
    reached, waiting = set(), [site / "index.html"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r'href="([^"#]+\.html)', page.read_text())
            waiting += [(page.parent / link).resolve() for link in links if ":" not in link]
    pages = {
        path.relative_to(site) for path in site.rglob("*.html") if path.name not in ("search.html", "genindex.html")
    }
    assert pages <= {path.relative_to(site) for path in reached if path.is_relative_to(site)}


def test_dead_links_and_network_content_are_found(tmp_path: Path):
    (tmp_path / "b.html").write_text('<p id="there">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">1</a><a href="b.html#gone">2</a><a href="c.html">3</a><a href="https://example.org">4</a>'
        '<script src="https://example.org/x.js"></script><img src="gone.png">'
    )
    assert broken_links(tmp_path) == [
        "a.html: https://example.org/x.js", "a.html: b.html#gone", "a.html: c.html", "a.html: gone.png",
    ]  # fmt: skip


def test_a_page_of_the_root_keeps_its_links():
    page = "[a](docs/how-to/x.md) ![b](docs/pictures/y.svg) [c](CONTRIBUTING.md#d) [docs/z.md](docs/z.md) see docs/decisions"
    assert as_page_of_docs(page) == (
        "[a](how-to/x.md) ![b](pictures/y.svg) [c](contributing.md#d) [z.md](z.md) see docs/decisions"
    )


def test_a_pattern_shows_its_evidence_below_its_advice():
    section = '## Title\n\n```toml\nevidence = ["trace:1", "search:2"]\nversions = { triton = ">=3.6" }\n```\n\nText.\n'
    page = as_pattern_page(f"# Page\n\n{section}\n{section.replace('Text', 'More')}")
    assert page.startswith("# Page\n\n## Title\n\nText.\n\n| | |\n")
    assert page.count("| evidence | trace:1, search:2 |") == 2
    assert page.endswith("More.\n\n| | |\n|---|---|\n| evidence | trace:1, search:2 |\n| versions | triton >=3.6 |\n\n")
    assert "```" not in page


def row(language: str, size: float, latency_us: float, dtypes: str = "T=bfloat16") -> dict[str, object]:
    return {
        "language": language, "bytes": size, "latency_us": latency_us, "dtypes_key": dtypes, "layouts_key": "",
        "is_fastest_in_language": True,
    }  # fmt: skip


def test_picture_has_a_line_per_language_and_slower_points_above():
    rows = [row("triton", 1e3, 5), row("triton", 1e6, 50), row("cutile", 1e3, 6), row("triton", 1e3, 9, "T=float32")]
    series = series_of(rows)
    assert {language: [size for size, _ in line] for language, line in series.items()} == {
        "triton": [1e3, 1e6],
        "cutile": [1e3],
    }
    assert [latency_us for _, latency_us in series["triton"]] == pytest.approx([5, 50])
    picture = latency_picture("x <on> h200", series)
    (points,) = re.findall(r'class="line triton" points="([\d.]+),([\d.]+) ([\d.]+),([\d.]+)"', picture)
    left, low, right, high = map(float, points)
    assert left < right
    assert low > high  # y grows downwards
    assert "x &lt;on&gt; h200" in picture


def test_sizes_of_which_nothing_is_known_have_no_picture():
    assert series_of([{**row("triton", 1e3, 5), "bytes": None}]) == {}
