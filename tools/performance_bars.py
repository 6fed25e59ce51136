"""Targets for operators and models, and how far the shipped traces and runs of models meet them: every shape, as tables.

    python tools/performance_bars.py        # prints them; docs/performance has one line per target

A bar is for the fastest language, for each language, or both. A figure is a share of the speed of light (for operators that only
move bytes that is the share of the calibrated copy), microseconds, TFLOP/s, or times as fast as something else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from marked_blocks import shipped_store

from tilegym_db.records.loop import ModelRun, claims_of

LANGUAGES = {"triton": "Triton", "tilelang": "TileLang", "cutile": "cuTile"}
LIGHT, LATENCY, RATE, BASELINE = "light", "us", "TFLOP/s", "x baseline"


@dataclass(frozen=True)
class Point:
    """One shape of an operator on one GPU: the fastest verified time of each language, and of what there is without kernels."""

    definition: str
    shape: str
    axes: Mapping[str, int]
    dtypes: str
    gpu: str
    sol_us: float
    times: Mapping[str, float]
    baseline_us: float | None


@dataclass(frozen=True)
class Shapes:
    """The shapes that a target is about: their name in the table, and a test of the axes."""

    text: str
    include: Callable[[Mapping[str, int]], bool]


@dataclass(frozen=True)
class Bar:
    """Target of some operators at some shapes.

    ``best`` is for the fastest language, ``each`` for every language, ``of_best`` for every one as a share of the fastest.
    """

    definitions: tuple[str, ...]
    where: Shapes
    figure: str
    best: float
    each: float | None = None
    of_best: float | None = None
    dtype: str = "bfloat16"
    """That of T, where the operator has one: every bar is about half precision unless it says otherwise."""


def rows_of(axes: Mapping[str, int]) -> int:
    """Return the number of tokens, which some operators call T."""
    return axes.get("T", axes.get("M", 0))


PREFILL_ROWS = Shapes("4,096 tokens and more", lambda axes: rows_of(axes) >= 4096)
FEW = Shapes("1 to 16 tokens", lambda axes: 1 <= rows_of(axes) <= 16)
ONE = Shapes("1 token", lambda axes: rows_of(axes) == 1)
SMALL = Shapes("64 tokens or fewer", lambda axes: rows_of(axes) <= 64)
LONGEST = Shapes("16,384 tokens", lambda axes: rows_of(axes) == 16384)
MANY_ROWS = Shapes("4,096 rows of all experts and more", lambda axes: axes["S"] >= 4096)
ANYWHERE = Shapes("Measured shapes", lambda axes: True)

EXPERTS = ("moe_experts", "moe_experts_oai")
ROUTERS = (
    "topk_softmax", "topk_then_softmax", "topk_softmax_groups", "topk_sigmoid_bias_groups", "topk_sqrtsoftplus_bias",
    "table_router",
)  # fmt: skip
MOVEMENT = (
    "expand_to_fused", "expand_to_fused_with_sf", "expand_to_fused_with_sf_ue8m0", "reduce_fused", "reduce_fused_scaled",
    "reduce_fused_to_fp8", "reduce_fused_unweighted",
)  # fmt: skip
CASTS = (
    "cast_back", "per_block_cast", "per_block_cast_32", "per_block_cast_lossless", "per_channel_cast",
    "per_channel_cast_and_transpose", "per_channel_cast_fused", "per_row_cast", "per_token_cast", "per_token_cast_e5m6",
    "per_token_cast_fp4", "per_token_cast_mxfp8", "per_token_cast_ue8m0", "per_token_requantise", "swiglu_and_per_token_cast",
    "swiglu_backward_and_per_token_cast",
)  # fmt: skip
BACKWARDS = (
    "engram_gate_backward", "engram_gate_backward_saved", "mhc_expand_backward", "mhc_norm_fn_backward", "mhc_post_backward",
    "mhc_pre_apply_mix_backward",
)  # fmt: skip
"""Those that move megabytes. The gradients of coefficients (Sinkhorn, split, head) move too little for a share to mean much."""

GROUPS = {
    EXPERTS: "layers of experts",
    ROUTERS: "routers",
    MOVEMENT: "expand and reduce",
    CASTS: "casts",
    BACKWARDS: "gradients",
}

BARS: dict[str, tuple[Bar, ...]] = {
    "Mixtures of experts": (
        Bar(EXPERTS, PREFILL_ROWS, LIGHT, 0.65, of_best=0.75),
        Bar(EXPERTS, PREFILL_ROWS, BASELINE, 1.10),
        Bar(EXPERTS, FEW, LIGHT, 0.70),
        Bar(ROUTERS, SMALL, LATENCY, 6.0),
        Bar(ROUTERS, LONGEST, LIGHT, 0.70),
        Bar(MOVEMENT, PREFILL_ROWS, LIGHT, 0.85),
    ),
    "Casts, transposes and FP8 products": (
        Bar(CASTS, PREFILL_ROWS, LIGHT, 0.85, each=0.70),
        Bar(("batched_transpose",), ANYWHERE, LIGHT, 0.90),
        Bar(("batched_transpose",), ANYWHERE, LIGHT, 0.80, dtype="uint8"),
        Bar(("gemm_fp8_blockwise",), PREFILL_ROWS, RATE, 1200),
        Bar(("gemm_fp8_blockwise", "gemm_fp8_blockwise_dynamic"), FEW, LIGHT, 0.75),
        Bar(("moe_grouped_gemm_fp8",), MANY_ROWS, RATE, 1000),
    ),
    "Hyper-connections and engram": (
        Bar(("mhc_pre_fused", "mhc_post", "mhc_post_hf"), PREFILL_ROWS, LIGHT, 0.85),
        Bar(("engram_gate_fwd", "engram_gate_fwd_save", "engram_gate_hf"), PREFILL_ROWS, LIGHT, 0.85),
        Bar(BACKWARDS, PREFILL_ROWS, LIGHT, 0.75),
        Bar(("mhc_sinkhorn",), ONE, LATENCY, 8.0),
    ),
}

POINTS = """
    SELECT definition, axes_key, any_value(axes), dtypes_key, gpu_family, any_value(sol_us), language,
           min(latency_us) FILTER (role = 'kernel'), min(latency_us) FILTER (role <> 'kernel'),
           row(axes_key, dtypes_key, scalars_key, layouts_key) AS key
    FROM verified WHERE gpu_family IN ('h200', 'h100') AND definition IN $names
    GROUP BY definition, axes_key, dtypes_key, scalars_key, layouts_key, gpu_family, language
    ORDER BY definition, key, gpu_family, language
