"""What a pass is worth by how its worker was confined, to whom, and whose source it ran. Pure."""

from __future__ import annotations

from typing import Literal

from tilegym_db.records.trace import PUBLISHED_SANDBOX_LEVEL

__all__ = ["Audience", "source_key", "why_not_believed"]

Audience = Literal["this user", "others"]
"""Who would be served: the user of the machine that measured, or whoever a published file reaches."""


def why_not_believed(level: int, *, is_shipped: bool, origin: str = "local", audience: Audience) -> str | None:
    """Why a promoted pass may not serve; None where it may.

    A worker that is not confined could have reached what judged it. Sources that the package ships were promoted confined by
    whoever released it, or at least read by them; on a machine that confines nobody they may serve its own user, and nobody else.

    Args:
        level: the sandbox level on the trace.
        is_shipped: definition and source are, by their digests, of those that the package ships.
        origin: who vouches for the trace: ``shipped``, ``local``, or ``foreign``.
        audience: who would be served.
    """
    if level >= PUBLISHED_SANDBOX_LEVEL:
        return None
    why = f"sandbox level {level}: its worker could have reached what judged it"
    if level < 1:
        return why
    if not is_shipped:
        return f"{why}, and its source is not one that the package ships"
    if origin != "local" or audience != "this user":
        return f"{why}, so it serves the user of the machine that measured it, and nobody else"
    return None


def source_key(definition_digest: str, solution_digest: str) -> str:
    """What a Definition and a source of it are known by together."""
    return f"{definition_digest}/{solution_digest}"
