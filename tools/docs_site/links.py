"""Whether every link of a built site leads somewhere, and no page loads anything from a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["broken_links"]

LOADED = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src"}


@dataclass
class _Page(HTMLParser):
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note where an element points, and the anchor that it is."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])


def broken_links(site: Path) -> list[str]:
    """Return ``page: link`` for each link that leads nowhere inside the site or loads something from outside of it."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    return [f"{path.relative_to(site)}: {link}" for path, page in pages.items() for link in _broken(path, page, pages)]


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _broken(path: Path, page: _Page, pages: dict[Path, _Page]) -> Iterator[str]:
    yield from (link for link in page.loaded if urlsplit(link).scheme in ("http", "https") or link.startswith("//"))
    for link in (*page.links, *page.loaded):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        known = pages.get(target)
        if not target.is_file() or (
            known is not None and parts.fragment and unquote(parts.fragment) not in known.anchors
        ):
            yield link
