"""The pages of the site's folder ``reference``: commands, Python, operators as functions, rules of the scan."""

from __future__ import annotations

from docs_site.python_pages import python_reference

__all__ = ["reference_pages"]

SCAN = """# Rules of the static scan

The scan reads every source as a syntax tree before it runs. A hard finding refuses the Solution. A soft finding is stored on its
traces. [Trust](../trust.md#the-static-scan) says when the scan runs and which names it allows.

"""


def reference_pages() -> dict[str, str]:
    """Return file name -> Markdown of every page of ``reference``."""
    from docs_site.command_page import reference_text
    from docs_site.function_page import page_text
    from tilegym_db.sandbox.scan import rule_table

    return {
        "cli.md": reference_text(),
        "ops.md": page_text(),
        "python.md": python_reference(),
        "scan.md": f"{SCAN}{rule_table()}\n",
    }
