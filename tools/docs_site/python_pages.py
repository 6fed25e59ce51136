"""The Python reference: the public names of the package, from their docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import tilegym_db

__all__ = ["python_reference"]

RESULTS = {
    "tilegym_db.store.connection": ("Store",),
    "tilegym_db.store.answer": ("Answer",),
    "tilegym_db.verification.add": ("Added",),
    "tilegym_db.measurement.plan": ("BenchReport",),
    "tilegym_db.measurement.tune.tune": ("TuneReport",),
    "tilegym_db.store.publish": ("PublishReport",),
    "tilegym_db.resolver.explain": ("Explanation",),
    "tilegym_db.resolver.resolve": ("Resolved",),
    "tilegym_db.models.handle": ("Handle",),
    "tilegym_db.loop.fit": ("FitReport",),
}
"""What the public functions give back, and where it is defined."""


def python_reference() -> str:
    """Return the page as MyST: functions, records, what calls return, errors."""
    public = {name: getattr(tilegym_db, name) for name in tilegym_db.__all__}
    functions = [name for name, value in public.items() if callable(value) and not inspect.isclass(value)]
    modules = [name for name, value in public.items() if inspect.ismodule(value)]
    classes = [name for name, value in public.items() if inspect.isclass(value)]
    parts = [
        "# Python reference",
        "From the docstrings. [From Python](../python-api.md) shows them at work.",
        "## Functions",
    ]
    parts.append(_directives("autofunction", (f"tilegym_db.{name}" for name in functions)))
    parts += ["## Modules", _directives("automodule", (f"tilegym_db.{name}" for name in modules))]
    parts += ["## Records, catalog and errors", _directives("autoclass", (f"tilegym_db.{name}" for name in classes))]
    results = [f"{module}.{name}" for module, names in RESULTS.items() for name in names]
    parts += ["## What calls return", _directives("autoclass", results)]
    parts += ["## Every error", "```{eval-rst}\n.. automodule:: tilegym_db.errors\n   :members:\n   :noindex:\n```"]
    return "\n\n".join(parts) + "\n"


def _directives(kind: str, names: Iterable[str]) -> str:
    options = "   :members:\n" if kind == "autoclass" else ""
    return "```{eval-rst}\n" + "\n".join(f".. {kind}:: {name}\n{options}" for name in names) + "```"
