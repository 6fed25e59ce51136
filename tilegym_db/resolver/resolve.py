"""Resolving outside of models: ``resolve("rms_norm", like=(x, weight, eps))(x, weight, eps, out)``."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from tilegym_db.catalog import Catalog, SolutionFiles, stock_of
from tilegym_db.errors import NoSolutionError, UsageError, check_kind, did_you_mean
from tilegym_db.published.entries import REQUIREMENTS, Entry, spelled_requirements, why_outside_scalars
from tilegym_db.published.table import ResolverTable, published_gpus, table_for, why_no_table
from tilegym_db.records import Definition
from tilegym_db.records.call import (
    LAUNCHES,
    MODES,
    Call,
    Launch,
    Mode,
    Request,
    backward_call,
    bind_call,
    is_code_selecting,
)
from tilegym_db.records.definition_parts import LAYOUT_CLASSES
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.hardware import CPU, GPU_SLUGS, gpu_base, parse_gpu, same_gpu
from tilegym_db.records.solution import Config
from tilegym_db.resolver.decide import (
    CONTIGUOUS,
    Decision,
    Evidence,
    MeasuredPoint,
    Rejection,
    candidates_table,
    decide,
    decide_first_call,
    equal_scalars,
    find_point,
    judge,
    judge_each_serving,
    layouts_match,
    no_kernel,
    selecting_scalars,
    spelled_decision,
)
from tilegym_db.resolver.device import common_device, default_gpu, device_gpu

if TYPE_CHECKING:
    import torch

    from tilegym_db.resolver.dispatch import Choose, Dispatcher, DispatchReport, Propose
    from tilegym_db.resolver.loader import Launcher


@dataclass(frozen=True, repr=False)
class Resolved:
    """The answer to one request, which is also a callable.

    ``solution``, ``config`` and ``evidence`` answer the request. A call with tensors (``*inputs, *written_outputs``) decides by
    these tensors and their device, so it is safe for all tensors. For another shape or device it runs the verified kernel
    there, or the stock code.
    """

    request: Request
    solution: SolutionFiles
    config: Config
    evidence: Evidence
    rejected: tuple[Rejection, ...]
    dispatcher: Dispatcher

    def __repr__(self) -> str:
        """Return the call, what serves it and why, in one line."""
        return f"<{spelled_decision(self.request, str(self.evidence.candidate or self.solution.name), self.evidence)}>"

    def _repr_html_(self) -> str:
        return candidates_table(self.request, self.evidence, self.rejected, self.solution.name)

    @property
    def is_stock(self) -> bool:
        """True if nothing verified is faster, so that ``solution`` is the Definition's stock code."""
        return self.evidence.source == "stock"

    def __call__(self, *args: Any) -> None:
        """Run on real tensors and write the outputs; raises the errors of the stock code if that runs."""
        if not self.dispatcher.attempt(*args):
            self.dispatcher.run_stock(*args)

    def report(self) -> DispatchReport:
        """Return the numbers of calls, hits, misses and failures so far."""
        return self.dispatcher.report()


def resolve(
    definition: str | Definition,
    *,
    axes: Mapping[str, int] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    layouts: Mapping[str, str] | None = None,
    scalars: Mapping[str, Scalar] | None = None,
    gpu: str | None = None,
    mode: Mode = "inference",
    launch: Launch = "call",
    like: Sequence[Any] | None = None,
    catalog: Catalog | None = None,
    trust: bool = False,
    require: str | Collection[str] = (),
) -> Resolved:
    """Return the fastest verified solution for a call, or else the Definition's stock code.

    Args:
        definition: name or record of the operator.
        axes: size per axis; const axes may be left out.
        dtypes: dtype per dtype variable, as ``"bfloat16"`` or ``torch.bfloat16``; a variable with one choice may be left out.
        layouts: layout class per tensor that is not contiguous.
        scalars: scalar inputs; those that select code are required.
        gpu: a GPU slug or family such as ``h200``; None or ``auto`` means this machine's device.
        mode: ``training`` resolves to stock unless a kernel for the backward of the call is also verified.
        launch: ``replay`` decides for a call in a CUDA graph, by device time alone; its first call must come before the capture.
        like: real arguments (inputs, optionally outputs), from which axes, dtypes, layouts and scalars are read.
        catalog: the catalog of the records; None means :meth:`Catalog.default`.
        trust: also use published traces that neither came with the package nor were published by this installation.
        require: ``deterministic``, ``batch_invariant`` or both: what is verified of the bits of a kernel that serves. See
            :func:`tilegym_db.patch`.

    Raises:
        NotFoundError: there is no such Definition.
        UsageError: the request does not fit the Definition, or the GPU is unknown.
        NoSolutionError: no verified solution is faster, and the Definition has no stock solution.
    """
    catalog = (catalog or Catalog.default()).trusting(trust).requiring(requirements(require))
    request = ask(
        definition,
        catalog,
        axes=axes,
        dtypes=dtypes,
        layouts=layouts,
        scalars=scalars,
        gpu=gpu,
        mode=mode,
        launch=launch,
        like=like,
    )
    decision, solutions = decide_request(request, catalog)
    stock = stock_of(solutions.values())
    chosen = decision.solution or stock
    if chosen is None:
        raise NoSolutionError(_why_nothing(request, decision), code="no_solution")
    record = request.definition
    launcher = stock_launcher(record, stock) if stock else None
    dispatcher = call_site(record, catalog, mode=mode, launch=launch, stock=launcher)
    return Resolved(request, chosen, decision.config, decision.evidence, decision.rejected, dispatcher)


