"""A page for each Definition: what it computes, axes, edges, how it is proved, and which kernels are fastest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from docs_site.latency_picture import latency_picture, series_of

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Definition, Workload
    from tilegym_db.report.page import ReportData
    from tilegym_db.store.connection import Store

__all__ = ["operator_files"]

SHAPES_SHOWN = 12
"""Rows of the table of fastest kernels; the smallest, the largest and evenly between."""


def operator_files(catalog: Catalog, store: Store, report: ReportData) -> dict[str, str]:
    """Return path below the site's ``operators/`` -> text: a page and pictures per Definition, and an index."""
    files: dict[str, str] = {}
    leaders = []
    for name, definition in sorted(catalog.definitions.items()):
        evidence = [row for row in report.evidence if row["definition"] == name]
        page = _head(definition) + _interface(definition) + _edges(definition, catalog.workloads_for(name))
        page += _proof(definition)
        kernels, pictures = _kernels(store, definition, evidence)
        files[f"{definition.op_type}/{name}.md"] = "\n\n".join([*page, *kernels]) + "\n"
        files |= {f"{definition.op_type}/{path}": text for path, text in pictures.items()}
        leaders.append((definition, evidence))
    files["index.md"] = _index(leaders)
    return files


def _head(definition: Definition) -> list[str]:
    state = "open: no kernel is verified on a GPU yet" if definition.is_open else "verified"
    models = [tag.removeprefix("model:") for tag in definition.tags if tag.startswith("model:")]
    facts = [f"Version {definition.version}, {state}."]
    if definition.backward_of:
        facts.append(f"Gradients of {_name(definition.backward_of)}.")
    if models:
        facts.append(f"Sizes of {', '.join(models)}.")
    lines = [f"# {definition.name}", definition.description, " ".join(facts), "## What it computes"]
    return [*lines, f"```python\n{definition.reference.rstrip()}\n```"]


def _interface(definition: Definition) -> list[str]:
    sizes = ((name, _axis(axis), axis.description) for name, axis in definition.axes.items())
    tensors = [
        (f"`{name}`", role, _shape(spec.shape), f"`{spec.dtype}`", spec.description)
        for role, specs in (("input", definition.inputs), ("output", definition.outputs))
        for name, spec in specs.items()
    ]
    parts = ["## Axes and tensors", _table(("axis", "size", "what"), sizes)]
    parts.append(_table(("tensor", "role", "shape", "dtype", "what"), tensors))
    if definition.dtypes:
        variables = ((f"`{name}`", ", ".join(choices)) for name, choices in definition.dtypes.items())
        parts.append(_table(("dtype variable", "dtypes"), variables))
    return parts


def _axis(axis: Any) -> str:
    if axis.value is not None:
        return str(axis.value)
    return f"the scalar `{axis.scalar}`" if axis.scalar else "of the workload"


def _shape(shape: Sequence[str | int] | None) -> str:
    return "number" if shape is None else f"`[{', '.join(map(str, shape))}]`"


def _edges(definition: Definition, workloads: Sequence[Workload]) -> list[str]:
    odd = sorted({", ".join(f"{k}={v}" for k, v in item.axes.items()) for item in workloads if "odd" in item.tags})
    lines = [
        *(f"`{text}`" for text in definition.constraints),
        *(f"`{output}` is written over `{source}`" for source, output in definition.in_place.items()),
        *(f"`{tensor}` always has the strides `{layout}`" for tensor, layout in definition.layouts.items()),
        *(f"`{output}`: codes must be equal ({rule})" for output, rule in definition.codes.items()),
        *(f"`{output}` may come in any order within a row" for output in definition.unordered),
        *(
            f"`{output}` points into `{source}`: any choice among equal values is right"
            for output, source in definition.gathers.items()
        ),
        *(
            f"`{output}` is drawn at random with the numbers in `{sampled.uniforms}`: it is judged by the law `{sampled.law}` of "
            "the reference, whichever index a number selects"
            for output, sampled in definition.sampled.items()
        ),
        *(f"tolerance of {dtype}: {tolerance.reason}" for dtype, tolerance in definition.tolerance.items()),
    ]
    special = ", ".join(definition.special_values)
    lines.append(f"defined for {special} as the reference treats them" if special else "not defined for nan and inf")
    if odd:
        lines.append(f"odd sizes that every kernel must pass: {'; '.join(f'`{text}`' for text in odd)}")
    return ["## Edges", "\n".join(f"- {line}" for line in lines)]


