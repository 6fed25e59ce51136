"""The four records and the hardware names: no I/O and no torch."""

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
