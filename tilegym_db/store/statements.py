"""The SQL that creates and fills the tables and views. Values are always bound parameters.

``schema.sql`` and ``views.sql`` beside this file have the tables and views; ``queries`` has the queries.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from tilegym_db.errors import TilegymDBError
from tilegym_db.files import read_bytes, write_atomically
from tilegym_db.published.input_files import (
    imported_manifests,
    loop_files,
    own_peaks_files,
    published_model_files,
    published_peaks_files,
    published_tuning_files,
    record_files,
    shipped_locks,
    shipped_traces,
)
from tilegym_db.records.hardware import GPU_SLUGS, gpu_family
from tilegym_db.records.text import FIRST_YEAR, LAST_YEAR, NAME_PATTERN, length_prefixed_digest
from tilegym_db.records.verdicts import (
    MIN_SPEEDUP,
    PUBLISHED_SANDBOX_LEVEL,
    REPEATABLE_GATES,
    STATUSES,
    UNTIMED_TIERS,
    VERIFIED_TIERS,
    Tier,
)

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog

SCHEMA_VERSION = 11
"""Version of ``schema.sql``."""


def listed(values: tuple[str, ...]) -> str:
    """Return texts as an SQL list."""
    return ", ".join(f"'{value}'" for value in values)


def schema_sql() -> str:
    """Return the statements that create the tables of an empty database."""
    return files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")


def views_sql(tiers: tuple[str, ...] = VERIFIED_TIERS) -> str:
    """Return the statements that create or renew the views, in which passes of ``tiers`` count as verified."""
    text = files(__package__).joinpath("views.sql").read_text(encoding="utf-8")
    families = {slug: gpu_family(slug) for slug in GPU_SLUGS}
    named = " ".join(f"WHEN '{slug}' THEN '{family}'" for slug, family in families.items() if slug != family)
    return Template(text).substitute(
        verified_tiers=listed(tiers),
        sandbox_level=PUBLISHED_SANDBOX_LEVEL,
        gpu_families=named,
        repeatable_gates=listed(REPEATABLE_GATES),
    )


def tables_and_views_sql() -> str:
    """Return :func:`views_sql`, and the tables and views of imported records and of the loop, which query those."""
    return f"{views_sql()}\n{imported_sql()}\n{loop_sql()}"


def imported_sql() -> str:
    """Return the statements that create the table and the views of imported records."""
    return files(__package__).joinpath("imported.sql").read_text(encoding="utf-8")


def loop_sql() -> str:
    """Return the statements that create the table and the views of the loop's records."""
    text = files(__package__).joinpath("loop.sql").read_text(encoding="utf-8")
    return text.replace("$min_speedup", repr(MIN_SPEEDUP)).replace("$sandbox_level", repr(PUBLISHED_SANDBOX_LEVEL))


# -- making and refreshing a store ------------------------------------------------------------------------------------

TRUST_FOREIGN = "SET VARIABLE trust_foreign = true"
TABLE_NAMES = "SELECT table_name FROM duckdb_tables() WHERE NOT internal"
META = "SELECT key, value FROM meta"
FORGET_META = "DELETE FROM meta WHERE key = $key"
REMEMBER_META = "INSERT INTO meta VALUES ($key, $value)"

# Each takes $records, one JSON array. A record that left the catalog stays, marked as not current. One that returned,
# or whose description changed, is replaced.
_GIVEN_DEFINITIONS = """(SELECT unnest(from_json($records::JSON,
    '[{"name":"VARCHAR","version":"VARCHAR","digest":"VARCHAR","op_type":"VARCHAR","record":"JSON"}]'),
    recursive := true))"""
_GIVEN_SOLUTIONS = """(SELECT unnest(from_json($records::JSON,
    '[{"name":"VARCHAR","definition":"VARCHAR","digest":"VARCHAR","record":"JSON"}]'), recursive := true))"""
_GIVEN_KEYS = (
    """(SELECT unnest(from_json($records::JSON, '[{"name":"VARCHAR","digest":"VARCHAR"}]'), recursive := true))"""
)
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
    f"DELETE FROM definition_records WHERE (name, digest) IN (SELECT (name, digest) FROM {_GIVEN_KEYS})",
    f"INSERT INTO definition_records SELECT name, version, digest, op_type, true, record FROM {_GIVEN_DEFINITIONS}",
)
SYNC_SOLUTIONS = (
    f"DELETE FROM solution_records WHERE (name, digest) IN (SELECT (name, digest) FROM {_GIVEN_KEYS})",
    f"INSERT INTO solution_records SELECT name, definition, digest, true, record FROM {_GIVEN_SOLUTIONS}",
)
SYNC_WORKLOADS = (
    f"INSERT INTO workload_records SELECT uuid, definition, axes_key, dtypes_key, record FROM {_GIVEN_WORKLOADS}",
)

