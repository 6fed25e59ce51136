"""``tilegym-db version``: this package and what a measurement depends on."""

from __future__ import annotations

import typer

from tilegym_db.cli.formats import (
    AsArrow,
    AsCsv,
    AsJson,
    AsParquet,
    OutputFile,
    chosen_form,
    write_json,
    write_records,
)

PACKAGES = ("duckdb", "torch", "triton", "tilelang", "cuda-tile", "nvidia-cuda-tileiras", "transformers")


def command(
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    as_parquet: AsParquet = False,
    as_arrow: AsArrow = False,
    output: OutputFile = None,
) -> None:
    """Print the version of tilegym-db and of the packages it works with."""
    form = chosen_form(as_json, as_csv, as_parquet, as_arrow, output)
    versions = installed_versions()
    if form.kind == "json":
        write_json(form, versions)
        return
    if not form.is_table:
        write_records(form, [{"package": name, "version": found} for name, found in versions.items()])
        return
    for name, found in versions.items():
        typer.echo(f"{name} {found or 'not installed'}")


def installed_versions() -> dict[str, str | None]:
    """Distribution -> version, None where it is not installed; nothing is imported to find out."""
    import importlib.metadata
    import platform

    import tilegym_db

    versions: dict[str, str | None] = {"tilegym-db": tilegym_db.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions
