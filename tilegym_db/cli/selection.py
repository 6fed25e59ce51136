"""Which Definitions ``--op-type`` and ``--status`` select."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tilegym_db.catalog import Catalog
    from tilegym_db.records import Definition

T = TypeVar("T")


def select_definitions(catalog: Catalog, op_type: str | None, status: str | None) -> list[Definition]:
    """The Definitions of a family and status, by name.

    Raises:
        NotFoundError: no Definition has that family or status; lists those there are.
    """
    found = list(catalog.definitions.values())
    return of_kind(found, [(item.op_type, status_of(item)) for item in found], op_type, status)


def of_kind(items: list[T], kinds: list[tuple[str, str]], op_type: str | None, status: str | None) -> list[T]:
    """Those of ``items`` whose family and status, which ``kinds`` gives for each, are the ones asked for.

    Raises:
        NotFoundError: nothing has that family or status; lists those there are.
    """
    from tilegym_db.errors import NotFoundError

    families, statuses = sorted({kind[0] for kind in kinds}), sorted({kind[1] for kind in kinds})
    if op_type is not None and op_type not in families:
        raise NotFoundError(
            f"no op_type '{op_type}'; there are {', '.join(families) or 'none'}.", code="op_type_unknown"
        )
    if status is not None and status not in statuses:
        raise NotFoundError(
            f"no definition has the status '{status}'; there are {', '.join(statuses) or 'none'}.",
            code="status_unknown",
        )
    wanted = (op_type, status)
    return [
        item
        for item, kind in zip(items, kinds, strict=True)
        if all(want in (None, of) for want, of in zip(wanted, kind, strict=True))
    ]


def status_of(definition: Definition) -> str:
    """The value of the ``status:`` tag, ``-`` where there is none."""
    return next((tag.removeprefix("status:") for tag in definition.tags if tag.startswith("status:")), "-")