def _proof(definition: Definition) -> list[str]:
    parts = []
    if definition.self_test is not None:
        errors = ((error.why, f"`{_code(error.replace)}`") for error in definition.self_test.planted_errors)
        parts = [
            "## Mistakes that the comparison must catch",
            _table(("mistake", "in place of the right line"), errors),
        ]
    if definition.cost is not None:
        cost = (("flops", f"`{definition.cost.flops}`"), ("bytes", f"`{definition.cost.bytes}`"))
        parts += ["## Cost of a call", _table(("what", "expression"), cost)]
    return parts


def _kernels(store: Store, definition: Definition, evidence: list[dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
    from tilegym_db.store.queries.measured import leaderboard_rows

    parts, pictures = ["## Kernels"], {}
    ranks = leaderboard_rows(store, definition=definition.name)
    if not ranks:
        parts.append(f"None is verified yet. `tilegym-db list --solutions` has what waits: `{definition.name}`.")
    for gpu in dict.fromkeys(row["gpu"] for row in ranks):
        here = [row for row in evidence if row["gpu"] == gpu]
        parts.append(f"### {gpu}")
        series = series_of(here)
        if series:
            path = f"{definition.name}-{gpu}.svg"
            pictures[path] = latency_picture(f"{definition.name} on {gpu}: the fastest of each language", series)
            parts.append(f"![Latency by size of {definition.name} on {gpu}, one line a language]({path})")
        parts.append(_table(RANK_COLUMNS, map(_rank, (row for row in ranks if row["gpu"] == gpu))))
        fastest = sorted((row for row in here if row["is_fastest"]), key=_by_size)
        parts.append(_table(SHAPE_COLUMNS, map(_shape_row, _spread(fastest, SHAPES_SHOWN))))
        every = f"All {len(fastest)} shapes" if len(fastest) > SHAPES_SHOWN else "The same as a query"
        parts.append(f"{every}: `tilegym-db best {definition.name} --gpu {gpu}`.")
    return parts, pictures


RANK_COLUMNS = ("solution", "language", "fastest at", "speedup", "lowest", "highest", "of the speed of light")
SHAPE_COLUMNS = ("shape", "dtypes", "fastest", "us", "against the model's own code", "of the speed of light")


def _rank(row: dict[str, Any]) -> tuple[str, ...]:
    won = f"{row['wins']} of {row['shapes']}"
    return (
        f"`{row['solution']}`",
        row["language"],
        won,
        *(_times(row[key]) for key in ("geomean_speedup", "lowest_speedup", "highest_speedup")),
        _share(row["geomean_sol_ratio"]),
    )


def _shape_row(row: dict[str, Any]) -> tuple[str, ...]:
    shape = ", ".join(filter(None, (row["axes_key"].replace(",", ", "), row["layouts_key"])))
    fastest = f"`{row['solution']}`"
    return (
        shape,
        row["dtypes_key"],
        fastest,
        f"{row['latency_us']:.4g}",
        _times(row["speedup"]),
        _share(row["sol_ratio"]),
    )


def _by_size(row: dict[str, Any]) -> tuple[str, float, str]:
    return row["dtypes_key"], row["bytes"] or 0.0, row["trace_id"]


def _spread(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    if len(rows) <= most:
        return rows
    return [rows[round(at * (len(rows) - 1) / (most - 1))] for at in range(most)]


def _index(leaders: Iterable[tuple[Definition, list[dict[str, Any]]]]) -> str:
    families: dict[str, list[tuple[str, ...]]] = {}
    entries = []
    for definition, evidence in leaders:
        fastest = [row for row in evidence if row["is_fastest"]]
        languages = sorted({row["language"] for row in evidence if row["role"] == "kernel"})
        shapes = f"{len(fastest)} on {', '.join(sorted({row['gpu'] for row in fastest}))}" if fastest else "open"
        first = definition.description.partition(". ")[0].rstrip(".")
        link = f"[{definition.name}]({definition.op_type}/{definition.name}.md)"
        families.setdefault(definition.op_type, []).append((link, first, ", ".join(languages), shapes))
        entries.append(f"{definition.op_type}/{definition.name}")
    parts = ["# Operators", "One page a Definition, made from the records and the shipped measurements."]
    for family, rows in sorted(families.items()):
        parts += [f"## {family}", _table(("operator", "what", "verified in", "shapes"), rows)]
    toctree = "\n".join(sorted(entries))
    return "\n\n".join([*parts, f"```{{toctree}}\n:hidden:\n\n{toctree}\n```"]) + "\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return text.strip() or "nothing"


def _name(name: str) -> str:
    return f"`{name}`"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _share(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}"