# There are few peaks, so all are reloaded from their files.
SYNC_PEAKS = (
    "DELETE FROM peak_records",
    """INSERT INTO peak_records SELECT gpu, gpu_name, driver, make_timestamp(epoch_us(timestamp)), is_own, record
        FROM (SELECT unnest(from_json($records::JSON,
            '[{"gpu":"VARCHAR","gpu_name":"VARCHAR","driver":"VARCHAR","timestamp":"TIMESTAMPTZ","is_own":"BOOLEAN",
            "record":"JSON"}]'), recursive := true))""",
)
FORGET_IMPORTED = "DELETE FROM imported_records"
INSERT_IMPORTED = """INSERT INTO imported_records
    SELECT origin, kind, name, definition, path, line, digest, coalesce(unset, []), coalesce(findings, []), record
    FROM read_json($files, format = 'newline_delimited', maximum_object_size = 67108864, columns = {
        origin: 'VARCHAR', kind: 'VARCHAR', name: 'VARCHAR', definition: 'VARCHAR', path: 'VARCHAR', line: 'BIGINT',
        digest: 'VARCHAR', unset: 'VARCHAR[]', findings: 'VARCHAR[]', record: 'JSON'})"""
# All published steps are reloaded as well. Steps of this machine are loaded run by run, as journals are.
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
# By name, so that a column or struct key missing from an older schema is null.
ADOPT_TRACES = "INSERT INTO trace_records BY NAME FROM old.trace_records ANTI JOIN trace_records USING (trace_id)"

# Traces that no journal and no shipped set has: of files that the user ingested, and of shared data sets.
ADOPT_FOREIGN = """INSERT INTO trace_records BY NAME SELECT o.* FROM old.trace_records o ANTI JOIN trace_records USING (trace_id)
    WHERE o.origin = 'foreign'"""
COUNT_LEFT_OUT = """SELECT count(*) AS n FROM old.trace_records o ANTI JOIN trace_records USING (trace_id)
    WHERE o.origin = 'local'"""

HAS_OLD_TRUST = """
    SELECT count(*) FROM duckdb_columns()
    WHERE database_name = 'old' AND table_name = $table AND column_name = 'trusted'
"""
# Traces that the user trusted, as long as they are unchanged.
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


# ---- trace statements -----------------------------------------------------------------------------
# The SQL that loads traces and checks their figures for plausibility.

TIERS: tuple[str, ...] = Tier.__args__  # type: ignore[attr-defined]

# Nested columns have the types of schema.sql. A field missing from a line is null here and gets its default below.
_FILES = """read_json($files, format = 'newline_delimited', columns = {
    trace_id: 'VARCHAR', run_id: 'VARCHAR', timestamp: 'TIMESTAMPTZ',
    definition: 'VARCHAR', definition_version: 'VARCHAR', definition_digest: 'VARCHAR', op_type: 'VARCHAR',
    solution: 'VARCHAR', solution_digest: 'VARCHAR', language: 'VARCHAR', role: 'VARCHAR',
    config: 'MAP(VARCHAR, JSON)', workload_uuid: 'VARCHAR', axes: 'MAP(VARCHAR, BIGINT)',
    dtypes: 'MAP(VARCHAR, VARCHAR)', scalars: 'MAP(VARCHAR, JSON)', layouts: 'MAP(VARCHAR, VARCHAR)',
    blobs: 'MAP(VARCHAR, VARCHAR)',
    gpu: 'VARCHAR', gpu_name: 'VARCHAR', sm: 'VARCHAR', driver: 'VARCHAR', cuda: 'VARCHAR',
    libs: 'MAP(VARCHAR, VARCHAR)', gpu_uuid: 'VARCHAR', host: 'VARCHAR', tier: 'VARCHAR',
    attempt: 'BIGINT', sandbox_level: 'BIGINT',
    evidence_level: 'VARCHAR', envelope: 'STRUCT(cases BIGINT, digest VARCHAR, seed VARCHAR, dropped VARCHAR[],
        scalars MAP(VARCHAR, DOUBLE[]), largest MAP(VARCHAR, BIGINT), largest_elements BIGINT, batch_slices BIGINT)',
    status: 'VARCHAR', reason: 'VARCHAR', log: 'VARCHAR',
    correctness: 'STRUCT(rel_fro DOUBLE, worst_row_rel DOUBLE, max_abs DOUBLE, matched_ratio DOUBLE,
        deterministic BOOLEAN, gate VARCHAR, oracle VARCHAR, cases BIGINT)',
    performance: 'STRUCT(latency_us DOUBLE, ci_low_us DOUBLE, ci_high_us DOUBLE, samples BIGINT, host_us DOUBLE,
        cold_l2 BOOLEAN, timer VARCHAR, comparisons STRUCT("with" VARCHAR, provides VARCHAR, ratio DOUBLE,
        ci_low DOUBLE, ci_high DOUBLE)[], sol_us DOUBLE, sol_ratio DOUBLE, clock_mhz BIGINT, throttled BOOLEAN)',
    audit: 'STRUCT(wall_us DOUBLE, owned_share DOUBLE, profiled_us DOUBLE, kernels VARCHAR[], notes VARCHAR[])',
    failure: 'STRUCT(gate VARCHAR, axes MAP(VARCHAR, BIGINT), dtypes MAP(VARCHAR, VARCHAR),
        layouts MAP(VARCHAR, VARCHAR), contents VARCHAR, seed VARCHAR, "offset" BIGINT, output VARCHAR,
        "index" BIGINT[], expected VARCHAR, got VARCHAR, worst_row BIGINT, command VARCHAR)',
    overrules: 'STRUCT(trace_id VARCHAR, "by" VARCHAR)'})"""