"""


def names() -> list[str]:
    """Return every operator that has a bar."""
    return sorted({name for bars in BARS.values() for bar in bars for name in bar.definitions})


def points(rows: Iterable[Any]) -> list[Point]:
    """Return what ``POINTS`` found, one point per shape and GPU; of shapes that differ in scalars or layouts alone the first."""
    grouped: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for row in rows:
        definition, shape, _, dtypes, gpu, *_, key = row
        grouped[definition, shape, dtypes, gpu, str(key)].append(row)
    found: dict[tuple[str, str, str, str], Point] = {}
    for (definition, shape, dtypes, gpu, _), group in grouped.items():
        times = {row[6]: row[7] for row in group if row[7] is not None and row[6] in LANGUAGES}
        baselines = [row[8] for row in group if row[8] is not None]
        if times:
            point = Point(
                definition, shape, dict(group[0][2]), dtypes, gpu, group[0][5], times, min(baselines, default=None)
            )
            found.setdefault((definition, shape, dtypes, gpu), point)
    return list(found.values())


def figures_of(point: Point, bar: Bar) -> dict[str, float]:
    """Return language -> the figure of the bar; empty without a baseline to compare with."""
    if bar.figure == LIGHT:
        return {language: point.sol_us / us for language, us in point.times.items()}
    if bar.figure == LATENCY:
        return dict(point.times)
    if bar.figure == BASELINE:
        baseline_us = point.baseline_us
        return {} if baseline_us is None else {language: baseline_us / us for language, us in point.times.items()}
    rows = point.axes.get("S", point.axes.get("M", 0))
    teraflop = 2 * rows * point.axes["N"] * point.axes["K"] / 1e12
    return {language: teraflop / us * 1e6 for language, us in point.times.items()}


def best_of(figures: Collection[float], bar: Bar) -> float:
    """Return the figure of the fastest language."""
    return min(figures) if bar.figure == LATENCY else max(figures)


def shown(figure: float | None, kind: str) -> str:
    """Return a figure as a cell."""
    if figure is None:
        return ""
    return {LIGHT: f"{figure:.3f}", LATENCY: f"{figure:.1f} us", RATE: f"{figure:,.0f}", BASELINE: f"{figure:.2f}x"}[
        kind
    ]


def asked(bar: Bar) -> str:
    """Return the bar in words."""
    unit = {LIGHT: "of light", LATENCY: "us", RATE: "TFLOP/s", BASELINE: "x the best baseline"}[bar.figure]
    sign = "<=" if bar.figure == LATENCY else ">="
    parts = [f"{sign} {bar.best:,g} {unit}"]
    parts += [f"each {bar.each:g}"] if bar.each is not None else []
    parts += [f"each {bar.of_best:g} of the best"] if bar.of_best is not None else []
    return ", ".join(parts)


def verdict(figures: Mapping[str, float], bar: Bar) -> str:
    """Return ``yes`` with the languages that miss the bar or lack a measurement, or ``no``."""
    best = best_of(figures.values(), bar)
    if best > bar.best if bar.figure == LATENCY else best < bar.best:
        return "**no**"
    lowest = bar.each if bar.each is not None else None if bar.of_best is None else bar.of_best * best
    behind = [LANGUAGES[name] for name, value in figures.items() if lowest is not None and value < lowest]
    missing = [LANGUAGES[name] for name in LANGUAGES if lowest is not None and name not in figures]
    said = [f"{', '.join(behind)} behind"] if behind else []
    said += [f"{', '.join(missing)} not measured"] if missing else []
    return f"yes; {'; '.join(said)}" if said else "yes"


def about(bar: Bar, point: Point) -> bool:
    """Return whether the bar asks something of this point."""
    dtype = dict(pair.split("=") for pair in point.dtypes.split(",") if pair).get("T", bar.dtype)
    return point.definition in bar.definitions and dtype == bar.dtype and bar.where.include(point.axes)


def bar_rows(bar: Bar, known: Iterable[Point]) -> Iterator[str]:
    """Yield a row for each H200 point that the bar is about, with the best of an H100, or a row that says that there is none."""
    found = [point for point in known if about(bar, point)]
    for name in bar.definitions:
        here = [point for point in found if point.definition == name and point.gpu == "h200"]
        for point in here:
            figures = figures_of(point, bar)
            cells = " | ".join(shown(figures.get(language), bar.figure) for language in LANGUAGES)
            met = verdict(figures, bar) if figures else "nothing to compare with"
            shape = point.shape.replace(",", " ")
            yield f"| {name} | {shape} | {asked(bar)} | {cells} | {met} | {_elsewhere(point, bar, found)} |"
        if not here:
            yield f"| {name} | {'' if bar.dtype == 'bfloat16' else bar.dtype} | {asked(bar)} |  |  |  | not measured |  |"


def _elsewhere(point: Point, bar: Bar, found: Iterable[Point]) -> str:
    for other in found:
        if (other.definition, other.shape, other.dtypes, other.gpu) == (
            point.definition,
            point.shape,
            point.dtypes,
            "h100",
        ):
            figures = figures_of(other, bar).values()
            return shown(best_of(figures, bar), bar.figure) if figures else ""
    return ""


def bars(rows: Iterable[Any]) -> str:
    """Return one table per subject, with a row for each bar and each H200 shape that it is about."""
    found, lines = points(rows), []
    for title, asked_for in BARS.items():
        lines += [
            f"### {title}",
            "",
            f"| operator | shape | bar | {' | '.join(LANGUAGES.values())} | met | best on an H100 |",
        ]
        lines += [f"|---|---|---|{'---:|' * len(LANGUAGES)}---|---:|"]
        for bar in asked_for:
            lines += bar_rows(bar, found)
        lines.append("")
    return "\n".join(lines)


def summary(rows: Iterable[Any]) -> str:
    """Return one row per bar: how many of the H200 shapes that it is about meet it."""
    found = points(rows)
    lines = ["| operators | shapes | target | met | missed |", "|---|---|---|---:|---:|"]
    for asked_for in BARS.values():
        for bar in asked_for:
            here = [point for point in found if about(bar, point) and point.gpu == "h200"]
            verdicts = [verdict(figures, bar) for point in here if (figures := figures_of(point, bar))]
            missed = sum(said == "**no**" for said in verdicts)
            named = GROUPS.get(bar.definitions) or ", ".join(bar.definitions)
            lines.append(f"| {named} | {bar.where.text} | {asked(bar)} | {len(verdicts) - missed} | {missed} |")
    return "\n".join(lines)


PREFILL, DECODE = "prefill", "decode"
GOALS = {
    "qwen3-30b-a3b": {PREFILL: 2.5, DECODE: 2.0},
    "olmoe-1b-7b": {PREFILL: 2.5, DECODE: 2.0},
    "gpt-oss-20b": {PREFILL: 1.5, DECODE: 1.5},
    "deepseek-v2-lite": {PREFILL: 1.5, DECODE: 1.5},
}
"""Speedup over the best of stock that is asked for, of eight layers in bf16 with a dynamic cache."""


def model_summary(records: Iterable[str]) -> str:
    """Return one row per goal: how many of the published runs meet it."""
    verdicts: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for record in records:
        run = ModelRun.from_json(record)
        what, figure = (DECODE, "tpot") if run.new_tokens else (PREFILL, "ttft")
        claims = claims_of(run)
        if run.model in GOALS and figure in claims:
            estimate = getattr(run, f"{figure}_speedup")
            is_met = claims[figure].verdict == "faster" and estimate.median >= GOALS[run.model][what]
            verdicts[run.model, what].append(is_met)
    lines = ["| model | phase | target | runs | met |", "|---|---|---:|---:|---:|"]
    for model, goals in GOALS.items():
        for what, goal in goals.items():
            runs = verdicts[model, what]
            lines.append(f"| {model} | {what} | {goal:g}x | {len(runs)} | {sum(runs)} |")
    return "\n".join(lines)


def model_bars(records: Iterable[str]) -> str:
    """Return a row for each published run of a model with a goal: the speedup over what stock runs by default, and the goal."""
    lines = ["| model | GPU | batch x prompt + new | goal | speedup | claim | met |", "|---|---|---|---|---|---|---|"]
    for record in records:
        run = ModelRun.from_json(record)
        what, figure = (DECODE, "tpot") if run.new_tokens else (PREFILL, "ttft")
        claims = claims_of(run)
        if run.model not in GOALS or figure not in claims:
            continue
        estimate, goal = getattr(run, f"{figure}_speedup"), GOALS[run.model][what]
        call = f"{run.batch} x {run.prompt_tokens}" + (f" + {run.new_tokens}" if run.new_tokens else "")
        met = "yes" if claims[figure].verdict == "faster" and estimate.median >= goal else "**no**"
        cells = (
            f"{run.model} | {run.gpu} | {call} | {goal:g}x | {estimate.median:.2f}x | {claims[figure].verdict} | {met}"
        )
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Print every shape and every run that has a target."""
    from tilegym_db.store.opening import run_user_query

    runs = "SELECT record FROM model_runs ORDER BY gpu, model, layers, batch, prompt_tokens, new_tokens, timestamp"
    with shipped_store():
        print(bars(run_user_query(POINTS, {"names": names()}).rows))
        print(model_bars(record for (record,) in run_user_query(runs).rows))


if __name__ == "__main__":
    main()
