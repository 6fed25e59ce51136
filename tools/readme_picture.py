"""The picture and the table of README.md, from the traces that ship with the package.

python tools/readme_picture.py            # writes docs/pictures/speedup.svg and the block in README.md
python tools/readme_picture.py --check
"""

from __future__ import annotations

import math
from pathlib import Path
from xml.sax.saxutils import escape

from marked_blocks import ROOT, shipped_store, with_block, write_or_check

GPU = "h200"
PICTURE = ROOT / "docs" / "pictures" / "speedup.svg"
README = ROOT / "README.md"

SPEEDUPS = f"""
    SELECT definition, count(*) AS shapes, min(speedup) AS low, exp(avg(ln(speedup))) AS mean, max(speedup) AS high,
           mode(language ORDER BY language) AS language
    FROM best WHERE gpu = '{GPU}' AND speedup IS NOT NULL AND language <> 'python'
    GROUP BY definition HAVING count(*) >= 10 ORDER BY mean DESC, definition
"""
FIVE = (
    ("rms_norm", "M=4096,N=4096"),
    ("fused_add_rms_norm", "M=4096,N=4096"),
    ("swiglu", "I=14336,M=4096"),
    ("rope_neox", "B=1,Bc=1,D=128,Hkv=8,Hq=32,S=4096"),
    ("softmax", "M=4096,N=4096"),
)
ROW = f"""
    SELECT solution, language, latency_us, speedup, sol_ratio FROM best
    WHERE gpu = '{GPU}' AND dtypes_key = 'T=bfloat16' AND definition = $definition AND axes_key = $axes
    ORDER BY layouts_key, latency_us, trace_id LIMIT 1
"""

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e }
.title { font-size: 14px; font-weight: 600 } .grid { stroke: #d1d9e0 } .one { stroke: #59636e }
.bar { fill: #54aeff } .range { stroke: #0550ae; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .small { fill: #9198a1 } .grid { stroke: #3d444d }
.one { stroke: #9198a1 } .bar { fill: #1f6feb } .range { stroke: #a5d6ff } }
"""
LEFT, WIDTH, ROW_HEIGHT, TOP, HIGHEST = 190, 470, 22, 58, 16.0


def picture(rows: list[tuple[str, int, float, float, float, str]]) -> str:
    """Return one bar per operator: the geometric mean of stock time over kernel time, with the range; log scale."""
    height = TOP + ROW_HEIGHT * len(rows) + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" viewBox="0 0 760 {height}" role="img" '
        'aria-label="Speedup of the fastest verified kernel over the model\'s own code, per operator, on an H200">',
        f"<style>{STYLE}</style>",
        '<text x="12" y="20" class="title">Fastest verified kernel against the model\'s own PyTorch code, NVIDIA H200</text>',
        '<text x="12" y="38" class="small">bar: geometric mean over the measured shapes; line: slowest to fastest shape</text>',
    ]
    bottom = TOP + ROW_HEIGHT * len(rows)
    for tick in (1, 2, 4, 8, 16):
        x = _x(tick)
        kind = "one" if tick == 1 else "grid"
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" class="{kind}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" class="small">{tick}x</text>')
    for index, (name, shapes, low, mean, high, language) in enumerate(rows):
        y = TOP + ROW_HEIGHT * index
        parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{_x(1):.1f}" y="{y}" width="{_x(mean) - _x(1):.1f}" height="14" rx="2" class="bar"/>')
        parts.append(f'<line x1="{_x(low):.1f}" y1="{y + 7}" x2="{_x(high):.1f}" y2="{y + 7}" class="range"/>')
        label = f"{mean:.1f}x, {shapes} shapes, {language}"
        parts.append(f'<text x="{_x(HIGHEST) + 8:.1f}" y="{y + 12}" class="small">{escape(label)}</text>')
    source = "shipped traces, promotion tier; python tools/readme_picture.py draws this"
    parts.append(f'<text x="12" y="{height - 8}" class="small">{source}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(ratio: float) -> float:
    return LEFT + (WIDTH - 60) * math.log2(max(ratio, 0.8)) / math.log2(HIGHEST)


def table() -> str:
    """Five operators of a Llama at 4096 tokens, as Markdown."""
    from tilegym_db.store.sql import run_user_query

    lines = [
        "| operator | shape, bf16 | fastest verified kernel | us | against the model's own code | of the speed of light |"
    ]
    lines.append("|---|---|---|---:|---:|---:|")
    for name, axes in FIVE:
        rows = run_user_query(ROW, {"definition": name, "axes": axes}).rows
        if not rows:
            raise SystemExit(f"nothing verified for {name} at {axes} on {GPU}")
        solution, language, latency_us, speedup, ratio = rows[0]
        lines.append(
            f"| {name} | {axes.replace(',', ' ')} | {solution} ({language}) | {latency_us:.1f} | {speedup:.2f}x | {ratio:.0%} |"
        )
    return "\n".join(lines)


def wanted() -> dict[Path, str]:
    """File -> what it must hold."""
    with shipped_store():
        from tilegym_db.store.sql import run_user_query

        drawn = picture(run_user_query(SPEEDUPS).rows)
        page = with_block(README.read_text(), "five operators", table())
    return {PICTURE: drawn, README: page}


if __name__ == "__main__":
    raise SystemExit(write_or_check(__doc__ or "", wanted()))
