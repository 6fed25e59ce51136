"""Resolving outside of a model: ``resolve("rms_norm", like=(x, weight, eps))(x, weight, eps, out)``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilegym_db.catalog import Catalog, SolutionFiles, stock_of
from tilegym_db.errors import NoSolutionError, UsageError, check_kind
from tilegym_db.records import Definition
from tilegym_db.records.backward import backward_binding
from tilegym_db.records.binding import Binding, bind_call
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.hardware import parse_gpu
from tilegym_db.records.solution import Config
from tilegym_db.resolver.decide import Decision, Evidence, Rejection, decide, no_kernel
from tilegym_db.resolver.device import common_device, default_gpu, device_gpu
from tilegym_db.resolver.index import PointIndex, index_of
from tilegym_db.resolver.request import Mode, Request, compile_target, make_request
from tilegym_db.resolver.table import ResolverTable, load_table

if TYPE_CHECKING:
    import torch

    from tilegym_db.resolver.dispatch import Choose, Dispatcher
    from tilegym_db.resolver.dispatch_report import DispatchReport
    from tilegym_db.resolver.loader import Launcher

__all__ = ["Resolved", "call_site", "decide_request", "resolve", "unavailable_languages"]


@dataclass(frozen=True)
class Resolved:
    """The answer to one request, and a callable.

    ``solution``, ``config`` and ``evidence`` answer the request as it was asked. Calling it with tensors
    (``*inputs, *written_outputs``) decides by those tensors and the device they lie on, so that it is safe for any of
    them: a call of another shape, or on another device, runs what is verified there, else the stock code.
    """

    request: Request
    solution: SolutionFiles
    config: Config
    evidence: Evidence
    rejected: tuple[Rejection, ...]
    dispatcher: Dispatcher

    @property
    def is_stock(self) -> bool:
        """True where nothing verified is faster, so that ``solution`` is the Definition's stock code."""
        return self.evidence.source == "stock"

    def __call__(self, *args: Any) -> None:
        """Run on real tensors; outputs are written. Raises what the stock code raises where that is what runs."""
        if not self.dispatcher.attempt(*args):
            self.dispatcher.run_stock(*args)

    def report(self) -> DispatchReport:
        """Calls, hits, misses and failures so far."""
        return self.dispatcher.report()


def resolve(
    definition: str | Definition,
    *,
    axes: Mapping[str, int] | None = None,
    dtypes: Mapping[str, str] | None = None,
    layouts: Mapping[str, str] | None = None,
    scalars: Mapping[str, Scalar] | None = None,
    gpu: str | None = None,
    mode: Mode = "inference",
    like: Sequence[Any] | None = None,
    catalog: Catalog | None = None,
    trust: bool = False,
) -> Resolved:
    """The fastest verified solution for a call, else the Definition's stock code.

    Args:
        definition: name or record of the operator.
        axes: size per axis; const axes may be left out.
        dtypes: dtype per dtype variable; one with a single choice may be left out.
        layouts: layout class per tensor that is not contiguous.
        scalars: scalar inputs; those that select code are needed.
        gpu: a GPU slug or family such as ``h200``; this machine's device where absent or ``auto``.
        mode: ``training`` resolves to stock unless a kernel for the backward of the call is verified too.
        like: real arguments (inputs, optionally outputs) to read axes, dtypes, layouts and scalars from, instead.
        catalog: where to read records; :meth:`Catalog.default` where absent.
        trust: use published traces too that neither came with the package nor were published by this installation.

    Raises:
        NotFoundError: no such Definition.
        UsageError: the request does not fit the Definition, or the GPU is unknown.
        NoSolutionError: nothing verified is faster, and the Definition has no stock solution.
    """
    check_kind(gpu or "", str, "gpu is the name of a GPU, a text")
    catalog = (catalog or Catalog.default()).trusting(trust)
    record = _record(definition, catalog)
    binding = _binding(record, like, axes=axes, dtypes=dtypes, layouts=layouts, scalars=scalars)
    slug, target = _gpu(gpu, like)
    unavailable = unavailable_languages(catalog.solutions_for(record.name)) if _is_this_machine(gpu) else None
    request = make_request(record, **vars(binding), gpu=slug, sm=target, mode=mode, unavailable=unavailable)
    decision, solutions = decide_request(request, catalog)
    stock = stock_of(solutions.values())
    chosen = decision.solution or stock
    if chosen is None:
        raise NoSolutionError(_why_nothing(request, decision), code="no_solution")
    dispatcher = call_site(record, catalog, mode=mode, stock=stock_launcher(record, stock) if stock else None)
    return Resolved(request, chosen, decision.config, decision.evidence, decision.rejected, dispatcher)


