"""What a shell completes: names of definitions, solutions, GPUs, languages, targets and views.

A shell asks while a user types: whatever fails, the answer is no proposal, and never an error.
"""

from __future__ import annotations

import re

__all__ = [
    "complete_definition",
    "complete_gpu",
    "complete_language",
    "complete_measurable_gpu",
    "complete_name",
    "complete_op_type",
    "complete_solution",
    "complete_statement",
    "complete_target",
]


def complete_definition(incomplete: str) -> list[str]:
    """Definitions of the catalog."""
    return _starting(_definitions(), incomplete)


def complete_name(incomplete: str) -> list[str]:
    """Definitions and solutions of the catalog."""
    return _starting([*_definitions(), *_solutions()], incomplete)


def complete_solution(incomplete: str) -> list[str]:
    """Solutions of the catalog."""
    return _starting(_solutions(), incomplete)


def complete_op_type(incomplete: str) -> list[str]:
    """Families of operators."""
    from tilegym_db.catalog import Catalog

    return _starting(
        sorted({path.parent.name for root in Catalog.default().roots for path in root.glob("definitions/*/*.json")}),
        incomplete,
    )


def complete_gpu(incomplete: str) -> list[str]:
    """Slugs and families that a query may name."""
    from tilegym_db.records.hardware import GPU_SLUGS, gpu_family

    return _starting(["auto", *sorted({*GPU_SLUGS, *map(gpu_family, GPU_SLUGS)})], incomplete)


def complete_measurable_gpu(incomplete: str) -> list[str]:
    """What this machine has, by name; a command that measures takes no other."""
    return _starting(["auto", "cpu"], incomplete) or complete_gpu(incomplete)


def complete_language(incomplete: str) -> list[str]:
    """Languages of solutions."""
    from tilegym_db.records import LANGUAGES

    return _starting(LANGUAGES, incomplete)


def complete_target(incomplete: str) -> list[str]:
    """Targets of ``compile``."""
    from tilegym_db.records.hardware import TARGETS

    return _starting([*TARGETS, "all"], incomplete)


def complete_statement(incomplete: str) -> list[str]:
    """A statement whose last word is completed to the name of a view."""
    from tilegym_db.store.views import public_views

    match = re.search(r"(\w*)$", incomplete)
    word = match.group() if match else ""
    start = incomplete[: len(incomplete) - len(word)]
    return [start + view for view in public_views() if view.startswith(word)]


def _definitions() -> list[str]:
    from tilegym_db.catalog import Catalog

    return sorted({path.stem for root in Catalog.default().roots for path in root.glob("definitions/*/*.json")})


def _solutions() -> list[str]:
    from tilegym_db.catalog import Catalog
    from tilegym_db.errors import TilegymDBError

    try:
        return list(Catalog.default().solutions)
    except TilegymDBError:  # one broken record; nothing is proposed while it is
        return []


def _starting(names: list[str] | tuple[str, ...], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