def _are_finite(struct: str, *fields: str) -> str:
    """Return SQL that is true if the numbers of a struct are finite or null."""
    return " AND ".join(f"coalesce(isfinite({struct}.{field}), true)" for field in fields)


# The rules of records.Trace that views and resolver rely on. NOT NULL in schema.sql covers the required keys.
_IS_TRACE = f"""coalesce(
    tier IN ({listed(TIERS)}) AND status IN ({listed(STATUSES)})
    AND (correctness IS NOT NULL) = (status IN ('PASSED', 'INCORRECT_NUMERICAL'))
    AND (performance IS NOT NULL) = (status = 'PASSED' AND tier NOT IN ({listed(UNTIMED_TIERS)}))
    AND (performance IS NULL OR (performance.latency_us > 0 AND performance.ci_low_us IS NOT NULL
        AND performance.ci_high_us IS NOT NULL AND performance.samples >= 1 AND performance.timer IS NOT NULL))
    AND (envelope IS NULL OR (envelope.cases IS NOT NULL AND envelope.digest IS NOT NULL AND envelope.seed IS NOT NULL))
    AND regexp_full_match(gpu, '{NAME_PATTERN.strip("^$")}')
    AND year(timestamp) BETWEEN {FIRST_YEAR} AND {LAST_YEAR}
    AND {_are_finite("correctness", "rel_fro", "worst_row_rel", "max_abs", "matched_ratio")}
    AND {_are_finite("performance", "latency_us", "ci_low_us", "ci_high_us", "host_us", "sol_us", "sol_ratio")}
    AND {_are_finite("audit", "wall_us", "owned_share", "profiled_us")}
    AND list_bool_and(list_transform(coalesce(performance.comparisons, []),
        lambda c: isfinite(c.ratio) AND isfinite(c.ci_low) AND isfinite(c.ci_high))) IS NOT FALSE
    AND (audit IS NULL OR audit.owned_share IS NULL OR audit.owned_share BETWEEN 0 AND 1)
    AND (failure IS NULL OR (failure.gate IS NOT NULL AND failure.axes IS NOT NULL AND failure.contents IS NOT NULL
        AND failure.seed IS NOT NULL AND failure.command IS NOT NULL))
    AND (overrules.trace_id IS NOT NULL AND overrules."by" IS NOT NULL) = (status = 'OVERRULED')
    AND (status = 'PASSED' OR coalesce(reason, '') <> '' OR coalesce(log, '') <> ''), false)"""


def _key_of(column: str) -> str:
    """Return SQL that spells a map as ``records.axes_key`` does: ``name=value`` by name, joined by commas."""
    return (
        f"coalesce(array_to_string(list_transform(list_sort(map_keys({column})), "
        f"lambda name: name || '=' || {column}[name]), ','), '')"
    )


