-- What users query. Recreated whenever this text changes; $verified_tiers, $sandbox_level and $repeatable_gates are filled in
-- from records/trace.py.

-- 'h100' for 'h100-sxm': what one calls a GPU whichever of its kind it is.
CREATE OR REPLACE MACRO gpu_family_of(gpu) AS CASE gpu $gpu_families ELSE gpu END;

-- Whether a trace counts: it came with the package, was measured here, or the user said that it may be trusted: when it was
-- ingested, or for this one connection.
CREATE OR REPLACE MACRO is_counted(origin, trusted) AS
    origin <> 'foreign' OR trusted OR coalesce(getvariable('trust_foreign')::BOOLEAN, false);

-- The one of several origins that says least.
CREATE OR REPLACE MACRO weakest_origin(origins) AS CASE
    WHEN list_contains(origins, 'foreign') THEN 'foreign' WHEN list_contains(origins, 'local') THEN 'local' ELSE 'shipped' END;

-- Whether a solution gives every output. One that omits some is verified without a time: it has no rank, whatever a trace
-- says.
CREATE OR REPLACE MACRO gives_all(record) AS coalesce(json_array_length(record, '/spec/omits'), 0) = 0;

CREATE OR REPLACE VIEW definitions AS
SELECT
    name, version, op_type,
    record->>'description' AS description,
    coalesce(from_json(record->'tags', '["VARCHAR"]'), []) AS tags,
    list_contains(coalesce(from_json(record->'tags', '["VARCHAR"]'), []), 'status:open') AS is_open,
    digest,
    record->>'reference' AS reference,
    record
FROM definition_records WHERE is_current;

CREATE OR REPLACE VIEW solutions AS
SELECT
    s.name, s.definition, d.op_type,
    s.record->>'/spec/language' AS language,
    coalesce(s.record->>'/spec/role', 'kernel') AS role,
    s.record->>'/spec/provides' AS provides,
    s.record->>'author' AS author,
    s.record->>'description' AS description,
    s.digest, s.record
FROM solution_records s JOIN definition_records d ON d.name = s.definition AND d.is_current
WHERE s.is_current;

CREATE OR REPLACE VIEW workloads AS
SELECT
    w.uuid, w.definition, d.op_type,
    from_json(w.record->'axes', '"MAP(VARCHAR, BIGINT)"') AS axes,
    w.axes_key,
    coalesce(from_json(w.record->'dtypes', '"MAP(VARCHAR, VARCHAR)"'), MAP {}) AS dtypes,
    w.dtypes_key,
    coalesce(from_json(w.record->'layouts', '"MAP(VARCHAR, VARCHAR)"'), MAP {}) AS layouts,
    coalesce(from_json(w.record->'tags', '["VARCHAR"]'), []) AS tags,
    w.record
FROM workload_records w JOIN definition_records d ON d.name = w.definition AND d.is_current;

