"""Our judgements on foreign Solutions, and where they are kept: beside their data set, of each the newest."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tilegym_db.files import write_atomically
from tilegym_db.store.imported import DataSet, import_lock, imported_folder

__all__ = ["NOT_RUN", "Judgement", "keep_judgements", "kept_judgements"]

NOT_RUN = "NOT_RUN"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """What came of one Solution on one Workload here. ``status`` is one of ours, or ``NOT_RUN`` with the reason."""

    definition: str
    solution: str
    workload: str
    gpu: str
    status: str
    reason: str = ""
    gate: str | None = None
    oracle: str = ""
    rule: str = ""
    """The other project's tolerance by name."""
    rule_passed: bool | None = None
    rule_reason: str = ""
    latency_us: float | None = None
    """Median of a few calls in one process: an indication, not a measurement that ranks anything."""
    sandbox_level: int = 0
    seed: str = ""
    adapted: bool = False
    """The time includes an entry point that was added, and its copies."""
    unchecked: tuple[str, ...] = ()
    """Constraints that could not be evaluated on the contents."""
    omits: tuple[str, ...] = ()
    """Optional outputs that it did not give; it is judged by the others, and has no time."""


def _path(found: DataSet) -> Path:
    return imported_folder(found.home) / found.dialect / found.name / "judgements.jsonl"


def keep_judgements(found: DataSet, judgements: Sequence[Judgement]) -> None:
    """Keep them beside the data set; of one Solution, Workload and GPU the newest stays."""
    with import_lock(found.home):
        known = {_key(item): item for item in (*kept_judgements(found), *judgements)}
        lines = [json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in known.values()]
        write_atomically(_path(found), "".join(lines).encode())


def kept_judgements(found: DataSet) -> list[Judgement]:
    """What was judged before; a line that cannot be read is left out and named."""
    path = _path(found)
    judgements = []
    # Not splitlines: a reason may hold U+2028 or U+0085, which it splits at too.
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            fields = json.loads(line)
            several = {name: tuple(fields[name]) for name in ("unchecked", "omits") if name in fields}
            judgements.append(Judgement(**{**fields, **several}))
        except (ValueError, TypeError, KeyError) as error:
            _log.warning("%s:%d: left out: %s", path, number, error)
    return judgements


def _key(item: Judgement) -> tuple[str, str, str, str]:
    return item.definition, item.solution, item.workload, item.gpu