# One pass from file to table, since a staging table would add half the time. A line that is not a trace ends it with an
# error. Python then reads the files line by line, which reports the place and reason.
INSERT_TRACES = f"""
    INSERT INTO trace_records SELECT
        trace_id, run_id, make_timestamp(epoch_us(timestamp)),
        definition, definition_version, definition_digest, op_type,
        solution, solution_digest, language, coalesce(role, 'kernel'),
        coalesce(to_json(config), '{{}}'), {_key_of("config")},
        workload_uuid, axes, {_key_of("axes")}, coalesce(dtypes, MAP {{}}), {_key_of("dtypes")},
        coalesce(to_json(scalars), '{{}}'), {_key_of("scalars")}, coalesce(layouts, MAP {{}}), {_key_of("layouts")},
        coalesce(blobs, MAP {{}}), {_key_of("blobs")},
        gpu, gpu_name, coalesce(sm, ''), coalesce(driver, ''), coalesce(cuda, ''), coalesce(libs, MAP {{}}),
        coalesce(gpu_uuid, ''), coalesce(host, ''),
        tier, coalesce(attempt, 0), coalesce(sandbox_level, 0), coalesce(evidence_level, 'op'),
        envelope, status, coalesce(reason, ''), coalesce(log, ''), correctness, performance, audit, failure, overrules,
        $origin, $trusted, NULL, status = 'PASSED' AND performance.latency_us IS NOT NULL
    FROM {_FILES} ANTI JOIN trace_records USING (trace_id)
    WHERE CASE WHEN {_IS_TRACE} THEN true ELSE error('not a trace') END
"""

# A trusted trace replaces an untrusted one with the same id, so that a foreign trace cannot block it.
HAS_DISPLACED = "SELECT count(*) FROM trace_records WHERE origin = 'foreign' AND ($over_trusted OR NOT trusted)"
DISPLACE_TRACES = """
    DELETE FROM trace_records WHERE origin = 'foreign' AND ($over_trusted OR NOT trusted) AND trace_id IN (
        SELECT trace_id FROM read_json($files, format = 'newline_delimited', columns = {trace_id: 'VARCHAR'}))
"""

# The points of passes, to check the figures for plausibility, and the passes that fail the check.
POINTS_OF_PASSES = """
    SELECT DISTINCT ON (t.definition_digest, t.gpu, t.axes_key, t.dtypes_key, cold_l2, timer)
        t.definition_digest, t.gpu, t.axes_key, t.dtypes_key, t.axes, t.dtypes,
        coalesce(t.performance.cold_l2, false) AS cold_l2, coalesce(t.performance.timer, '') AS timer
    FROM trace_records t WHERE t.status = 'PASSED' AND t.rowid > $last AND NOT list_contains($plausible::VARCHAR[], t.definition)
"""
DEFINITIONS_BY_DIGEST = """
    SELECT DISTINCT ON (digest) digest, record FROM definition_records WHERE digest IN (SELECT unnest($digests::VARCHAR[]))
"""
PEAKS_BY_GPU = """
    SELECT DISTINCT ON (gpu) gpu, record FROM peak_records ORDER BY gpu, is_own, timestamp DESC, record::VARCHAR
"""
FORGET_DOUBTS = "UPDATE trace_records SET doubt = NULL WHERE doubt IS NOT NULL AND rowid > $last"
DOUBT = """
    UPDATE trace_records t SET doubt = CASE
        WHEN t.performance.latency_us < b.least_us THEN printf('%.4g us is below the physics floor of %.4g us',
            t.performance.latency_us, b.least_us)
        WHEN t.performance IS NOT NULL AND NOT t.performance.latency_us
            BETWEEN t.performance.ci_low_us / 1.001 AND t.performance.ci_high_us * 1.001
            THEN printf('%.4g us lies outside its own interval', t.performance.latency_us)
        WHEN t.correctness.rel_fro > b.rel_fro THEN printf('rel_fro %.3g exceeds %.3g, which no gate lets pass',
            t.correctness.rel_fro, b.rel_fro)
        WHEN t.correctness.worst_row_rel > b.worst_row_rel THEN printf(
            'worst row %.3g exceeds %.3g, which no gate lets pass', t.correctness.worst_row_rel, b.worst_row_rel)
        ELSE printf('only %.4g of the elements match', t.correctness.matched_ratio) END
    FROM (SELECT unnest(from_json($bounds::JSON, '[{"definition_digest":"VARCHAR","gpu":"VARCHAR","axes_key":"VARCHAR",
        "dtypes_key":"VARCHAR","cold_l2":"BOOLEAN","timer":"VARCHAR","least_us":"DOUBLE","rel_fro":"DOUBLE",
        "worst_row_rel":"DOUBLE","matched_ratio":"DOUBLE"}]'), recursive := true)) b
    WHERE t.rowid > $last AND t.status = 'PASSED' AND t.definition_digest = b.definition_digest AND t.gpu = b.gpu
        AND t.axes_key = b.axes_key AND t.dtypes_key = b.dtypes_key
        AND coalesce(t.performance.cold_l2, false) = b.cold_l2 AND coalesce(t.performance.timer, '') = b.timer
        AND (t.performance.latency_us < b.least_us OR t.correctness.rel_fro > b.rel_fro
            OR NOT t.performance.latency_us
                BETWEEN t.performance.ci_low_us / 1.001 AND t.performance.ci_high_us * 1.001
            OR t.correctness.worst_row_rel > b.worst_row_rel OR t.correctness.matched_ratio < b.matched_ratio)
"""