-- One row per trace, with the nested metrics as columns. `speedup` is stock time over this time; where a trace was
-- compared with several stock implementations, the least favourable ratio counts. `incumbent` was the fastest verified
-- before, and took part in the same rounds; `incumbent_ratio` is its time over this time. `strongest_baseline` is the
-- fastest baseline of the same rounds, and `strongest_ratio` its time over this time. `latency_us` holds a launch by the
-- events of the driver; `profiled_us` is the kernels' own clock (CUPTI), without it. `origin` is 'shipped', 'local' or
-- 'foreign' (not measured by this installation; counts only where `trusted`); `doubt` is why a pass cannot be true.
CREATE OR REPLACE VIEW marked_traces AS
SELECT
    trace_id, run_id, timestamp,
    definition, definition_version, definition_digest, op_type,
    solution, solution_digest, language, role, config, config_key,
    workload_uuid, axes, axes_key, dtypes, dtypes_key, scalars, scalars_key, layouts, layouts_key, blobs, blobs_key,
    gpu, gpu_family_of(gpu) AS gpu_family, gpu_name, sm, driver, cuda, libs, gpu_uuid, host,
    tier, attempt, sandbox_level, evidence_level, origin, trusted, doubt, status, reason, log,
    performance.latency_us AS latency_us,
    performance.ci_low_us AS ci_low_us,
    performance.ci_high_us AS ci_high_us,
    performance.samples AS samples,
    performance.host_us AS host_us,
    performance.cold_l2 AS cold_l2,
    performance.timer AS timer,
    list_min(list_transform(
        list_filter(performance.comparisons, lambda c: c.provides = 'stock'), lambda c: c.ratio)) AS speedup,
    list_min(list_transform(
        list_filter(performance.comparisons, lambda c: c.provides = 'stock'), lambda c: c.ci_low)) AS speedup_ci_low,
    list_filter(performance.comparisons, lambda c: c.provides = 'incumbent')[1]."with" AS incumbent,
    list_filter(performance.comparisons, lambda c: c.provides = 'incumbent')[1].ratio AS incumbent_ratio,
    list_filter(performance.comparisons, lambda c: c.provides = 'incumbent')[1].ci_low AS incumbent_ci_low,
    performance.comparisons AS comparisons,
    list_sort(list_transform(
        list_filter(performance.comparisons, lambda c: c.provides <> 'incumbent'),
        lambda c: {'ratio': c.ratio, 'name': c."with"}))[1].name AS strongest_baseline,
    list_min(list_transform(
        list_filter(performance.comparisons, lambda c: c.provides <> 'incumbent'), lambda c: c.ratio)) AS strongest_ratio,
    performance.sol_us AS sol_us,
    performance.sol_ratio AS sol_ratio,
    performance.clock_mhz AS clock_mhz,
    performance.throttled AS throttled,
    correctness.rel_fro AS rel_fro,
    correctness.worst_row_rel AS worst_row_rel,
    correctness.max_abs AS max_abs,
    correctness.matched_ratio AS matched_ratio,
    correctness.deterministic AS deterministic,
    correctness.gate AS gate,
    correctness.oracle AS oracle,
    correctness.cases AS cases,
    envelope.cases AS envelope_cases,
    envelope.digest AS envelope_digest,
    envelope.seed AS envelope_seed,
    envelope.dropped AS envelope_dropped,
    envelope.scalars AS envelope_scalars,
    envelope.largest AS envelope_largest,
    envelope.largest_elements AS envelope_largest_elements,
    envelope.batch_slices AS envelope_batch_slices,
    audit.wall_us AS wall_us,
    audit.owned_share AS owned_share,
    audit.profiled_us AS profiled_us,
    audit.kernels AS kernels,
    audit.notes AS scan_notes,
    failure.command AS failure_command,
    failure,
    overrules,
    is_newest
FROM trace_records;

CREATE OR REPLACE VIEW traces AS SELECT * EXCLUDE (is_newest) FROM marked_traces;

-- What GPUs were calibrated to do, newest first to be believed: `is_current` marks the row that a GPU's speed of light is
-- computed from, which is a calibration of this machine wherever there is one. Rates are per second, times microseconds.
CREATE OR REPLACE VIEW peaks AS
SELECT
    gpu, gpu_family_of(gpu) AS gpu_family, gpu_name, record->>'sm' AS sm, driver, record->>'cuda' AS cuda, timestamp, is_own,
    CASE WHEN is_own THEN 'local' ELSE 'shipped' END AS origin,
    row_number() OVER (PARTITION BY gpu ORDER BY is_own DESC, timestamp DESC, record::VARCHAR) = 1 AS is_current,
    (record->>'/copy_bytes_per_s/value')::DOUBLE AS copy_bytes_per_s,
    (record->>'/read_bytes_per_s/value')::DOUBLE AS read_bytes_per_s,
    (record->>'/flops/bfloat16/value')::DOUBLE AS bfloat16_flops_per_s,
    (record->>'/flops/float16/value')::DOUBLE AS float16_flops_per_s,
    (record->>'/flops/tf32/value')::DOUBLE AS tf32_flops_per_s,
    (record->>'/flops/float32/value')::DOUBLE AS float32_flops_per_s,
    (record->>'/flops/float8_e4m3fn/value')::DOUBLE AS float8_flops_per_s,
    (record->>'/launch_us/value')::DOUBLE AS launch_us,
    (record->>'clock_mhz')::BIGINT AS clock_mhz,
    record
