"""Write the tables of docs/performance, and its CSV files, from the shipped traces and runs of models.

python tools/performance_tables.py            # writes the blocks
python tools/performance_tables.py --check
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import performance_bars
from marked_blocks import ROOT, shipped_store, with_block, write_or_check

from tilegym_db.records.loop import ModelRun, claims_of

FOLDER = ROOT / "docs" / "performance"
KERNELS, GPUS, MODELS = (FOLDER / f"{name}.md" for name in ("kernels", "gpus", "models"))
OPERATORS, RUNS = FOLDER / "kernels.csv", FOLDER / "models.csv"
GPU, DTYPES = "h200", "T=bfloat16"

SHAPES = {
    "gemm": ("K=4096,M=1,N=4096", "K=4096,M=512,N=4096", "K=4096,M=4096,N=4096", "K=8192,M=8192,N=8192"),
    "qk_rms_norm": ("D=128,Hkv=8,Hq=32,M=1", "D=128,Hkv=8,Hq=32,M=4096"),
    "rms_norm": ("M=1,N=4096", "M=4096,N=4096", "M=16384,N=7168"),
    "softmax": ("M=8,N=128256", "M=4096,N=4096"),
    "swiglu": ("I=14336,M=1", "I=14336,M=4096"),
}
"""Shapes of one token and of many at which stock code, ATen and torch.compile are shown beside the kernels."""
COLUMNS = ("Triton", "TileLang", "cuTile", "stock", "ATen", "compile")
TILE = {"triton": "Triton", "tilelang": "TileLang", "cutile": "cuTile"}
TITLES = {
    "activation": "Activations",
    "linear_attention": "Linear attention",
    "gemm": "Matrix products",
    "mhc": "Hyper-connections",
    "moe": "Mixtures of experts",
    "norm": "Norms",
    "quant": "Casts",
    "rope": "Rotary embeddings",
    "transpose": "Transposes",
}
"""Headings of op_types that do not read as one; any other is its own."""

BASELINES = {"stock": ("_stock", "_cublas"), "ATen": ("_aten",), "compile": ("_compile",)}

PASSES = """
    SELECT definition, axes_key, solution, language, role, config_key, latency_us, sol_ratio FROM verified
    WHERE gpu = $gpu AND dtypes_key = $dtypes AND definition IN $names
    QUALIFY row_number() OVER (PARTITION BY definition, axes_key, solution ORDER BY latency_us, trace_id) = 1
    ORDER BY definition, axes_key, solution
"""


def times() -> str:
    """Return one row per shape: the fastest verified time in us of each language and baseline, and the share of light."""
    lines = [f"| operator | shape | {' | '.join(COLUMNS)} | of light |", f"|---|---|{'---:|' * (len(COLUMNS) + 1)}"]
    for name, shapes in SHAPES.items():
        for shape in shapes:
            cells, shares = _cells(name, shape)
            share = f"{max(shares):.0%}" if shares else ""
            lines.append(f"| {name} | {shape} | {' | '.join(cells[c] for c in COLUMNS)} | {share} |")
    return "\n".join(lines)


RUN_FIGURES = (("ttft", "ttft_ms"), ("tpot", "tpot_ms"))
RUNS_QUERY = "SELECT record FROM model_runs ORDER BY gpu, model, layers, batch, prompt_tokens, new_tokens, timestamp"
NO_RUNS = "No run is published yet."


def runs_of_models(records: Iterable[str]) -> str:
    """Return the CSV of the published runs: ms to the first token and per later token, stock and patched, with the speedup."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = [f"{token} token {column}" for token in ("first", "later") for column in RUN_COLUMNS]
    writer.writerow(["model", "layers", "gpu", "batch", "prompt tokens", "new tokens", *figures])
    for run in map(ModelRun.from_json, records):
        claims = claims_of(run)
        cells: list[object] = [run.model, run.layers, run.gpu, run.batch, run.prompt_tokens, run.new_tokens]
        for figure, timed in RUN_FIGURES:
            if figure in claims:
                cells += [f"{getattr(way, timed).median:.4g}" for way in (run.stock, run.patched)]
                cells += [_times_as_fast(getattr(run, f"{figure}_speedup").median), claims[figure].verdict]
            else:
                cells += [""] * len(RUN_COLUMNS)
        writer.writerow(cells)
    return text.getvalue()


RUN_COLUMNS = ("stock ms", "patched ms", "speedup", "claim")


