"""Products of linear layers in decoding steps that a CUDA graph replays. Eager code leaves them to PyTorch.

A mode of PyTorch sees the calls of ``torch.nn.functional.linear`` in one forward: the eager step before a capture, or the
capture itself. A call of few rows asks for a kernel of the Definition of one linear layer with or without a bias
(``serving.linear``). Hooks and subclasses of ``Linear`` need no rule, because only the function inside of their forward is
replaced. A product with the transpose of a weight, ``x @ weight.T``, is the same call. Weight and bias must be parameters of
the model, because a generation only notices then if they were replaced. Quantised and distributed weights, and those that a
module computes, stay stock.

Three products of one input, such as queries, keys and values, may be one call. The first eager step shows them: three calls in a
row whose input is the same object. Later the first call computes all three, and the other two take their results.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from tilegym_db.catalog import Catalog, stock_of
from tilegym_db.models.call_site import AUTOCAST, NOT_ROWS, CallSite, has_hooks, rows
from tilegym_db.models.report import CallSiteReport
from tilegym_db.resolver import device
from tilegym_db.resolver.hot_path import allocate_of, replayed
from tilegym_db.resolver.resolve import call_site, stock_launcher

KIND = "product"
"""The kind of the call sites in a report."""
LINEAR = torch.nn.Linear.__name__
MAX_ROWS = 16
"""Maximum number of rows of an input. More rows are no longer bound by reading the weight."""
MANY_ROWS = f"more than {MAX_ROWS} rows"

_linear = torch.nn.functional.linear
_matmul = torch.Tensor.matmul
"""The function that PyTorch names for ``x @ y``."""
_is_compiling = torch.compiler.is_compiling


class Operators(NamedTuple):
    """The Definitions of products in a catalog, by ``serving.linear``."""

    one: str | None
    three: str | None
    gated: Mapping[str, str]
    """Definition of a gate -> the Definition of the gate with the two products before it."""
    biased: str | None = None
    """The Definition of one product with a bias."""

    @classmethod
    def of(cls, catalog: Catalog) -> Operators:
        """Return the Definitions of a catalog that compute linear layers."""
        alone: dict[tuple[int, bool], str] = {}
        gated: dict[str, str] = {}
        for name in sorted(catalog.definitions):
            serving = catalog.definition(name).serving
            if serving is None or serving.linear is None:
                continue
            if serving.linear.gate is None:
                alone.setdefault((serving.linear.count, bool(serving.linear.bias)), name)
            elif serving.linear.count == 2:
                gated.setdefault(serving.linear.gate, name)
        return cls(alone.get((1, False)), alone.get((3, False)), gated, alone.get((1, True)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all Definitions, those of single products first."""
        found = (self.one, self.three, *self.gated.values(), self.biased)
        return tuple(name for name in found if name is not None)


@dataclass(eq=False)
class _Group:
    """Three weights whose products have one input. It is not usable if a forward did not take all of its results."""

    weights: tuple[torch.Tensor, ...]
    is_usable: bool = True