def requirements(given: str | Collection[str] | None) -> frozenset[str]:
    """Return what is required of the bits of kernels; raise :class:`UsageError` for an unknown name."""
    check_kind(given or (), Collection, "require is a name or a collection of names")
    names = frozenset(
        str(name).replace("-", "_") for name in ((given,) if isinstance(given, str) else given or ()) if name
    )
    for name in sorted(names - {*REQUIREMENTS}):
        raise UsageError(
            f"require is {' or '.join(REQUIREMENTS)}, not {name!r}.{did_you_mean(name, REQUIREMENTS)}",
            code="requirement_unknown",
        )
    return names


def ask(
    definition: str | Definition,
    catalog: Catalog,
    *,
    axes: Mapping[str, int] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    layouts: Mapping[str, str] | None = None,
    scalars: Mapping[str, Scalar] | None = None,
    gpu: str | None = None,
    mode: str = "inference",
    launch: str = "call",
    like: Sequence[Any] | None = None,
) -> Request:
    """Return the request that the arguments of :func:`resolve` describe.

    Only a request about this machine knows which languages cannot run here. Errors are those of :func:`resolve`.
    """
    check_kind(gpu or "", str, "gpu is the name of a GPU, a text")
    record = _record(definition, catalog)
    call = _call(record, like, axes=axes, dtypes=dtypes, layouts=layouts, scalars=scalars)
    slug, target = _gpu(gpu, like)
    unavailable = unavailable_languages(catalog.solutions_for(record.name)) if _is_this_machine(gpu) else None
    return make_request(record, call, gpu=slug, sm=target, mode=mode, unavailable=unavailable, launch=launch)


def _call(record: Definition, like: Sequence[Any] | None, **given: Mapping[str, Any] | None) -> Call:
    """Return the call from real arguments, or from its parts."""
    if like is None:
        for name, values in given.items():
            check_kind(values or {}, Mapping, f"{name} is a mapping of names to values")
        parts: dict[str, dict[str, Any]] = {name: dict(values or {}) for name, values in given.items()}
        parts["axes"] = {name: _size(value) for name, value in parts["axes"].items()}
        parts["scalars"] = {name: _scalar(record, name, value) for name, value in parts["scalars"].items()}
        parts["dtypes"] = {name: str(value).removeprefix("torch.") for name, value in parts["dtypes"].items()}
        return Call(record.name, **parts)
    if any(given.values()):
        raise UsageError(
            "give either like=(real arguments) or axes, dtypes, layouts and scalars, not both.", code="options_clash"
        )
    check_kind(like, Sequence, f"like is the arguments of a call in order: ({', '.join(record.inputs)})")
    return bind_call(record, like)


