"""Records that cannot be read: left out, named once, and in the way of nothing but the commands that are about them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DEFINITION_BROKEN", "RECORD_NAME", "Broken", "name_once"]

RECORD_NAME = "solution.json"
"""The record of a Solution, in the folder that is called as it is."""

DEFINITION_BROKEN = "its definition is broken"

_log = logging.getLogger("tilegym_db.catalog")
_named: set[Path] = set()


@dataclass(frozen=True)
class Broken:
    """A file or folder that should hold a record and does not.

    ``path`` is the file, ``name`` what the record would be called, ``definition`` what it would belong to, and ``reason`` a
    paragraph that names file and key.
    """

    path: Path
    name: str
    definition: str
    reason: str

    @property
    def is_consequence(self) -> bool:
        """True for a Solution of a Definition that is broken itself: mending that mends this."""
        return f": {DEFINITION_BROKEN}: " in self.reason

    def concerns(self, names: tuple[str, ...]) -> bool:
        """True where a command that is about ``names`` is about this too; without names it is about all."""
        return not names or self.name in names or self.definition in names


def name_once(broken: Broken) -> None:
    """Warn about a file that is left out, the first time that this process meets it. Python prints that on stderr."""
    if broken.path not in _named:
        _named.add(broken.path)
        if not broken.is_consequence:
            after = f", then: tilegym-db check {broken.definition}" if broken.definition else "."
            _log.warning("warning: left out: %s Mend or remove it%s", broken.reason, after)