class Products:
    """The call sites of the products of one model.

    Attributes:
        operators: the Definitions of products.
        sites: Definition -> its call site.
        rows: the rows of a report, each with its call site or with the reason for none.
        groups: identity of the first weight of a group -> the group.
    """

    def __init__(self, model: torch.nn.Module, catalog: Catalog, why_not: Callable[[str], str], *, check: bool) -> None:
        """Make a call site for each Definition that the catalog has.

        Args:
            why_not: returns the reason for a Definition to stay stock; empty if kernels may serve it.
            check: check a kernel at the first call of a size that was not measured.
        """
        self._model = weakref.ref(model)
        self.operators = Operators.of(catalog)
        self.sites: dict[str, CallSite] = {}
        self.rows: list[tuple[CallSiteReport, CallSite | None]] = []
        self.groups: dict[int, _Group] = {}
        layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        without = sum(layer.bias is None for layer in layers)
        for name in self.operators.names:
            count = len(layers) - without if name == self.operators.biased else without
            if not count:
                continue
            reason = why_not(name)
            site = None if reason else replay_site(catalog, name, check=check)
            self.rows.append((CallSiteReport(KIND, LINEAR, count, name, reason), site))
            if site is not None:
                self.sites[name] = site

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Make all call sites answer for replays, and the products ask for kernels, in this thread inside a ``with`` block."""
        model = self._model()
        weights = {} if model is None else {id(weight): weight for weight in model.parameters()}
        for first, group in list(self.groups.items()):
            if any(id(weight) not in weights for weight in group.weights):  # a weight was replaced
                del self.groups[first]
        with replayed(), _Forward(self, weights) if self.sites else contextlib.nullcontext():
            yield


def replay_site(catalog: Catalog, name: str, *, check: bool) -> CallSite:
    """Return a call site for replays, in eager code without gradients."""
    definition = catalog.definition(name)
    stock = stock_of(catalog.solutions_for(name))
    launcher = None if stock is None else stock_launcher(definition, stock)
    dispatcher = call_site(definition, catalog, launch="replay", stock=launcher, check=check)
    return CallSite(dispatcher.serving(allocate_of(definition)), dispatcher)


# ---- one forward ----------------------------------------------------------------------------------


class _Made(NamedTuple):
    """The result of a product before its call; it holds for an input with that version."""

    group: _Group
    input: torch.Tensor
    version: int
    out: torch.Tensor


class _Row(NamedTuple):
    """The weights of calls in a row that have one input."""

    input: torch.Tensor
    version: int
    weights: list[torch.Tensor]


class _Forward(TorchFunctionMode):
    """One forward of a model whose products ask for kernels."""

    def __init__(self, products: Products, weights: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._operators, self._sites, self._groups = products.operators, products.sites, products.groups
        self._counting = next(iter(products.sites.values()))
        self._weights = weights
        self._made: dict[int, _Made] = {}
        self._row: _Row | None = None
        self._outer: _Forward | None = None
        self._runs_kernel = False

    def __enter__(self) -> _Forward:
        """Begin the forward in this thread."""
        self._outer = forwards.get(get_ident())
        forwards[get_ident()] = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """End the forward, and drop the results that no call took."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self._outer is None:
            del forwards[get_ident()]
        else:
            forwards[get_ident()] = self._outer
        for made in self._made.values() if raised[0] is None else ():
            made.group.is_usable = False
        self._made.clear()
        self._row = self._outer = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch, or a kernel in its place. No mode is active inside of it."""
        given = kwargs or {}
        if function is _linear and not _is_compiling() and not self._runs_kernel:
            out = self._product(*args, **given)
            if out is not None:
                return out
        elif function is _matmul and not given and not _is_compiling() and not self._runs_kernel:
            weight = self._transposed(*args)
            out = None if weight is None else self._product(args[0], weight)
            if out is not None:
                return out
        return function(*args, **given)

    def _transposed(self, x: Any, other: Any) -> torch.Tensor | None:
        """Return the weight whose transpose is the second factor; None if that is no transpose of a weight."""
        weight = other._base if type(other) is torch.Tensor and other.dim() == 2 else None
        if weight is None or id(weight) not in self._weights or weight.dim() != 2:
            return None
        is_transpose = other.shape == weight.shape[::-1] and other.stride() == weight.stride()[::-1]
        return weight if is_transpose and other.storage_offset() == weight.storage_offset() else None

    def _product(self, input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
        """Return the product by a kernel; None if stock code must compute it. The names are those of PyTorch."""
        if bias is not None:
            matrix = self._matrix(input, weight, bias) if self._operators.biased in self._sites else None
            out = None if matrix is None else self._ask(self._operators.biased, matrix, weight, bias)
            return None if out is None else out.view(*input.shape[:-1], out.shape[-1])
        matrix = self._matrix(input, weight)
        if matrix is None:
            return None
        out = self._taken(input, weight)
        if out is None:
            out = self._first_of_three(input, matrix, weight)
        if out is None:
            out = self._ask(self._operators.one, matrix, weight)
            self._follow(input, matrix, weight)
        else:
            self._row = None
        return None if out is None else out.view(*input.shape[:-1], out.shape[-1])

    def _matrix(self, x: Any, *weights: Any) -> torch.Tensor | None:
        """Return the few rows of an input that may be multiplied by a kernel; None if stock code must do it."""
        if not isinstance(x, torch.Tensor) or any(id(weight) not in self._weights for weight in weights):
            return None
        if self._counting.falls_back(False, x, *weights):
            return None
        matrix = rows(x)
        if matrix is None:
            self._counting.bypass(NOT_ROWS)
        elif matrix.shape[0] > MAX_ROWS:
            self._counting.bypass(MANY_ROWS)
        elif torch.is_autocast_enabled(x.device.type):
            self._counting.bypass(AUTOCAST)
        else:
            return matrix
        return None

    def _ask(self, name: str | None, *inputs: torch.Tensor) -> Any:
        """Return the outputs of a kernel of a Definition; None if no kernel ran."""
        site = None if name is None else self._sites.get(name)
        if site is None:
            return None
        self._runs_kernel = True
        try:
            return site.ask(False, *inputs)
        finally:
            self._runs_kernel = False

    # -- three products of one input ----------------------------------------------------------------------------------

    def _taken(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the result that was made with the first product of its group, once; None if the input is another now."""
        made = self._made.pop(id(weight), None)
        if made is None:
            return None
        if made.input is x and made.version == _version(x):
            return made.out
        made.group.is_usable = False
        return None

    def _first_of_three(self, x: torch.Tensor, matrix: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the first result of a group, and keep the others for their calls; None if it is no group, or without kernel."""
        group, version = self._groups.get(id(weight)), _version(x)
        if group is None or version is None or not group.is_usable:
            return None
        outputs = self._ask(self._operators.three, matrix, *group.weights)
        if outputs is None:
            return None
        for later, out in zip(group.weights[1:], outputs[1:], strict=True):
            self._made[id(later)] = _Made(group, x, version, out)
        first: torch.Tensor = outputs[0]
        return first

    def _follow(self, x: torch.Tensor, matrix: torch.Tensor, weight: torch.Tensor) -> None:
        """Note a product. The third in a row of one input makes a group, and binds its kernel for the capture that comes."""
        version = _version(x)
        if version is None or self._operators.three not in self._sites:
            return
        row = self._row
        if row is None or row.input is not x or row.version != version:
            row = self._row = _Row(x, version, [])
        row.weights.append(weight)
        if len(row.weights) < 3:
            return
        self._row = None
        first, are_different = id(row.weights[0]), len({*map(id, row.weights)}) == 3
        if are_different and first not in self._groups and not device.is_capturing():
            group = self._groups[first] = _Group(tuple(row.weights))
            self._ask(self._operators.three, matrix, *group.weights)

    # -- two products and their gate ----------------------------------------------------------------------------------

    def gated(self, definition: str, x: torch.Tensor, projections: Sequence[Any]) -> torch.Tensor | None:
        """Return the result of a gate of two products; None if no kernel computes all of it."""
        name = self._operators.gated.get(definition)
        if name not in self._sites or len(projections) != 2 or not all(map(_is_plain, projections)):
            return None
        weights = [projection.weight for projection in projections]
        matrix = self._matrix(x, *weights)
        out = None if matrix is None else self._ask(name, matrix, *weights)
        if out is None:
            return None
        self._row = None
        gated: torch.Tensor = out.view(*x.shape[:-1], out.shape[-1])
        return gated


forwards: dict[int, _Forward] = {}
"""Thread -> its innermost forward whose products ask for kernels."""


def gated_products(definition: str, x: torch.Tensor, projections: Sequence[Any]) -> torch.Tensor | None:
    """Return the result of a gate of two products by one kernel, if this thread runs a forward that a graph repeats.

    Args:
        projections: the modules of both products, in the order of the gate's inputs.
    """
    here = forwards.get(get_ident())
    return None if here is None else here.gated(definition, x, projections)


def _is_plain(module: Any) -> bool:
    """Return True if a call of a module is a product without bias, and nothing else."""
    return type(module) is torch.nn.Linear and module.bias is None and not has_hooks(module)


def _version(x: torch.Tensor) -> int | None:
    """Return the number of changes in place so far; None if PyTorch does not count them, in inference mode."""
    return None if x.is_inference() else x._version
