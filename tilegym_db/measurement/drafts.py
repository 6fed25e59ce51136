"""Solutions that are files of their author, beside a catalog: to measure them, or show a failure, before they are added."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilegym_db.catalog import Catalog, SolutionFiles
from tilegym_db.catalog.reader import is_place
from tilegym_db.catalog.record_files import of_family_file
from tilegym_db.catalog.writers import add_solution
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.files import decode, read_bytes
from tilegym_db.paths import home as default_home
from tilegym_db.paths import scratch_folder
from tilegym_db.published.input_files import loop_folder
from tilegym_db.records import Solution
from tilegym_db.scaffold.solution_draft import language_of
from tilegym_db.verification.add import Sources, read_draft


@dataclass(frozen=True)
class Draft:
    """A Solution of a file or folder, with its name while a command runs."""

    place: Path
    name: str
    """That of its record. If the catalog has another Solution of that name, a part of the digest follows."""
    words: str
    """The words of a command that select it: its path, and ``-d`` with the operator of a ``.py`` file."""
    add_command: str
    """The command that adds it to the catalog."""


@contextlib.contextmanager
def catalog_with_drafts(
    places: Sequence[str | Path], catalog: Catalog, definition: str | None = None
) -> Iterator[tuple[list[Draft], Catalog]]:
    """Yield the drafts, and a catalog that contains them while the block runs."""
    drafts: list[Draft] = []
    with scratch_folder() as root:
        for place in map(Path, places):
            draft, record, sources = _read(place, catalog, definition)
            if any(draft.name == other.name for other in drafts):
                raise UsageError(f"{place}: '{draft.name}' is given twice.", code="name_repeated")
            drafts.append(draft)
            if draft.name not in catalog.solution_paths:
                add_solution(catalog.reread(root), record, sources, root)
        yield drafts, catalog.reread(root)


@contextlib.contextmanager
def catalog_with(name: str | Path, catalog: Catalog, definition: str | None = None) -> Iterator[tuple[str, Catalog]]:
    """Yield the name of one Solution and a catalog that has it, from its name in ``catalog`` or from its path.

    Arguments and errors are those of :func:`catalog_with_drafts`.
    """
    if not is_place(name, catalog):
        yield str(name), catalog
        return
    with catalog_with_drafts([name], catalog, definition) as (drafts, extended):
        yield drafts[0].name, extended


def language_in(file: Path) -> str:
    """Return the language of a source by its imports; ``python`` if it does not parse, which its reader reports."""
    try:
        return language_of(decode(read_bytes(file, "source"), file))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # RecordError is a ValueError
        return "python"


def _read(place: Path, catalog: Catalog, definition: str | None) -> tuple[Draft, Solution, Sources]:
    """Return a draft with its record, renamed if the catalog has another Solution of its name."""
    if not (place.exists() or of_family_file(place)):
        raise UsageError(f"{place}: there is no such file or folder.", code="file_missing")
    is_source = place.suffix == ".py" and place.is_file()
    if is_source and definition is None:
        raise UsageError(
            f"{place}: a single file needs a definition. Try it again with: -d NAME", code="options_missing"
        )
    language = language_in(place) if is_source else None
    record, sources = read_draft(place, catalog, definition=definition if is_source else None, language=language)
    words = [str(place), *(["-d", str(definition)] if is_source else [])]
    add = ["tilegym-db", "add-solution", *words, *(["-l", str(language)] if is_source else [])]
    known = _known(record.name, catalog)
    if known is not None and (known.record.definition, known.digest) != (record.definition, record.digest(sources)):
        add.append("--replace")
        name = f"{record.name[:100]}_draft_{record.digest(sources)[:8]}"
        return Draft(place, name, shlex.join(words), shlex.join(add)), record.model_copy(update={"name": name}), sources
    return Draft(place, record.name, shlex.join(words), shlex.join(add)), record, sources


def _known(name: str, catalog: Catalog) -> SolutionFiles | None:
    try:
        return catalog.solution(name) if name in catalog.solution_paths else None
    except RecordError:
        return None


# ---- the candidates' catalog ----------------------------------------------------------------------
# Commands that only refuse a name read it, so this module loads no PyTorch.


def candidate_root(home: Path | None) -> Path:
    """Return the root of the candidates' catalog."""
    return loop_folder(home) / "candidates"


def with_candidates(catalog: Catalog | None = None, home: Path | None = None) -> Catalog:
    """Return the catalog extended by the submissions that are on disk now."""
    catalog = catalog or Catalog.default()
    return catalog.reread(candidate_root(home or default_home()))
