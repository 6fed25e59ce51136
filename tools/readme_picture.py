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
PAGE, ROW_HEIGHT, TOP, MARGIN = 860, 22, 58, 12
CHARACTER = 7.0
"""Maximum mean width of a character of 12 pixels, so that no name or label is cut."""
TICKS = 8
"""Maximum number of ticks."""

Row = tuple[str, int, float, float, float, str]


class Axis:
    """A logarithmic axis over every value of the rows, between the widest name and the widest label."""

    def __init__(self, rows: list[Row]) -> None:
        """Place the axis."""
        self.left = 2 * MARGIN + CHARACTER * max(len(row[0]) for row in rows)
        self.right = PAGE - 2 * MARGIN - CHARACTER * max(len(label(row)) for row in rows)
        self.low = math.floor(math.log2(min(1.0, *(row[2] for row in rows))))
        self.high = math.ceil(math.log2(max(row[4] for row in rows)))

    def x(self, ratio: float) -> float:
        """Return the place of a ratio."""
        return self.left + (self.right - self.left) * (math.log2(ratio) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return powers of two with 1 among them."""
        step = math.ceil((self.high - self.low + 1) / TICKS)
        first = -(-self.low // step) * step
        return [2.0**power for power in range(first, self.high + 1, step)]


def label(row: Row) -> str:
    """Return the text beside a bar."""
    _, shapes, _, mean, _, language = row
    return f"{mean:.1f}x, {shapes} shapes, {language}"


def picture(rows: list[Row]) -> str:
    """Return one bar per operator: the geometric mean of stock time over kernel time, with the range; log scale."""
    height = TOP + ROW_HEIGHT * len(rows) + 44
    axis = Axis(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PAGE}" height="{height}" viewBox="0 0 {PAGE} {height}" role="img" '
        'aria-label="Speedup of the fastest verified kernel over the model\'s own code, per operator, on an H200">',
        f"<style>{STYLE}</style>",
        '<text x="12" y="20" class="title">Fastest verified kernel against the model\'s own PyTorch code, NVIDIA H200</text>',
        '<text x="12" y="38" class="small">bar: geometric mean over the measured shapes; line: slowest to fastest shape</text>',
    ]
    bottom = TOP + ROW_HEIGHT * len(rows)
    for tick in axis.ticks():
        x = axis.x(tick)
        kind = "one" if tick == 1 else "grid"
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" class="{kind}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" class="small">{tick:g}x</text>')
    for index, row in enumerate(rows):
        name, _, low, mean, high, _ = row
        y = TOP + ROW_HEIGHT * index
        begin, end = sorted((axis.x(1), axis.x(mean)))
        parts.append(f'<text x="{axis.left - 8:.1f}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{begin:.1f}" y="{y}" width="{end - begin:.1f}" height="14" rx="2" class="bar"/>')
        parts.append(f'<line x1="{axis.x(low):.1f}" y1="{y + 7}" x2="{axis.x(high):.1f}" y2="{y + 7}" class="range"/>')
        parts.append(f'<text x="{axis.right + 8:.1f}" y="{y + 12}" class="small">{escape(label(row))}</text>')
    source = "shipped traces, promotion tier; python tools/readme_picture.py draws this"
    parts.append(f'<text x="12" y="{height - 8}" class="small">{source}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def table() -> str:
    """Return five operators of a Llama at 4096 tokens, as Markdown."""
    from tilegym_db.store.opening import run_user_query

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
    """Return file -> the content that it must have."""
    with shipped_store():
        from tilegym_db.store.opening import run_user_query

        drawn = picture(run_user_query(SPEEDUPS).rows)
        page = with_block(README.read_text(), "five operators", table())
    return {PICTURE: drawn, README: page}


if __name__ == "__main__":
    raise SystemExit(write_or_check(__doc__ or "", wanted()))