def _binding(record: Definition, like: Sequence[Any] | None, **given: Mapping[str, Any] | None) -> Binding:
    """What a call is: read from real arguments, or as given."""
    if like is None:
        for name, values in given.items():
            check_kind(values or {}, Mapping, f"{name} is a mapping of names to values")
        return Binding(**{name: dict(values or {}) for name, values in given.items()})
    if any(given.values()):
        raise UsageError(
            "give either like=(real arguments) or axes, dtypes, layouts and scalars, not both.", code="options_clash"
        )
    return bind_call(record, like)


def _record(definition: str | Definition, catalog: Catalog) -> Definition:
    if isinstance(definition, str):
        return catalog.definition(definition)
    if not isinstance(definition, Definition):
        raise UsageError(
            f"a Definition is given by its name or as a record, not as {type(definition).__name__}.",
            code="argument_type",
        )
    return definition


def decide_request(request: Request, catalog: Catalog) -> tuple[Decision, dict[str, SolutionFiles]]:
    """Decide by the published table of the request's GPU; also returns the catalog's solutions that were considered."""
    solutions = {files.name: files for files in catalog.solutions_for(request.definition.name)}
    return decide(
        request, load_table(request.gpu, trust=catalog.trust_foreign), solutions, _decide_backward(request, catalog)
    ), solutions


def _decide_backward(request: Request, catalog: Catalog) -> Decision | None:
    """What is decided about the gradients of a request in training; None where no Definition gives them."""
    backward = _backward(request.definition, catalog, request.mode)
    if backward is None:
        return None
    call = Binding(dict(request.axes), dict(request.dtypes), dict(request.layouts), dict(request.scalars))
    gradients = backward_binding(backward, call)
    try:
        asked = make_request(
            backward,
            **vars(gradients),
            gpu=request.gpu,
            sm=request.sm,
            mode=request.mode,
            unavailable=request.unavailable,
        )
    except UsageError as error:
        return no_kernel(str(error), request.gpu)
    return decide_request(asked, catalog)[0]


def _backward(definition: Definition, catalog: Catalog, mode: Mode) -> Definition | None:
    """The Definition of all gradients of a call in training; None where there is none to ask for."""
    if mode != "training" or definition.backward_of is not None:
        return None
    return next(iter(catalog.backwards_of(definition.name)), None)


def call_site(
    definition: Definition,
    catalog: Catalog,
    *,
    mode: Mode = "inference",
    stock: Launcher | None = None,
    backward: Definition | None = None,
    only: str | None = None,
) -> Dispatcher:
    """A new call site of a Definition; see :class:`~tilegym_db.resolver.dispatch.Dispatcher`.

    Args:
        definition: the operator that is called there.
        catalog: whose solutions may serve it, read once, now.
        mode: ``training`` leaves a call to stock unless a kernel for its backward is verified too.
        stock: destination-passing stock code of the call site, for calling the dispatcher itself.
        backward: the Definition of the gradients that training asks for; by default, of as many as there are.
        only: the one solution that may serve there, by the same rules as among others; any where absent.
    """
    from tilegym_db.resolver.dispatch import Dispatcher

    gradients_by = backward or _backward(definition, catalog, mode)
    return Dispatcher(definition, _chooser(definition, catalog, mode, gradients_by, only), stock=stock)


