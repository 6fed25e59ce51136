-- Records of the loop from a task to an award: a copy of <home>/loop and of docs/patterns for SQL to read, made anew whenever
-- one of them changes. `line` is the place in the journal: later lines know more.

CREATE TABLE IF NOT EXISTS loop_records (kind VARCHAR NOT NULL, line BIGINT NOT NULL, record JSON NOT NULL);

-- The newest line of each attempt: how far it came and why no further.
CREATE OR REPLACE VIEW attempts AS
SELECT
    record->>'task' AS task, (record->>'number')::BIGINT AS number, record->>'solution' AS solution,
    record->>'solution_digest' AS solution_digest, record->>'stage' AS stage, record->>'verdict' AS verdict,
    coalesce(record->>'gate', '') AS gate, coalesce(record->>'reason', '') AS reason,
    coalesce(record->>'command', '') AS command,
    coalesce(from_json(record->'trace_ids', '["VARCHAR"]'), []) AS trace_ids,
    coalesce(from_json(record->'promotions', '["VARCHAR"]'), []) AS promotions,
    coalesce((record->>'wall_s')::DOUBLE, 0) AS wall_s, coalesce((record->>'device_s')::DOUBLE, 0) AS device_s,
    make_timestamp(epoch_us((record->>'timestamp')::TIMESTAMPTZ)) AS timestamp, record
FROM loop_records WHERE kind = 'attempt'
QUALIFY row_number() OVER (PARTITION BY record->>'task', record->>'number' ORDER BY line DESC) = 1;

-- `status` is promoted, tried (every attempt so far was refused, or waits) or open.
CREATE OR REPLACE VIEW tasks AS
SELECT
    t.record->>'id' AS id, t.record->>'definition' AS definition, t.record->>'definition_digest' AS definition_digest,
    t.record->>'language' AS language, t.record->>'gpu' AS gpu, coalesce(t.record->>'objective', 'latency') AS objective,
    coalesce((t.record->>'min_speedup')::DOUBLE, $min_speedup) AS min_speedup,
    json_array_length(t.record->'workloads')::BIGINT AS workloads,
    coalesce(a.attempts, 0) AS attempts,
    CASE WHEN a.promoted THEN 'promoted' WHEN a.attempts > 0 THEN 'tried' ELSE 'open' END AS status,
    make_timestamp(epoch_us((t.record->>'created')::TIMESTAMPTZ)) AS created, t.record
FROM loop_records t
LEFT JOIN (SELECT task, count(*) AS attempts, bool_or(verdict = 'promoted') AS promoted FROM attempts GROUP BY task) a
    ON a.task = t.record->>'id'
WHERE t.kind = 'task'
QUALIFY row_number() OVER (PARTITION BY t.record->>'id' ORDER BY t.line) = 1;

-- What may be said of each award now. (Awards are journaled and published as promotions, so the view keeps that name.) An award
-- stands on a trace, and falls with it: `standing`; `revoked` by a failure of this source; `not repeated` where a later verification of the same source on the same workload is slower than the bar;
-- `no evidence` where its trace is gone, is not what the record says, or does not count here.
-- `verify` journals awards in the home where it runs, and what the package ships was measured in another: of shipped traces
-- they are derived, by the rule of measurement/awards.py. Their numbers count shipped traces alone.
CREATE OR REPLACE VIEW promotions AS
WITH journaled AS (
    SELECT
        record->>'id' AS id, record->>'solution' AS solution, record->>'solution_digest' AS solution_digest,
        record->>'definition' AS definition, record->>'definition_digest' AS definition_digest,
        record->>'language' AS language, record->>'gpu' AS gpu, record->>'workload_uuid' AS workload_uuid,
        from_json(record->'axes', '"MAP(VARCHAR, BIGINT)"') AS axes,
        coalesce(from_json(record->'dtypes', '"MAP(VARCHAR, VARCHAR)"'), MAP {}) AS dtypes,
        record->>'trace_id' AS trace_id, record->>'baseline' AS baseline, (record->>'ratio')::DOUBLE AS ratio,
        (record->>'ci_low')::DOUBLE AS ci_low, (record->>'ci_high')::DOUBLE AS ci_high,
        'op' AS evidence_level, false AS applied,
        make_timestamp(epoch_us((record->>'created')::TIMESTAMPTZ)) AS created, record
    FROM loop_records WHERE kind = 'promotion'
    QUALIFY row_number() OVER (PARTITION BY record->>'id' ORDER BY line) = 1
), compared AS (
    SELECT *, list_sort(list_transform(
        list_filter(comparisons, lambda c: c.provides IN ('stock', 'library', 'compile')), lambda c:
            {'ci_low': c.ci_low, 'with': c."with", 'ratio': c.ratio, 'ci_high': c.ci_high}))[1] AS lowest,
        list_transform(list_sort(map_entries(dtypes)), lambda e: e.value) AS dtype_names,
        array_to_string(list_transform(list_sort(map_entries(axes)), lambda e: e.key || e.value), '-') AS shape
    FROM verified WHERE origin = 'shipped' AND role = 'kernel' AND sandbox_level >= $sandbox_level
), earned AS (
    SELECT *, concat_ws('_', language, definition, gpu,
        if(len(dtype_names) = 0, 'any', array_to_string(
            list_filter(dtype_names, lambda name, place: list_position(dtype_names, name) = place), '-')),
        if(shape = '', 'scalar', regexp_replace(shape, '[^A-Za-z0-9_.-]', '', 'g')[:120])) AS prefix
    FROM compared c
    WHERE lowest['ci_low'] >= $min_speedup AND NOT EXISTS (FROM best_per_solution b
        WHERE b.role = 'baseline' AND b.definition_digest = c.definition_digest AND b.workload_uuid = c.workload_uuid
            AND b.gpu = c.gpu AND b.latency_us < $min_speedup * c.latency_us
            AND NOT list_contains(list_transform(c.comparisons, lambda one: one."with"), b.solution))
), shipped AS (
    SELECT *, prefix || '_v' || row_number() OVER (PARTITION BY prefix ORDER BY timestamp, trace_id) AS id,
        lowest['with'] AS baseline, lowest['ratio'] AS ratio, lowest['ci_low'] AS low, lowest['ci_high'] AS high
    FROM earned
), listed AS (
    FROM journaled
    UNION ALL
    SELECT
        id, solution, solution_digest, definition, definition_digest, language, gpu, workload_uuid, axes, dtypes, trace_id,
        baseline, ratio, low AS ci_low, high AS ci_high, 'op' AS evidence_level, false AS applied, timestamp AS created,
        to_json({
            'schema_version': 1, 'id': id, 'solution': solution, 'solution_digest': solution_digest, 'definition': definition,
            'definition_digest': definition_digest, 'language': language, 'config': config, 'gpu': gpu,
            'workload_uuid': workload_uuid, 'axes': axes, 'dtypes': dtypes, 'trace_id': trace_id, 'baseline': baseline,
            'ratio': ratio, 'ci_low': low, 'ci_high': high, 'evidence_level': 'op', 'applied': false,
            'created': strftime(timestamp, '%Y-%m-%dT%H:%M:%S.%fZ')}) AS record
    FROM shipped s
    WHERE NOT EXISTS (FROM journaled j WHERE j.id = s.id OR j.trace_id = s.trace_id)
), passes AS (
    SELECT *, list_min(list_transform(
        list_filter(comparisons, lambda c: c.provides IN ('stock', 'library', 'compile')), lambda c: c.ci_low)) AS low,
        list_min(list_transform(
        list_filter(comparisons, lambda c: c.provides IN ('stock', 'library', 'compile')), lambda c: c.ci_high)) AS high
    FROM traces
    WHERE tier = 'promotion' AND status = 'PASSED' AND role = 'kernel' AND is_counted(origin, trusted) AND doubt IS NULL
)
SELECT
    p.* EXCLUDE (record), r.trace_id AS revoked_by, r.revoked_at,
    CASE
        WHEN t.trace_id IS NULL OR coalesce(t.low, 0) < $min_speedup THEN 'no evidence'
        WHEN r.trace_id IS NOT NULL THEN 'revoked'
        WHEN n.trace_id IS NOT NULL THEN 'not repeated'
        ELSE 'standing' END AS status,
    p.record
FROM listed p
LEFT JOIN passes t ON t.trace_id = p.trace_id AND t.solution_digest = p.solution_digest AND t.gpu = p.gpu
    AND t.definition_digest = p.definition_digest AND t.workload_uuid = p.workload_uuid
LEFT JOIN (
    SELECT p.id, arg_max(r.trace_id, r.revoked_at) AS trace_id, max(r.revoked_at) AS revoked_at
    FROM listed p
    JOIN passes t ON t.trace_id = p.trace_id
    JOIN revocations r ON takes_back(r, t)
    GROUP BY p.id) r ON r.id = p.id
LEFT JOIN (
    SELECT p.id, any_value(n.trace_id) AS trace_id
    FROM listed p
    JOIN passes t ON t.trace_id = p.trace_id
    JOIN passes n ON n.solution_digest = t.solution_digest AND n.definition_digest = t.definition_digest
        AND n.gpu = t.gpu AND n.workload_uuid = t.workload_uuid AND n.config_key = t.config_key
        AND n.timestamp > t.timestamp AND n.high < $min_speedup
    GROUP BY p.id) n ON n.id = p.id;

CREATE OR REPLACE VIEW experiments AS
SELECT
    record->>'id' AS id, record->>'model' AS model, record->>'config_digest' AS config_digest, record->>'gpu' AS gpu,
    record->>'base' AS base, record->>'definition' AS definition, coalesce(record->>'task', '') AS task,
    coalesce(from_json(record->'changed', '"MAP(VARCHAR, VARCHAR)"'), MAP {}) AS changed,
    record->>'/before/time_of' AS time_of,
    (record->>'/before/median')::DOUBLE AS coverage_before, (record->>'/after/median')::DOUBLE AS coverage_after,
    coalesce(from_json(record->'runs', '["VARCHAR"]'), []) AS runs,
    (record->>'total_speedup')::DOUBLE AS total_speedup, (record->>'total_ci_low')::DOUBLE AS total_ci_low,
    record->>'decision' AS decision, record->>'reason' AS reason, (record->>'seconds')::DOUBLE AS seconds,
    make_timestamp(epoch_us((record->>'timestamp')::TIMESTAMPTZ)) AS timestamp, record
FROM loop_records WHERE kind = 'experiment'
QUALIFY row_number() OVER (PARTITION BY record->>'id' ORDER BY line) = 1;

CREATE OR REPLACE VIEW patterns AS
SELECT
    record->>'id' AS id, record->>'title' AS title, record->>'language' AS language,
    coalesce((record->>'anti')::BOOLEAN, false) AS anti,
    from_json(record->'applies_to', '["VARCHAR"]') AS applies_to, from_json(record->'evidence', '["VARCHAR"]') AS evidence,
    from_json(record->'evidence', '["VARCHAR"]') <> ['unmeasured'] AS is_measured,
    record->>'digest' AS digest, record->>'text' AS text, record
FROM loop_records WHERE kind = 'pattern';
