-- Records of imported data sets: a copy of <home>/imported for SQL to read, made anew whenever that changes.
-- No other view joins these: what others measured is shown, and never ranked, published or resolved from.

CREATE TABLE IF NOT EXISTS imported_records (
    origin VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    definition VARCHAR NOT NULL,
    path VARCHAR NOT NULL,
    line BIGINT,
    digest VARCHAR NOT NULL,
    unset VARCHAR[] NOT NULL,
    findings VARCHAR[] NOT NULL,
    record JSON NOT NULL
);

CREATE OR REPLACE VIEW imported_definitions AS
SELECT origin, name, record->>'op_type' AS op_type, record->>'description' AS description,
    coalesce(from_json(record->'tags', '["VARCHAR"]'), []) AS tags,
    record->>'reference' AS reference, findings, path, digest, record
FROM imported_records WHERE kind = 'definition';

CREATE OR REPLACE VIEW imported_solutions AS
SELECT origin, name, definition, record->>'/spec/language' AS language, record->>'author' AS author,
    record->>'description' AS description,
    (record->>'/spec/destination_passing_style')::BOOLEAN AS destination_passing_style,
    unset, findings, path, digest, record
FROM imported_records WHERE kind = 'solution';

CREATE OR REPLACE VIEW imported_workloads AS
SELECT origin, name AS uuid, definition,
    coalesce(from_json(record->'axes', '"MAP(VARCHAR, BIGINT)"'), MAP {}) AS axes,
    findings, path, line, digest, record
FROM imported_records WHERE kind = 'workload';

-- What others measured, as they wrote it. Times are milliseconds there and microseconds here; 0 means not timed.
CREATE OR REPLACE VIEW imported_traces AS
SELECT origin, definition, record->>'solution' AS solution, name AS workload_uuid,
    coalesce(from_json(record->'/workload/axes', '"MAP(VARCHAR, BIGINT)"'), MAP {}) AS axes,
    record->>'/evaluation/status' AS status,
    record->>'/evaluation/environment/hardware' AS gpu_name,
    record->>'/evaluation/timestamp' AS timestamp_text,
    nullif((record->>'/evaluation/performance/latency_ms')::DOUBLE, 0) * 1e3 AS latency_us,
    nullif((record->>'/evaluation/performance/reference_latency_ms')::DOUBLE, 0) * 1e3 AS reference_latency_us,
    nullif((record->>'/evaluation/performance/speedup_factor')::DOUBLE, 0) AS speedup_over_reference,
    (record->>'/evaluation/correctness/max_relative_error')::DOUBLE AS max_relative_error,
    (record->>'/evaluation/correctness/max_absolute_error')::DOUBLE AS max_absolute_error,
    record->>'/evaluation/log' AS log,
    true AS is_foreign, path, line, digest, record
FROM imported_records WHERE kind = 'trace';
