"""What scripts write into the documentation is current."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from types import ModuleType

import import_graph
import marked_blocks
import performance_tables
import pytest
import readme_picture

from tilegym_db.store.sql import run_user_query


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


def test_a_block_is_replaced_and_a_page_without_it_is_refused():
    page = "before\n<!-- generated: x -->\nold\n<!-- end: x -->\nafter\n"
    assert marked_blocks.with_block(page, "x", "new") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="has no block"):
        marked_blocks.with_block(page, "y", "new")


def test_the_import_graph_follows_the_layers_of_the_contract():
    ordered = import_graph.layers()
    depth = {part: index for index, layer in enumerate(ordered) for part in layer}
    arrows = import_graph.edges(set(depth))
    assert {("cli", "loop"), ("loop", "integrations")} <= set(arrows)  # and not what these two imply
    assert all(depth[one] < depth[two] for one, two in arrows)


def operators_by_table(page: str) -> list[tuple[str, str]]:
    """(heading, operator) of each operator that a table of the page has; once, however many rows it takes there."""
    found: dict[tuple[str, str], None] = {}
    heading = ""
    for line in page.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| operator "):
            found[heading, line.split(" | ")[0].removeprefix("| ")] = None
    return list(found)


def test_each_verified_operator_is_in_one_table_of_the_families_that_of_its_op_type():
    with marked_blocks.shipped_store():
        verified = run_user_query(
            "SELECT DISTINCT op_type, definition FROM verified WHERE gpu = ? AND role = 'kernel'",
            [performance_tables.GPU],
        ).rows
    shown = operators_by_table(performance_tables.FAMILIES.read_text())
    assert set(Counter(name for _, name in shown).values()) == {1}
    assert {name for _, name in shown} == {name for _, name in verified}
    headings = {name: heading for heading, name in shown}
    assert len({(op_type, headings[name]) for op_type, name in verified}) == len({op_type for op_type, _ in verified})


def test_an_op_type_that_is_new_gets_a_table_of_its_own():
    rows = [
        ("norm", "rms_norm", "M=1,N=1", 5.0, None, 6.0, 20.0, 0.9),
        ("scan", "cumsum", "M=1", 1.0, None, None, None, None),
    ]
    page = performance_tables.families(rows)
    assert operators_by_table(page) == [("Norms", "rms_norm"), ("Scan", "cumsum")]
    assert "| cumsum | M=1 | 1.0 |  |  |  |  |" in page
