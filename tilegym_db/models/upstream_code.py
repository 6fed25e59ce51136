"""A fingerprint of a function's source that ignores the names of local variables.

Two ``forward`` methods that differ only in local names, annotations, docstrings or formatting have one fingerprint. A
difference in an operation, attribute, constant or parameter changes it. Names of parameters count because callers may pass
them by keyword. A fingerprint only suggests a Definition: a probe confirms it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import sys
import textwrap
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

import torch

Answer = TypeVar("Answer")


def once_per_function(ask: Callable[[FunctionType], Answer]) -> Callable[[FunctionType], Answer]:
    """Return a function that asks a question about the source of a function once, because source does not change."""
    answers: weakref.WeakKeyDictionary[FunctionType, Answer] = weakref.WeakKeyDictionary()

    @functools.wraps(ask)
    def asked(function: FunctionType) -> Answer:
        if function not in answers:
            answers[function] = ask(function)
        return answers[function]

    return asked


SOURCE = "_tilegym_db_source"
"""The attribute of a function with its text, if no file has it."""
NO_FINGERPRINT = "0" * 16
"""The fingerprint in a record of code that was recognised, but has no source."""


def fingerprint(function: Any) -> str | None:
    """Return 16 hex digits, or None if there is no source for the code that runs.

    There is none for built-in, generated or wrapped functions: a wrapper shows the source of the inner function and does more.
    """
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return None
    return _of_source(function)


@once_per_function
def source_of(function: FunctionType) -> str:
    """Return the text of a function without its indentation. A patch of a deep model asks often, and reading takes long.

    Raises:
        OSError: it has no source.
        TypeError: it wraps an object that is no function.
    """
    return vars(function).get(SOURCE) or textwrap.dedent(inspect.getsource(function))


def with_source(function: FunctionType, source: str) -> FunctionType:
    """Note the text of a function that was made from a changed one, for parts that change it further."""
    vars(function)[SOURCE] = source
    return function


@once_per_function
def _of_source(function: FunctionType) -> str | None:
    try:
        source = source_of(function)
    except OSError:
        return None
    return source_fingerprint(source)


def source_fingerprint(source: str) -> str | None:
    """Return the :func:`fingerprint` of the text of one function; None for any other text."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:  # for example a lambda in the middle of an expression
        return None
    function = tree.body[0] if tree.body else None
    if not isinstance(function, ast.FunctionDef):
        return None
    parameters = [argument.arg for argument in _arguments(function.args)]
    normalised = _Normalise(parameters)
    body = [normalised.visit(statement) for statement in _without_docstring(function.body)]
    # Unparsed instead of dumped: the text of a tree is the same in every Python version, its dump is not.
    text = ast.unparse(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[])))
    defaults = [ast.unparse(value) for value in (*function.args.defaults, *function.args.kw_defaults) if value]
    return hashlib.sha256(repr((parameters, defaults, text)).encode()).hexdigest()[:16]


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    extra = [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *extra]


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_docstring = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_docstring else body


class _Normalise(ast.NodeTransformer):
    """A transformer that renames local variables in order of appearance; parameters, globals and attributes keep their names."""

    def __init__(self, parameters: list[str]) -> None:
        self._names = {name: name for name in parameters}
        self._locals = 0

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Store) and node.id not in self._names:
            self._names[node.id] = f"${self._locals}"  # no valid identifier, so it equals no global
            self._locals += 1
        return ast.Name(id=self._names.get(node.id, node.id), ctx=node.ctx)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        # The right side is evaluated before the names on the left are bound.
        value = self.visit(node.value)
        targets = [self.visit(target) for target in node.targets]
        return ast.Assign(targets=targets, value=value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        value = self.visit(node.value)
        return ast.Assign(targets=[self.visit(node.target)], value=value)


# ---- decorators -----------------------------------------------------------------------------------
# Decorators of transformers whose effect on a forward is known: how to remove them, and how to put them around other code.
#
# ``deprecate_kwarg`` renames arguments that callers pass by an older name. ``force_accelerate_hooks`` brings the weights of a
# submodule to the device before the forward uses them itself. ``torch.no_grad()`` keeps no gradients. A patched forward must do
# so too, so it gets the model's own decorator. The wrapper for gradient checkpointing does nothing outside of training.


def undecorated(forward: Any) -> Any:
    """Return a forward without the decorators that are known; ``forward`` itself if it has none."""
    while _is_known_wrapper(forward):
        forward = forward.__wrapped__
    return forward


def decorated_alike(forward: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` under the decorators that :func:`undecorated` removes from ``forward``."""
    if not _is_known_wrapper(forward):
        return function
    inner = decorated_alike(forward.__wrapped__, function)
    cells = tuple(CellType(inner) if _holds(cell, forward.__wrapped__) else cell for cell in forward.__closure__)
    around = FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, cells)
    around.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(around, inner)


def without_checkpointing(forward: Any) -> Any:
    """Return a layer's forward without the wrapper for gradient checkpointing; ``forward`` itself if it has none."""
    if isinstance(forward, FunctionType) and forward.__code__ in _checkpointing_codes():
        return getattr(forward, "__wrapped__", None)
    return forward


def is_known_decorator(decorator: ast.expr, scope: Mapping[str, Any]) -> bool:
    """Return True if a decorator in a function's source is a known one; ``scope`` has the globals of the function."""
    match decorator:
        case ast.Call(func=ast.Name(id=name)):
            return any(scope.get(name) is known for known in (*_known_decorators(), *_documenting_decorators()))
        case ast.Name(id=name):
            return any(scope.get(name) is known for known in _documenting_decorators())
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="no_grad"), args=[], keywords=[]):
            return scope.get(name) is torch
    return False


def _is_known_wrapper(forward: Any) -> bool:
    if not isinstance(forward, FunctionType):
        return False
    is_known = forward.__code__ in _renaming_codes() or _keeps_no_gradient(forward)
    wrapped = getattr(forward, "__wrapped__", None)
    return is_known and any(_holds(cell, wrapped) for cell in forward.__closure__ or ())


def _keeps_no_gradient(forward: FunctionType) -> bool:
    """Return True if a function is the wrapper that ``torch.no_grad()`` puts around another."""
    if forward.__code__ != _code_without_gradients():
        return False
    contexts = [getattr(cell.cell_contents, "__self__", None) for cell in forward.__closure__ or ()]
    return any(type(context) is torch.no_grad for context in contexts)


@cache
def _code_without_gradients() -> CodeType | None:
    @torch.no_grad()
    def nothing() -> None:
        """Do nothing."""

    return getattr(nothing, "__code__", None)


def _holds(cell: CellType, value: Any) -> bool:
    return cell.cell_contents is value and value is not None


@cache
def _renaming_codes() -> frozenset[CodeType]:
    return frozenset(code for decorator in _known_decorators() for code in wrapper_codes(decorator))


@cache
def _known_decorators() -> tuple[Any, ...]:
    """Return the decorators that rename arguments, or that run accelerate's hooks of a submodule before and after the forward."""
    found = []
    for module, name in (
        ("transformers.utils.deprecation", "deprecate_kwarg"),
        ("transformers.integrations.accelerate", "force_accelerate_hooks"),
    ):
        with contextlib.suppress(ImportError):
            found.append(getattr(importlib.import_module(module), name, None))
    return tuple(decorator for decorator in found if decorator is not None)


@cache
def _documenting_decorators() -> tuple[Any, ...]:
    """Return the decorators that change the docstring of a function and nothing else."""
    with contextlib.suppress(ImportError):
        from transformers.utils import auto_docstring

        return (auto_docstring,)
    return ()


@cache
def _checkpointing_codes() -> frozenset[CodeType]:
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        return frozenset()
    defined = vars(GradientCheckpointingLayer).get("__init_subclass__")
    return frozenset(_codes_in(getattr(getattr(defined, "__func__", None), "__code__", None)))


def wrapper_codes(decorator: Any) -> frozenset[CodeType]:
    """Return the code of the wrappers that a decorator with arguments makes: functions inside the functions that it defines."""
    made = _codes_in(getattr(decorator, "__code__", None))
    return frozenset(inner for code in made for inner in _codes_in(code))


def _codes_in(code: CodeType | None) -> Iterator[CodeType]:
    """Return the code of the functions that a function defines."""
    return (const for const in getattr(code, "co_consts", ()) if isinstance(const, CodeType))


# ---- foreign errors -------------------------------------------------------------------------------
# Exceptions of code outside of this package: of models, and of packages that load kernels from a hub.

BUILT_IN: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
OF_PACKAGES = (
    ("triton.errors", "TritonError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
    ("huggingface_hub.errors", "CacheNotFound"),
    ("huggingface_hub.errors", "CorruptedCacheException"),
)
"""Classes that derive from ``Exception`` directly, named by module: a package that is not loaded cannot raise."""


def of_models() -> tuple[type[Exception], ...]:
    """Return the exceptions of a model's code that may not run here, including those of packages that are loaded."""
    classes = [getattr(sys.modules.get(module), name, None) for module, name in OF_PACKAGES]
    return (*BUILT_IN, *(one for one in classes if isinstance(one, type) and issubclass(one, Exception)))


# ---- experts wrapper ------------------------------------------------------------------------------
# The wrapper that transformers puts around every class of experts, and the implementations that it chooses from.
#
# At each call it reads the implementation from the config of the module: ``eager``, the loop of the class, or a function in
# a registry.

EAGER = "eager"
KNOWN = (EAGER, "batched_mm", "grouped_mm")
"""The implementations in PyTorch operations. Those of the kernels hub are the stock code of no model."""


class Wrapper(NamedTuple):
    """The choices of the wrapper around a forward: the loop of the class, and a registry of functions."""

    eager: Any
    registry: Any


def wrapper_of(forward: Any) -> Wrapper | None:
    """Return what transformers' wrapper of experts contains; None for any other forward.

    A quantiser puts the wrapper around its class again for every layer. The loop is inside the innermost one.
    """
    found: Wrapper | None = None
    while getattr(forward, "__code__", None) in _wrapping_codes() and hasattr(forward, "__wrapped__"):
        held = [cell.cell_contents for cell in forward.__closure__ or ()]
        registry = next((value for value in held if hasattr(value, "get_interface")), None)
        if registry is None or (found is not None and registry is not found.registry):
            return None
        forward = forward.__wrapped__
        found = Wrapper(forward, registry)
    return found


@cache
def _wrapping_codes() -> frozenset[Any]:
    """Return the code of that wrapper."""
    try:
        from transformers.integrations.moe import use_experts_implementation as decorator
    except ImportError:
        return frozenset()
    return frozenset(code for code in wrapper_codes(decorator) if code.co_name == "forward")


def implementations(forward: Any) -> dict[str, Any]:
    """Return implementation -> its function in the registry, for the known ones that a wrapped forward can run.

    The loop itself has no function there.
    """
    wrapper = wrapper_of(forward)
    assert wrapper is not None, "only called for experts that were found by their wrapper"
    return {name: wrapper.registry.get(name) for name in KNOWN if name == EAGER or name in wrapper.registry}


def way_of(module: torch.nn.Module) -> str:
    """Return the implementation that a module of experts is set to."""
    return str(getattr(getattr(module, "config", None), "_experts_implementation", None))


@contextlib.contextmanager
def counted_ways(model: torch.nn.Module) -> Iterator[Mapping[str, int]]:
    """Yield implementation -> calls of the model's experts in a ``with`` block; empty for a model without experts."""
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if wrapper_of(type(module).forward) is not None:
                hook = module.register_forward_pre_hook(lambda module, _: counts.update([way_of(module)]))
                undo.callback(hook.remove)
        yield counts


# ---- code that only computes ----------------------------------------------------------------------
# A probe runs a piece of code on a few inputs. Its answer holds for all inputs only if the code takes no decision by them, and
# holds for all calls only if the code keeps nothing and draws nothing.

UNSTEADY = ("dropout", "rand", "training", "bernoulli", "item", "tolist", "print", "cuda_graph")
"""Parts of names of functions and attributes whose value is not one of the arguments alone, or that wait for a device."""


def why_not_plain(functions: Iterable[Any]) -> str:
    """Return the reason if one of some functions does more than compute; empty if all only compute."""
    for function in functions:
        reason = "" if not isinstance(function, FunctionType) else _why_not(function)
        if reason:
            return reason
    return ""


@once_per_function
def _why_not(function: FunctionType) -> str:
    tree = _tree(function)
    if tree is None:
        return f"there is no source of its {function.__name__}"
    given = {argument.arg for argument in (*tree.args.args, *tree.args.kwonlyargs)} - {"self"}
    for node in ast.walk(tree):
        reason = _of_node(node, given)
        if reason:
            return f"its {function.__name__} {reason}"
    return ""


def _tree(function: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of the code that runs; a decorator that returned the function itself is irrelevant."""
    if hasattr(function, "__wrapped__"):
        return None
    try:
        body = ast.parse(source_of(function)).body
    except (OSError, SyntaxError):
        return None
    return body[0] if body and isinstance(body[0], ast.FunctionDef) else None


def _of_node(node: ast.AST, given: Collection[str]) -> str:
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
            return "writes to an object"
        case ast.Global() | ast.Nonlocal() | ast.Yield() | ast.Await() | ast.While():
            return "keeps a state"
        case ast.Attribute(attr=name) | ast.Name(id=name) if any(part in name for part in UNSTEADY):
            return f"uses {name}"
        case ast.Call(func=ast.Attribute(attr=name)) if name.endswith("_") and not name.startswith("_"):
            return f"calls {name}, which overwrites"
        case ast.If(test=test) | ast.IfExp(test=test) if _decides_by(test, given):
            return "takes a decision by its arguments"
    return ""


def _decides_by(test: ast.expr, given: Collection[str]) -> bool:
    """Return True if a condition reads an argument other than to compare it with None."""
    match test:
        case ast.Compare(left=ast.Name(), ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return False
    return any(isinstance(node, ast.Name) and node.id in given for node in ast.walk(test))


# ---- sizes that code lets differ ------------------------------------------------------------------
# Sizes that a piece of code lets differ from each other, by a run on tensors without memory whose sizes are symbols.
#
# PyTorch notes each condition on a size that the code checks, for example that two sizes are equal because two tensors are
# added.

Place = tuple[str, int]
"""A tensor and the number of a dimension."""


class SymbolicSizes(NamedTuple):
    """The symbol of each size, as text; equal symbols are sizes that the code needs to be equal."""

    inputs: Mapping[Place, str | None]
    results: Mapping[tuple[int, int], str | None]

    def of(self, name: str, place: int) -> str | None:
        """Return the symbol of a dimension of an input; None if the run had its number."""
        return self.inputs.get((name, place))

    def of_result(self, number: int, place: int) -> str | None:
        """Return the symbol of a dimension of a result; None if the run had its number."""
        return self.results.get((number, place))


def symbolic_sizes(
    run: Callable[[Mapping[str, Any]], Any], tensors: Mapping[str, torch.Tensor], known: Collection[Place]
) -> SymbolicSizes | None:
    """Run code once with symbols as sizes; None if it cannot be run so, for example because it reads contents.

    Args:
        run: ``run(tensors) -> results``.
        tensors: example inputs.
        known: the dimensions that keep their numbers.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    fakes = {}
    for name, tensor in tensors.items():
        sizes = [DimDynamic.STATIC if (name, place) in known else DimDynamic.DYNAMIC for place in range(tensor.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        fakes[name] = mode.from_tensor(plain, source=ConstantSource(name), symbolic_context=context)
    try:
        with mode, enable_python_dispatcher(), torch.no_grad():
            returned = run(fakes)
    except of_models():
        return None
    results = returned if isinstance(returned, tuple | list) else (returned,)

    def symbol(size: Any) -> str | None:
        if not isinstance(size, torch.SymInt):
            return None
        found: Any = environment.simplify(size.node.expr)
        return None if found.is_number else str(found)

    return SymbolicSizes(
        {(name, place): symbol(size) for name, fake in fakes.items() for place, size in enumerate(fake.shape)},
        {
            (number, place): symbol(size)
            for number, value in enumerate(results)
            if isinstance(value, torch.Tensor)
            for place, size in enumerate(value.shape)
        },
    )
