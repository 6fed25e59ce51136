"""The call site of the writes into a cache of fixed size, which layers of that cache make in graphs of ``generate`` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilegym_db.catalog import Catalog
from tilegym_db.models.cache_writes import is_known
from tilegym_db.models.call_site import CallSite
from tilegym_db.models.products import replay_site
from tilegym_db.models.report import CallSiteReport

KIND = "cache_write"
"""The kind of the call site in a report."""
LAYER = "StaticLayer"
PROVED_EAGERLY = "verify=True proves kernels on calls outside of graphs, and only graphs of generate make this call"


def definition_of_writes(catalog: Catalog) -> str | None:
    """Return the Definition of a catalog that writes into a cache of fixed size; None if it has none."""
    for name in sorted(catalog.definitions):
        serving = catalog.definition(name).serving
        if serving is not None and serving.fixed_cache:
            return name
    return None


def layers_of_fixed_size(model: Any) -> int:
    """Return how many layers of a model's cache of fixed size write keys by code that is known."""
    from transformers import StaticCache

    try:
        cache: Any = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=2)
    except (AttributeError, KeyError, NotImplementedError, TypeError):
        return 0  # its steps run without graphs for the same reason
    return sum(1 for layer in cache.layers if is_known(type(layer)))


def write_site(
    model: Any, catalog: Catalog, why_not: Callable[[str], str], *, check: bool
) -> tuple[CallSiteReport, CallSite | None] | None:
    """Return the row of a report with its call site, or with the reason for none; None if the model has no such writes.

    Args:
        why_not: returns the reason for a Definition to stay stock; empty if kernels may serve it.
        check: check a kernel at the first call of a size that was not measured.
    """
    name, layers = definition_of_writes(catalog), layers_of_fixed_size(model)
    if name is None or not layers:
        return None
    reason = why_not(name)
    site = None if reason else replay_site(catalog, name, check=check)
    return CallSiteReport(KIND, LAYER, layers, name, reason), site