def _chooser(
    definition: Definition, catalog: Catalog, mode: Mode, backward: Definition | None, only: str | None = None
) -> Choose:
    known = {files.name: files for files in catalog.solutions_for(definition.name)}
    solutions = {name: files for name, files in known.items() if only in (None, name)}
    unavailable = unavailable_languages(solutions.values())

    choose_backward = None if backward is None else _chooser(backward, catalog, mode, None)
    tables: dict[str, ResolverTable | None] = {}  # what is published later must not change a running model
    indexes: dict[str, PointIndex] = {}

    def choose(binding: Binding, device: torch.device, serving: str | None) -> Decision:
        gpu, target = device_gpu(device)
        if gpu not in tables:
            table = tables[gpu] = load_table(gpu, trust=catalog.trust_foreign)
            if table is not None:
                indexes[gpu] = index_of(definition, table, solutions, sm=target, unavailable=unavailable)
        after = after_it(binding, device)
        leads_back = after is not None and after.solution is not None
        if gpu in indexes and (mode == "inference" or definition.backward_of is not None or leads_back):
            known = indexes[gpu].find(**vars(binding), serving=serving)
            if known is not None:
                return known
        request = make_request(
            definition, **vars(binding), gpu=gpu, sm=target, mode=mode, serving=serving, unavailable=unavailable
        )
        return decide(request, tables[gpu], solutions, after)

    def after_it(binding: Binding, device: torch.device) -> Decision | None:
        if backward is None or choose_backward is None:
            return None
        try:
            return choose_backward(backward_binding(backward, binding), device, None)
        except UsageError as error:
            return no_kernel(str(error), device_gpu(device)[0])

    return choose


def unavailable_languages(solutions: Iterable[SolutionFiles]) -> dict[str, str]:
    """Language -> why this process cannot run it and what to do, for the languages of some solutions."""
    from tilegym_db.backends import toolchains

    found: dict[str, str] = {}
    environ = frozenset(os.environ.items())
    for language in sorted({files.record.spec.language for files in solutions}):
        asked = toolchains.toolchain_status, language, environ
        if asked in _available:
            continue
        status = toolchains.toolchain_status(language)
        if status.available:
            _available.add(asked)
        else:
            found[language] = f"{language} cannot run here: {status.detail}. Try: {status.fix}"
    return found


_available: set[tuple[Callable[..., Any], str, frozenset[tuple[str, str]]]] = set()
"""What was found to run, under which environment. What cannot run is asked about again: it may be installed meanwhile."""


def stock_launcher(definition: Definition, stock: SolutionFiles) -> Callable[..., None]:
    """``launch(*inputs, *outputs)`` of a stock solution, loaded at its first call: asking what would run needs no PyTorch."""
    loaded: list[Launcher] = []

    def launch_stock(*args: Any) -> None:
        if not loaded:
            from tilegym_db.resolver.loader import load_launcher

            loaded.append(load_launcher(definition, stock, {}, stock.digest))
        loaded[0](*args)

    return launch_stock


def _is_this_machine(asked: str | None) -> bool:
    return asked is None or asked.strip().lower() == "auto"


def _gpu(asked: str | None, like: Sequence[Any] | None) -> tuple[str, str]:
    """(slug or family, compile target) of the device a request is about."""
    if asked is not None and not _is_this_machine(asked):
        name = parse_gpu(asked)
        return name, compile_target(name)
    if like is None:
        return default_gpu()
    device = common_device(like)
    if isinstance(device, str):
        raise UsageError(
            f"cannot tell the device from like: {device}. Pass gpu=, or tensors of one device.", code="device_unclear"
        )
    return device_gpu(device)


def _why_nothing(request: Request, decision: Decision) -> str:
    name = request.definition.name
    reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in decision.rejected[:5])
    return (
        f"no solution can serve {name} on {request.gpu}: {decision.evidence.reason}, and the Definition has no stock "
        f"solution. {reasons or 'It has no solutions yet'}. Try: tilegym-db list --solutions"
    )
