"""A rule about all texts of a source together: assembler that reads clocks or counts launches."""

from __future__ import annotations

import ast
import re

from tilegym_db.verify.scan.context import ScanReport

__all__ = ["check_texts"]

CLOCK_REGISTER = re.compile(r"%\s*(clock|globaltimer|gridid|pm\d)")
"""Special registers of PTX that tell a kernel when it runs, or as which launch."""
LONGEST = 16


def check_texts(tree: ast.AST, report: ScanReport) -> None:
    """Refuse texts that name such a register, also where one is put together from parts that follow one another."""
    before = ""
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for node in sorted(texts, key=lambda text: (text.lineno, text.col_offset)):
        joined = before + str(node.value)
        found = CLOCK_REGISTER.search(joined)
        if found:
            report.add(node, "imports-clock", "names a register that tells the time or counts launches")
        before = "" if found else joined[-LONGEST:]
