"""Build the documentation site, offline: ``python tools/build_site.py -o build/site``, or ``make docs``.

Pages of ``docs/`` and the root, a page for each operator made from its Definition and the shipped measurements, the commands'
reference, and the Python reference from docstrings. A warning of Sphinx or a link that leads nowhere fails the build.
Needs ``pip install 'tilegym-db[docs,all]'`` and no GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from docs_site.links import broken_links
from docs_site.staging import stage
from marked_blocks import ROOT

CONFIGURATION = Path(__file__).parent / "docs_site"


def build(site: Path) -> list[str]:
    """Write the site; what is wrong with it, where Sphinx itself found nothing.

    Raises:
        SystemExit: Sphinx found something; it is on standard error.
    """
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as place:
        sources = Path(place) / "sources"
        stage(sources)
        options = ["-b", "html", "-W", "--keep-going", "-q", "-c", str(CONFIGURATION), "-d", f"{place}/doctrees"]
        status = build_main([*options, str(sources), str(site)])
    if status:
        raise SystemExit(status)
    return broken_links(site.resolve())


def main() -> int:
    """Build it and print where it is; exit with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "site")
    site = parser.parse_args().output
    wrong = build(site)
    for line in wrong:
        print(f"{line} leads nowhere", file=sys.stderr)
    print(f"{site / 'index.html'}: {sum(1 for _ in site.rglob('*.html'))} pages")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