def speedups_of_models(records: Iterable[str]) -> str:
    """Return one row per model and number of layers: its least and greatest speedups, and how many of them are claims."""
    lines = [
        "| model | layers | GPU | runs | speedup to first token | claims | speedup per later token | claims |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    runs = [ModelRun.from_json(record) for record in records]
    for (gpu, model, layers), group in itertools.groupby(runs, key=lambda run: (run.gpu, run.model, run.layers)):
        of_model = list(group)
        cells = []
        for figure, _ in RUN_FIGURES:
            timed = [(run, claims[figure]) for run in of_model if figure in (claims := claims_of(run))]
            speedups = [getattr(run, f"{figure}_speedup").median for run, _ in timed]
            ends = [_times_as_fast(end) for end in sorted({min(speedups), max(speedups)})] if speedups else [""]
            cells += [" to ".join(ends), str(sum(claim.verdict == "faster" for _, claim in timed)) if timed else ""]
        lines.append(f"| {model} | {layers} | {gpu} | {len(of_model)} | {' | '.join(cells)} |")
    return "\n".join(lines) if runs else NO_RUNS


def operators(rows: Iterable[Any]) -> str:
    """Return the CSV of all operators: the largest measured shape, the time in us of each language, and the median speedup."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["op_type", "operator", "largest shape", *TILE.values(), "stock", "of light", "speedup"])
    for *named, triton, tilelang, cutile, stock, ratio, speedup in rows:
        times = ["" if time is None else f"{time:.1f}" for time in (triton, tilelang, cutile, stock)]
        writer.writerow([*named, *times, _share(ratio), _times_as_fast(speedup)])
    return text.getvalue()


def families(rows: Iterable[Any]) -> str:
    """Return one row per op_type: operators, those with a kernel in each language, the medians, and the least speedup."""
    lines = [
        f"| operators | count | {' | '.join(TILE.values())} | of light | speedup | least speedup |",
        f"|---|{'---:|' * (len(TILE) + 4)}",
    ]
    for op_type, group in itertools.groupby(rows, key=lambda row: row[0]):
        of_type = list(group)
        languages = [sum(row[place] is not None for row in of_type) for place in range(3, 3 + len(TILE))]
        shares, speedups = ([row[place] for row in of_type if row[place] is not None] for place in (-2, -1))
        cells = [_share(statistics.median(shares) if shares else None)]
        cells += [_times_as_fast(of(speedups) if speedups else None) for of in (statistics.median, min)]
        counts = " | ".join(map(str, [len(of_type), *languages]))
        lines.append(f"| {TITLES.get(op_type, op_type.capitalize())} | {counts} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}"


def _times_as_fast(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}x"


FAMILY = """
    WITH point AS (
        SELECT op_type, definition, axes_key, row(axes_key, dtypes_key, scalars_key, layouts_key) AS key,
               any_value(sol_us) AS sol_us, max(sol_ratio) FILTER (role = 'kernel') AS ratio,
               min(latency_us) FILTER (role = 'kernel' AND language = 'triton') AS triton,
               min(latency_us) FILTER (role = 'kernel' AND language = 'tilelang') AS tilelang,
               min(latency_us) FILTER (role = 'kernel' AND language = 'cutile') AS cutile,
               min(latency_us) FILTER (ends_with(solution, '_stock') OR ends_with(solution, '_cublas')) AS stock
        FROM verified WHERE gpu = $gpu
        GROUP BY op_type, definition, axes_key, dtypes_key, scalars_key, layouts_key
        HAVING count(*) FILTER (role = 'kernel') > 0
    ),
    gain AS (
        SELECT definition, median(speedup) AS speedup FROM best
        WHERE gpu = $gpu AND speedup IS NOT NULL GROUP BY definition
    )
    SELECT op_type, definition, axes_key, triton, tilelang, cutile, stock, ratio, speedup
    FROM point LEFT JOIN gain USING (definition)
    QUALIFY row_number() OVER (PARTITION BY definition ORDER BY sol_us DESC, key) = 1
    ORDER BY op_type, definition
"""


def coverage() -> str:
    """Return one row per GPU: the number of published traces, operators and shapes."""
    lines = [
        "| GPU | traces | operators with a verified kernel | in Triton, TileLang and cuTile | shapes |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [f"| {gpu} | {' | '.join(f'{count:,}' for count in counts)} |" for gpu, *counts in _rows(COVERAGE, {})]
    return "\n".join(lines)


COVERAGE = """
    WITH kernel AS (
        SELECT gpu, definition, count(DISTINCT language) FILTER (language <> 'python') AS languages
        FROM verified WHERE role = 'kernel' GROUP BY ALL
    )
    SELECT gpu, count(*), any_value(found), any_value(three), count(DISTINCT (definition, workload_uuid)) FROM verified
    JOIN (SELECT gpu, count(*) AS found, count(*) FILTER (languages = 3) AS three FROM kernel GROUP BY gpu) USING (gpu)
    GROUP BY gpu ORDER BY gpu
"""


def side_by_side() -> str:
    """Return one row per op_type: the time on an H100 over that on an H200, at the largest shape of each operator."""
    lines = ["| operators | count | least | median | most |", "|---|---:|---:|---:|---:|"]
    for op_type, count, least, median, most in _rows(RATIOS, {}):
        title = TITLES.get(op_type, op_type.capitalize())
        lines.append(f"| {title} | {count} | {least:.2f} | {median:.2f} | {most:.2f} |")
    return "\n".join(lines)


RATIOS = """
    WITH fastest AS (
        SELECT op_type, definition, axes_key, dtypes_key, scalars_key, layouts_key, gpu_family, max(sol_us) AS sol_us,
               min(latency_us) AS us
        FROM verified WHERE role = 'kernel' GROUP BY ALL
    ),
    pair AS (
        SELECT a.op_type, a.definition, row(a.axes_key, a.dtypes_key, a.scalars_key, a.layouts_key) AS key, a.sol_us,
               b.us / a.us AS ratio
        FROM fastest a JOIN fastest b USING (definition, axes_key, dtypes_key, scalars_key, layouts_key)
        WHERE a.gpu_family = 'h200' AND b.gpu_family = 'h100'
    ),
    largest AS (
        FROM pair QUALIFY row_number() OVER (PARTITION BY definition ORDER BY sol_us DESC, key) = 1
    )
    SELECT op_type, count(*), min(ratio), median(ratio), max(ratio) FROM largest GROUP BY op_type ORDER BY op_type
"""


def differing() -> str:
    """Return the answer of the query of the page: how many shapes each pair of languages wins on the two GPUs."""
    lines = ["| on the H200 | on the H100 | shapes |", "|---|---|---:|"]
    (query,) = re.findall(r"^```sql\n(.*?)^```$", GPUS.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join([*lines, *(f"| {one} | {other} | {count} |" for one, other, count in _rows(query, {}))])


def operator_targets() -> str:
    """Return one row per target of operators: the number of shapes that meet it."""
    return performance_bars.summary(_rows(performance_bars.POINTS, {"names": performance_bars.names()}))


def model_targets(records: Iterable[str]) -> str:
    """Return one row per target of models: the number of published runs that meet it."""
    return performance_bars.model_summary(records)


def _cells(name: str, shape: str) -> tuple[dict[str, str], list[float]]:
    cells: dict[str, str] = defaultdict(str)
    fastest: dict[str, float] = {}
    shares = []
    for definition, axes, solution, language, role, config, latency_us, ratio in _passes():
        if (definition, axes) != (name, shape):
            continue
        column = TILE.get(language) if role == "kernel" else _baseline(solution)
        if column is None or latency_us >= fastest.get(column, float("inf")):
            continue
        fastest[column] = latency_us
        cells[column] = f"{latency_us:.1f}" + (" t" if config not in (None, "", "{}") else "")
        if role == "kernel" and ratio is not None:
            shares.append(ratio)
    return cells, shares


def _baseline(solution: str) -> str | None:
    return next((column for column, ends in BASELINES.items() if solution.endswith(ends)), None)


_known: list[Any] = []


def _passes() -> list[Any]:
    if not _known:
        _known.extend(_rows(PASSES, {"gpu": GPU, "dtypes": DTYPES, "names": list(SHAPES)}))
    return _known


def _rows(query: str, parameters: dict[str, Any]) -> list[Any]:
    from tilegym_db.store.opening import run_user_query

    return run_user_query(query, parameters).rows


def wanted() -> dict[Path, str]:
    """Return file -> the text that it must hold."""
    with shipped_store():
        rows = _rows(FAMILY, {"gpu": GPU})
        kernels = with_block(KERNELS.read_text(), "families", families(rows))
        kernels = with_block(kernels, "times", times())
        kernels = with_block(kernels, "targets of operators", operator_targets())
        gpus = with_block(GPUS.read_text(), "coverage of GPUs", coverage())
        gpus = with_block(gpus, "side by side", side_by_side())
        gpus = with_block(gpus, "winners", differing())
        records = [record for (record,) in _rows(RUNS_QUERY, {})]
        models = with_block(MODELS.read_text(), "runs of models", speedups_of_models(records))
        models = with_block(models, "targets of models", model_targets(records))
        return {
            KERNELS: kernels,
            OPERATORS: operators(rows),
            GPUS: gpus,
            MODELS: models,
            RUNS: runs_of_models(records),
        }


if __name__ == "__main__":
    raise SystemExit(write_or_check(__doc__ or "", wanted()))
