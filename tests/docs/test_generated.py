"""What scripts write into the documentation is current."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from types import ModuleType

import import_graph
import marked_blocks
import performance_tables
import pytest
import readme_picture


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
