"""``tilegym-db new``: write valid draft files, and print the next command."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilegym_db.cli.commands import command_group
from tilegym_db.cli.kit.formats import AsJson, file_name
from tilegym_db.cli.kit.output import note, print_json, print_table
from tilegym_db.errors import ConflictError, RecordError, UsageError

if TYPE_CHECKING:
    from tilegym_db.scaffold.model_config import MappedWorkloads


app = command_group("Write a draft of a definition, a solution or workloads, with the next command.")


@app.command("definition")
def new_definition(
    name: Annotated[str, typer.Argument(help="Name of the operator, such as layer_norm.")],
    op_type: Annotated[str, typer.Option(help="Its family: norm, activation, softmax, ...")] = "elementwise",
    inputs: Annotated[
        str, typer.Option(help="Arguments of the operator, in order; without [] it is a Python number.")
    ] = ("x[M, N], weight[N]"),
    outputs: Annotated[str, typer.Option(help="Outputs of the operator.")] = "out[M, N]",
    description: Annotated[str, typer.Option(help="The computation, and where it rounds.")] = "",
    folder: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; default: ./NAME.", callback=file_name)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the draft of an operator: a folder with its record, its reference and its self-test."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.scaffold.definition_draft import draft_definition, parse_tensors

    check_name(name, "NAME")
    if not description.isprintable():
        raise UsageError(
            "--description is one line of text, without line breaks and control characters.", code="description_invalid"
        )
    existing = Catalog.default().definition_paths.get(name)
    if existing is not None:
        raise ConflictError(
            f"definition '{name}' exists already, at {existing}. Use another name.", code="definition_exists"
        )
    files = draft_definition(
        name, op_type, parse_tensors("--inputs", inputs), parse_tensors("--outputs", outputs), description
    )
    target = folder or Path(name)
    write_new(target, files)
    print_purposes(target, PURPOSES, as_json)
    note(f"Replace each TODO with your code. Next: tilegym-db check {shlex.quote(f'{target}/')}")


PURPOSES = {
    "definition.json": "axes, dtypes, tensors, constraints, cost of one call",
    "reference.py": "run(): the operator in plain PyTorch, with the model's rounding",
    "independent.py": "run(): another formulation; must agree with the reference",
    "planted_errors.json": "three or more mistakes that the verifier must catch",
    "workloads.jsonl": "small sizes, tagged 'tiny', that the self-test runs on",
}


@app.command("solution")
def new_solution(
    definition: Annotated[str, typer.Argument(help="The operator that it computes.")],
    language: Annotated[
        str | None, typer.Option("--language", "-l", help="python, triton, tilelang or cutile.")
    ] = None,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="Add the definition's reference as its stock code; there is nothing to edit."),
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the solution; default: from definition and language.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; default: ./NAME.", callback=file_name)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the draft of a kernel with the operator's signature, or add its stock code."""
    from tilegym_db.catalog import Catalog, writers
    from tilegym_db.records.solution import normalise_language
    from tilegym_db.scaffold.solution_draft import draft_solution, login_name, stock_solution_files

    if name is not None:
        check_name(name, "--name")
    catalog = Catalog.default()
    operator = catalog.definition(definition)
    if stock == (language is not None):
        raise UsageError(
            "give either --language for a draft of a kernel or --stock for the stock code.",
            code="options_clash",
        )
    if stock:
        if folder is not None:
            raise UsageError(
                "--stock adds to the catalog and writes no folder; leave out --output.", code="options_clash"
            )
        record, sources = stock_solution_files(operator, login_name(), name)
        path = writers.add_solution(catalog, record, sources)
        print_json({"solution": record.name, "definition": definition, "path": str(path)}) if as_json else typer.echo(
            str(path)
        )
        note(f"added solution '{record.name}' for {definition}. Next: tilegym-db new solution {definition} -l triton")
        return
    assert language is not None
    chosen = normalise_language(language)
    called = name or free_name(f"{definition}_{chosen}", set(catalog.solution_paths))
    target = folder or Path(called)
    write_new(target, draft_solution(operator, chosen, called, login_name()))
    purposes = {
        "kernel.py": "run(), called as the operator calls it",
        "solution.json": "what it supports, and its tunables",
    }
    print_purposes(target, purposes, as_json)
    draft = shlex.quote(f"{target}/")
    note(
        f"Replace each TODO with your code. Next: tilegym-db dev {draft} --watch, then: tilegym-db add-solution {draft}"
    )


WorkloadFile = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File to write; default: ./DEFINITION-MODEL.jsonl.", callback=file_name),
]


