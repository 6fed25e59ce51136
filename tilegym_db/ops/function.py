"""The function of a Definition, with its signature and its description."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad

from tilegym_db.catalog import Catalog
from tilegym_db.errors import NoSolutionError, UsageError
from tilegym_db.published.input_files import published_folders
from tilegym_db.published.table import load_table
from tilegym_db.records import Definition
from tilegym_db.records.call import bind_call
from tilegym_db.records.definition_parts import TensorSpec
from tilegym_db.records.dtypes import scalar_type
from tilegym_db.resolver.dispatch import Dispatcher
from tilegym_db.resolver.hot_path import allocate_of
from tilegym_db.resolver.resolve import call_site
from tilegym_db.resolver.training import Training, training_of
from tilegym_db.verification.oracle import load_function, name_outputs

# Python source, so that a compiler can look inside. It contains only names of inputs, which are identifiers.
_TEMPLATE = """\
def {called}({parameters}, *, backend="auto"):
    if _is_compiling() or _dispatch_modes() or _jit_tracing():
        return _traced(({parameters},), backend)
    return _operator(({parameters},), backend)
"""


def operator_function(definition: Definition, catalog: Catalog) -> Callable[..., Any]:
    """Return ``function(*inputs, backend="auto")`` of a Definition; see :class:`CatalogOperator`.

    Raises:
        UsageError: the shape of an output does not follow from the inputs, or an input has the name ``backend``.
    """
    if "backend" in definition.inputs:
        raise UsageError(
            f"an input of {definition.name} is named 'backend', like the option of its function; rename the input.",
            code="input_name_reserved",
        )
    operator = CatalogOperator(definition, catalog)
    in_graph = define(operator)

    def traced(inputs: tuple[Any, ...], backend: str) -> Any:
        if backend == REFERENCE or operator.is_differentiated(inputs):
            return operator.by_reference(inputs)
        written = in_graph(*inputs, backend)
        return operator.returned(inputs, () if written is None else written)

    called = re.sub(r"\W|^(?=\d)", "_", definition.name)
    namespace: dict[str, Any] = {
        "_is_compiling": torch.compiler.is_compiling,
        "_dispatch_modes": torch._C._len_torch_dispatch_stack,
        "_jit_tracing": torch._C._is_tracing,
        "_traced": traced,
        "_operator": operator,
    }
    source = _TEMPLATE.format(called=called, parameters=", ".join(definition.inputs))
    exec(compile(source, f"<tilegym_db.ops.{called}>", "exec"), namespace)
    function: Callable[..., Any] = namespace[called]
    function.__module__, function.__doc__ = "tilegym_db.ops", described(definition, catalog)
    function.__annotations__ = _annotations(definition)
    return function


def _annotations(definition: Definition) -> dict[str, Any]:
    inputs = {
        name: scalar_type(spec.dtype) if spec.is_scalar else torch.Tensor for name, spec in definition.inputs.items()
    }
    count = len(definition.outputs)
    returned: Any = torch.Tensor if count == 1 else tuple[(torch.Tensor,) * count]  # type: ignore[misc]
    return {**inputs, "backend": str, "return": returned}


# ---- description ----------------------------------------------------------------------------------
# The docstring of an operator's function, from the Definition and from published measurements.


def described(definition: Definition, catalog: Catalog) -> str:
    """Return the docstring of a function: arguments, results, sizes, and its verified kernels."""
    lines = [definition.description or definition.name, "", "Args:"]
    lines += [f"    {name}: {text}" for name, text in arguments(definition).items()]
    lines += ["    backend: 'auto', 'reference', or the name of a verified solution.", "", "Returns:"]
    lines += [f"    {name}: {text}" for name, text in results(definition).items()]
    if definition.constraints:
        lines += ["", "Sizes:", *(f"    {text}" for text in definition.constraints)]
    kernels = kernels_of(definition, catalog)
    found = [f"    {gpu}: {', '.join(names)}" for gpu, names in kernels.items()]
    return "\n".join([*lines, "", "Fastest verified kernels:", *(found or ["    none yet; the reference runs"])])


def arguments(definition: Definition) -> dict[str, str]:
    """Return each input with its shape, dtype and description."""
    return {name: _spelled(definition, name, spec) for name, spec in definition.inputs.items()}


def results(definition: Definition) -> dict[str, str]:
    """Return each output with its shape, dtype and description."""
    overwritten = {target: f" ({source}, overwritten)" for source, target in definition.in_place.items()}
    return {
        name: _spelled(definition, name, spec) + overwritten.get(name, "") for name, spec in definition.outputs.items()
    }


def _spelled(definition: Definition, name: str, spec: TensorSpec) -> str:
    dtypes = " or ".join(definition.dtypes.get(spec.dtype, (spec.dtype,)))
    axis = definition.size_scalars.get(name)
    if spec.is_scalar:
        what = f"a number, {dtypes}" if axis is None else f"a number, the size of {axis}"
    else:
        shape = f"[{', '.join(map(str, spec.shape or ()))}]"
        layout = f", {definition.layouts[name]}" if name in definition.layouts else ""
        variable = f"{spec.dtype} = " if spec.dtype in definition.dtypes else ""
        what = f"{shape} of {variable}{dtypes}{layout}"
    return f"{what}; {spec.description}" if spec.description else what


def kernels_of(definition: Definition, catalog: Catalog) -> dict[str, list[str]]:
    """Return GPU -> the kernels that are fastest at some published point, those of most points first."""
    digests = {files.name: files.digest for files in catalog.solutions_for(definition.name)}
    found = {}
    for folder in published_folders(catalog):
        table = load_table(folder.name, trust=catalog.trust_foreign)
        if table is None or definition.name not in table.definitions:
            continue
        wins: Counter[str] = Counter()
        for dtypes in table.dtypes_of(definition.name):
            for entry in table.believed_entries(definition, dtypes):
                serving = [
                    candidate
                    for candidate in entry.candidates
                    if entry.definition_digest == definition.digest
                    and candidate.role == "kernel"
                    and candidate.latency_us is not None
                    and (candidate.speedup_ci_low or 0) > 1
                    and digests.get(candidate.solution) == candidate.solution_digest
                ]
                if serving:
                    wins[min(serving, key=lambda candidate: candidate.latency_us or 0).solution] += 1
        if wins:
            found[folder.name] = [name for name, _ in wins.most_common()]
    return found


# ---- compiled and traced code ---------------------------------------------------------------------
# Operators in compiled or traced code: ``torch.ops.tilegym_db_ops.<definition>(*inputs, backend)``.
#
# A compiler sees an operator with known output shapes and strides, and the inputs that it overwrites. When the operator runs, its
# inputs decide what serves the call, as in eager mode. A call that may need a derivative is traced as the operations of the
# reference.

NAMESPACE = "tilegym_db_ops"

_library: list[torch.library.Library] = []
_defined: dict[str, int] = {}
_defining = threading.Lock()


def define(operator: CatalogOperator) -> Callable[..., Any]:
    """Define a library operator that runs an operator, under its name, or with a number if the name is taken.

    It returns the outputs that are not written in place.
    """
    called = re.sub(r"\W", "_", operator.definition.name)
    with _defining:
        if not _library:
            _library.append(torch.library.Library(NAMESPACE, "FRAGMENT"))  # type: ignore[no-untyped-call]
        number = _defined[called] = _defined.get(called, -1) + 1
    return _define(_library[0], f"{called}_{number}" if number else called, operator)


def _define(library: torch.library.Library, called: str, operator: CatalogOperator) -> Callable[..., Any]:
    # Kernels are chosen by strides, so a compiler must pass the layout that it promised.
    tags = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
    library.define(called + _schema(operator), tags=tags)  # type: ignore[no-untyped-call]

    def run(*arguments: Any) -> Any:
        outputs = operator.written(arguments[:-1], arguments[-1])
        return None if outputs == () else outputs

    def shapes(*arguments: Any) -> Any:
        outputs = operator.allocate(*arguments[:-1])
        return None if outputs == () else outputs

    library.impl(called, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{called}", shapes, lib=library)
    defined: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), called).default

    def differentiate(*arguments: Any) -> Any:
        # The Python function asks this too, but a transform inside compiled code can hide a derivative from it.
        inputs: tuple[Any, ...] = arguments[:-1]
        if operator.is_differentiated(inputs):
            outputs = operator.written_by_reference(inputs)
            return None if outputs == () else outputs
        with torch._C._AutoDispatchBelowAutograd():
            return defined(*arguments)

    library.impl(called, differentiate, "Autograd")  # type: ignore[no-untyped-call]
    return defined


def _schema(operator: CatalogOperator) -> str:
    definition = operator.definition
    inputs: list[str] = []
    for name, spec in definition.inputs.items():
        overwritten = f"Tensor(a{len(inputs)}!)" if name in definition.in_place else "Tensor"
        inputs.append(f"{scalar_type(spec.dtype).__name__ if spec.is_scalar else overwritten} {name}")
    outputs = ", ".join(["Tensor"] * len(definition.written_outputs))
    return f"({', '.join(inputs)}, str backend) -> ({outputs})"


# ---- catalog operator -----------------------------------------------------------------------------
# A call of an operator runs a verified kernel, or else the reference of its Definition.

AUTO, REFERENCE = "auto", "reference"
"""Backends that are no names of solutions: the fastest verified kernel or else the reference, and always the reference."""

_functorch_level = torch._C._functorch.peek_interpreter_stack

Serve = Callable[..., Any]
"""``serve(*inputs)`` returns the written outputs (None, one, or a tuple), or :data:`NOT_SERVED` if no kernel ran."""

NOT_SERVED = object()


def _without_autocast(like: torch.Tensor) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False)


class CatalogOperator:
    """One operator of a catalog. It remembers the decision for each kind of call, like a call site of a model."""

    def __init__(self, definition: Definition, catalog: Catalog) -> None:
        """Prepare the operator; nothing is loaded before the first call.

        Raises:
            UsageError: the shape of an output does not follow from the inputs.
        """
        self.definition = definition
        self.allocate = allocate_of(definition)
        self._catalog = catalog
        self._reference = load_function(definition.reference, definition.name)
        self._tensors = tuple(map(list(definition.inputs).index, definition.tensor_inputs))
        self._overwritten = tuple(map(list(definition.inputs).index, definition.in_place))
        self._backends: dict[str, tuple[Serve, Dispatcher]] = {}
        self._training: tuple[Training | None] | None = None
        self._making = threading.Lock()

    def __call__(self, inputs: tuple[Any, ...], backend: str = AUTO) -> Any:
        """Return the outputs in the order of the Definition; an output written in place is the input itself.

        If autograd records the call, a kernel serves it if another one is verified for the gradients. Otherwise autograd
        records the operations of the reference.

        Raises:
            UsageError: an argument does not fit the Definition; the message names it.
            NotFoundError: there is no such backend.
            NoSolutionError: the solution named by ``backend`` is not verified for such a call, or not faster.
        """
        if self.is_differentiated(inputs) or backend == REFERENCE:
            self._check(inputs)
            if backend not in (AUTO, REFERENCE):
                raise NoSolutionError(
                    f"{backend} has no derivative. Leave 'backend' out, or call it under torch.no_grad().",
                    code="derivative_missing",
                )
            outputs = self._with_gradients(inputs) if backend == AUTO else None
            return self.by_reference(inputs) if outputs is None else outputs
        return self.returned(inputs, self.written(inputs, backend))

    def written(self, inputs: tuple[Any, ...], backend: str) -> Any:
        """Return one output or a tuple of them, without those written in place, by a kernel or the reference.

        It raises the same errors as a call.
        """
        serve, dispatcher = self._backends.get(backend) or self._make(backend)
        try:
            outputs = serve(*inputs)
        except (AttributeError, TypeError):  # an argument of another type has no shape, or no hash
            self._check(inputs)
            raise
        if outputs is not NOT_SERVED:
            self._tell_autograd(inputs)
            return outputs
        self._check(inputs)
        if backend != AUTO:
            reason = dispatcher.preview(inputs, self.allocate).reason
            raise NoSolutionError(
                f"{backend} cannot serve this call of {self.definition.name}: {reason}.", code="call_unsupported"
            )
        return self.written_by_reference(inputs)

    def _tell_autograd(self, inputs: Sequence[Any]) -> None:
        """Mark inputs that a kernel wrote, so that autograd raises if one was saved for a backward."""
        for index in self._overwritten:
            tensor = inputs[index]
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    def returned(self, inputs: Sequence[Any], written: Any) -> Any:
        """Return the outputs of a call: a tuple, or the value if there is one. ``written`` has those that are not in place."""
        if not self.definition.in_place:
            return written
        values = written if isinstance(written, tuple) else (written,)
        named = dict(zip(self.definition.written_outputs, values, strict=True))
        given = dict(zip(self.definition.inputs, inputs, strict=True))
        named |= {target: given[source] for source, target in self.definition.in_place.items()}
        found = tuple(named[name] for name in self.definition.outputs)
        return found[0] if len(found) == 1 else found

    # -- reference ----------------------------------------------------------------------------------------------------

    def is_differentiated(self, inputs: tuple[Any, ...]) -> bool:
        """Return True if a call may need a derivative or a transform is active; then only plain operations may run."""
        if torch.is_grad_enabled():
            for index in self._tensors:  # runs at every call: a generator would double the time
                if getattr(inputs[index], "requires_grad", False):
                    return True
        # Dynamo cannot read the levels; its operator asks again when it runs. is_compiling() may be True because another thread
        # compiles, so it must not decide here.
        return not torch.compiler.is_dynamo_compiling() and (
            forward_ad._current_level >= 0 or _functorch_level() is not None
        )

    def by_reference(self, inputs: tuple[Any, ...]) -> Any:
        """Return the result of a call by the operations of the reference, which autograd and transforms can see."""
        outputs = self._by_reference(inputs)
        if torch.compiler.is_dynamo_compiling() or _functorch_level() is None:
            outputs = self._laid_out(inputs, outputs)
        return self.returned(inputs, outputs[0] if len(outputs) == 1 else outputs)

    def written_by_reference(self, inputs: tuple[Any, ...]) -> Any:
        """Return what :meth:`written` returns, by the operations of the reference."""
        found = self._laid_out(inputs, self._by_reference(inputs))
        return found[0] if len(found) == 1 else found

    def _by_reference(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the outputs that are not written in place; write the others."""
        definition = self.definition
        given = dict(zip(definition.inputs, inputs, strict=True))
        own = {name: value.clone() if name in definition.in_place else value for name, value in given.items()}
        with _without_autocast(inputs[self._tensors[0]]):  # like kernels, which ignore autocast
            results = self._reference(*own.values())
        found = name_outputs(definition, results, own, definition.name)
        for source, target in definition.in_place.items():
            given[source].copy_(found[target])
        return tuple(found[name] for name in definition.written_outputs)

    def _laid_out(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copy outputs into the layout of a kernel's outputs, because a reference may return a part of an input."""
        made = self.allocate(*inputs)
        likes = made if isinstance(made, tuple) else (made,)
        return tuple(like.copy_(value) for like, value in zip(likes, outputs, strict=True))

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _with_gradients(self, inputs: tuple[Any, ...]) -> Any:
        """Return the outputs of a kernel if autograd records the call and a kernel is verified for its gradients, else None.

        Transforms and forward derivatives need operations that they can see. An operator that overwrites an input has no
        gradients.
        """
        if self.definition.in_place or forward_ad._current_level >= 0 or _functorch_level() is not None:
            return None
        with self._making:
            if self._training is None:
                self._training = (training_of(self.definition, self._catalog),)
        (training,) = self._training
        outputs = None if training is None else training.ask(inputs, training=True)
        return None if isinstance(outputs, str) else outputs

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _make(self, backend: str) -> tuple[Serve, Dispatcher]:
        with self._making:
            if backend not in self._backends:
                dispatcher = call_site(self.definition, self._catalog, only=self._solution(backend))
                self._backends[backend] = (self._serve(dispatcher), dispatcher)
        return self._backends[backend]

    def _solution(self, backend: str) -> str | None:
        if backend == AUTO:
            return None
        files = self._catalog.solution(backend)
        if files.record.definition != self.definition.name:
            raise UsageError(
                f"{backend} is a solution of {files.record.definition}, not of {self.definition.name}.",
                code="solution_of_other_definition",
            )
        return backend

    def _serve(self, dispatcher: Dispatcher) -> Serve:
        if not self.definition.written_outputs:
            attempt = dispatcher.attempt
            return lambda *inputs: () if attempt(*inputs) else NOT_SERVED
        growing = self.definition.serving.growing if self.definition.serving else None
        serve = dispatcher.serving(self._checked_allocation, growing)

        def answer(*inputs: Any) -> Any:
            outputs = serve(*inputs)
            return NOT_SERVED if outputs is None else outputs

        return answer

    def _checked_allocation(self, *inputs: Any) -> Any:
        """Allocate the outputs; first check a new kind of call without memory, and refuse one that does not fit the operator."""
        if inputs[self._tensors[0]].is_meta:
            self._check(inputs)
        return self.allocate(*inputs)

    def _check(self, inputs: tuple[Any, ...]) -> None:
        """Raise :class:`UsageError` with the name of an argument that does not fit the Definition."""
        for (name, spec), value in zip(self.definition.inputs.items(), inputs, strict=True):
            wanted = scalar_type(spec.dtype) if spec.is_scalar else None
            if wanted is not None and not _is_a(value, wanted):
                raise UsageError(
                    f"'{name}' of {self.definition.name} is a number of type {wanted.__name__}, not {type(value).__name__}.",
                    code="scalar_type",
                )
        bind_call(self.definition, inputs)


def _is_a(value: Any, wanted: type) -> bool:
    if isinstance(value, bool) or wanted is bool:
        return isinstance(value, bool) and wanted is bool
    return isinstance(value, int if wanted is int else (int, float))