FROM peak_records;

-- What a failure takes back, whatever tier and sandbox found it: nothing makes a failure look better than a pass. A null
-- column means "any". A wrong, crashing or hanging kernel loses the passes of that source and config on that GPU; a cheating
-- source loses them in every config; a compile error says nothing about workloads that did compile, so it only takes back
-- its own. UNSUPPORTED is the solution's own, honest limit; and an interpreter runs no code of a GPU.
-- A wrong number or a cheat (`is_final`, records.trace.is_wrong) outweighs later passes too: a lucky repetition proves nothing.
-- A person may overrule a failure, which then takes nothing back.
CREATE OR REPLACE VIEW revocations AS
SELECT
    definition_digest, solution_digest, gpu, gpu_family_of(gpu) AS gpu_family,
    weakest_origin(list(origin)) AS origin,
    CASE WHEN status <> 'REJECTED' THEN config_key END AS config_key,
    CASE WHEN status = 'COMPILE_ERROR' THEN workload_uuid END AS workload_uuid,
    bool_or(is_wrong) AS is_final,
    arg_max(timestamp, row(is_wrong, timestamp, trace_id)) AS revoked_at,
    arg_max(trace_id, row(is_wrong, timestamp, trace_id)) AS trace_id
FROM (
    SELECT *, starts_with(status, 'INCORRECT_')
        OR (status = 'REJECTED' AND coalesce(failure.gate, '') NOT IN ($repeatable_gates)) AS is_wrong
    FROM trace_records
    WHERE status NOT IN ('PASSED', 'UNSUPPORTED', 'OVERRULED') AND tier <> 'interpreter' AND is_counted(origin, trusted)) f
ANTI JOIN trace_records o ON o.status = 'OVERRULED' AND o.overrules.trace_id = f.trace_id AND is_counted(o.origin, o.trusted)
GROUP BY ALL;

-- The only answer to: does this failure `r`, of the view above, take back this pass `t`? table.py has it for published files.
CREATE OR REPLACE MACRO takes_back(r, t) AS
    r.definition_digest = t.definition_digest AND r.solution_digest = t.solution_digest AND r.gpu = t.gpu
    AND (r.is_final OR r.revoked_at >= t.timestamp)
    AND coalesce(r.config_key, t.config_key) = t.config_key
    AND coalesce(r.workload_uuid, t.workload_uuid) = t.workload_uuid;

-- Passed in a tier that counts, with exactly the definition and source that the catalog holds now, and not taken back.
-- The joins match one row each; as semi joins they would say so, but DuckDB then plans the anti join twice as slow.
-- `is_newest` leaves out nothing that the views below would pick, and nearly everything where there are millions of traces.
CREATE OR REPLACE VIEW standing AS
SELECT t.* EXCLUDE (is_newest) FROM marked_traces t
JOIN definition_records d ON d.is_current AND d.name = t.definition AND d.digest = t.definition_digest
JOIN solution_records s ON s.is_current AND s.name = t.solution AND s.digest = t.solution_digest
ANTI JOIN revocations r ON takes_back(r, t)
WHERE t.is_newest AND t.status = 'PASSED' AND t.tier IN ($verified_tiers) AND t.latency_us IS NOT NULL
    AND is_counted(t.origin, t.trusted) AND t.doubt IS NULL AND gives_all(s.record);

