"""The records and the names of hardware, without I/O and without torch. Each loads on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilegym_db.lazy import loader

if TYPE_CHECKING:
    from tilegym_db.records.definition import Definition
    from tilegym_db.records.definition_parts import TensorSpec
    from tilegym_db.records.solution import LANGUAGES, TILE_LANGUAGES, Config, Solution
    from tilegym_db.records.trace import Trace
    from tilegym_db.records.workload import Workload, axes_key

__all__ = [
    "LANGUAGES",
    "TILE_LANGUAGES",
    "Config",
    "Definition",
    "Solution",
    "TensorSpec",
    "Trace",
    "Workload",
    "axes_key",
]

_HOMES = {
    "LANGUAGES": "tilegym_db.records.solution",
    "TILE_LANGUAGES": "tilegym_db.records.solution",
    "Config": "tilegym_db.records.solution",
    "Definition": "tilegym_db.records.definition",
    "Solution": "tilegym_db.records.solution",
    "TensorSpec": "tilegym_db.records.definition_parts",
    "Trace": "tilegym_db.records.trace",
    "Workload": "tilegym_db.records.workload",
    "axes_key": "tilegym_db.records.workload",
}
__getattr__ = loader(__name__, _HOMES)
