"""The package's queries of the store: one named text and one function each, with bound parameters.

Each module covers one subject and loads on first use. The queries use the views of ``views.sql``; ``statements`` has
the SQL that creates and fills the tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilegym_db.lazy import loader

if TYPE_CHECKING:
    from tilegym_db.store.queries.measured import (
        Promotable,
        best_rows,
        count_traces,
        count_traces_of,
        count_unverified,
        definition_by_digest,
        done_keys,
        failed_screen,
        find_traces,
        history_of_passes,
        leaderboard_rows,
        likely_fastest_of,
        measured_gpus,
        promotable,
        read_peaks,
        read_traces,
        size_rows,
        solutions_of_run,
        traced_gpus,
        traces_of,
        tuned_configs,
    )
    from tilegym_db.store.queries.publishing import (
        disagreements,
        kept_back_runs,
        not_verified,
        promoted_rows,
        provided,
        publishable_model_runs,
        publishable_rows,
        publishable_steps,
        revoking_rows,
        unconfined_definitions,
        verified_rows,
    )

__all__ = [
    "Promotable",
    "best_rows",
    "count_traces",
    "count_traces_of",
    "count_unverified",
    "definition_by_digest",
    "disagreements",
    "done_keys",
    "failed_screen",
    "find_traces",
    "history_of_passes",
    "kept_back_runs",
    "leaderboard_rows",
    "likely_fastest_of",
    "measured_gpus",
    "not_verified",
    "promotable",
    "promoted_rows",
    "provided",
    "publishable_model_runs",
    "publishable_rows",
    "publishable_steps",
    "read_peaks",
    "read_traces",
    "revoking_rows",
    "size_rows",
    "solutions_of_run",
    "traced_gpus",
    "traces_of",
    "tuned_configs",
    "unconfined_definitions",
    "verified_rows",
]

_SUBJECTS = {
    "measured": (
        "Promotable",
        "done_keys",
        "failed_screen",
        "likely_fastest_of",
        "promotable",
        "read_peaks",
        "solutions_of_run",
        "tuned_configs",
        "count_traces",
        "count_traces_of",
        "definition_by_digest",
        "find_traces",
        "history_of_passes",
        "read_traces",
        "traces_of",
        "best_rows",
        "count_unverified",
        "leaderboard_rows",
        "measured_gpus",
        "size_rows",
        "traced_gpus",
    ),
    "publishing": (
        "disagreements",
        "kept_back_runs",
        "not_verified",
        "promoted_rows",
        "provided",
        "publishable_model_runs",
        "publishable_rows",
        "publishable_steps",
        "revoking_rows",
        "unconfined_definitions",
        "verified_rows",
    ),
}
__getattr__ = loader(
    __name__, {name: f"{__name__}.{subject}" for subject, names in _SUBJECTS.items() for name in names}
)
