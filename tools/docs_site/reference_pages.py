"""The pages of the site's folder ``reference``: commands, Python, operators as functions, rules of the scan, cheats."""

from __future__ import annotations

import os
import subprocess
import sys

from marked_blocks import ROOT

from docs_site.python_pages import python_reference

__all__ = ["reference_pages"]

SCAN = """# Rules of the static scan

The scan reads every source as a syntax tree before it runs. A hard finding refuses the Solution. A soft finding is stored on its
traces. [Trust](../trust.md#the-static-scan) says when the scan runs and which names it allows.

"""
CHEATS = """# Cheats

Each file in `tests/exploits/cheats` holds a cheat and an honest twin. The last column names the gates that refuse the cheat. A
promotion draws its calls at random, so any one of these gates may be the first. For these tests the scan is off, unless the
column names it. [Verification](../verification.md) lists the gates, and [trust](../trust.md) says what they do not cover.

| cheat | action | refused by |
|---|---|---|
"""


def reference_pages() -> dict[str, str]:
    """Return file name -> Markdown of every page of ``reference``."""
    from docs_site.command_page import reference_text
    from docs_site.function_page import page_text
    from tilegym_db.sandbox.scan import rule_table

    return {
        "cheats.md": f"{CHEATS}{cheat_rows()}",
        "cli.md": reference_text(),
        "ops.md": page_text(),
        "python.md": python_reference(),
        "scan.md": f"{SCAN}{rule_table()}\n",
    }


def cheat_rows() -> str:
    """Return a row of a Markdown table for each cheat, as the tests read its file."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "exploits.cheat"]
    return subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout
