"""The table of operators in docs/performance.md, from the verified traces of a GPU that the database holds.

One row a shape: the fastest verified Solution of each language, each baseline, and the share of the fastest kernel of ours in
what the peaks allow (compulsory bytes over a copy's bandwidth, or flops over a large product's rate).

    python benchmarks/operator_table.py --gpu h200
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.paths import home
from tilegym_db.store.connection import open_store
from tilegym_db.store.ingest import ingest_journals

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
BASELINES = {"stock": ("_stock", "_cublas"), "ATen": ("_aten",), "compile": ("_compile",)}

PASSES = """
    SELECT p.axes_key, p.solution, s.language, s.role, newest.latency_us AS latency_us
    FROM newest_passes p JOIN solutions s ON s.name = p.solution AND s.definition = p.definition
    WHERE gpu = $gpu AND dtypes_key = $dtypes AND p.definition = $definition
"""


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bytes-per-us", type=float, default=4.3e6, help="of a large copy, read and written")
    parser.add_argument("--flops-per-us", type=float, default=790e6, help="of a large product")
    options = parser.parse_args()
    catalog = Catalog.default()
    columns = ("Triton", "TileLang", "cuTile", *BASELINES, "share")
    print(f"| operator | shape | {' | '.join(columns)} |")
    print("|---|---|" + "---|" * len(columns))
    with open_store(home(), catalog=catalog) as store:
        ingest_journals(store)
        for name, shapes in SHAPES.items():
            found: dict[str, dict[str, float]] = defaultdict(dict)
            asked = {"gpu": options.gpu, "dtypes": f"T={options.dtype}", "definition": name}
            for row in store.rows(PASSES, asked):
                column = column_of(row)
                known = found[row["axes_key"]]
                known[column] = min(row["latency_us"], known.get(column, row["latency_us"]))
            for shape in shapes:
                best = min((found[shape].get(c, float("inf")) for c in columns[:3]), default=float("inf"))
                sol_us = speed_of_light(catalog, name, shape, options)
                times = [f"{found[shape][c]:.1f}" if c in found[shape] else "" for c in columns[:-1]]
                print(f"| {name} | {shape} | {' | '.join(times)} | {sol_us / best:.2f} |")


def column_of(row: dict[str, Any]) -> str:
    """The column that a pass belongs to."""
    if row["role"] == "kernel":
        return {"triton": "Triton", "tilelang": "TileLang", "cutile": "cuTile"}[row["language"]]
    return next(name for name, ends in BASELINES.items() if row["solution"].endswith(ends))


def speed_of_light(catalog: Catalog, name: str, shape: str, options: argparse.Namespace) -> float:
    """The least time in microseconds that the peaks allow."""
    definition = catalog.definition(name)
    given = {axis: int(size) for axis, _, size in (part.partition("=") for part in shape.split(","))}
    axes = definition.bind_axes(given)
    flops, moved = definition.cost_of(axes, {"T": options.dtype})
    return max(moved / options.bytes_per_us, flops / options.flops_per_us)


if __name__ == "__main__":
    main()
