-- Tables of the store. They hold records as they were written; what users query are the views in views.sql.
-- No primary keys and no indexes: they slow bulk ingest down, and ingest is made idempotent by an anti-join instead.
-- A change here needs a new SCHEMA_VERSION in statements.py.

CREATE TABLE meta (key VARCHAR NOT NULL, value VARCHAR NOT NULL);

-- Every definition and solution ever seen, by digest, so that old traces stay explainable; `is_current` marks the catalog's.
CREATE TABLE definition_records (
    name VARCHAR NOT NULL,
    version VARCHAR NOT NULL,
    digest VARCHAR NOT NULL,
    op_type VARCHAR NOT NULL,
    is_current BOOLEAN NOT NULL,
    record JSON NOT NULL
);

CREATE TABLE solution_records (
    name VARCHAR NOT NULL,
    definition VARCHAR NOT NULL,
    digest VARCHAR NOT NULL,
    is_current BOOLEAN NOT NULL,
    record JSON NOT NULL
);

CREATE TABLE workload_records (
    uuid VARCHAR NOT NULL,
    definition VARCHAR NOT NULL,
    axes_key VARCHAR NOT NULL,
    dtypes_key VARCHAR NOT NULL,
    record JSON NOT NULL
);

-- Calibrations of GPUs; `is_own` marks those of this machine, the others were published.
CREATE TABLE peak_records (
    gpu VARCHAR NOT NULL,
    gpu_name VARCHAR NOT NULL,
    driver VARCHAR NOT NULL,
    timestamp TIMESTAMP NOT NULL, -- UTC
    is_own BOOLEAN NOT NULL,
    record JSON NOT NULL
);

-- Steps of searches over configs: those of this machine (`is_own`, by the run whose log holds them) and published ones.
-- One step may be here as both.
CREATE TABLE tuning_records (
    is_own BOOLEAN NOT NULL,
    run_id VARCHAR NOT NULL,
    gpu VARCHAR NOT NULL,
    solution VARCHAR NOT NULL,
    solution_digest VARCHAR NOT NULL,
    definition_digest VARCHAR NOT NULL,
    workload_uuid VARCHAR NOT NULL,
    config_key VARCHAR NOT NULL,
    outcome VARCHAR NOT NULL,
    timestamp TIMESTAMP NOT NULL, -- UTC
    record JSON NOT NULL
);

-- Journals are append-only, so one of unchanged size has nothing new.
CREATE TABLE ingested_files (path VARCHAR NOT NULL, size BIGINT NOT NULL);

-- `origin` says who vouches for a trace: 'shipped' with the package, measured here ('local'), or 'foreign', which counts only
-- where the user said so (`trusted`). `doubt` is why the figures of a pass cannot be true.
-- `is_newest` marks the timed, undoubted passes that no newer one of the same point supersedes (newest.py): most questions need no
-- other rows, and of millions of traces few are marked, so that a scan leaves most row groups out.
-- A *_key is the canonical spelling of the map beside it ('M=4096,N=4096', sorted by name), to group and join by.
CREATE TABLE trace_records (
    trace_id VARCHAR NOT NULL,
    run_id VARCHAR NOT NULL,
    timestamp TIMESTAMP NOT NULL, -- UTC
    definition VARCHAR NOT NULL,
    definition_version VARCHAR NOT NULL,
    definition_digest VARCHAR NOT NULL,
    op_type VARCHAR NOT NULL,
    solution VARCHAR NOT NULL,
    solution_digest VARCHAR NOT NULL,
    language VARCHAR NOT NULL,
    role VARCHAR NOT NULL,
    config JSON NOT NULL,
    config_key VARCHAR NOT NULL,
    workload_uuid VARCHAR NOT NULL,
    axes MAP(VARCHAR, BIGINT) NOT NULL,
    axes_key VARCHAR NOT NULL,
    dtypes MAP(VARCHAR, VARCHAR) NOT NULL,
    dtypes_key VARCHAR NOT NULL,
    scalars JSON NOT NULL,
    scalars_key VARCHAR NOT NULL,
    layouts MAP(VARCHAR, VARCHAR) NOT NULL,
    layouts_key VARCHAR NOT NULL,
    blobs MAP(VARCHAR, VARCHAR) NOT NULL DEFAULT MAP {}, -- input -> sha256 of the file that has its contents
    blobs_key VARCHAR NOT NULL DEFAULT '',
    gpu VARCHAR NOT NULL,
    gpu_name VARCHAR NOT NULL,
    sm VARCHAR NOT NULL,
    driver VARCHAR NOT NULL,
    cuda VARCHAR NOT NULL,
    libs MAP(VARCHAR, VARCHAR) NOT NULL,
    gpu_uuid VARCHAR NOT NULL DEFAULT '', -- of all GPUs of this kind; empty on a CPU and in older traces
    host VARCHAR NOT NULL DEFAULT '',
    tier VARCHAR NOT NULL,
    attempt BIGINT NOT NULL,
    sandbox_level BIGINT NOT NULL,
    evidence_level VARCHAR NOT NULL,
    envelope STRUCT(cases BIGINT, digest VARCHAR, seed VARCHAR, dropped VARCHAR[],
        scalars MAP(VARCHAR, DOUBLE[]), largest MAP(VARCHAR, BIGINT), largest_elements BIGINT, batch_slices BIGINT),
    status VARCHAR NOT NULL,
    reason VARCHAR NOT NULL,
    log VARCHAR NOT NULL,
    correctness STRUCT(
        rel_fro DOUBLE, worst_row_rel DOUBLE, max_abs DOUBLE, matched_ratio DOUBLE, deterministic BOOLEAN,
        gate VARCHAR, oracle VARCHAR, cases BIGINT),
    performance STRUCT(
        latency_us DOUBLE, ci_low_us DOUBLE, ci_high_us DOUBLE, samples BIGINT, host_us DOUBLE, cold_l2 BOOLEAN,
        timer VARCHAR,
        comparisons STRUCT("with" VARCHAR, provides VARCHAR, ratio DOUBLE, ci_low DOUBLE, ci_high DOUBLE)[],
        sol_us DOUBLE, sol_ratio DOUBLE, clock_mhz BIGINT, throttled BOOLEAN),
    audit STRUCT(wall_us DOUBLE, owned_share DOUBLE, profiled_us DOUBLE, kernels VARCHAR[], notes VARCHAR[]),
    failure STRUCT(
        gate VARCHAR, axes MAP(VARCHAR, BIGINT), dtypes MAP(VARCHAR, VARCHAR), layouts MAP(VARCHAR, VARCHAR),
        contents VARCHAR, seed VARCHAR, "offset" BIGINT, output VARCHAR, "index" BIGINT[], expected VARCHAR,
        got VARCHAR, worst_row BIGINT, command VARCHAR),
    overrules STRUCT(trace_id VARCHAR, "by" VARCHAR),
    origin VARCHAR NOT NULL DEFAULT 'foreign',
    trusted BOOLEAN NOT NULL DEFAULT false,
    doubt VARCHAR,
    is_newest BOOLEAN NOT NULL DEFAULT false
);

-- Runs of whole models (records.ModelRun): those of this home folder (`is_own`), from the files in model_runs/ beside the database,
-- and published ones. One run may be here as both. `origin` and `trusted` are as for traces.
CREATE TABLE model_run_records (
    run_id VARCHAR NOT NULL,
    is_own BOOLEAN NOT NULL,
    origin VARCHAR NOT NULL,
    trusted BOOLEAN NOT NULL DEFAULT false,
    record JSON NOT NULL
);
