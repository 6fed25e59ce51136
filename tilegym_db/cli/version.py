"""``tilegym-db version``: this package and what a measurement depends on."""

from __future__ import annotations

from typing import Annotated

import typer

from tilegym_db.cli.output import print_json

PACKAGES = ("duckdb", "torch", "triton", "tilelang", "cuda-tile", "nvidia-cuda-tileiras", "transformers")


def command(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print the version of tilegym-db and of the packages it works with."""
    versions = installed_versions()
    if as_json:
        print_json(versions)
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
