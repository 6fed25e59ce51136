"""The static scan: what a Solution's source may not contain, decided from its syntax tree before anything of it runs.

It is triage. What it lets through still runs in the sandbox and under every gate; what it refuses never runs at all.
What may be used of every module is listed name by name (``allowed/``): what is not there is refused. ``RULES`` is the table
of rules.
"""

from tilegym_db.sandbox.scan.scan import (
    hard_findings,
    require_clean,
    rule_table,
    scan_definition,
    scan_sources,
    soft_findings,
)
from tilegym_db.sandbox.scan.tables import RULES, Finding, Rule, Severity

__all__ = [
    "RULES",
    "Finding",
    "Rule",
    "Severity",
    "hard_findings",
    "require_clean",
    "rule_table",
    "scan_definition",
    "scan_sources",
    "soft_findings",
]