@app.command("workload")
def new_workload(
    config: Annotated[
        str,
        typer.Option(
            "--from-config", help="config.json of a Hugging Face model, or 'models': the list of known models."
        ),
    ],
    definition: Annotated[
        str | None, typer.Argument(help="The operator that is called; without it, all operators of the models.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name for the tag model:NAME; default: from the config.")] = None,
    tokens: Annotated[str, typer.Option(help="Counts of tokens, one workload each.")] = "1,512,4096",
    batch: Annotated[int, typer.Option(help="Number of sequences, for axes that count them.", min=1)] = 1,
    axes: Annotated[list[str] | None, typer.Option(help="Sizes that the config does not have: N=1024.")] = None,
    scalar: Annotated[list[str] | None, typer.Option(help="Scalars that the config does not have: eps=1e-5.")] = None,
    file: WorkloadFile = None,
    parallel: Annotated[
        str, typer.Option("--parallel", "--tp", help="Numbers of GPUs that share a model, if no operator is named.")
    ] = "1,2,4,8",
    gpu: Annotated[str, typer.Option(help="GPU whose peaks give the cost, if no operator is named.")] = "h200",
    add: Annotated[bool, typer.Option("--add", help="Add them to the catalog instead of writing a file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write an operator's workloads at the sizes of a model, from its config, and list what could not be mapped.

    Without an operator, write the points that all operators of the models need beside those of the catalog: from 1 to 256
    sequences and 128 to 131,072 tokens, each answered exactly or by a neighbour. The cost in seconds of a GPU is printed.
    """
    from tilegym_db.catalog import Catalog
    from tilegym_db.cli.kit.options import parse_axes, parse_scalars
    from tilegym_db.scaffold.model_config import read_model_config, workloads_from_config

    if definition is None:
        _write_cover(config, parallel, gpu, file, add, as_json)
        return
    path = Path(config)
    content = read_model_config(path)
    tag = model_name(content, path) if model is None else model
    if not tag.strip():
        raise UsageError(
            "--model '' is not a valid name for the tag model:NAME. Leave it out to use the config's name.",
            code="name_empty",
        )
    found = workloads_from_config(
        Catalog.default().definition(definition),
        content,
        model=tag,
        tokens=parse_counts(tokens),
        batch=batch,
        axes=parse_axes(axes),
        scalars=parse_scalars(scalar),
    )
    if not as_json:
        print_mapping(found)
    if not found.workloads:
        raise RecordError(f"no workload was written: {_why_none(found)}.", code="workload_missing")
    if add:
        add_to_catalog(found, definition, as_json)
        return
    target = file or Path(f"{definition}-{_as_file_name(tag)}.jsonl")
    write_workloads(target, found)
    print_json({"written": [str(target)], **mapping_of(found)}) if as_json else typer.echo(str(target))
    note(f"{len(found.workloads)} workloads. Next: tilegym-db add-workload {shlex.quote(str(target))}")


def _write_cover(config: str, parallel: str, gpu: str, file: Path | None, add: bool, as_json: bool) -> None:
    """Write the points that models need, and print their number and cost."""
    from tilegym_db.catalog import Catalog, writers
    from tilegym_db.records.hardware import parse_gpu
    from tilegym_db.scaffold.model_calls import cover_models, models_of

    catalog = Catalog.default()
    models = models_of(config)
    found, seconds = cover_models(catalog, models, parse_gpu(gpu), parallel=parse_counts(parallel, "--parallel"))
    workloads = [point.workload for point in found.points]
    content: dict[str, object] = {
        "models": len(models),
        "questions": found.questions,
        "answered_by_the_catalog": found.known,
        "without_definition": found.undescribed,
        "left_out": len(found.refused),
        "points": len(workloads),
        "gpu_seconds": round(seconds),
    }
    after = "nothing is left to measure: the catalog answers every question that has a definition"
    if workloads and add:
        content["added"] = len(writers.add_workloads(catalog, workloads))
        after = "Next: tilegym-db bench --workload 'model:*'"
    elif workloads:
        target = file or Path("workloads-models.jsonl")
        after = f"Next: tilegym-db add-workload {shlex.quote(str(target))}"
        write_new_file(target, "".join(workload.to_json() + "\n" for workload in workloads))
        content["written"] = str(target)
    print_json(content) if as_json else print_table(("what", "number"), list(content.items()))
    if not as_json:
        for reason in found.refused[:5]:
            note(f"left out: {reason}")
    note(f"{len(workloads)} points cost about {seconds / 60:.0f} minutes of one {gpu}. {after}")


def _as_file_name(tag: str) -> str:
    """Return a tag as part of a file name, without slashes."""
    return re.sub(r"[^\w.-]+", "-", tag).strip("-.") or "model"


def check_name(name: str, option: str) -> None:
    """Raise :class:`UsageError` unless a text is a valid record name."""
    from tilegym_db.records.text import NAME_PATTERN

    if re.fullmatch(NAME_PATTERN, name) is None:
        raise UsageError(
            f"{option} {name!r} is not a valid name: 1 to 128 of a-z, 0-9, '_', '.' and '-', beginning with a letter or a digit.",
            code="name_invalid",
        )


def add_to_catalog(found: MappedWorkloads, definition: str, as_json: bool) -> None:
    """Add the new workloads to the catalog and print their number."""
    from tilegym_db.catalog import Catalog, writers

    added = writers.add_workloads(Catalog.default(), found.workloads)
    if as_json:
        print_json({"added": [workload.uuid for _, workload in added], **mapping_of(found)})
    note(f"added {len(added)} of {len(found.workloads)} workloads. Next: tilegym-db bench {definition}")


def write_workloads(target: Path, found: MappedWorkloads) -> None:
    """Write a new file of workloads, one per line."""
    write_new_file(target, "".join(workload.to_json() + "\n" for workload in found.workloads))


def _why_none(found: MappedWorkloads) -> str:
    missing = ", ".join(found.unmapped)
    given = f"give what the config does not have with --axes or --scalar ({missing})"
    if missing:
        return given
    return found.refused[0].rstrip(".") if found.refused else "the definition's constraints exclude every size"


def print_mapping(found: MappedWorkloads) -> None:
    """Print the source of each axis and scalar, and those that could not be mapped, as a table."""
    sizes = found.workloads[-1] if found.workloads else None
    values = {} if sizes is None else {**sizes.axes, **sizes.scalars(), **sizes.dtypes}
    rows = [(name, values.get(name), source) for name, source in found.mapped.items()]
    rows += [(name, None, f"NOT MAPPED: {reason}") for name, reason in found.unmapped.items()]
    print_table(("axis or scalar", "value", "from"), rows)
    for reason in found.refused:
        note(f"left out: {reason}")


def mapping_of(found: MappedWorkloads) -> dict[str, object]:
    """Return the content of :func:`print_mapping` for JSON."""
    return {"mapped": found.mapped, "not_mapped": found.unmapped, "left_out": found.refused}


def parse_counts(text: str, option: str = "--tokens") -> list[int]:
    """Parse ``"1,512"`` to ``[1, 512]``; raise :class:`UsageError` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,12}", part) for part in parts):
        raise UsageError(f"{option}: {text!r} must be whole numbers, as in 1,512,4096.", code="tokens_invalid")
    return list(dict.fromkeys(int(part) for part in parts))


def model_name(config: Mapping[str, object], path: Path) -> str:
    """Return a model's name for a tag: from the config's name, type, or file name, in lower case without the organisation."""
    stated = config.get("_name_or_path") or config.get("model_type") or path.stem
    return re.sub(r"[^a-z0-9.]+", "-", str(stated).rstrip("/").rpartition("/")[2].lower()).strip("-") or "model"


def free_name(name: str, taken: set[str]) -> str:
    """Return ``name``, or ``name_2``, ``name_3``, ... if it is taken."""
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


def print_purposes(folder: Path, purposes: Mapping[str, str], as_json: bool) -> None:
    """Print the written files with their purposes."""
    if as_json:
        print_json({"written": [str(folder / name) for name in purposes]})
        return
    for name, purpose in purposes.items():
        typer.echo(f"{folder / name}  {purpose}")


# ---- Files ----------------------------------------------------------------------------------------------


def write_new(folder: Path, files: Mapping[str, str]) -> None:
    """Write a folder's files. Existing files are not changed."""
    from tilegym_db.files import write_exclusively, write_folder

    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ConflictError(
            f"{folder} exists already, and nothing was written. Choose another folder with --output.",
            code="folder_exists",
        )
    contents = {name: _encoded(text) for name, text in files.items()}
    if not os.path.lexists(folder):
        write_folder(folder, contents)  # atomic
        return
    for name, content in contents.items():  # an empty folder may be the working directory, so keep it
        write_exclusively(folder / name, content)


def write_new_file(path: Path, text: str) -> None:
    """Write a file that does not exist yet."""
    from tilegym_db.files import write_exclusively

    write_exclusively(path, _encoded(text))


def _encoded(text: str) -> bytes:
    """Encode a text in UTF-8, independent of the locale."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start]
        raise UsageError(
            f"an argument is not UTF-8, after {near!r}. Write it in UTF-8; nothing was written.", code="text_encoding"
        ) from None
