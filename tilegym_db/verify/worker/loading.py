"""What a worker is told in order to load a Solution."""

from __future__ import annotations

from typing import Any

from tilegym_db.catalog import SolutionFiles
from tilegym_db.records import Definition
from tilegym_db.verify.scan.tables import reviewed_libraries

__all__ = ["load_request"]


def load_request(definition: Definition, solution: SolutionFiles, *, interpret: bool) -> dict[str, Any]:
    """The content of a ``load`` request.

    Args:
        definition: says in which order the arguments come.
        solution: the record's file and the digest that its source must still have.
        interpret: run it in its language's interpreter.
    """
    return {
        "record": str(solution.path),
        "digest": solution.digest,
        "inputs": list(definition.inputs),
        "outputs": list(definition.written_outputs),
        "in_place": definition.in_place,
        "libraries": reviewed_libraries(solution.record.spec.dependencies),
        "interpret": interpret,
    }
