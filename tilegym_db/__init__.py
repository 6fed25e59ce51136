"""tilegym-db: transformer operators, tile kernels that implement them, and the measurements of each kernel.

The public names load on first use, so ``import tilegym_db`` costs almost nothing and never imports torch.
"""

from __future__ import annotations

from tilegym_db.lazy import loader

__version__ = "0.2.0"

TYPE_CHECKING = False  # importing typing would take most of the start-up time before Ctrl-C is handled

if TYPE_CHECKING:
    from tilegym_db import ops
    from tilegym_db.catalog import Catalog
    from tilegym_db.errors import TilegymDBError
    from tilegym_db.loop.fit import fit
    from tilegym_db.measurement.benchmark import bench, verify
    from tilegym_db.measurement.tune.tune import tune
    from tilegym_db.models.patch import patch, patched, patched_init
    from tilegym_db.records import Definition, Solution, Trace, Workload
    from tilegym_db.resolver.explain import explain
    from tilegym_db.resolver.resolve import resolve
    from tilegym_db.store.opening import open_store
    from tilegym_db.store.publish import publish
    from tilegym_db.verification.add import add
    from tilegym_db.verification.check import check

__all__ = [
    "Catalog",
    "Definition",
    "Solution",
    "TilegymDBError",
    "Trace",
    "Workload",
    "add",
    "bench",
    "check",
    "explain",
    "fit",
    "open_store",
    "ops",
    "patch",
    "patched",
    "patched_init",
    "publish",
    "resolve",
    "tune",
    "verify",
]

# Public name -> the module that defines it.
_HOMES = {
    "Catalog": "tilegym_db.catalog",
    "Definition": "tilegym_db.records",
    "Solution": "tilegym_db.records",
    "TilegymDBError": "tilegym_db.errors",
    "Trace": "tilegym_db.records",
    "Workload": "tilegym_db.records",
    "add": "tilegym_db.verification.add",
    "bench": "tilegym_db.measurement.benchmark",
    "check": "tilegym_db.verification.check",
    "explain": "tilegym_db.resolver.explain",
    "fit": "tilegym_db.loop.fit",
    "open_store": "tilegym_db.store.opening",
    "ops": "tilegym_db.ops",
    "patch": "tilegym_db.models",
    "patched": "tilegym_db.models",
    "patched_init": "tilegym_db.models",
    "publish": "tilegym_db.store.publish",
    "resolve": "tilegym_db.resolver.resolve",
    "tune": "tilegym_db.measurement.tune.tune",
    "verify": "tilegym_db.measurement.benchmark",
}
__getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
