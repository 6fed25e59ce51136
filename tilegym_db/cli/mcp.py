"""``tilegym-db mcp``: a server of the Model Context Protocol over stdio."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    allow_submit: Annotated[
        bool, typer.Option("--allow-submit", help="Also offer what writes: making tasks and handing kernels in.")
    ] = False,
) -> None:
    """Offer the loop's verbs to an agent as tools, on stdin and stdout. Read-only unless --allow-submit is given.

    A kernel that is handed in runs in a confined worker, as everywhere.
    """
    from tilegym_db.loop.mcp_server import serve

    serve(allow_submit)