-- The newest of them per solution, config, shape and GPU: a lucky measurement must not outlive the ones that came after.
-- A pass that can be published is not superseded by one that cannot.
CREATE OR REPLACE VIEW newest_passes AS
SELECT
    definition, gpu, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key, solution, config_key,
    arg_max(
        {trace_id: trace_id, latency_us: latency_us},
        row(sandbox_level >= $sandbox_level, timestamp, trace_id)) AS newest
FROM standing GROUP BY ALL;

-- Here and below: `definition` and `gpu` are joined on, although the id says it all, so that a reader's condition on them reaches
-- the inside.
CREATE OR REPLACE VIEW verified AS
SELECT t.* EXCLUDE (is_newest) FROM marked_traces t
JOIN newest_passes n ON n.definition = t.definition AND n.gpu = t.gpu AND n.newest.trace_id = t.trace_id
WHERE t.is_newest;

-- The fastest verified trace of each solution, per GPU and shape. Ties fall to the smaller trace_id, so that two
-- readers of the same traces always see the same row.
CREATE OR REPLACE VIEW best_per_solution AS
SELECT t.* EXCLUDE (is_newest) FROM marked_traces t JOIN (
    SELECT definition, gpu, arg_min(newest.trace_id, row(newest.latency_us, newest.trace_id)) AS trace_id FROM newest_passes
    GROUP BY definition, gpu, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key, solution
) b ON b.definition = t.definition AND b.gpu = t.gpu AND b.trace_id = t.trace_id
WHERE t.is_newest;

-- The fastest verified trace of any solution, per GPU and shape.
CREATE OR REPLACE VIEW best AS
SELECT t.* EXCLUDE (is_newest) FROM marked_traces t JOIN (
    SELECT definition, gpu, arg_min(newest.trace_id, row(newest.latency_us, newest.trace_id)) AS trace_id FROM newest_passes
    GROUP BY definition, gpu, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key
) b ON b.definition = t.definition AND b.gpu = t.gpu AND b.trace_id = t.trace_id
WHERE t.is_newest;

-- Every timed pass, with the pass before it of the same solution, config, call, GPU and tier. Sources may differ: `solution_digest`
-- says which was measured. A difference counts only beyond both intervals. Runs of different hosts, drivers or days are
-- no comparison of sources; `regress` times two sources in the same rounds.
CREATE OR REPLACE VIEW history AS
SELECT
    definition, op_type, solution, language, role, gpu, gpu_family_of(gpu) AS gpu_family, tier,
    axes, axes_key, dtypes_key, scalars_key, layouts_key, blobs_key, config_key,
    row_number() OVER earlier AS number,
    timestamp, run_id, trace_id, solution_digest,
    solution_digest IN (SELECT digest FROM solution_records WHERE is_current) AS is_current,
    driver, host, origin, trusted, latency_us, ci_low_us, ci_high_us, samples, speedup, speedup_ci_low,
    latency_us / lag(latency_us) OVER earlier AS ratio,
    CASE
        WHEN ci_low_us > lag(ci_high_us) OVER earlier THEN 'slower'
        WHEN ci_high_us < lag(ci_low_us) OVER earlier THEN 'faster'
        WHEN lag(trace_id) OVER earlier IS NOT NULL THEN 'same' END AS change
FROM marked_traces
WHERE status = 'PASSED' AND latency_us IS NOT NULL AND doubt IS NULL AND is_counted(origin, trusted)
WINDOW earlier AS (
    PARTITION BY definition, solution, gpu, tier, dtypes_key, axes_key, scalars_key, layouts_key, blobs_key, config_key
    ORDER BY timestamp, trace_id);

-- What `verify` may be tried on: passed its newest screen, with the definition and source that the catalog holds now,
-- neither judged by the promotion tier since nor verified before.
CREATE OR REPLACE VIEW promotable AS
SELECT
    t.definition, t.op_type, t.definition_digest, t.solution, t.solution_digest, t.gpu,
    gpu_family_of(t.gpu) AS gpu_family, t.origin, t.workload_uuid, t.config, t.config_key, t.screened_at
FROM (
    SELECT
        definition, op_type, definition_digest, solution, solution_digest, gpu, workload_uuid, config, config_key,
        max(timestamp) AS screened_at, arg_max(status, row(timestamp, trace_id)) AS status,
        arg_max(origin, row(timestamp, trace_id)) AS origin
    FROM trace_records WHERE tier = 'screen' AND is_counted(origin, trusted) GROUP BY ALL) t
JOIN definition_records d ON d.is_current AND d.name = t.definition AND d.digest = t.definition_digest
JOIN solution_records s ON s.is_current AND s.name = t.solution AND s.digest = t.solution_digest
ANTI JOIN trace_records p ON p.tier = 'promotion' AND p.solution_digest = t.solution_digest
    AND p.definition_digest = t.definition_digest AND p.gpu = t.gpu AND p.workload_uuid = t.workload_uuid
    AND p.config_key = t.config_key AND p.timestamp >= t.screened_at AND is_counted(p.origin, p.trusted)
ANTI JOIN standing v ON v.solution_digest = t.solution_digest AND v.definition_digest = t.definition_digest
    AND v.gpu = t.gpu AND v.workload_uuid = t.workload_uuid AND v.config_key = t.config_key
WHERE t.status = 'PASSED' AND gives_all(s.record);

-- The newest step of each config in a search, which is all that counts, with the definition and source that the catalog
-- holds now.
CREATE OR REPLACE VIEW newest_steps AS
SELECT
    s.definition, d.op_type, t.gpu, t.solution, s.record AS solution_record, t.workload_uuid, w.record AS workload_record,
    w.axes_key, w.dtypes_key, t.config_key,
    arg_max(t.outcome, row(t.timestamp, t.outcome)) AS outcome,
    arg_max(t.record, row(t.timestamp, t.outcome)) AS record,
    max(t.timestamp) AS stepped_at, bool_or(t.is_own) AS is_own
FROM tuning_records t
JOIN solution_records s ON s.is_current AND s.name = t.solution AND s.digest = t.solution_digest
JOIN definition_records d ON d.is_current AND d.name = s.definition AND d.digest = t.definition_digest
JOIN workload_records w ON w.uuid = t.workload_uuid AND w.definition = s.definition
GROUP BY ALL;

-- How far the configs of each solution were searched on each GPU and workload, and what came of it. `config` is what
-- leads: '{}' is the source's own defaults, null is nothing.
-- Whether it is verified is for `verified` to say. `configs` is the size of the space; the defaults, which are `tried`
-- too, may be a point of it. There are no times: those of a search are too few to be compared with any other.
CREATE OR REPLACE VIEW searches AS
SELECT
    definition, op_type, gpu, gpu_family_of(gpu) AS gpu_family, solution, solution_record->>'/spec/language' AS language,
    CASE WHEN bool_or(is_own) THEN 'local' ELSE 'shipped' END AS origin,
    axes_key, dtypes_key, coalesce(from_json(workload_record->'layouts', '"MAP(VARCHAR, VARCHAR)"'), MAP {}) AS layouts,
    workload_uuid,
    arg_max(record->'config', stepped_at) FILTER (outcome = 'leads') AS config,
    count(*) AS tried,
    any_value(list_product(list_transform(
        json_keys(solution_record->'/spec/tunables'),
        lambda name: json_array_length(solution_record->'spec'->'tunables'->name)
    ))::BIGINT) AS configs,
    count(*) FILTER (outcome = 'slower') AS slower,
    count(*) FILTER (outcome = 'tie') AS ties,
    count(*) FILTER (outcome = 'compile') AS not_compiled,
    count(*) FILTER (outcome = 'failed') AS failed,
    max(stepped_at) AS searched_at
FROM newest_steps GROUP BY ALL;

