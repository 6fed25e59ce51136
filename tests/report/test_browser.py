"""The page in a real browser, from disk, without a network."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser_page import HOSTILE, chromium_page, needs_chromium
from model_runs import LIGER, model_run, speedups, timing

from tilegym_db.catalog import Catalog
from tilegym_db.report.page import ReportData, page
from tilegym_db.store.connection import Store
from tilegym_db.store.opening import open_store
from tilegym_db.store.queries.report_rows import model_rows
from tilegym_db.store.side_files import save_model_run

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.nightly]

TABLES = ("kernels", "gpus", "coverage", "open", "changes", "solutions")
SORTED = """name => {
  const table = document.querySelector(`#table-${name} table`);
  return [...table.querySelectorAll("thead tr:last-child th")].map((_, at) => {
    const order = () => [...document.querySelectorAll(`#table-${name} tbody tr`)].map((row) => row.children[at].textContent);
    const head = () => document.querySelectorAll(`#table-${name} thead tr:last-child th`)[at];
    head().querySelector("button").click();
    const up = [head().getAttribute("aria-sort"), order()];
    head().querySelector("button").click();
    return [...up, head().getAttribute("aria-sort"), order()];
  });
}"""
FILTER_MS = """words => {
  const box = document.getElementById("q"), start = performance.now();
  box.value = words;
  box.dispatchEvent(new Event("input", {bubbles: true}));
  document.body.offsetHeight;
  return performance.now() - start;
}"""

TOO_WIDE = """() => document.documentElement.scrollWidth <= innerWidth ? []
  : [...document.querySelectorAll("body *")].filter((node) => node.getBoundingClientRect().right > innerWidth)
    .map((node) => `${node.tagName} ${node.id} ${node.className}`)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[tuple[Any, list[str]]]:
    with chromium_page(viewport={"width": 1280, "height": 900}) as opened:
        yield opened


