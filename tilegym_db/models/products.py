"""Products of linear layers in decoding steps that a CUDA graph replays. Eager code leaves them to PyTorch.

A mode of PyTorch sees the calls of ``torch.nn.functional.linear`` in one forward: the eager step before a capture, or the capture
itself. A call without bias and of few rows asks for a kernel of ``gemm``. Hooks and subclasses of ``Linear`` need no rule,
because only the function inside of their forward is replaced. The weight must be a parameter of the model, because a generation
only notices then if it was replaced. Quantised and distributed weights, and those that a module computes, stay stock.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilegym_db.catalog import Catalog, stock_of
from tilegym_db.models.call_site import AUTOCAST, NOT_ROWS, CallSite, rows
from tilegym_db.models.report import CallSiteReport
from tilegym_db.resolver.hot_path import allocate_of
from tilegym_db.resolver.replay import replayed
from tilegym_db.resolver.resolve import call_site, stock_launcher

KIND = "product"
"""The kind of the call sites in a report."""
PRODUCT = "gemm"
MAX_ROWS = 16
"""Maximum number of rows of an input. More rows are no longer bound by reading the weight."""
MANY_ROWS = f"more than {MAX_ROWS} rows"

_linear = torch.nn.functional.linear
_is_compiling = torch.compiler.is_compiling


class Products:
    """The call sites of the products of one model.

    Attributes:
        sites: Definition -> its call site.
        rows: the rows of a report, each with its call site or with the reason for none.
    """

    def __init__(self, model: torch.nn.Module, catalog: Catalog, why_not: Callable[[str], str], *, check: bool) -> None:
        """Make a call site for each Definition that the catalog has.

        Args:
            model: its parameters are the weights.
            catalog: its kernels may serve the products.
            why_not: returns the reason for a Definition to stay stock; empty if kernels may serve it.
            check: check a kernel at the first call of a size that was not measured.
        """
        self._model = weakref.ref(model)
        self.sites: dict[str, CallSite] = {}
        self.rows: list[tuple[CallSiteReport, CallSite | None]] = []
        count = sum(1 for module in model.modules() if isinstance(module, torch.nn.Linear) and module.bias is None)
        for name in (PRODUCT,):
            if count and name in catalog.definitions:
                reason = why_not(name)
                site = None if reason else _site(catalog, name, check=check)
                self.rows.append((CallSiteReport(KIND, torch.nn.Linear.__name__, count, name, reason), site))
                if site is not None:
                    self.sites[name] = site

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Make all call sites answer for replays, and the products ask for kernels, in this thread inside a ``with`` block."""
        model = self._model()
        weights = {} if model is None else {id(weight): weight for weight in model.parameters()}
        with replayed(), _Forward(self.sites, weights) if self.sites else contextlib.nullcontext():
            yield


def _site(catalog: Catalog, name: str, *, check: bool) -> CallSite:
    """Return a call site for replays, in eager code without gradients."""
    definition = catalog.definition(name)
    stock = stock_of(catalog.solutions_for(name))
    launcher = None if stock is None else stock_launcher(definition, stock)
    dispatcher = call_site(definition, catalog, launch="replay", stock=launcher, check=check)
    return CallSite(dispatcher.serving(allocate_of(definition)), dispatcher)


class _Forward(TorchFunctionMode):
    """One forward of a model whose products ask for kernels."""

    def __init__(self, sites: Mapping[str, CallSite], weights: Mapping[int, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sites = sites
        self._counting = next(iter(sites.values()))
        self._weights = weights

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch, or a kernel in its place. No mode is active inside of it."""
        given = kwargs or {}
        if function is _linear and not _is_compiling():
            out = self._product(*args, **given)
            if out is not None:
                return out
        return function(*args, **given)

    def _product(self, input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
        """Return the product by a kernel; None if stock code must compute it. The names are those of PyTorch."""
        if bias is not None or id(weight) not in self._weights or not isinstance(input, torch.Tensor):
            return None
        if self._counting.falls_back(False, input, weight):
            return None
        matrix = rows(input)
        if matrix is None or matrix.shape[0] > MAX_ROWS or torch.is_autocast_enabled(input.device.type):
            self._counting.bypass(NOT_ROWS if matrix is None else MANY_ROWS if matrix.shape[0] > MAX_ROWS else AUTOCAST)
            return None
        out = self._ask(PRODUCT, matrix, weight)
        return None if out is None else out.view(*input.shape[:-1], out.shape[-1])

    def _ask(self, name: str, *inputs: torch.Tensor) -> Any:
        """Return the outputs of a kernel of a Definition; None if no kernel ran."""
        site = self._sites.get(name)
        return None if site is None else site.ask(False, *inputs)