-- How each solution fares over all shapes of a definition on a GPU; means are geometric, so they and the ranges leave
-- out ratios of zero.
CREATE OR REPLACE VIEW leaderboard AS
SELECT
    definition, op_type, gpu, gpu_family_of(gpu) AS gpu_family, solution, language, role,
    weakest_origin(list(origin)) AS origin,
    count(*) AS shapes,
    count(*) FILTER (WHERE trace_id IN (SELECT trace_id FROM best)) AS wins,
    exp(avg(ln(speedup)) FILTER (WHERE speedup > 0)) AS geomean_speedup,
    exp(avg(ln(sol_ratio)) FILTER (WHERE sol_ratio > 0)) AS geomean_sol_ratio,
    min(speedup) FILTER (WHERE speedup > 0) AS lowest_speedup, max(speedup) FILTER (WHERE speedup > 0) AS highest_speedup,
    min(sol_ratio) FILTER (WHERE sol_ratio > 0) AS lowest_sol_ratio,
    max(sol_ratio) FILTER (WHERE sol_ratio > 0) AS highest_sol_ratio
FROM best_per_solution
GROUP BY definition, op_type, gpu, solution, language, role;

-- One row per run of a whole model, patched against itself as it is. Not comparable with traces: those are of operators.
-- A run that was published from this home folder is here once.
CREATE OR REPLACE VIEW model_runs AS
SELECT
    run_id,
    make_timestamp(epoch_us((record->>'timestamp')::TIMESTAMPTZ)) AS timestamp,
    record->>'evidence_level' AS evidence_level,
    record->>'model' AS model,
    record->>'model_class' AS model_class,
    record->>'config_digest' AS config_digest,
    (record->>'layers')::BIGINT AS layers,
    (record->>'parameters')::BIGINT AS parameters,
    record->>'weights' AS weights,
    record->>'dtype' AS dtype,
    record->>'gpu' AS gpu,
    gpu_family_of(record->>'gpu') AS gpu_family,
    origin,
    trusted,
    record->>'gpu_name' AS gpu_name,
    (record->>'batch')::BIGINT AS batch,
    (record->>'prompt_tokens')::BIGINT AS prompt_tokens,
    (record->>'new_tokens')::BIGINT AS new_tokens,
    (record->>'rounds')::BIGINT AS rounds,
    record->>'timer' AS timer,
    (record->>'throttled')::BOOLEAN AS throttled,
    (record->>'proved')::BOOLEAN AS proved,
    (record->>'/stock/ttft_ms/median')::DOUBLE AS stock_ttft_ms,
    (record->>'/patched/ttft_ms/median')::DOUBLE AS patched_ttft_ms,
    (record->>'/ttft_speedup/median')::DOUBLE AS ttft_speedup,
    (record->>'/ttft_speedup/ci_low')::DOUBLE AS ttft_speedup_ci_low,
    (record->>'/ttft_speedup/ci_high')::DOUBLE AS ttft_speedup_ci_high,
    (record->>'/stock/tpot_ms/median')::DOUBLE AS stock_tpot_ms,
    (record->>'/patched/tpot_ms/median')::DOUBLE AS patched_tpot_ms,
    (record->>'/tpot_speedup/median')::DOUBLE AS tpot_speedup,
    (record->>'/tpot_speedup/ci_low')::DOUBLE AS tpot_speedup_ci_low,
    (record->>'/tpot_speedup/ci_high')::DOUBLE AS tpot_speedup_ci_high,
    batch * prompt_tokens / stock_ttft_ms * 1e3 AS stock_prefill_tokens_per_s,
    batch * prompt_tokens / patched_ttft_ms * 1e3 AS patched_prefill_tokens_per_s,
    (record->>'/stock/tokens_per_s')::DOUBLE AS stock_tokens_per_s,
    (record->>'/patched/tokens_per_s')::DOUBLE AS patched_tokens_per_s,
    (record->>'/total_speedup/median')::DOUBLE AS speedup,
    (record->>'/total_speedup/ci_low')::DOUBLE AS speedup_ci_low,
    (record->>'/total_speedup/ci_high')::DOUBLE AS speedup_ci_high,
    (record->>'/stock/peak_memory_bytes')::BIGINT AS stock_peak_memory_bytes,
    (record->>'/patched/peak_memory_bytes')::BIGINT AS patched_peak_memory_bytes,
    from_json(record->'kernels', '"MAP(VARCHAR, BIGINT)"') AS kernels,
    from_json(record->'experts', '"MAP(VARCHAR, BIGINT)"') AS experts,
    from_json(record->'gpu_shares', '"MAP(VARCHAR, DOUBLE)"') AS gpu_shares,
    CASE WHEN gpu_shares IS NOT NULL THEN coalesce(list_sum(map_values(gpu_shares)), 0) END AS gpu_share,
    (record->>'equal_tokens')::BIGINT AS equal_tokens,
    from_json(record->'libs', '"MAP(VARCHAR, VARCHAR)"') AS libs,
    record
