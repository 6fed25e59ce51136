"""The static scan: what a Solution's source may not contain, decided from its syntax tree before anything of it runs.

It is triage. What it lets through still runs in the sandbox and under every gate; what it refuses never runs at all.
``RULES`` is the table of rules; the modules, functions and attributes that they name are in :mod:`.modules` and
:mod:`.paths`.
"""

from tilegym_db.verify.scan.findings import Finding, Rule, Severity
from tilegym_db.verify.scan.rules import RULES
from tilegym_db.verify.scan.scan import hard_findings, rule_table, scan_sources, soft_findings

__all__ = ["RULES", "Finding", "Rule", "Severity", "hard_findings", "rule_table", "scan_sources", "soft_findings"]
