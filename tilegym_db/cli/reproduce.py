"""``tilegym-db reproduce``: one solution at one case, alone. Failure reports print the whole command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilegym_db.cli.output import print_json

if TYPE_CHECKING:
    from tilegym_db.bench.reproduce import Reproduction


def command(
    name: Annotated[str, typer.Argument(help="The solution.", metavar="SOLUTION")],
    axes: Annotated[list[str] | None, typer.Option(help="A size: M=17. Once per axis.", metavar="A=SIZE")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="A dtype: T=bfloat16.", metavar="T=DTYPE")] = None,
    scalar: Annotated[list[str] | None, typer.Option(help="A scalar: eps=1e-5.", metavar="S=VALUE")] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="A layout as workloads spell it; absent: contiguous.", metavar="X=LAYOUT")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(help="A tunable: BLOCK_M=2.", metavar="NAME=VALUE")] = None,
    contents: Annotated[str, typer.Option(help="The distribution of the inputs.")] = "normal",
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    offset: Annotated[int, typer.Option(help="Elements off alignment.")] = 0,
    gpu: Annotated[str, typer.Option(help="auto, cpu, or the GPU in this machine.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify one case of one solution and say what every gate found. Exit status 1 where it fails."""
    from tilegym_db.bench.reproduce import reproduce
    from tilegym_db.cli.explain import parse_scalar

    result = reproduce(
        name,
        axes={key: _whole(key, text) for key, text in _pairs("--axes", axes).items()},
        dtypes=_pairs("--dtype", dtype),
        scalars={key: parse_scalar(text) for key, text in _pairs("--scalar", scalar).items()},
        layouts=_pairs("--layout", layout),
        config={key: _tunable(text) for key, text in _pairs("--config", config).items()},
        contents=contents,
        seed=seed,
        offset=offset,
        gpu=gpu,
    )
    answer = describe(result)
    if as_json:
        print_json(answer)
    else:
        for key, value in answer.items():
            if value not in (None, "", []):
                typer.echo(f"{key}: {value}")
    if result.failure is not None:
        raise typer.Exit(1)


def describe(result: Reproduction) -> dict[str, Any]:
    """What to show of a result."""
    shown: dict[str, Any] = {"case": str(result.case)}
    if result.failure is not None:
        failure, verdict = result.failure, result.failure.verdict
        shown |= {"status": failure.status, "gate": failure.gate, "reason": failure.reason}
        if verdict is not None:
            shown |= {
                "output": failure.output,
                "first wrong index": list(verdict.index),
                "expected": verdict.expected,
                "got": verdict.got,
                "worst row": verdict.worst_row,
            }
        return shown | {"log": failure.log}
    if result.verdict is None:
        return shown | {"status": "proves nothing: the reference as written does not pass this case itself"}
    verdict_of = result.verdict
    return shown | {
        "status": "PASSED",
        "relative Frobenius error": verdict_of.rel_fro,
        "worst row": verdict_of.worst_row_rel,
        "largest error": verdict_of.max_abs,
    }


def _pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    """``["M=1", "x=strided(N + 8, 1)"]`` -> a dict; a value may hold commas and equals signs."""
    from tilegym_db.errors import UsageError

    found: dict[str, str] = {}
    for text in texts or ():
        key, separator, value = (piece.strip() for piece in text.partition("="))
        if not (separator and key and value):
            raise UsageError(f"{option}: {text!r} must read name=value, as in M=17.")
        if key in found:
            raise UsageError(f"{option}: '{key}' is given twice.")
        found[key] = value
    return found


def _whole(axis: str, text: str) -> int:
    from tilegym_db.errors import UsageError

    if not text.isdigit():
        raise UsageError(f"--axes: {axis} must be a whole number, not {text!r}.")
    return int(text)


def _tunable(text: str) -> bool | int | float | str:
    """A config value as JSON spells it; anything else is text."""
    import json

    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | str) else text
