"""The SQL that makes the tables and views, and fills them. Values reach it as bound parameters only.

Tables and views are beside this file, in ``schema.sql`` and ``views.sql``; questions are in ``queries``.
"""

from __future__ import annotations

from importlib.resources import files
from string import Template

from tilegym_db.records.bars import MIN_SPEEDUP
from tilegym_db.records.hardware import GPU_SLUGS, gpu_family
from tilegym_db.records.trace import PUBLISHED_SANDBOX_LEVEL

__all__ = [
    "SCHEMA_VERSION",
    "VERIFIED_TIERS",
    "imported_sql",
    "listed",
    "loop_sql",
    "schema_sql",
    "views_sql",
]

SCHEMA_VERSION = 9
"""Version of ``schema.sql``."""

VERIFIED_TIERS: tuple[str, ...] = ("promotion",)
"""Tiers whose passes count as verified. Never ``interpreter``: it runs no GPU code."""


def listed(values: tuple[str, ...]) -> str:
    """Texts as SQL lists them."""
    return ", ".join(f"'{value}'" for value in values)


def schema_sql() -> str:
    """The statements that make the tables of an empty database."""
    return files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")


def views_sql(tiers: tuple[str, ...] = VERIFIED_TIERS) -> str:
    """The statements that make, or renew, the views; passes of ``tiers`` are what they call verified."""
    text = files(__package__).joinpath("views.sql").read_text(encoding="utf-8")
    families = {slug: gpu_family(slug) for slug in GPU_SLUGS}
    named = " ".join(f"WHEN '{slug}' THEN '{family}'" for slug, family in families.items() if slug != family)
    return Template(text).substitute(
        verified_tiers=listed(tiers), sandbox_level=PUBLISHED_SANDBOX_LEVEL, gpu_families=named
    )


def imported_sql() -> str:
    """The statements that make the table and the views of imported records."""
    return files(__package__).joinpath("imported.sql").read_text(encoding="utf-8")


def loop_sql() -> str:
    """The statements that make the table and the views of the loop's records."""
    text = files(__package__).joinpath("loop.sql").read_text(encoding="utf-8")
    return text.replace("$min_speedup", repr(MIN_SPEEDUP)).replace("$sandbox_level", repr(PUBLISHED_SANDBOX_LEVEL))


# -- making and refreshing a store ------------------------------------------------------------------------------------

TRUST_FOREIGN = "SET VARIABLE trust_foreign = true"
TABLE_NAMES = "SELECT table_name FROM duckdb_tables() WHERE NOT internal"
META = "SELECT key, value FROM meta"
FORGET_META = "DELETE FROM meta WHERE key = $key"
REMEMBER_META = "INSERT INTO meta VALUES ($key, $value)"

# Each takes $records, one JSON array. A record that left the catalog stays, no longer current; one that is back, or
# whose description changed, is replaced.
_GIVEN_DEFINITIONS = """(SELECT unnest(from_json($records::JSON,
    '[{"name":"VARCHAR","version":"VARCHAR","digest":"VARCHAR","op_type":"VARCHAR","record":"JSON"}]'),
    recursive := true))"""
_GIVEN_SOLUTIONS = """(SELECT unnest(from_json($records::JSON,
    '[{"name":"VARCHAR","definition":"VARCHAR","digest":"VARCHAR","record":"JSON"}]'), recursive := true))"""
_GIVEN_WORKLOADS = """(SELECT unnest(from_json($records::JSON,
    '[{"uuid":"VARCHAR","definition":"VARCHAR","axes_key":"VARCHAR","dtypes_key":"VARCHAR","record":"JSON"}]'),
    recursive := true))"""

RETIRE_RECORDS = (
    "UPDATE definition_records SET is_current = false",
    "UPDATE solution_records SET is_current = false",
    "DELETE FROM workload_records",
)
HAS_RETIRED = "SELECT EXISTS (FROM definition_records WHERE NOT is_current) AS retired"
SYNC_DEFINITIONS = (
    f"DELETE FROM definition_records WHERE (name, digest) IN (SELECT (name, digest) FROM {_GIVEN_DEFINITIONS})",
    f"INSERT INTO definition_records SELECT name, version, digest, op_type, true, record FROM {_GIVEN_DEFINITIONS}",
)
SYNC_SOLUTIONS = (
    f"DELETE FROM solution_records WHERE (name, digest) IN (SELECT (name, digest) FROM {_GIVEN_SOLUTIONS})",
    f"INSERT INTO solution_records SELECT name, definition, digest, true, record FROM {_GIVEN_SOLUTIONS}",
)
SYNC_WORKLOADS = (
    f"INSERT INTO workload_records SELECT uuid, definition, axes_key, dtypes_key, record FROM {_GIVEN_WORKLOADS}",
)

