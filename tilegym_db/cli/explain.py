"""``tilegym-db explain``: what the resolver picks for a call, and why it picks none of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.output import note, print_json, print_table, spelled_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilegym_db.records.dtypes import Scalar
    from tilegym_db.resolver import Decision, Request

NO_VERIFIED_SOLUTION = 3


def command(
    name: Annotated[str, typer.Argument(help="The definition that is called.", metavar="NAME")],
    axes: Annotated[list[str] | None, typer.Option(help="Sizes: M=4096,N=4096.", metavar="A=SIZE,...")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Dtypes: T=bfloat16.", metavar="T=DTYPE,...")] = None,
    gpu: Annotated[str, typer.Option(help="A GPU such as h200 or cpu; auto is this machine's.")] = "auto",
    scalar: Annotated[list[str] | None, typer.Option(help="Scalars: eps=1e-5.", metavar="S=VALUE,...")] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="Layouts: x=row_contiguous (absent: contiguous).", metavar="X=CLASS,...")
    ] = None,
    mode: Annotated[str, typer.Option(help="inference or training.")] = "inference",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which solution the resolver picks for a call, and why not each of the others. Exit 3: stock code runs."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.resolver import decide_request, make_request, stock_solution, unavailable_languages

    catalog = Catalog.default()
    slug, target = _device(gpu)
    here = target is not None
    request = make_request(
        catalog.definition(name),
        axes={key: _size(key, text) for key, text in parse_pairs("--axes", axes).items()},
        dtypes=parse_pairs("--dtype", dtype),
        scalars={key: parse_scalar(text) for key, text in parse_pairs("--scalar", scalar).items()},
        layouts=parse_pairs("--layout", layout),
        gpu=slug,
        sm=target,
        mode=mode,
        unavailable=unavailable_languages(catalog.solutions_for(name)) if here else None,
    )
    decision, solutions = decide_request(request, catalog)
    stock = stock_solution(solutions)
    answer = describe(request, decision, stock.name if stock else None)
    if as_json:
        print_json(answer)
    else:
        _print(answer)
        if decision.solution is None:
            _note_unverified(name, slug)
    if decision.solution is None:
        raise typer.Exit(NO_VERIFIED_SOLUTION)


def _device(gpu: str) -> tuple[str, str | None]:
    """(slug or family, compile target); only ``auto`` asks the driver."""
    from tilegym_db.records.hardware import parse_gpu
    from tilegym_db.resolver.device import default_gpu

    return default_gpu() if gpu.strip().lower() == "auto" else (parse_gpu(gpu), None)


def parse_pairs(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """``["M=1,N=2"]`` or ``["M=1", "N=2"]`` -> ``{"M": "1", "N": "2"}``.

    Raises:
        UsageError: a part is not ``name=value``, or a name is given twice.
    """
    from tilegym_db.errors import UsageError

    found: dict[str, str] = {}
    for part in (part.strip() for text in texts or () for part in text.split(",")):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not (separator and key and value):
            raise UsageError(f"{option}: {part!r} must read name=value, as in M=4096.")
        if key in found:
            raise UsageError(f"{option}: '{key}' is given twice.")
        found[key] = value
    return found


def _size(axis: str, text: str) -> int:
    from tilegym_db.errors import UsageError

    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--axes: {axis} must be a whole number, not {text!r}.") from None


def parse_scalar(text: str) -> Scalar:
    """``true``, ``false``, ``none``, a number, or the text itself."""
    words: dict[str, Scalar] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def describe(request: Request, decision: Decision, stock: str | None) -> dict[str, Any]:
    """The decision as plain values: what ``--json`` prints, and what the table is made of."""
    from tilegym_db.resolver import not_in_compiled_code

    evidence, chosen = decision.evidence, decision.evidence.candidate
    return {
        "definition": request.definition.name,
        "axes": dict(request.axes),
        "dtypes": dict(request.dtypes),
        "scalars": dict(request.scalars),
        "layouts": dict(request.layouts),
        "gpu": request.gpu,
        "mode": request.mode,
        "solution": decision.solution.name if decision.solution else None,
        "stock": stock,
        "config": decision.config,
        "left_to_compilers": not_in_compiled_code(decision) if decision.solution else None,
        "evidence": {
            "source": evidence.source,
            "reason": evidence.reason,
            "gpu": evidence.gpu,
            "published": evidence.published,
            "axes": dict(evidence.axes) if evidence.axes is not None else None,
            "measurement": vars(chosen) if chosen is not None else None,
        },
        "rejected": [{**vars(candidate), "reason": reason} for candidate, reason in decision.rejected],
    }


def _print(answer: dict[str, Any]) -> None:
    evidence = answer["evidence"]
    asked = {**answer["axes"], **answer["dtypes"], **answer["scalars"], **answer["layouts"]}
    note(f"{answer['definition']} at {spelled_map(asked)} on {answer['gpu']}:")
    print_table(
        ["", "solution", "language", "config", "latency us", "speedup", "CI low", "why"],
        [
            _row("picked", evidence["measurement"] or {"solution": _stock_label(answer)}, evidence["reason"]),
            *(_row("", item, item["reason"]) for item in answer["rejected"]),
        ],
    )
    if answer["left_to_compilers"]:
        note(f"In code under torch.compile stock code runs: {answer['left_to_compilers']}.")
    if evidence["published"]:
        note(f"Measured on {evidence['gpu']}, published {evidence['published']}. Speedup is against stock code.")
    elif answer["solution"] is None:
        note("Measure and publish on that GPU: tilegym-db bench --promote, then tilegym-db publish.")


def _note_unverified(definition: str, gpu: str) -> None:
    from tilegym_db.cli.reader import open_reader, unverified_note
    from tilegym_db.errors import StoreError

    try:
        with open_reader() as store:
            unverified = unverified_note(store, definition=definition, gpu=gpu)
    except StoreError as error:  # the decision above was made without the store, and stands
        unverified = f"note: {error}"
    if unverified:
        note(unverified)


def _stock_label(answer: dict[str, Any]) -> str:
    return f"stock ({answer['stock']})" if answer["stock"] else "none: there is no stock solution"


def _row(mark: str, item: dict[str, Any], why: str) -> list[Any]:
    keys = ("solution", "language", "config", "latency_us", "speedup", "speedup_ci_low")
    return [mark, *(item.get(key) for key in keys), why]