def _size(value: Any) -> Any:
    """Return a whole number of another library, such as NumPy's, as Python's; other values as they are."""
    return operator.index(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _scalar(definition: Definition, name: str, value: Any) -> Scalar:
    """Return a number of another library as Python's, because only those are compared with verified ranges."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Integral):
        return operator.index(value)
    if isinstance(value, Real):
        return float(value)
    raise UsageError(f"'{name}' of {definition.name} is a Python number, not {value!r}.", code="scalar_expected")


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
    """Decide by the published table of the request's GPU; return the decision and the solutions that were considered."""
    solutions = {files.name: files for files in catalog.solutions_for(request.definition.name)}
    table, backward = table_for(catalog, request.gpu), _decide_backward(request, catalog)
    return decide(request, table, solutions, backward, missing=why_no_table(request.gpu)), solutions


def _decide_backward(request: Request, catalog: Catalog) -> Decision | None:
    """Return the decision about the gradients of a request in training; None if no Definition computes them."""
    backward = _backward(request.definition, catalog, request.mode)
    if backward is None:
        return None
    try:
        asked = make_request(
            backward,
            backward_call(backward, request.call),
            gpu=request.gpu,
            sm=request.sm,
            mode=request.mode,
            unavailable=request.unavailable,
            launch=request.launch,
        )
    except UsageError as error:
        return no_kernel(str(error), request.gpu)
    return decide_request(asked, catalog)[0]


def _backward(definition: Definition, catalog: Catalog, mode: Mode) -> Definition | None:
    """Return the Definition of all gradients of a call in training; None if there is none."""
    if mode != "training" or definition.backward_of is not None:
        return None
    return next(iter(catalog.backwards_of(definition.name)), None)


def call_site(
    definition: Definition,
    catalog: Catalog,
    *,
    mode: Mode = "inference",
    launch: Launch = "call",
    stock: Launcher | None = None,
    backward: Definition | None = None,
    only: str | None = None,
    check: bool = False,
) -> Dispatcher:
    """Return a new call site of a Definition; see :class:`~tilegym_db.resolver.dispatch.Dispatcher`.

    Args:
        launch: ``replay`` if all calls will be replayed; else only those inside :func:`~tilegym_db.resolver.hot_path.replayed`.
        stock: destination-passing stock code of the call site, for calls of the dispatcher itself.
        backward: the Definition of the gradients that training needs; by default that of all gradients.
        only: the one solution that may serve the site, by the usual rules; None allows all.
        check: check the kernel of the nearest measured point at the first call of a size that was not measured.
    """
    from tilegym_db.resolver.dispatch import Dispatcher

    gradients_by = backward or _backward(definition, catalog, mode)
    propose = _proposer(definition, catalog, only) if check and mode == "inference" else None
    chooser = _chooser(definition, catalog, mode, gradients_by, only)
    return Dispatcher(definition, chooser, stock=stock, propose=propose, launch=launch)


def _proposer(definition: Definition, catalog: Catalog, only: str | None) -> Propose:
    known = {files.name: files for files in catalog.solutions_for(definition.name)}
    solutions = {name: files for name, files in known.items() if only in (None, name)}
    unavailable = unavailable_languages(solutions.values())

    def propose(call: Call, device: torch.device, launch: Launch) -> Decision | None:
        gpu, target = device_gpu(device)
        table = table_for(catalog, gpu)
        request = make_request(definition, call, gpu=gpu, sm=target, unavailable=unavailable, launch=launch)
        return decide_first_call(request, table, solutions)

    return propose


def _chooser(
    definition: Definition, catalog: Catalog, mode: Mode, backward: Definition | None, only: str | None = None
) -> Choose:
    known = {files.name: files for files in catalog.solutions_for(definition.name)}
    solutions = {name: files for name, files in known.items() if only in (None, name)}
    unavailable = unavailable_languages(solutions.values())

    choose_backward = None if backward is None else _chooser(backward, catalog, mode, None)
    tables: dict[str, ResolverTable | None] = {}  # later publications must not change a running model
    indexes: dict[tuple[str, Launch], PointIndex] = {}

    def choose(call: Call, device: torch.device, serving: str | None, launch: Launch = "call") -> Decision:
        gpu, target = device_gpu(device)
        if gpu not in tables:
            tables[gpu] = table_for(catalog, gpu)
        table, index = tables[gpu], indexes.get((gpu, launch))
        if index is None and table is not None:
            index = index_of(definition, table, solutions, sm=target, unavailable=unavailable, launch=launch)
            indexes[gpu, launch] = index
        after = after_it(call, device, launch)
        leads_back = after is not None and after.solution is not None
        if index is not None and (mode == "inference" or definition.backward_of is not None or leads_back):
            known = index.find(call, serving)
            if known is not None:
                return known
        request = make_request(
            definition, call, gpu=gpu, sm=target, mode=mode, serving=serving, unavailable=unavailable, launch=launch
        )
        return decide(request, table, solutions, after, missing=why_no_table(gpu))

    def after_it(call: Call, device: torch.device, launch: Launch) -> Decision | None:
        if backward is None or choose_backward is None:
            return None
        try:
            return choose_backward(backward_call(backward, call), device, None, launch)
        except UsageError as error:
            return no_kernel(str(error), device_gpu(device)[0])

    return choose


def unavailable_languages(solutions: Iterable[SolutionFiles]) -> dict[str, str]:
    """Return language -> reason and fix, for the languages of some solutions that cannot run in this process."""
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
"""Backends that can run, each with its environment. Others are asked again, because they may be installed later."""


def stock_launcher(definition: Definition, stock: SolutionFiles) -> Callable[..., None]:
    """Return ``launch(*inputs, *outputs)`` of a stock solution. The first call loads it, so resolving needs no PyTorch."""
    loaded: list[Launcher] = []

    def launch_stock(*args: Any) -> None:
        if not loaded:
            from tilegym_db.resolver.loader import load_launcher

            loaded.append(load_launcher(definition, stock, {}, stock.digest))
        loaded[0](*args)

    return launch_stock


def _is_this_machine(asked: str | None) -> bool:
    if asked is None:
        return True
    check_kind(asked, str, "gpu is the name of a kind of GPU, such as 'h200'")
    return asked.strip().lower() == "auto"


def _gpu(asked: str | None, like: Sequence[Any] | None) -> tuple[str, str]:
    """Return (slug or family, compile target) of the requested device."""
    if asked is not None and not _is_this_machine(asked):
        name = parse_gpu(asked, published_gpus())
        return name, compile_target(name)
    if like is None:
        return default_gpu()
    device = common_device(like)
    if isinstance(device, str):
        raise UsageError(
            f"the device of like= is unclear: {device}. Pass gpu=, or tensors of one device.", code="device_unclear"
        )
    return device_gpu(device)


def _why_nothing(request: Request, decision: Decision) -> str:
    name = request.definition.name
    reasons = "; ".join(f"{candidate}: {reason}" for candidate, reason in decision.rejected[:5])
    return (
        f"no solution can serve {name} on {request.gpu}: {decision.evidence.reason}, and the Definition has no stock "
        f"solution. {reasons or 'It has no solutions yet'}. Try: tilegym-db list --solutions"
    )


# ---- index ----------------------------------------------------------------------------------------
# An index of the measured points of one Definition: exact sizes, dtypes and code-selecting scalars -> the decision.
#
# It is built once per table and dtypes, by the same judgement as in :func:`~tilegym_db.resolver.decide.decide`. Every point is
# judged for a request of its sizes, and the decision is kept with a reason for every candidate. A lookup is then one dictionary
# access. Only valid calls are in the index, so a hit needs no further check. All other calls (another size, a spelling that needs
# a check, a mistake) go to ``make_request`` and ``decide``.

_Special = tuple[tuple[str, str], ...]
"""The tensors that are not contiguous, with their classes, in the order in which they were stated. The judgement of a point
depends on nothing else; the reason names the first tensor whose layout a Solution does not accept."""

_NOTHING_SPECIAL: _Special = ()
_CLASSES = frozenset(LAYOUT_CLASSES)
_SCALAR_TYPES = frozenset({bool, int, float, str, type(None)})


class _Measured:
    """A measured point with its decisions, by special layouts and then by the solution that serves the site now."""

    __slots__ = ("decisions", "entry", "plain", "request")

    def __init__(self, entry: Entry, request: Request) -> None:
        self.entry = entry
        self.request = request
        self.plain = not _special(entry.call.layouts)
        self.decisions: dict[_Special, dict[str | None, Decision]] = {}


class PointIndex:
    """The measured points of one Definition on one GPU, for one set of Solutions."""

    def __init__(
        self,
        definition: Definition,
        table: ResolverTable,
        solutions: Mapping[str, SolutionFiles],
        *,
        sm: str,
        unavailable: Mapping[str, str],
        launch: Launch = "call",
    ) -> None:
        """Create an index whose points are judged dtype by dtype, on demand.

        Args:
            table: the published measurements of a GPU.
            solutions: the catalog's Solutions of the Definition, by name.
            sm: the device's ``sm_XX``, or ``cpu``.
            unavailable: language -> reason if it cannot run in this process.
            launch: the way in which the calls get to the device.
        """
        self._definition, self._table, self._solutions = definition, table, dict(solutions)
        self._tensors = frozenset((*definition.tensor_inputs, *definition.outputs))
        self._scalars = frozenset(name for name, spec in definition.inputs.items() if spec.is_scalar)
        self._selecting = selecting_scalars(definition)
        self._sizes = tuple(definition.size_scalars.items())
        self._dtype_names = tuple(definition.dtypes)
        # A call may leave out const axes or name all axes: the number of sizes shows which.
        self._axis_names = {len(names): names for names in (tuple(definition.axes), definition.var_axes)}
        self._points: dict[tuple[Any, ...], list[_Measured]] = {}
        # Within these ranges every candidate may serve; outside, each candidate is judged.
        self._ranges = dict(table.scalar_hull(definition.name))
        self._sm, self._unavailable, self._launch = sm, unavailable, launch
        self._judged: set[tuple[Any, ...]] = set()
        self._never_served: dict[tuple[str, ...], str] = {}

    def _judge_points(self, dtypes: tuple[Any, ...]) -> None:
        """Judge the points of one dtype binding when it is first requested; a model has one or two."""
        self._judged.add(dtypes)
        binding = dict(zip(self._dtype_names, dtypes, strict=True))
        for entry in self._table.believed_entries(self._definition, binding):
            self._add(entry)
            for candidate in entry.candidates:
                for name, (low, high) in (candidate.scalar_ranges or {}).items():
                    least, most = self._ranges.get(name, (low, high))
                    self._ranges[name] = max(least, low), min(most, high)

    def _add(self, entry: Entry) -> None:
        definition = self._definition
        selecting = {name: entry.call.scalars.get(name) for name in self._selecting}
        # NaN equals nothing, but a dictionary would find it by identity.
        if entry.definition_digest != definition.digest or any(value != value for value in selecting.values()):
            return
        try:
            request = self._request_at(entry, selecting)
        except UsageError:
            return  # no call can have these values either
        measured = _Measured(entry, request)
        self._judge(measured, _special(request.call.layouts))
        for names in self._axis_names.values():
            sizes = tuple(request.call.axes[name] for name in names)
            key = sizes, tuple(request.call.dtypes.values()), tuple(selecting.values())
            self._points.setdefault(key, []).append(measured)

    def _request_at(self, entry: Entry, scalars: Mapping[str, Scalar]) -> Request:
        """Return the request that a model makes at a measured point: var axes and the layouts of inputs."""
        definition, axes, layouts = self._definition, entry.call.axes, entry.call.layouts
        call = Call(
            definition.name,
            axes={name: axes[name] for name in definition.var_axes if name in axes},
            dtypes=entry.call.dtypes,
            layouts={name: layouts[name] for name in definition.tensor_inputs if name in layouts},
            scalars=scalars,
        )
        return make_request(
            definition,
            call,
            gpu=self._table.gpu,
            sm=self._sm,
            unavailable=self._unavailable,
            launch=self._launch,
        )

    def _judge(self, measured: _Measured, special: _Special) -> dict[str | None, Decision]:
        request = replace(measured.request, call=replace(measured.request.call, layouts=dict(special)))
        found = judge_each_serving(MeasuredPoint(measured.entry, exact=True), request, self._table, self._solutions)
        measured.decisions[special] = found
        return found

    def find(self, call: Call, serving: str | None = None) -> Decision | None:
        """Return the decision of :func:`~tilegym_db.resolver.decide.decide` in inference if a point is exactly that call.

        The arguments are those of :func:`make_request`. None has no meaning about them: the call may
        be a mistake, state fewer dtypes than there are, or lie between the points.
        """
        axes, dtypes, scalars = call.axes, call.dtypes, call.scalars
        names = self._axis_names.get(len(axes))
        if names is None or len(dtypes) != len(self._dtype_names) or not scalars.keys() <= self._scalars:
            return None
        for scalar, axis in self._sizes:
            if scalar in scalars and (type(scalars[scalar]) is not int or scalars[scalar] != axes.get(axis)):
                return None
        sizes = tuple([axes.get(name) for name in names])
        chosen = tuple([dtypes.get(name) for name in self._dtype_names])
        for size in sizes:
            if type(size) is not int:  # True equals 1, but is no size
                return None
        for dtype in chosen:
            if type(dtype) is not str:
                return None
        selecting: tuple[Scalar, ...] = ()
        if self._selecting:
            if not all(name in scalars and type(scalars[name]) in _SCALAR_TYPES for name in self._selecting):
                return None
            selecting = tuple([scalars[name] for name in self._selecting])
        if chosen not in self._judged:
            self._judge_points(chosen)
        if scalars and why_outside_scalars(self._definition, scalars, self._ranges):
            return None
        points = self._points.get((sizes, chosen, selecting))
        return None if points is None else self._at(points, call.layouts, scalars, serving)

    def _at(
        self,
        points: Sequence[_Measured],
        layouts: Mapping[str, str],
        scalars: Mapping[str, Scalar],
        serving: str | None,
    ) -> Decision | None:
        """Return the decision at one of the points that differ only in layouts and continuous scalars."""
        special = _NOTHING_SPECIAL
        if layouts:
            if not (layouts.keys() <= self._tensors and _CLASSES.issuperset(layouts.values())):
                return None
            special = _special(layouts)
        if special or len(points) > 1 or not points[0].plain:
            points = [point for point in points if layouts_match(point.entry, layouts, self._definition)]
            if not points:
                return None
        measured = points[0]
        if len(points) > 1:
            measured = max(points, key=lambda point: equal_scalars(point.entry, scalars))
        decisions = measured.decisions.get(special) or self._judge(measured, special)
        return decisions.get(serving) or decisions[None]

    def why_never_served(self, bindings: Sequence[Mapping[str, str]]) -> str:
        """Return why no measured point with one of some dtype bindings gets a kernel; empty if a point gets one."""
        definition, table = self._definition, self._table
        key = tuple(map(str, bindings))
        if key not in self._never_served:
            reason = f"{definition.name} was not measured on {table.gpu}"
            for entry in (entry for binding in bindings for entry in table.entries(definition.name, binding)):
                reason = self._why_not_at(entry)
                if not reason:
                    break
            self._never_served[key] = reason
        return self._never_served[key]

    def _why_not_at(self, entry: Entry) -> str:
        """Return why even a call at a measured point gets no kernel; empty if such a call gets one."""
        definition, table, scalars = self._definition, self._table, entry.call.scalars
        try:
            request = self._request_at(entry, {name: scalars[name] for name in definition.inputs if name in scalars})
        except UsageError as error:
            return str(error)
        if entry.definition_digest != definition.digest:
            why = find_point(request, table)
            return why if isinstance(why, str) else f"{definition.name} was measured under another meaning"
        decision = judge(MeasuredPoint(entry, exact=True), request, table, self._solutions)
        if decision.solution is not None:
            return ""
        kernels = [
            lost
            for lost in decision.rejected
            if lost.candidate.role == "kernel" and lost.candidate.latency_us is not None
        ]
        detail = f": {kernels[0].candidate}: {kernels[0].reason}" if kernels else ""
        what = f"no verified solution of {definition.name}{spelled_requirements(table.required)}"
        return f"{what} is faster than stock anywhere on {table.gpu}{detail}"


def _special(layouts: Mapping[str, str]) -> _Special:
    return tuple([item for item in layouts.items() if item[1] != CONTIGUOUS])


def index_of(
    definition: Definition,
    table: ResolverTable,
    solutions: Mapping[str, SolutionFiles],
    *,
    sm: str,
    unavailable: Mapping[str, str],
    launch: Launch = "call",
) -> PointIndex:
    """Return the index of a Definition, built once per table and set of Solutions; arguments as of :class:`PointIndex`."""
    digests = frozenset((name, files.digest) for name, files in solutions.items())
    key = definition.name, definition.digest, digests, sm, frozenset(unavailable.items()), launch
    index: PointIndex | None = table.indexes.get(key)
    if index is None:
        index = PointIndex(definition, table, solutions, sm=sm, unavailable=unavailable, launch=launch)
        table.indexes[key] = index
    return index


# ---- servable -------------------------------------------------------------------------------------
# Whether anything could serve a Definition on a GPU at all: asked once, before a call site is put into a model.
#
# What no published point could ever give a kernel for is no reason to stand before the model's own code.


def why_never_served(
    definition: Definition,
    table: ResolverTable | None,
    solutions: Mapping[str, SolutionFiles],
    *,
    gpu: str,
    sm: str,
    dtypes: Collection[str] | None = None,
    unavailable: Mapping[str, str] | None = None,
    launch: Launch = "call",
) -> str:
    """Return why no call of a Definition can be given a kernel, whatever its sizes; empty if some call can.

    Args:
        table: the published measurements of the GPU; None if there are none.
        solutions: the catalog's Solutions of the Definition, by name.
        gpu: the GPU's slug, for the reason.
        sm: its ``sm_XX``, or ``cpu``.
        dtypes: those that the model's tensors have; None if that is not known.
        unavailable: language -> why it cannot run in this process.
        launch: ``replay`` if some of the calls may be replayed. What serves a call also serves a replay.
    """
    if table is None:
        return why_no_table(gpu)
    measured = table.dtypes_of(definition.name)
    usable = [one for one in measured if dtypes is None or not one or set(dtypes) & set(one.values())]
    if measured and not usable:
        known = "; ".join(", ".join(f"{name}={dtype}" for name, dtype in one.items()) for one in measured)
        return f"{definition.name} was not measured on {table.gpu} with {' or '.join(sorted(dtypes or ()))} (measured: {known})"
    index = index_of(definition, table, solutions, sm=sm, unavailable=unavailable or {}, launch=launch)
    return index.why_never_served(usable)


# ---- requests -------------------------------------------------------------------------------------
# A request to the resolver: one call of a Definition on one GPU, checked before any decision.


def make_request(
    definition: Definition,
    call: Call,
    *,
    gpu: str,
    sm: str | None = None,
    mode: str = "inference",
    serving: str | None = None,
    unavailable: Mapping[str, str] | None = None,
    launch: str = "call",
) -> Request:
    """Return a checked request: the call is bound and fits the Definition."""
    if mode not in MODES:
        raise UsageError(f"mode must be {' or '.join(MODES)}, not {mode!r}.", code="mode_unknown")
    if launch not in LAUNCHES:
        raise UsageError(f"launch must be {' or '.join(LAUNCHES)}, not {launch!r}.", code="launch_unknown")
    bound = call.bind(definition)
    _check_layouts(definition, call.layouts)
    _check_scalars(definition, call.scalars)
    return Request(definition, bound, gpu, sm or compile_target(gpu), mode, serving, dict(unavailable or {}), launch)


def compile_target(gpu: str) -> str:
    """Return ``sm_90`` for ``h200`` or for the family ``h100``; ``cpu`` for the CPU."""
    if gpu == CPU:
        return CPU
    return next((sm for slug, sm in GPU_SLUGS.items() if same_gpu(gpu, slug)), GPU_SLUGS.get(gpu_base(gpu), ""))


def _check_layouts(definition: Definition, layouts: Mapping[str, str]) -> None:
    tensors = (*definition.tensor_inputs, *definition.outputs)
    for name, layout in layouts.items():
        if name not in tensors:
            raise UsageError(
                f"{definition.name} has no tensor '{name}'.{did_you_mean(name, tensors)}", code="tensor_unknown"
            )
        if layout not in LAYOUT_CLASSES:
            raise UsageError(
                f"layout of '{name}' must be one of {', '.join(LAYOUT_CLASSES)}, not {layout!r}.", code="layout_unknown"
            )


def _check_scalars(definition: Definition, scalars: Mapping[str, Scalar]) -> None:
    known = [name for name, spec in definition.inputs.items() if spec.is_scalar]
    for name, value in scalars.items():
        if name not in known:
            raise UsageError(
                f"{definition.name} has no scalar '{name}' (its scalars: {', '.join(known) or 'none'})."
                f"{did_you_mean(name, known)}",
                code="scalar_unknown",
            )
        if isinstance(value, str):
            raise UsageError(
                f"the scalar '{name}' of {definition.name} is {value!r}, which is text. Pass a number or a bool.",
                code="scalar_kind",
            )
    for name in known:
        if name not in scalars and is_code_selecting(definition, name):
            raise UsageError(
                f"{definition.name} needs the scalar '{name}', because its value selects the code that runs.",
                code="scalar_missing",
            )
