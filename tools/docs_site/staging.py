"""The folder that Sphinx reads: the pages of ``docs/``, those of the root, and generated ones."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

from import_graph import edges, layers
from marked_blocks import ROOT, shipped_store, with_block

from docs_site.operator_pages import operator_files
from docs_site.reference_pages import reference_pages

__all__ = ["stage"]

ROOT_PAGES = {"README.md": "start.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
TABLES = {
    "architectures": "Every architecture",
    "performance/kernels": "Every operator",
    "performance/models": "Every run",
}
"""Pages of which a CSV file of the same name is shown as a table, and its title."""
INDEX = Path(__file__).parent / "index.md"
_KEYS_AND_TEXT = re.compile(r"^```toml\n(?P<keys>.*?)^```\n(?P<text>.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)


def stage(folder: Path) -> None:
    """Write every source of the site into a new folder."""
    shutil.copytree(ROOT / "docs", folder)
    shutil.copy(INDEX, folder / "index.md")
    for source, target in ROOT_PAGES.items():
        (folder / target).write_text(as_page_of_docs((ROOT / source).read_text()))
    architecture = folder / "architecture.md"
    architecture.write_text(with_block(architecture.read_text(), "import graph", import_table()))
    for name, title in TABLES.items():
        page = folder / f"{name}.md"
        table = f"```{{csv-table}} {title}\n:file: {page.stem}.csv\n:header-rows: 1\n```\n"
        page.write_text(f"{page.read_text()}\n{table}")
    for pattern in (folder / "patterns").rglob("*.md"):
        pattern.write_text(as_pattern_page(pattern.read_text()))
    generated = {f"reference/{name}": text for name, text in reference_pages().items()}
    generated |= {f"operators/{path}": text for path, text in _operators().items()}
    for path, text in generated.items():
        page = folder / path
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)


def as_page_of_docs(text: str) -> str:
    """Return a page of the root with its links as they are from inside ``docs/``."""
    text = re.sub(r"(\]\(|\[)docs/(performance/README\.md|[\w/.-]+)", r"\1\2", text)
    for source, target in ROOT_PAGES.items():
        text = re.sub(rf"\]\({re.escape(source)}", f"]({target}", text)
    return text


def as_pattern_page(text: str) -> str:
    """Turn the keys of each pattern into a table below its text: the reader of the site wants the advice first."""
    return _KEYS_AND_TEXT.sub(lambda match: f"{match['text'].strip()}\n\n{_key_table(match['keys'])}\n", text)


def _key_table(keys: str) -> str:
    rows = []
    for key, value in tomllib.loads(keys).items():
        listed = [f"{name} {item}" for name, item in value.items()] if isinstance(value, dict) else value
        shown = ", ".join(map(str, listed)) if isinstance(listed, list) else str(listed)
        rows.append(f"| {key.replace('_', ' ')} | {shown} |")
    return "\n".join(["| | |", "|---|---|", *rows, ""])


def import_table() -> str:
    """Return the layers of the package, top first, and what each part imports: the graph of the page as a table."""
    ordered = layers()
    arrows = edges({part for layer in ordered for part in layer})
    lines = ["| layer | part | imports directly |", "|---:|---|---|"]
    for depth, layer in enumerate(ordered, 1):
        for part in layer:
            imported = ", ".join(f"`{two}`" for one, two in sorted(arrows) if one == part)
            lines.append(f"| {depth} | `{part}` | {imported} |")
    return "\n".join(lines)


def _operators() -> dict[str, str]:
    from tilegym_db.catalog import Catalog
    from tilegym_db.paths import shipped_root
    from tilegym_db.report.page import read_report
    from tilegym_db.store.opening import open_store

    catalog = Catalog((shipped_root(),))
    with shipped_store(), open_store(read_only=True) as store:
        return operator_files(catalog, store, read_report(store, catalog))