@pytest.fixture
def show(browser: tuple[Any, list[str]], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``show(report, address)``: the page of a report in the browser; afterwards nothing was logged or asked for."""
    tab, wrong = browser
    wrong.clear()

    def open_page(report: ReportData, address: str = "") -> Any:
        path = tmp_path / "report.html"
        path.write_text(page(report, version="0.2.0"))
        tab.goto("about:blank")
        tab.goto(f"{path.as_uri()}{address}")
        return tab

    yield open_page
    assert wrong == []


def body_rows(tab: Any, table: str) -> list[str]:
    rows: list[str] = tab.locator(f"#table-{table} tbody tr").all_inner_texts()
    return rows


def test_every_table_sorts_both_ways_with_the_best_time_first(shipped_report: ReportData, show: Callable[..., Any]):
    tab = show(shipped_report)
    for table in TABLES:
        for up, rising, down, falling in tab.evaluate(SORTED, table):
            assert (up, down) == ("ascending", "descending")
            assert len(set(rising)) == len(set(falling)) == 1 or rising != falling, table
    tab.locator("#table-kernels th[data-key=latency_us] button").click()
    least = min(row["latency_us"] for row in shipped_report.evidence if row["is_fastest_in_language"])
    assert f"{least:.4g} [" in body_rows(tab, "kernels")[0].replace("\n", " ")


def model_ways(home: Path, catalog: Catalog) -> list[dict[str, Any]]:
    """What a report has of one run beside a peer, through a database."""
    control = {"timing": timing(1.0), "against": {"stock": speedups(1.0)}, "equal_tokens": 12}
    run = model_run(
        ways={"liger": LIGER, "stock_again": control}, absent={"tilegym": "it is not installed"}, proved=True,
        kernels={"swiglu": 4}, gpu_shares={"swiglu": 0.62},
    )  # fmt: skip
    save_model_run(run, home)
    with open_store(home, catalog=catalog) as store:
        return [row for row in model_rows(store) if row["model"] == run.model]


def test_model_is_shown_beside_stock_and_peers_as_other_evidence(
    shipped_report: ReportData, show: Callable[..., Any], catalog: Catalog, tmp_path: Path
):
    ways = model_ways(tmp_path / "home", catalog)
    tab = show(replace(shipped_report, models=ways))
    heads = [head.strip() for head in tab.locator("#table-models thead th").all_inner_texts()]
    shown = [dict(zip(heads, row.split("\t"), strict=True)) for row in body_rows(tab, "models")]
    columns = ("way", "tokens/s", "stock tokens/s", "speedup [interval]", "claim", "served", "day")
    assert [[row[name] for name in columns] for row in shown] == [
        ["patched", "800", "400", "2.00 [1.80, 2.20]", "faster proved on this model", "62%", "2026-11-21"],
        ["liger", "500", "400", "1.25 [1.13, 1.38]", "", "", "2026-11-21"],
        ["tilegym", "", "400", "", "it is not installed", "", "2026-11-21"],
    ]
    assert (shown[0]["model"], shown[0]["call"]) == ("tiny 2 layers", "1 x 8 + 12")
    assert "Model-level evidence, not comparable with that of operators" in tab.locator("#models").inner_text()
    for up, rising, down, falling in tab.evaluate(SORTED, "models"):
        assert (up, down) == ("ascending", "descending")
        assert len(set(rising)) == 1 or rising != falling
    tab = show(replace(shipped_report, models=[]))
    assert "no run of a whole model" in tab.locator("#table-models").inner_text()


def test_model_without_a_permitted_claim_shows_no_speedup(
    shipped_report: ReportData, show: Callable[..., Any], catalog: Catalog, tmp_path: Path
):
    ways = [
        {**row, "claim": "nothing", "reason": "no kernel ran"} if row["way"] == "patched" else row
        for row in model_ways(tmp_path / "home", catalog)
    ]
    tab = show(replace(shipped_report, models=ways))
    row = body_rows(tab, "models")[0]
    assert "none no kernel ran" in row
    assert "2.00" not in row


def test_gpus_of_a_language_are_side_by_side_in_the_coverage_map(shipped_report: ReportData, show: Callable[..., Any]):
    tab = show(shipped_report)
    gpus = sorted({row["gpu"] for row in shipped_report.coverage})
    assert len(gpus) == 2
    assert tab.locator("#table-coverage thead tr:first-child th").all_inner_texts() == [
        "triton", "tilelang", "cutile", "python",
    ]  # fmt: skip
    assert tab.locator("#table-coverage thead tr:last-child th").all_inner_texts()[2:] == gpus * 4
    cells = {(row["gpu"], row["language"]): row for row in shipped_report.coverage if row["definition"] == "rms_norm"}
    (shown,) = [row.split("\t") for row in body_rows(tab, "coverage") if row.startswith("rms_norm\t")]
    first = [cells[gpu, "triton"] for gpu in gpus]
    assert shown[2:4] == [f"{cell['verified']} / {cell['workloads']}" for cell in first]
    summary = tab.locator("#table-coverage .summary li").all_inner_texts()
    for gpu, line in zip(gpus, summary, strict=True):
        operators = {row["definition"] for row in shipped_report.coverage if row["gpu"] == gpu and row["verified"]}
        assert line.startswith(f"{gpu} {len(operators)} of {len(shipped_report.definitions)} operators verified")


def test_shape_shows_the_fastest_per_gpu_and_the_ratio_of_sql(
    shipped_report: ReportData, show: Callable[..., Any], store: Store
):
    tab = show(shipped_report, "#q=rms_norm_backward_x")
    (pair,) = store.rows(
        """SELECT one.solution AS first, two.solution AS second, one.latency_us / two.latency_us AS ratio
        FROM best one JOIN best two USING (definition, axes_key, dtypes_key, scalars_key, layouts_key)
        WHERE definition = 'rms_norm_backward_x' AND one.gpu = 'h100-sxm' AND two.gpu = 'h200'
        ORDER BY one.latency_us DESC LIMIT 1"""
    )
    head = tab.locator("#table-gpus th[data-key='us h100-sxm'] button")
    head.click()
    head.click()
    row = tab.locator("#table-gpus tbody tr").first
    assert row.locator("button").all_inner_texts() == [
        pair[name].removeprefix("rms_norm_backward_x_") for name in ("first", "second")
    ]
    assert row.locator("td").nth(8).inner_text() == f"{pair['ratio']:.2f}"
    assert row.locator("td").nth(9).inner_text() == ("same" if pair["first"] == pair["second"] else "differs")
    row.locator("button").nth(1).click()
    assert tab.locator("#detail h2").inner_text() == pair["second"]
    assert "NVIDIA H200" in tab.locator("#detail-body").inner_text()


def test_stock_code_beside_a_kernel_is_no_ratio_of_gpus(shipped_report: ReportData, show: Callable[..., Any]):
    case = [
        row for row in shipped_report.evidence
        if (row["definition"], row["axes_key"]) == ("softmax", "M=64,N=128256")
    ]  # fmt: skip
    assert {row["gpu"] for row in case} == {"h100-sxm", "h200"}
    left = [row for row in case if row["gpu"] == "h200" or row["role"] != "kernel"]
    fastest = min((row for row in left if row["gpu"] == "h100-sxm"), key=lambda row: row["latency_us"])
    tab = show(
        replace(shipped_report, evidence=[{**row, "is_fastest": row["is_fastest"] or row is fastest} for row in left])
    )
    (row,) = body_rows(tab, "gpus")
    assert row.split("\t")[-2:] == ["", "none on h100-sxm"]


def test_the_filter_of_a_gpu_leads_the_plots_too(shipped_report: ReportData, show: Callable[..., Any]):
    for gpu in ("h100-sxm", "h200"):
        tab = show(shipped_report, f"#q=softmax&gpu={gpu}")
        assert tab.locator("#roof-gpu").input_value() == gpu
        assert tab.locator("#plot-roofline .point:not([display])").count() > 0
        assert tab.locator("#lat-key").input_value().startswith(f"{gpu};")
        assert tab.locator("#table-coverage thead tr:last-child th").all_inner_texts()[2:] == [gpu] * 4


def test_search_and_filters_work_from_keyboard_and_address(
    shipped_report: ReportData, show: Callable[..., Any], store: Store
):
    # A table shows 50 rows until more are asked for; this operator has fewer.
    tab = show(shipped_report, "#q=topk_then_softmax&lang=triton&fastest=1")
    fastest = store.rows("SELECT solution FROM best WHERE definition = 'topk_then_softmax' AND language = 'triton'")
    assert tab.locator("#status").inner_text().startswith(f"{len(fastest)} of ")
    shown = tab.locator("#table-kernels tbody tr td:nth-child(6)").all_inner_texts()
    assert sorted(shown) == sorted(row["solution"] for row in fastest)
    assert "softmax" in tab.locator("#lat-definition").input_value()  # the plot is of an operator that the search shows
    tab.locator("button[type=reset]").click()
    tab.wait_for_url(lambda address: "softmax" not in address)
    tab.locator("h1").click()
    tab.keyboard.press("/")
    tab.keyboard.type("rope_neox tilelang")
    assert "q=rope_neox+tilelang" in tab.evaluate("location.hash")
    assert all("rope_neox" in row and "tilelang" in row for row in body_rows(tab, "kernels"))


def test_first_screen_has_the_speedup_of_each_family_as_in_sql(
    shipped_report: ReportData, show: Callable[..., Any], store: Store
) -> None:
    tab = show(shipped_report)
    assert tab.locator("#plot-speedups svg").bounding_box()["y"] < 900
    said = tab.locator("#plot-speedups svg").get_attribute("aria-label")
    (row,) = store.rows(
        """SELECT median(speedup) AS middle, min(speedup) AS low, max(speedup) AS high, count(*) AS n FROM (
            FROM best_per_solution WHERE op_type = 'softmax' AND role = 'kernel' AND speedup IS NOT NULL
            QUALIFY row_number() OVER (PARTITION BY definition, gpu, axes_key, dtypes_key, scalars_key, layouts_key
                ORDER BY latency_us) = 1)"""
    )
    said_of = re.search(r"softmax ([\d.]+)x, from ([\d.]+) to ([\d.]+), of (\d+) shapes", said)
    assert said_of is not None
    assert [float(one) for one in said_of.groups()[:3]] == pytest.approx(
        [row["middle"], row["low"], row["high"]], rel=6e-3
    )
    assert int(said_of[4]) == row["n"]


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_labels_of_the_first_chart_can_be_read(
    width: int, shipped_report: ReportData, show: Callable[..., Any]
) -> None:
    tab = show(shipped_report)
    tab.set_viewport_size({"width": width, "height": 900})
    tab.reload()
    boxes = sorted((box["x"], box["width"], box["height"]) for box in boxes_of(tab, "#plot-speedups .axis text"))
    tab.set_viewport_size({"width": 1280, "height": 900})
    assert len(boxes) >= 4
    assert all(x + wide < following for (x, wide, _), (following, *_) in itertools.pairwise(boxes))
    assert min(high for *_, high in boxes) >= 11


def boxes_of(tab: Any, selector: str) -> list[dict[str, float]]:
    return [one.bounding_box() for one in tab.locator(selector).all()]


def test_filter_of_an_operator_leaves_no_other(shipped_report: ReportData, show: Callable[..., Any]) -> None:
    tab = show(shipped_report, "#operator=rms_norm")
    assert tab.locator("#operator").input_value() == "rms_norm"
    for name in ("kernels", "gpus", "coverage", "solutions"):
        cells = tab.locator(f"#table-{name} tbody td[data-label=operator]").all_inner_texts()
        assert set(cells) == {"rms_norm"}
    tab.locator("#operator").select_option("softmax")
    assert "operator=softmax" in tab.evaluate("location.hash")
    assert set(tab.locator("#table-kernels tbody td[data-label=operator]").all_inner_texts()) == {"softmax"}


def test_point_shows_the_number_of_sql_and_opens_its_kernel(
    shipped_report: ReportData, show: Callable[..., Any], store: Store
):
    tab = show(shipped_report, "#q=softmax")
    point = tab.locator("#plot-roofline .point:not([display])").first
    point.focus()
    solution, _, case, figures, *_ = [*tab.locator("#tip").inner_text().replace(" (", "\n(").split("\n")]
    tab.keyboard.press("Enter")
    tab.locator("#detail pre", has_text="def run(").first.wait_for()  # sources are unpacked beside everything else
    details = tab.locator("#detail-body").inner_text()
    trace_id = next(
        line for line in tab.evaluate("location.hash").split("&") if line.startswith("trace=")
    ).removeprefix("trace=")
    (row,) = store.rows("FROM best WHERE trace_id = $trace_id", {"trace_id": trace_id})
    assert solution == row["solution"]
    assert row["gpu"] in case
    assert float(figures.split(" us")[0]) == row["latency_us"]
    assert trace_id in details
    assert f"tilegym-db debug reproduce {solution} --axes {row['axes_key']}" in details
    assert "def run(" in details
    cases = tab.locator("#cases option").count()
    assert (
        cases
        == store.rows("SELECT count(*) AS n FROM best_per_solution WHERE solution = $name", {"name": solution})[0]["n"]
    )
    tab.locator("#cases").select_option(index=cases - 1)
    assert (
        tab.locator("#cases option").nth(cases - 1).get_attribute("value") in tab.locator("#detail-body").inner_text()
    )
    tab.keyboard.press("Escape")
    assert not tab.locator("#detail").is_visible()


def test_arrow_keys_move_over_the_points_that_the_filters_leave(shipped_report: ReportData, show: Callable[..., Any]):
    tab = show(shipped_report, "#q=softmax")
    points = tab.locator("#plot-roofline .point:not([display])")
    assert 2 < points.count() < tab.locator("#plot-roofline .point").count()
    points.first.focus()
    for key, at in (("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1)):
        tab.keyboard.press(key)
        assert points.nth(at).evaluate("node => node === document.activeElement")
        assert tab.locator("#plot-roofline .point[tabindex='0']").count() == 1
    for _ in range(3):  # the first one is the end
        tab.keyboard.press("ArrowUp")
    assert points.first.evaluate("node => node === document.activeElement")


def test_ten_thousand_rows_are_filtered_in_a_tenth_of_a_second(shipped_report: ReportData, show: Callable[..., Any]):
    rows = [row for row in shipped_report.evidence if row["is_fastest_in_language"]]
    many = (rows * (10_000 // len(rows) + 1))[:10_000]
    tab = show(replace(shipped_report, evidence=many))
    searches = ("r", "rms", "rms_norm triton", "", "softmax", "nothing fits")
    taken = {words: min(tab.evaluate(FILTER_MS, words) for _ in range(5)) for words in searches}
    print(f"ms a filter of 10,000 rows: { {words: round(ms) for words, ms in taken.items()} }")
    assert max(taken.values()) < 100  # the least of five: another process may have had the processor
    tab.locator("#table-solutions .notice").first.wait_for(state="attached")  # the other parts follow


def test_a_hostile_name_is_shown_as_text_and_runs_nothing(shipped_report: ReportData, show: Callable[..., Any]):
    hostile = {**shipped_report.solutions[0], "name": HOSTILE, "description": HOSTILE}
    tab = show(
        replace(shipped_report, solutions=[hostile], sources={"a": HOSTILE}, files_of={HOSTILE: [("k.py", "a")]})
    )
    tab.locator("#table-solutions tbody button").click()
    assert tab.locator("#detail h2").inner_text() == HOSTILE
    tab.locator("#detail pre", has_text="alert").wait_for()
    assert tab.locator("#detail pre").inner_text() == HOSTILE
    assert tab.locator("img").count() == 0


def test_a_phone_shows_the_page_without_scrolling_sideways(shipped_report: ReportData, show: Callable[..., Any]):
    tab = show(shipped_report)
    assert tab.evaluate(TOO_WIDE) == []
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate(TOO_WIDE) == []
    letters = tab.locator("#plot-latency text").first
    letters.wait_for()
    assert letters.bounding_box()["height"] >= 11
    tab.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_no_width_or_theme_scrolls_sideways_or_hides_the_search(
    width: int, scheme: str, shipped_report: ReportData, show: Callable[..., Any]
) -> None:
    tab = show(shipped_report, "#q=rms_norm")
    tab.emulate_media(color_scheme=scheme)
    tab.set_viewport_size({"width": width, "height": 900})
    assert tab.evaluate(TOO_WIDE) == []
    assert tab.locator("#q").is_visible()
    assert "rms_norm" in tab.locator("#operators option").evaluate_all("all => all.map((one) => one.value)")
    assert len(tab.screenshot()) > 20_000
    tab.emulate_media(color_scheme=None)
    tab.set_viewport_size({"width": 1280, "height": 900})


def test_a_button_copies_the_command_and_each_source(shipped_report: ReportData, show: Callable[..., Any]) -> None:
    row = shipped_report.evidence[0]
    tab = show(shipped_report, f"#kernel={row['solution']}")
    tab.locator("#detail pre", has_text="def ").first.wait_for()
    sources = len(shipped_report.files_of[row["solution"]])
    assert tab.locator("#detail .copy").count() == 1 + sources
    tab.evaluate(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async (text) => { window.copied = text; }}})"
    )
    tab.locator("#detail .copy").first.click()
    tab.locator("#detail .copy", has_text="Copied").wait_for()
    assert tab.evaluate("window.copied") == tab.locator("#detail pre.command").inner_text()


def test_history_of_a_kernel_is_a_plot_with_a_row_a_pass(shipped_report: ReportData, show: Callable[..., Any]) -> None:
    row = next(row for row in shipped_report.evidence if row["role"] == "kernel")
    keys = ("solution", "gpu", "axes_key", "dtypes_key", "scalars_key", "layouts_key", "config_key", "tier", "driver")
    passes = [
        {
            **{key: row[key] for key in keys}, "number": number, "timestamp": f"2026-11-0{number}T00:00:00Z",
            "latency_us": latency, "ci_low_us": latency * 0.99, "ci_high_us": latency * 1.01,
            "ratio": None if number == 1 else 1.2, "change": None if number == 1 else "slower", "is_current": number > 1,
            "trace_id": f"{number}" * 32,
        }
        for number, latency in ((1, 10.0), (2, 12.0), (3, 14.4))
    ]  # fmt: skip
    tab = show(replace(shipped_report, history=passes), f"#kernel={row['solution']}&trace={row['trace_id']}")
    marks = tab.locator("#plot-history .point")
    assert marks.count() == 3
    assert tab.locator("#plot-history .point.old").count() == 1
    assert tab.locator("#plot-history .tick text").all_text_contents()[:3] == ["2026-11-01", "2026-11-02", "2026-11-03"]
    assert tab.locator("#plot-history line.series").count() == 3  # an interval for each
    tab.locator("#plot-history").scroll_into_view_if_needed()
    marks.nth(1).hover()
    assert "12 us [11.88, 12.12]" in tab.locator("#tip").inner_text()
    assert tab.evaluate("document.getElementById('tip').closest('dialog') !== null")  # else the dialog covers it
    marks.nth(1).focus()
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.textContent").startswith("2026-11-02")
    rows = tab.locator("#table-history tbody tr").all_inner_texts()
    assert [("slower" in line, "older" in line) for line in rows] == [(False, True), (True, False), (True, False)]
    assert tab.evaluate(TOO_WIDE) == []


def test_kernel_timed_once_has_no_history(shipped_report: ReportData, show: Callable[..., Any]) -> None:
    tab = show(replace(shipped_report, history=[]), f"#kernel={shipped_report.evidence[0]['solution']}")
    assert tab.locator("#detail h3", has_text="Reproduce").count() == 1
    assert tab.locator("#plot-history").count() == 0


def test_paper_shows_plots_and_tables_without_controls(shipped_report: ReportData, show: Callable[..., Any]) -> None:
    tab = show(shipped_report)
    tab.emulate_media(media="print")
    tab.set_viewport_size({"width": 794, "height": 1123})  # A4 at 96 dots an inch
    controls = tab.locator("form, nav, .more, .skip")
    assert controls.count() > 0
    assert [controls.nth(at).is_visible() for at in range(controls.count())] == [False] * controls.count()
    assert all(tab.locator(f"#table-{name} tbody tr").first.is_visible() for name in TABLES)
    assert tab.locator("#plot-roofline svg").first.is_visible()
    assert tab.evaluate(TOO_WIDE) == []
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.emulate_media(media="screen")


SERIOUS = ("serious", "critical")


def serious_findings(tab: Any) -> list[str]:
    """Return what axe-core finds on the page that keeps people from using it."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(tab).response
    assert found["passes"], "axe checked nothing"
    return [
        f"{rule['impact']} {rule['id']}: {rule['help']}: {node['html'][:200]}"
        for rule in found["violations"]
        if rule["impact"] in SERIOUS
        for node in rule["nodes"][:3]
    ]


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("address", ["", "#q=softmax&gpu=h200", "detail"])
def test_axe_finds_nothing_serious(
    address: str, scheme: str, width: int, shipped_report: ReportData, show: Callable[..., Any]
) -> None:
    if address == "detail":
        address = f"#kernel={shipped_report.evidence[0]['solution']}"
    tab = show(shipped_report, address)
    assert tab.locator("#detail").is_visible() == ("kernel=" in address)
    tab.emulate_media(color_scheme=scheme)
    tab.set_viewport_size({"width": width, "height": 900})
    found = serious_findings(tab)
    tab.emulate_media(color_scheme=None)
    tab.set_viewport_size({"width": 1280, "height": 900})
    assert found == []


def test_axe_finds_a_button_without_a_name(shipped_report: ReportData, show: Callable[..., Any]) -> None:
    tab = show(shipped_report, "#q=softmax&gpu=h200")
    tab.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<button></button>')")
    assert ["button-name" in line for line in serious_findings(tab)] == [True]
