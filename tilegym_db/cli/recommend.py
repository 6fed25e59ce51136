"""``tilegym-db recommend``: which promotions would serve which calls of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from tilegym_db.cli.completion import complete_gpu
from tilegym_db.cli.options import MOST_TOKENS, ConfigFile
from tilegym_db.cli.output import note, print_json, print_table


def command(
    config: ConfigFile,
    gpu: Annotated[str, typer.Option(help="h100, h200, ...; it need not be here.", autocompletion=complete_gpu)],
    prompt: Annotated[
        int, typer.Option(help="Random tokens; a step of decoding follows.", min=1, max=MOST_TOKENS)
    ] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    layers: Annotated[int, typer.Option(help="Keep only the first so many layers.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which promoted kernels would serve which calls of a model. Nothing is applied: publish and patch do that.

    Ratios are of operators, and no figure of the model is made of them; what was measured of the model itself is listed apart.
    """
    from tilegym_db.cli.best import chosen_gpu

    chosen_gpu(gpu)  # before PyTorch is loaded, which takes seconds
    from tilegym_db.loop.recommend import recommend

    found = recommend(config, gpu=gpu, prompt=prompt, dtype=dtype, layers=layers)
    if as_json:
        print_json(found.to_dict())
        return
    columns = (
        "definition",
        "stage",
        "axes",
        "dtypes",
        "available",
        "applied",
        "promotion",
        "op_ratio",
        "over",
        "reason",
    )
    rows = [
        tuple("" if value is None else value for value in (getattr(call, name) for name in columns))
        for call in found.calls
    ]
    print_table(columns, rows, prose=("reason",), least=("over", "dtypes"))
    if found.model_runs:
        names = list(found.model_runs[0])
        print_table(names, [tuple(run.values()) for run in found.model_runs])
    else:
        note(f"nothing was measured of {found.model} itself on {gpu}. Try: tilegym-db model-bench {config}")