# One batch may hold a trace twice, which the anti-join cannot see. New rows have the highest row ids.
LAST_ROW = "SELECT coalesce(max(rowid), -1) FROM trace_records"
COUNT_REPEATED = "SELECT count(*) - count(DISTINCT trace_id) FROM trace_records WHERE rowid > $last"
DELETE_REPEATED = """
    DELETE FROM trace_records WHERE rowid > $last
        AND rowid NOT IN (SELECT min(rowid) FROM trace_records WHERE rowid > $last GROUP BY trace_id)
"""


# ---- fingerprints ---------------------------------------------------------------------------------
# Detects whether the database is in step with its sources. ``meta`` keeps a fingerprint of each part.


def fingerprints(catalog: Catalog, home: Path) -> dict[str, str]:
    """Return the ``meta`` of a store in step with this package, this catalog and this home folder.

    Reads names, sizes and times only.
    """
    locks = shipped_locks(catalog)
    return {
        "views": views_fingerprint(),
        "catalog": fingerprint(record_files(catalog)),
        "shipped_traces": fingerprint([*shipped_traces(catalog), *locks]),
        "peaks": fingerprint([*own_peaks_files(home), *published_peaks_files(catalog), *locks]),
        "searches": fingerprint([*published_tuning_files(catalog), *locks]),
        "model_runs": fingerprint([*published_model_files(catalog), *locks]),
        "imported": fingerprint(imported_manifests(home)),
        "loop": fingerprint(loop_files(home, catalog)),
    }


def views_fingerprint() -> str:
    """Return the ``meta`` of the views of this package."""
    return length_prefixed_digest([tables_and_views_sql().encode()])


def outdated(meta: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """Return the outdated parts of a store, by their key in ``meta``."""
    return [key for key, value in wanted.items() if meta.get(key) != value]


def fingerprint(paths: Iterable[Path]) -> str:
    """Return a digest of the names, sizes and times of the files that exist, in any order."""
    parts = []
    for path in sorted(paths, key=str):  # paths compare slowly
        try:
            status = path.stat()
        except OSError:  # a link to nothing, or a file removed since
            continue
        if stat.S_ISREG(status.st_mode):
            parts.append(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return length_prefixed_digest(parts)


# ---- listed ---------------------------------------------------------------------------------------
# Caches the output of ``tilegym-db list`` in the home folder until the catalog's files or this package change, since
# reading a catalog takes most of the time of ``list``. A catalog with left-out records is read every time, so that the
# warning is repeated. A fault of the cache file costs only time.

FILE_NAME = "listed.json"
MAX_BYTES = 8 << 20


def state_of(catalog: Catalog) -> str:
    """Return the state behind the rows: names, sizes and times of the records and of the modules that validate them."""
    package = Path(__file__).parents[1]
    modules = [path for name in ("catalog", "records") for path in package.glob(f"{name}/*.py")]
    return fingerprint([*record_files(catalog), *modules, package / "cli" / "list.py"])


def kept_rows(home: Path, state: str) -> list[dict[str, Any]] | None:
    """Return the rows cached at this state, or None."""
    with suppress(TilegymDBError, ValueError, LookupError, TypeError, RecursionError):
        content = json.loads(read_bytes(home / FILE_NAME, "list of the catalog", MAX_BYTES))
        if content["state"] == state and all(isinstance(row, dict) for row in content["rows"]):
            return list(content["rows"])
    return None


def keep_rows(home: Path, state: str, rows: list[dict[str, Any]]) -> None:
    """Cache rows; ``state`` is the state before the catalog was read."""
    with suppress(TilegymDBError):
        write_atomically(home / FILE_NAME, json.dumps({"state": state, "rows": rows}).encode())
