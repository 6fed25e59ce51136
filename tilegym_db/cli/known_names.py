"""Names that a command is given are looked up before the harness and PyTorch are loaded, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

from tilegym_db.cli.other_names import OTHER_NAMES

__all__ = ["refuse_unknown_names"]


def refuse_unknown_names(names: Sequence[str]) -> None:
    """Refuse at once a name that no Definition and no Solution has.

    Raises:
        NotFoundError: names the nearest ones.
        RecordError: the record of that name is broken.
    """
    from tilegym_db.catalog import Catalog
    from tilegym_db.errors import NotFoundError, did_you_mean

    if not names:
        return
    catalog = Catalog.default()
    known = {*catalog.definition_paths, *catalog.solution_paths}
    for name in names:
        if name not in known:
            catalog.refuse_broken(name)
            if name in OTHER_NAMES:
                raise NotFoundError(
                    f"{OTHER_NAMES[name].said(name)}. Try: tilegym-db show {name}", code="name_of_others"
                )
            hint = did_you_mean(name, known)
            raise NotFoundError(
                f"'{name}' is no definition and no solution.{hint} Try: tilegym-db list", code="name_unknown"
            )
