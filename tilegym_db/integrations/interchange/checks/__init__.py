"""What the records of a dialect must be. A table of rules per dialect; the checks are pure and execute nothing."""

from __future__ import annotations

from tilegym_db.integrations.interchange.checks.definitions import axis_kind, check_definition
from tilegym_db.integrations.interchange.checks.dialect import FIB_DTYPES, STATUSES, Problem, Rules, number
from tilegym_db.integrations.interchange.checks.measurements import check_trace, check_workload
from tilegym_db.integrations.interchange.checks.solutions import check_solution

__all__ = [
    "FIB_DTYPES",
    "STATUSES",
    "Problem",
    "Rules",
    "axis_kind",
    "check_definition",
    "check_solution",
    "check_trace",
    "check_workload",
    "number",
]
