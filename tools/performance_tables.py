"""The tables of docs/performance/{kernels,families,gpus,models,bars}.md that the shipped traces and runs of models hold.

python tools/performance_tables.py            # writes the blocks
python tools/performance_tables.py --check
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import performance_bars
from marked_blocks import ROOT, shipped_store, with_block, write_or_check

from tilegym_db.records.model_run import CONTROL, Estimate, ModelRun, claims_of

PAGE = ROOT / "docs" / "performance" / "kernels.md"
FAMILIES, GPUS, MODELS, BARS = (PAGE.with_name(f"{name}.md") for name in ("families", "gpus", "models", "bars"))
GPU, DTYPES = "h200", "T=bfloat16"

SHAPES = {
    "fused_add_rms_norm": ("M=1,N=4096", "M=4096,N=4096", "M=16384,N=7168"),
    "gemm": (
        "K=4096,M=1,N=4096",
        "K=4096,M=8,N=28672",
        "K=14336,M=128,N=4096",
        "K=4096,M=512,N=4096",
        "K=4096,M=4096,N=4096",
        "K=4096,M=4096,N=28672",
        "K=8192,M=8192,N=8192",
    ),
    "rms_norm": ("M=1,N=4096", "M=4096,N=4096", "M=16384,N=7168", "M=131072,N=128"),
    "rms_norm_fp32": ("M=1,N=4096", "M=4096,N=4096", "M=16384,N=5120"),
    "rms_norm_gemma": ("M=1,N=5376", "M=4096,N=5376", "M=16384,N=5376"),
    "qk_rms_norm": ("D=128,Hkv=8,Hq=32,M=1", "D=128,Hkv=8,Hq=32,M=4096", "D=128,Hkv=8,Hq=32,M=16384"),
    "rope_neox": (
        "B=1,Bc=1,D=128,Hkv=8,Hq=32,S=1",
        "B=1,Bc=1,D=128,Hkv=8,Hq=32,S=4096",
        "B=1,Bc=1,D=128,Hkv=8,Hq=32,S=16384",
    ),
    "rope_partial": (
        "B=1,Bc=1,D=128,Hkv=8,Hq=24,R=96,S=1",
        "B=1,Bc=1,D=128,Hkv=8,Hq=24,R=96,S=4096",
        "B=1,Bc=1,D=256,Hkv=2,Hq=16,R=64,S=16384",
    ),
    "gelu_tanh_and_mul": ("I=21504,M=1", "I=10240,M=4096", "I=21504,M=4096"),
    "silu_and_mul": ("I=14336,M=1", "I=14336,M=4096", "I=8192,M=16384"),
    "softmax": ("M=8,N=128256", "M=32,N=4096", "M=1024,N=128256", "M=4096,N=4096", "M=16384,N=8192", "M=65536,N=2048"),
    "swiglu": ("I=14336,M=1", "I=14336,M=4096", "I=8192,M=16384"),
}
LARGE = (
    ("fused_add_rms_norm", "M=16384,N=7168"),
    ("rms_norm", "M=16384,N=7168"),
    ("rms_norm_fp32", "M=16384,N=5120"),
    ("rms_norm_gemma", "M=16384,N=5376"),
    ("rope_neox", "B=1,Bc=1,D=128,Hkv=8,Hq=32,S=16384"),
    ("rope_neox", "B=8,Bc=1,D=128,Hkv=8,Hq=32,S=2048"),
    ("silu_and_mul", "I=12288,M=4096"),
    ("silu_and_mul", "I=14336,M=4096"),
    ("silu_and_mul", "I=8192,M=16384"),
    ("softmax", "M=1024,N=128256"),
    ("softmax", "M=16384,N=8192"),
    ("softmax", "M=65536,N=2048"),
    ("swiglu", "I=12288,M=4096"),
    ("swiglu", "I=14336,M=4096"),
    ("swiglu", "I=8192,M=16384"),
)
COLUMNS = ("Triton", "TileLang", "cuTile", "stock", "ATen", "compile")
TILE = {"triton": "Triton", "tilelang": "TileLang", "cutile": "cuTile"}
TITLES = {
    "activation": "Activations",
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
    """One row a shape: the fastest verified time in us of each language and baseline, and the share of the speed of light."""
    lines = [f"| operator | shape | {' | '.join(COLUMNS)} | of light |", f"|---|---|{'---:|' * (len(COLUMNS) + 1)}"]
    for name, shapes in SHAPES.items():
        for shape in shapes:
            cells, shares = _cells(name, shape)
            share = f"{max(shares):.0%}" if shares else ""
            lines.append(f"| {name} | {shape.replace(',', ' ')} | {' | '.join(cells[c] for c in COLUMNS)} | {share} |")
    return "\n".join(lines)


def shares() -> str:
    """One row a large shape: the share of the speed of light that each language reaches."""
    lines = [f"| operator | shape | {' | '.join(TILE.values())} |", f"|---|---|{'---:|' * len(TILE)}"]
    for name, shape in LARGE:
        best: dict[str, float] = defaultdict(float)
        for definition, axes, _, language, role, _, _, ratio in _passes():
            if (definition, axes, role) == (name, shape, "kernel") and ratio is not None:
                best[language] = max(best[language], ratio)
        cells = [f"{best[language]:.0%}" if best[language] else "" for language in TILE]
        lines.append(f"| {name} | {shape.replace(',', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


RUN_FIGURES = (("ms to the first token", "ttft", "ttft_ms"), ("ms a token", "tpot", "tpot_ms"))
RUNS = "SELECT record FROM model_runs ORDER BY gpu, model, layers, batch, prompt_tokens, new_tokens, timestamp"
NO_RUNS = "No run is published yet."


def runs_of_models() -> str:
    """Two rows a published run: the first token and the tokens after it, stock, patched and what is claimed; the peers beside."""
    lines = [
        "| model | layers | GPU | batch x prompt + new | figure | stock | patched | speedup | claim | other ways |",
        "|---|---:|---|---|---|---:|---:|---:|---|---|",
    ]
    for (record,) in _rows(RUNS, {}):
        run = ModelRun.from_json(record)
        claims = claims_of(run)
        call = f"{run.batch} x {run.prompt_tokens}" + (f" + {run.new_tokens}" if run.new_tokens else "")
        for label, figure, timed in RUN_FIGURES:
            if figure in claims:
                stock, patched = (getattr(way, timed).median for way in (run.stock, run.patched))
                others = {name: getattr(way.timing, timed) for name, way in run.ways.items() if name != CONTROL}
                beside = ", ".join(f"{name} {time.median:.4g}" for name, time in others.items() if time is not None)
                place = f"{run.model} | {run.layers} | {run.gpu} | {call} | {label}"
                times = f"{stock:.4g} | {patched:.4g} | {_speedup(getattr(run, f'{figure}_speedup'))}"
                lines.append(f"| {place} | {times} | {claims[figure].verdict} | {beside} |")
    return "\n".join(lines) if len(lines) > 2 else NO_RUNS


def _speedup(estimate: Estimate) -> str:
    interval = "" if estimate.ci_low is None else f" ({estimate.ci_low:.2f} to {estimate.ci_high:.2f})"
    return f"{estimate.median:.2f}x{interval}"


def families(rows: Iterable[Any]) -> str:
    """One table an op_type, whatever op_types there are; two rows an operator, its smallest and its largest measured shape."""
    columns = [*TILE.values(), "stock"]
    lines: list[str] = []
    for op_type, group in itertools.groupby(rows, key=lambda row: row[0]):
        lines += [f"## {TITLES.get(op_type, op_type.capitalize())}", ""]
        lines += [
            f"| operator | shape | {' | '.join(columns)} | of light |",
            f"|---|---|{'---:|' * (len(columns) + 1)}",
        ]
        for _, name, shape, *times, ratio in group:
            cells = ["" if time is None else f"{time:.1f}" for time in times]
            share = "" if ratio is None else f"{ratio:.0%}"
            lines.append(f"| {name} | {shape.replace(',', ' ')} | {' | '.join(cells)} | {share} |")
        lines.append("")
    return "\n".join(lines)


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
    )
    SELECT op_type, definition, axes_key, triton, tilelang, cutile, stock, ratio FROM point
    QUALIFY least(row_number() OVER (PARTITION BY definition ORDER BY sol_us, key),
                  row_number() OVER (PARTITION BY definition ORDER BY sol_us DESC, key)) = 1
    ORDER BY op_type, definition, sol_us, key
"""


def gains() -> str:
    """One row an operator: how much faster the fastest verified kernel is than the model's own code, over all shapes."""
    lines = ["| operator | shapes | slowest | median | fastest |", "|---|---:|---:|---:|---:|"]
    for name, count, low, median, high in _rows(GAINS, {"gpu": GPU}):
        lines.append(f"| {name} | {count} | {low:.2f}x | {median:.2f}x | {high:.2f}x |")
    return "\n".join(lines)


GAINS = """
    SELECT definition, count(*), min(speedup), median(speedup), max(speedup)
    FROM best WHERE gpu = $gpu AND speedup IS NOT NULL GROUP BY definition ORDER BY definition
"""


def coverage() -> str:
    """One row a GPU: what is published of it."""
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
    """One row an operator: the fastest verified kernel of each GPU at the largest shape that both have."""
    lines = ["| operator | shape | H200 | us | H100 | us | H100 / H200 |", "|---|---|---|---:|---|---:|---:|"]
    for name, shape, one, one_us, other, other_us in _rows(f"{FASTEST} {LARGEST}", {}):
        shape = shape.replace(",", " ")
        lines.append(
            f"| {name} | {shape} | {one} | {one_us:.1f} | {other} | {other_us:.1f} | {other_us / one_us:.2f} |"
        )
    return "\n".join(lines)


def differing() -> str:
    """One row a shape at which, of the kernels verified on both, another one is the fastest on the H100 than on the H200."""
    lines = ["| operator | shape | on the H200 | us | on the H100 | us |", "|---|---|---|---:|---|---:|"]
    for name, shape, one, one_us, other, other_us in _rows(DIFFERING, {}):
        lines.append(f"| {name} | {shape.replace(',', ' ')} | {one} | {one_us:.1f} | {other} | {other_us:.1f} |")
    return "\n".join(lines)


FASTEST = """
    WITH fastest AS (
        SELECT definition, axes_key, dtypes_key, scalars_key, layouts_key, gpu_family, max(sol_us) AS sol_us,
               arg_min(solution, row(latency_us, solution)) AS solution,
               arg_min(language, row(latency_us, solution)) AS language, min(latency_us) AS us
        FROM verified WHERE role = 'kernel' GROUP BY ALL
    ),
    pair AS (
        SELECT a.definition, row(a.axes_key, a.dtypes_key, a.scalars_key, a.layouts_key) AS key, a.axes_key, a.sol_us,
               a.solution AS one, a.language AS one_in, a.us AS one_us,
               b.solution AS other, b.language AS other_in, b.us AS other_us
        FROM fastest a JOIN fastest b USING (definition, axes_key, dtypes_key, scalars_key, layouts_key)
        WHERE a.gpu_family = 'h200' AND b.gpu_family = 'h100'
    )
"""
LARGEST = """
    SELECT definition, axes_key, one_in, one_us, other_in, other_us FROM pair
    QUALIFY row_number() OVER (PARTITION BY definition ORDER BY sol_us DESC, key) = 1 ORDER BY definition
"""
DIFFERING = """
    WITH paired AS (
        SELECT definition, axes_key, dtypes_key, scalars_key, layouts_key, solution,
               min(latency_us) FILTER (gpu_family = 'h200') AS h200_us, min(latency_us) FILTER (gpu_family = 'h100') AS h100_us
        FROM verified WHERE role = 'kernel' GROUP BY ALL HAVING h200_us IS NOT NULL AND h100_us IS NOT NULL
    )
    SELECT definition, axes_key, arg_min(solution, row(h200_us, solution)) AS on_h200, min(h200_us),
           arg_min(solution, row(h100_us, solution)) AS on_h100, min(h100_us)
    FROM paired GROUP BY definition, axes_key, dtypes_key, scalars_key, layouts_key HAVING on_h200 <> on_h100 ORDER BY ALL
"""


def operator_bars() -> str:
    """What is asked of operators, and whether it is met."""
    return performance_bars.bars(_rows(performance_bars.POINTS, {"names": performance_bars.names()}))


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
    from tilegym_db.store.sql import run_user_query

    return run_user_query(query, parameters).rows


def wanted() -> dict[Path, str]:
    """File -> what it must hold."""
    with shipped_store():
        page = with_block(PAGE.read_text(), "times", times())
        page = with_block(page, "shares", shares())
        tables = with_block(FAMILIES.read_text(), "families", families(_rows(FAMILY, {"gpu": GPU})))
        gpus = with_block(GPUS.read_text(), "coverage of GPUs", coverage())
        gpus = with_block(gpus, "side by side", side_by_side())
        gpus = with_block(gpus, "winners that differ", differing())
        runs = with_block(MODELS.read_text(), "runs of models", runs_of_models())
        bars = with_block(BARS.read_text(), "bars of operators", operator_bars())
        bars = with_block(bars, "bars of models", performance_bars.model_bars(record for (record,) in _rows(RUNS, {})))
        return {PAGE: with_block(page, "gains", gains()), FAMILIES: tables, GPUS: gpus, MODELS: runs, BARS: bars}


if __name__ == "__main__":
    raise SystemExit(write_or_check(__doc__ or "", wanted()))