# Peaks are few and come whole, from their files.
SYNC_PEAKS = (
    "DELETE FROM peak_records",
    """INSERT INTO peak_records SELECT gpu, gpu_name, driver, make_timestamp(epoch_us(timestamp)), is_own, record
        FROM (SELECT unnest(from_json($records::JSON,
            '[{"gpu":"VARCHAR","gpu_name":"VARCHAR","driver":"VARCHAR","timestamp":"TIMESTAMPTZ","is_own":"BOOLEAN",
            "record":"JSON"}]'), recursive := true))""",
)
# Published steps come whole as well; those of this machine run by run, as journals do.
INSERT_TUNING = """INSERT INTO tuning_records
    SELECT is_own, run_id, gpu, solution, solution_digest, definition_digest, workload_uuid, config_key, outcome,
        make_timestamp(epoch_us(timestamp)), record
    FROM (SELECT unnest(from_json($records::JSON,
        '[{"is_own":"BOOLEAN","run_id":"VARCHAR","gpu":"VARCHAR","solution":"VARCHAR","solution_digest":"VARCHAR",
        "definition_digest":"VARCHAR","workload_uuid":"VARCHAR","config_key":"VARCHAR","outcome":"VARCHAR",
        "timestamp":"TIMESTAMPTZ","record":"JSON"}]'), recursive := true))"""
SYNC_PUBLISHED_TUNING = ("DELETE FROM tuning_records WHERE NOT is_own", INSERT_TUNING)
FORGET_OWN_TUNING = "DELETE FROM tuning_records WHERE is_own AND run_id IN (SELECT unnest($runs::VARCHAR[]))"

ADOPT_HISTORY = (
    """INSERT INTO definition_records SELECT * REPLACE (false AS is_current) FROM old.definition_records
        WHERE (name, digest) NOT IN (SELECT (name, digest) FROM definition_records)""",
    """INSERT INTO solution_records SELECT * REPLACE (false AS is_current) FROM old.solution_records
        WHERE (name, digest) NOT IN (SELECT (name, digest) FROM solution_records)""",
)
# By name: a column, or a key of a struct, that an older schema does not have is null.
ADOPT_TRACES = "INSERT INTO trace_records BY NAME FROM old.trace_records ANTI JOIN trace_records USING (trace_id)"

HAS_OLD_TRUST = """
    SELECT count(*) FROM duckdb_columns()
    WHERE database_name = 'old' AND table_name = $table AND column_name = 'trusted'
"""
# What the user said may be trusted, as long as it is still the same trace.
ADOPT_TRUST = """
    UPDATE trace_records t SET trusted = true FROM old.trace_records o
    WHERE o.trusted AND t.origin = 'foreign' AND t.trace_id = o.trace_id AND t.status = o.status AND t.tier = o.tier
        AND t.solution_digest = o.solution_digest AND t.definition_digest = o.definition_digest AND t.gpu = o.gpu
        AND t.workload_uuid = o.workload_uuid AND t.sandbox_level = o.sandbox_level
        AND t.performance IS NOT DISTINCT FROM o.performance AND t.correctness IS NOT DISTINCT FROM o.correctness
"""
ADOPT_MODEL_RUN_TRUST = """
    UPDATE model_run_records r SET trusted = true FROM old.model_run_records o
    WHERE o.trusted AND r.is_own AND r.origin = 'foreign' AND r.run_id = o.run_id AND r.record = o.record
"""

# -- files that grow --------------------------------------------------------------------------------------------------

INGESTED_FILES = "SELECT path, size FROM ingested_files"
FORGET_FILES = "DELETE FROM ingested_files WHERE path IN (SELECT unnest($paths::VARCHAR[]))"
REMEMBER_FILES = "INSERT INTO ingested_files SELECT unnest($paths::VARCHAR[]), unnest($sizes::BIGINT[])"

# -- runs of whole models ---------------------------------------------------------------------------------------------

OWN_MODEL_RUN_IDS = "SELECT run_id FROM model_run_records WHERE is_own"
INSERT_MODEL_RUNS = """INSERT INTO model_run_records BY NAME
    SELECT unnest(from_json($records::JSON,
        '[{"run_id":"VARCHAR","is_own":"BOOLEAN","origin":"VARCHAR","record":"JSON"}]'), recursive := true)"""
SYNC_PUBLISHED_MODEL_RUNS = ("DELETE FROM model_run_records WHERE NOT is_own", INSERT_MODEL_RUNS)
TRUST_MODEL_RUNS = "UPDATE model_run_records SET trusted = true WHERE is_own AND origin = 'foreign'"
