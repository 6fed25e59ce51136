"""Every operator of the catalog as a plain function: ``tilegym_db.ops.rms_norm(x, weight, eps)``.

A function allocates its outputs and returns them in the order of the Definition. It runs the fastest verified kernel of this
machine for the call, or the Definition's reference if there is none. ``backend="reference"`` selects the reference, and the name
of a solution selects that solution. ``help(tilegym_db.ops.rms_norm)`` describes the arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__: list[str] = []  # names appear on demand, one per Definition; see dir()


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function of the Definition of that name, and create it at its first use."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.errors import NotFoundError
    from tilegym_db.ops.function import operator_function

    if name.startswith("__"):
        raise AttributeError(f"module '{__name__}' has no attribute {name!r}")
    catalog = Catalog.default(warns=False)
    try:
        function = globals()[name] = operator_function(catalog.definition(name), catalog)
    except NotFoundError as error:
        raise AttributeError(f"module '{__name__}': {error}") from None
    return function


def __dir__() -> list[str]:
    from tilegym_db.catalog import Catalog

    return sorted(Catalog.default(warns=False).definition_paths)