FROM model_run_records
QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY list_position(['shipped', 'local', 'foreign'], origin), is_own DESC) = 1;

-- One row per way of running the model in each of those runs: stock and patched, then what was asked for besides. A way that
-- could not be had has a reason and no figures. Speedups are stock time over this way's, in the same rounds.
CREATE OR REPLACE VIEW model_ways AS
WITH entries AS (
    SELECT *, unnest(list_concat(
        [{'way': 'stock', 'entry': json_object('timing', record->'stock')},
            {'way': 'patched', 'entry': json_object('timing', record->'patched',
                'equal_tokens', record->'equal_tokens', 'kernels', record->'kernels',
                'against', json_object('stock', json_object('ttft', record->'ttft_speedup',
                    'tpot', record->'tpot_speedup', 'total', record->'total_speedup')))}],
        list_transform(map_entries(coalesce(from_json(record->'ways', '"MAP(VARCHAR, JSON)"'), MAP {})),
            lambda item: {'way': item.key, 'entry': item.value}),
        list_transform(map_entries(coalesce(from_json(record->'absent', '"MAP(VARCHAR, VARCHAR)"'), MAP {})),
            lambda item: {'way': item.key, 'entry': json_object('reason', item.value)})
    ), recursive := true)
    FROM model_runs
)
SELECT
    run_id, timestamp, evidence_level, origin, trusted, model, model_class, layers, dtype, gpu, gpu_family, batch, prompt_tokens,
    new_tokens, rounds, way,
    (entry->>'/timing/ttft_ms/median')::DOUBLE AS ttft_ms,
    (entry->>'/timing/tpot_ms/median')::DOUBLE AS tpot_ms,
    (entry->>'/timing/total_ms/median')::DOUBLE AS total_ms,
    (entry->>'/timing/tokens_per_s')::DOUBLE AS tokens_per_s,
    batch * prompt_tokens / ttft_ms * 1e3 AS prefill_tokens_per_s,
    (entry->>'/timing/peak_memory_bytes')::BIGINT AS peak_memory_bytes,
    (entry->>'/against/stock/ttft/median')::DOUBLE AS ttft_speedup,
    (entry->>'/against/stock/tpot/median')::DOUBLE AS tpot_speedup,
    (entry->>'/against/stock/total/median')::DOUBLE AS speedup,
    (entry->>'/against/stock/total/ci_low')::DOUBLE AS speedup_ci_low,
    (entry->>'/against/stock/total/ci_high')::DOUBLE AS speedup_ci_high,
    (entry->>'equal_tokens')::BIGINT AS equal_tokens,
    from_json(entry->'kernels', '"MAP(VARCHAR, BIGINT)"') AS kernels,
    coalesce(entry->>'library', '') AS library,
    coalesce(entry->>'reason', '') AS reason
FROM entries;
