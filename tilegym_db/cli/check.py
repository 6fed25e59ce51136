"""``tilegym-db check``: validate records, the lock, references, self-tests and sources."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from tilegym_db.cli.kit.output import note, print_line


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Definitions, solutions, or drafts of definitions (a folder or a .json file); none means all."
        ),
    ] = None,
    update_lock: Annotated[bool, typer.Option(help="Add new versions to definitions.lock.json first.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print what the static scan only notes.")
    ] = False,
    architecture: Annotated[
        bool,
        typer.Option(
            "--architecture", help="Only what the catalog lacks as a whole: kernels, traces, names, evidence."
        ),
    ] = False,
    static: Annotated[
        bool, typer.Option("--static", help="Only what is found without running a reference: records, lock, sources.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check records, the lock, references, self-tests and sources, and list every problem.

    Exit status 1 if anything is found.
    """
    from tilegym_db.catalog import Catalog, writers
    from tilegym_db.verification.check import check, divided, draft_findings

    catalog = Catalog.default(warns=False)
    if update_lock:
        for locked in writers.update_lock(catalog, catalog.write_root):
            note(f"locked {locked}")
        catalog = Catalog.default(warns=False)
    drafts, added = divided(names or (), catalog)
    if architecture:
        from tilegym_db.loop.architecture import architecture_findings

        findings = [finding for path in drafts for finding in draft_findings(path, catalog)]
        findings += architecture_findings(catalog, added)
    else:
        findings = check(
            *names or (),
            catalog=catalog,
            static=static,
            on_note=(lambda text: note(f"note: {text}")) if verbose else None,
        )
    if as_json:
        print_line(json.dumps(findings))
    else:
        for finding in findings:
            print_line(finding)
        kind = "records" if catalog.solution_paths.keys() & {*added} else "definitions"
        note(f"checked {len(names or catalog.definitions)} {kind}: {len(findings)} findings")
        if names and not findings:
            after = [f"tilegym-db add-definition {shlex.quote(str(path))}" for path in drafts]
            note(f"Next: {'; '.join([*after, *(f'tilegym-db bench {name}' for name in added)])}")
    if added and (others := len(catalog.broken()) - len(catalog.broken(added))):
        note(f"{others} other records are broken. To list them: tilegym-db check")
    if findings:
        raise typer.Exit(1)
