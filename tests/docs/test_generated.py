"""What scripts write into the documentation is current."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ElementTree
from types import ModuleType

import import_graph
import marked_blocks
import performance_bars
import performance_tables
import pytest
import readme_picture

from tilegym_db.store.opening import run_user_query


@pytest.mark.parametrize(
    "script", [readme_picture, performance_tables, import_graph], ids=lambda script: script.__name__
)
def test_the_blocks_that_a_script_writes_are_current(script: ModuleType):
    stale = [str(path) for path, text in script.wanted().items() if not path.exists() or path.read_text() != text]
    assert not stale, f"Try: python tools/{script.__name__}.py"


def test_the_picture_is_an_svg_with_one_bar_an_operator():
    tree = ElementTree.fromstring(readme_picture.PICTURE.read_text())
    bars = [node for node in tree.iter("{http://www.w3.org/2000/svg}rect") if node.get("class") == "bar"]
    names = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text") if node.get("text-anchor") == "end"]
    assert len(bars) == len(names) >= 5
    assert {"rms_norm", "swiglu"} <= set(names)
    assert all(float(bar.get("width", "-1")) >= 0 for bar in bars)


def test_nothing_in_the_picture_overlaps_or_is_cut():
    svg = "{http://www.w3.org/2000/svg}"
    tree = ElementTree.fromstring(readme_picture.PICTURE.read_text())
    ticks = [float(node.get("x", "")) for node in tree.iter(f"{svg}text") if node.get("text-anchor") == "middle"]
    names = [node for node in tree.iter(f"{svg}text") if node.get("text-anchor") == "end"]
    bars = [node for node in tree.iter(f"{svg}rect") if node.get("class") == "bar"]
    ranges = [node for node in tree.iter(f"{svg}line") if node.get("class") == "range"]
    labels = [node for node in tree.iter(f"{svg}text") if (node.text or "").count(" shapes, ")]
    width = readme_picture.CHARACTER
    edge = min(float(node.get("x", "")) for node in labels)
    assert all(float(node.get("x", "")) >= width * len(node.text or "") for node in names)
    assert all(float(bar.get("x", "")) + float(bar.get("width", "")) < edge for bar in bars)
    assert all(float(node.get("x2", "")) < edge for node in ranges)
    assert all(float(node.get("x1", "")) > float(names[0].get("x", "")) for node in ranges)
    assert all(edge + width * len(node.text or "") <= readme_picture.PAGE for node in labels)
    assert max(ticks) < edge


def test_a_block_is_replaced_and_a_page_without_it_is_refused():
    page = "before\n<!-- generated: x -->\nold\n<!-- end: x -->\nafter\n"
    assert marked_blocks.with_block(page, "x", "new") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="has no block"):
        marked_blocks.with_block(page, "y", "new")


def test_the_import_graph_follows_the_layers_of_the_contract():
    ordered = import_graph.layers()
    depth = {part: index for index, layer in enumerate(ordered) for part in layer}
    arrows = import_graph.edges(set(depth))
    assert {("cli", "loop"), ("loop", "models")} <= set(arrows)  # and not what these two imply
    assert all(depth[one] < depth[two] for one, two in arrows)


def test_every_verified_operator_has_one_row_of_the_table():
    with marked_blocks.shipped_store():
        verified = run_user_query(
            "SELECT DISTINCT op_type, definition FROM verified WHERE gpu = ? AND role = 'kernel'",
            [performance_tables.GPU],
        ).rows
    rows = list(csv.DictReader(performance_tables.OPERATORS.read_text().splitlines()))
    assert sorted((row["op_type"], row["operator"]) for row in rows) == sorted(verified)
    assert all(row["Triton"] or row["TileLang"] or row["cuTile"] for row in rows)


ROWS = [
    ("norm", "layer_norm", "M=1,N=1", 5.0, None, 6.0, 9.0, 0.5, 1.5),
    ("norm", "rms_norm", "M=1,N=1", 5.0, None, 6.0, 20.0, 0.9, 4.0),
    ("scan", "cumsum", "M=1", 1.0, None, None, None, None, None),
]


def test_operators_are_rows_of_times_with_their_units_left_out():
    assert performance_tables.operators(ROWS).splitlines()[2:] == [
        'norm,rms_norm,"M=1,N=1",5.0,,6.0,20.0,90%,4.00x',
        "scan,cumsum,M=1,1.0,,,,,",
    ]


def test_an_op_type_is_a_row_of_counts_and_medians():
    assert performance_tables.families(ROWS).splitlines()[2:] == [
        "| Norms | 2 | 2 | 0 | 2 | 70% | 2.75x | 1.50x |",
        "| Scan | 1 | 1 | 0 | 0 |  |  |  |",
    ]


BAR = performance_bars.Bar(("cast",), performance_bars.PREFILL_ROWS, performance_bars.LIGHT, 0.85, each=0.70)
PRODUCT = performance_bars.Bar(("gemm",), performance_bars.PREFILL_ROWS, performance_bars.RATE, 1200)
FAST = performance_bars.Bar(("router",), performance_bars.FEW, performance_bars.LATENCY, 6.0)


def point(definition: str, axes: dict[str, int], gpu: str = "h200", **times: float) -> list[tuple[object, ...]]:
    shape = ",".join(f"{name}={size}" for name, size in axes.items())
    return [
        (definition, shape, axes, "T=bfloat16", gpu, 90.0, language, us, None, shape) for language, us in times.items()
    ]


@pytest.mark.parametrize(
    ("bar", "axes", "times", "met"),
    [
        (BAR, {"M": 4096}, {"triton": 100.0, "tilelang": 101.0, "cutile": 120.0}, "yes"),
        (BAR, {"M": 4096}, {"triton": 100.0, "cutile": 150.0}, "yes; cuTile behind; TileLang not measured"),
        (BAR, {"M": 4096}, {"triton": 110.0, "tilelang": 110.0, "cutile": 110.0}, "**no**"),
        (BAR, {"M": 64}, {"triton": 100.0}, "not measured"),
        (PRODUCT, {"M": 4096, "N": 4096, "K": 4096}, {"tilelang": 114.0}, "yes"),
        (PRODUCT, {"M": 4096, "N": 4096, "K": 4096}, {"tilelang": 115.0}, "**no**"),
        (FAST, {"M": 1}, {"triton": 6.0, "cutile": 9.0}, "yes"),
        (FAST, {"M": 1}, {"triton": 6.1}, "**no**"),
    ],
)
def test_bar_is_met_by_the_fastest_language_and_names_the_others(bar, axes, times, met):
    found = performance_bars.points(point(bar.definitions[0], axes, **times))
    (row,) = performance_bars.bar_rows(bar, found)
    assert row.split(" | ")[6].strip() == met


def test_bar_shows_the_fastest_of_the_other_gpu_at_its_shape():
    rows = point("cast", {"M": 4096}, triton=100.0) + point("cast", {"M": 4096}, "h100", triton=180.0, cutile=120.0)
    (row,) = performance_bars.bar_rows(BAR, performance_bars.points(rows))
    assert row.endswith("| 0.750 |")


def test_summary_of_bars_counts_shapes_that_meet_and_miss(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(performance_bars, "BARS", {"Casts": (BAR,), "Routers": (FAST,)})
    rows = [
        *point("cast", {"M": 4096}, triton=100.0),
        *point("cast", {"M": 8192}, tilelang=110.0),
        *point("cast", {"M": 16384}, "h100", tilelang=90.0),
        *point("cast", {"M": 64}, triton=1.0),
    ]
    assert performance_bars.summary(rows).splitlines()[2:] == [
        "| cast | 4,096 tokens and more | >= 0.85 of light, each 0.7 | 1 | 1 |",
        "| router | 1 to 16 tokens | <= 6 us | 0 | 0 |",
    ]


def test_summary_of_models_counts_the_runs_of_the_full_tables():
    with marked_blocks.shipped_store():
        records = [record for (record,) in run_user_query(performance_tables.RUNS_QUERY).rows]
    every = [line.split(" | ") for line in performance_bars.model_bars(records).splitlines()[2:]]
    for line in performance_bars.model_summary(records).splitlines()[2:]:
        model, phase, goal, runs, met = line.strip("| ").split(" | ")
        shown = [
            row
            for row in every
            if row[0].strip("| ") == model and (phase == "decode") == ("+" in row[2]) and row[3] == goal
        ]
        assert int(runs) == len(shown)
        assert int(met) == sum(row[6].strip("| ") == "yes" for row in shown)


def test_speedups_of_models_are_those_of_the_published_runs():
    runs = list(csv.DictReader(performance_tables.RUNS.read_text().splitlines()))
    page = performance_tables.MODELS.read_text()
    block = page.partition("<!-- generated: runs of models -->")[2].partition("<!-- end")[0]
    lines = [line.strip("| ").split(" | ") for line in block.strip().splitlines()[2:]]
    assert sum(int(line[3]) for line in lines) == len(runs) > 10
    for model, layers, gpu, count, first, claims, *_ in lines:
        of_model = [run for run in runs if (run["model"], run["layers"], run["gpu"]) == (model, layers, gpu)]
        speedups = sorted((run["first token speedup"] for run in of_model), key=lambda text: float(text.rstrip("x")))
        assert len(of_model) == int(count)
        assert first.split(" to ") == list(dict.fromkeys([speedups[0], speedups[-1]]))
        assert int(claims) == sum(run["first token claim"] == "faster" for run in of_model)


def test_every_operator_with_a_bar_is_in_the_catalog():
    from tilegym_db.catalog import Catalog

    assert set(performance_bars.names()) <= set(Catalog.default(warns=False).definition_paths)
