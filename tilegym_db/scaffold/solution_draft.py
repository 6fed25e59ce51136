"""Drafts a Solution: ``kernel.py`` with the right signature and a kernel to fill in, and ``solution.json``.

The second part writes a function of a notebook or module, with everything it uses, into one self-contained file. Modules
become imports. Functions and kernels of the same notebook or module are copied, and plain values are written out. A
tensor or closure cannot be written out, so it is refused by name.
"""

from __future__ import annotations

import ast
import builtins
import getpass
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from tilegym_db.catalog.record_files import RECORD_NAME
from tilegym_db.errors import UsageError
from tilegym_db.records import Definition, Solution
from tilegym_db.records.solution import called_with

# Default dependencies of a new Solution. The author narrows them in solution.json.
DEPENDENCIES: dict[str, tuple[str, ...]] = {
    "python": ("torch>=2.8",),
    "triton": ("triton>=3.4",),
    "tilelang": ("tilelang>=0.1.15",),
    "cutile": ("cuda-tile>=1.7",),
}
TUNABLES: dict[str, dict[str, list[int]]] = {
    "python": {},
    "triton": {"num_warps": [4, 8]},
    "tilelang": {"threads": [128, 256]},
    "cutile": {"WARPS": [4, 8]},
}
KERNEL_FILE = "kernel.py"


def login_name() -> str:
    """Return the login name of the user, or ``unknown``."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"


def draft_solution(definition: Definition, language: str, name: str, author: str) -> dict[str, str]:
    """Return file name -> content of a valid Solution that takes the Definition's arguments.

    In ``python`` it computes the reference's maths, which are right. In a tile language it copies or clears the first
    output, and the author adds the maths.
    """
    in_python = language == "python"
    spec = {
        "language": language,
        "entry_point": f"{KERNEL_FILE}::run",
        "destination_passing_style": not in_python,
        "dependencies": list(DEPENDENCIES[language]),
        **({"tunables": TUNABLES[language]} if TUNABLES[language] else {}),
    }
    kernel = _python_kernel(definition) if in_python else _tile_kernel(definition, language)
    record = _record(definition, name, author, "TODO: how it works, in one line.", spec)
    return {RECORD_NAME: record.to_json(indent=2) + "\n", KERNEL_FILE: kernel}


def stock_solution_files(
    definition: Definition, author: str, name: str | None = None
) -> tuple[Solution, dict[str, bytes]]:
    """Return the baseline Solution ``<definition>_stock``, whose code is the Definition's reference.

    If a model's own code computes the same result in another way, write that code instead.
    """
    spec = {
        "language": "python",
        "role": "baseline",
        "provides": "stock",
        "entry_point": f"{KERNEL_FILE}::run",
        "destination_passing_style": False,
        "dependencies": list(DEPENDENCIES["python"]),
        "layouts": {name: "strided" for name in (*definition.tensor_inputs, *definition.written_outputs)},
    }
    record = _record(
        definition, name or f"{definition.name}_stock", author, "The reference, run as it is written.", spec
    )
    return record, {KERNEL_FILE: _python_kernel(definition, stock=True).encode()}


def _record(definition: Definition, name: str, author: str, description: str, spec: Mapping[str, object]) -> Solution:
    return Solution.from_dict(
        {
            "schema_version": 1,
            "name": name,
            "definition": definition.name,
            "author": author,
            "description": description,
            "spec": dict(spec),
            "sources": [{"path": KERNEL_FILE}],
        },
        name,
    )


def describe_call(definition: Definition, *, destination_passing_style: bool) -> str:
    """Return the arguments of ``run``, one per line: name, shape, dtype and description."""
    lines = []
    for name in called_with(definition, destination_passing_style=destination_passing_style):
        spec = definition.inputs.get(name) or definition.outputs[name]
        shape = "scalar" if spec.shape is None else f"[{', '.join(map(str, spec.shape))}]"
        kind = (
            "written"
            if name in definition.outputs
            else "read and overwritten"
            if name in definition.in_place
            else "read"
        )
        note = f": {spec.description}" if spec.description and not spec.description.startswith("TODO") else ""
        lines.append(f"{name} {shape} {spec.dtype}, {kind}{note}")
    variables = [f"{name} is {', '.join(choices)}" for name, choices in definition.dtypes.items()]
    return "\n".join([*lines, *variables])


def try_command(definition: Definition) -> str:
    """Return the command that tries ``kernel.py`` in its folder after each edit."""
    return f"tilegym-db dev {KERNEL_FILE} -d {definition.name} --watch"


# -- python ------------------------------------------------------------------------------------------------------------


def _python_kernel(definition: Definition, *, stock: bool = False) -> str:
    title = (
        f"{definition.name}: the Definition's reference, as stock code." if stock else f"{definition.name} in PyTorch."
    )
    call = textwrap.indent(describe_call(definition, destination_passing_style=False), "  ")
    tried = "" if stock else f"After each edit: {try_command(definition)}\n\n"
    returned = ", ".join(definition.outputs)
    head = f'"""{title}\n\n{tried}run() is given, and returns the outputs ({returned}):\n{call}\n"""\n\n'
    reference = definition.reference
    if not stock:
        advice = (
            "# TODO: the same maths, faster. This is the reference; a library call or fewer passes over memory win.\n"
        )
        reference = advice + reference
    if not definition.in_place or not _returns_all(definition):
        return head + reference
    arguments = ", ".join(definition.inputs)
    body = [f"    {', '.join(definition.outputs)} = _reference({arguments})"]
    body += [f"    {source}.copy_({target})" for source, target in definition.in_place.items()]
    body.append(f"    return {', '.join(definition.written_outputs) or '()'}")
    renamed = reference.replace("def run(", "def _reference(", 1)
    return head + renamed.rstrip() + f"\n\n\ndef run({arguments}):\n" + "\n".join(body) + "\n"


def _returns_all(definition: Definition) -> bool:
    """Return True if the reference also returns outputs that replace inputs, instead of writing into those inputs."""
    functions = [node for node in ast.parse(definition.reference).body if isinstance(node, ast.FunctionDef)]
    returns = [node for function in functions if function.name == "run" for node in ast.walk(function)]
    values = [node.value for node in returns if isinstance(node, ast.Return)]
    return all(isinstance(value, ast.Tuple) and len(value.elts) == len(definition.outputs) for value in values)


# -- tile languages ------------------------------------------------------------------------------------------------------


def _tile_kernel(definition: Definition, language: str) -> str:
    """Return a language's template: it copies rows of the first written tensor from an input of that shape, or clears
    them.
    """
    out = next(iter(definition.written_outputs or definition.in_place))
    shape = {**definition.inputs, **definition.outputs}[out].shape
    like = [
        name
        for name in definition.tensor_inputs
        if definition.inputs[name].shape == shape and name not in definition.in_place
    ]
    call = describe_call(definition, destination_passing_style=True)
    arguments = ", ".join(called_with(definition, destination_passing_style=True))
    template = TEMPLATES[language]["copy" if like else "clear"]
    values = {
        "name": definition.name,
        "arguments": arguments,
        "call": textwrap.indent(call, "    "),
        "x": like[0] if like else "",
        "out": out,
        "try": try_command(definition),
    }
    for key, value in values.items():
        template = template.replace(f"<{key}>", value)
    compile(template, KERNEL_FILE, "exec")  # a template that does not parse is a bug of this package
    return template


# ---- kernels --------------------------------------------------------------------------------------
# Templates of a first kernel in each tile language: one program per row, which compiles, with a place for the maths.
# ``<name>``, ``<arguments>``, ``<call>``, ``<try>``, ``<x>`` and ``<out>`` are filled in. ``copy`` reads an input of the
# output's shape; ``clear`` is for operators that have none.


def unfinished(record: Solution, sources: Mapping[str, bytes], definition: Definition) -> list[str]:
    """Return one line for each TODO of a draft that is still in a Solution. An author's own remarks do not count."""
    draft = draft_solution(definition, record.spec.language, record.name, record.author)
    places = {line.strip() for text in draft.values() for line in text.splitlines() if "TODO" in line}
    found = [f"{RECORD_NAME}: {record.description}"] if record.description.startswith("TODO") else []
    for path, content in sources.items():
        lines = enumerate(content.decode(errors="replace").splitlines(), start=1)
        found += [f"{path}:{number}: {line.strip()}" for number, line in lines if line.strip() in places]
    return found


_RUN = '''def run(<arguments>, *, {tunable}):
    """TODO: the formula, with what is rounded where.

<call>
    """
    columns = <out>.shape[-1] if <out>.dim() else 1
    rows = <out>.numel() // max(columns, 1)
    if rows == 0 or columns == 0:  # sizes of zero are fuzzed too
        return
'''

_TRITON = (
    '''"""<name> in Triton. TODO: how it works, in one line.

After each edit: <try>
"""

import triton
import triton.language as tl


@triton.jit
def _rows({pointers}, columns, BLOCK: tl.constexpr):
    # One program a row: every axis of <out> but the last is flattened into rows.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < columns  # BLOCK is a power of two, and rows need not be
{load}
    # TODO: the maths, in float32 where the reference computes in float32. Reductions along the row: tl.sum(value, axis=0).
    tl.store(<out>_ptr + row * columns + cols, value.to(<out>_ptr.dtype.element_ty), mask=inside)


'''
    + _RUN.replace("{tunable}", "num_warps=4")
    + """    block = 1 << (columns - 1).bit_length()
    _rows[(rows,)]({tensors}, columns, block, num_warps=num_warps)
"""
)

_TILELANG = (
    '''"""<name> in TileLang. TODO: how it works, in one line.

After each edit: <try>
"""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit
def _rows_kernel(columns, {dtypes}, threads):
    rows = T.dynamic("rows")  # one kernel serves every number of rows

    @T.prim_func
    def rows_kernel({parameters}):
        # One block a row: every axis of <out> but the last is flattened into rows.
        with T.Kernel(rows, threads=threads) as row:
            for column in T.Parallel(columns):
                # TODO: the maths. Reductions along the row: T.reduce_sum over a fragment of float32.
                <out>[row, column] = {value}

    return rows_kernel


'''
    + _RUN.replace("{tunable}", "threads=128")
    + """    kernel = _rows_kernel(columns, {given_dtypes}, threads)
    kernel({matrices})
"""
)

_CUTILE = (
    '''"""<name> in cuTile. TODO: how it works, in one line.

After each edit: <try>
"""

import cuda.tile as ct
import torch


@ct.kernel
def _rows({parameters}, TILE: ct.Constant[int]):
    # One block a row: every axis of <out> but the last is flattened into rows.
    row = ct.bid(0)
    cols = ct.arange(TILE, dtype=ct.int32)
    inside = cols < <out>.shape[1]  # TILE is a power of two, and rows need not be
{load}
    # TODO: the maths, in float32 where the reference computes in float32. Reductions along the row: ct.sum(value).
    ct.scatter(<out>, (row, cols), value.astype(<out>.dtype), mask=inside, check_bounds=False)


_KERNELS = {warps: _rows.replace_hints(num_worker_warps=warps) for warps in (4, 8)}


'''
    + _RUN.replace("{tunable}", "WARPS=4")
    + """    tile = 1 << (columns - 1).bit_length()
    matrices = ({matrices},)
    ct.launch(torch.cuda.current_stream(), (rows, 1, 1), _KERNELS[WARPS], (*matrices, tile))
"""
)


def _filled(template: str, **parts: str) -> str:
    for key, value in parts.items():
        template = template.replace("{" + key + "}", value)
    return template


TEMPLATES: dict[str, dict[str, str]] = {
    "triton": {
        "copy": _filled(
            _TRITON,
            pointers="<x>_ptr, <out>_ptr",
            load="    value = tl.load(<x>_ptr + row * columns + cols, mask=inside, other=0.0).to(tl.float32)",
            tensors="<x>, <out>",
        ),
        "clear": _filled(
            _TRITON,
            pointers="<out>_ptr",
            load="    value = tl.zeros([BLOCK], dtype=tl.float32)",
            tensors="<out>",
        ),
    },
    "tilelang": {
        "copy": _filled(
            _TILELANG,
            dtypes="in_dtype, out_dtype",
            parameters="<x>: T.Tensor((rows, columns), in_dtype), <out>: T.Tensor((rows, columns), out_dtype)",
            value='T.cast(T.cast(<x>[row, column], "float32"), out_dtype)',
            given_dtypes="<x>.dtype, <out>.dtype",
            matrices="<x>.view(rows, columns), <out>.view(rows, columns)",
        ),
        "clear": _filled(
            _TILELANG,
            dtypes="out_dtype",
            parameters="<out>: T.Tensor((rows, columns), out_dtype)",
            value="T.cast(0, out_dtype)",
            given_dtypes="<out>.dtype",
            matrices="<out>.view(rows, columns)",
        ),
    },
    "cutile": {
        "copy": _filled(
            _CUTILE,
            parameters="<x>, <out>",
            load="    value = ct.gather(<x>, (row, cols), mask=inside, check_bounds=False).astype(ct.float32)",
            matrices="<x>.view(rows, columns), <out>.view(rows, columns)",
        ),
        "clear": _filled(
            _CUTILE,
            parameters="<out>",
            load="    value = ct.zeros((TILE,), dtype=ct.float32)",
            matrices="<out>.view(rows, columns)",
        ),
    },
}


# ---- Sources of functions --------------------------------------------------------------------------------

_PLAIN = (bool, int, float, str, bytes, type(None))
_LANGUAGES = {"triton": "triton", "tilelang": "tilelang", "cuda.tile": "cutile"}


def function_source(function: Callable[..., Any], *, is_bare: bool = False) -> str:
    """Return one Python file that defines the function at its top level, under the same name.

    Args:
        is_bare: leave out decorators, and annotations that name anything other than tensors and builtin types.
    """
    if not callable(function) or not hasattr(function, "__name__"):
        raise UsageError(
            f"a function of Python is needed, defined with def, not {type(function).__name__}.",
            code="function_expected",
        )
    found = _Collected(is_bare)
    found.take(_plain(function), function.__name__)
    parts = [*sorted(found.imports), *found.values, *found.functions]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def rewritten_source(functions: Sequence[ast.FunctionDef], scope: Mapping[str, Any], module: str) -> str:
    """Return one Python file with functions given as syntax trees, and everything of their scope that they use."""
    found = _Collected(True)
    own = {function.name for function in functions}
    for function in functions:
        for name in _names(function, scope):
            if name not in own:
                found.use(name, scope[name], module)
    parts = [*sorted(found.imports), *found.values, *found.functions, *map(ast.unparse, functions)]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def language_of(source: str) -> str:
    """Return the kernel language of a file by its imports; ``python`` if it imports none of the three tile languages."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}  # from cuda import tile
    for package, language in _LANGUAGES.items():
        if any(name == package or name.startswith(f"{package}.") for name in names):
            return language
    return "python"


class _Collected:
    """The contents of a file: imports, values, and functions in definition order."""

    def __init__(self, is_bare: bool = False) -> None:
        self._is_bare = is_bare
        self.imports: set[str] = set()
        self.values: list[str] = []
        self.functions: list[str] = []
        self._seen: dict[str, Any] = {}

    def take(self, function: FunctionType, name: str) -> None:
        """Add a function after everything it uses."""
        text, tree = _parsed(function, name)
        if self._is_bare:
            text, tree = _bare(text, tree)
        if function.__closure__:
            inner = ", ".join(function.__code__.co_freevars)
            raise UsageError(
                f"'{name}' uses {inner} of the function around it. Pass it as an argument, or define it outside.",
                code="closure_variable",
            )
        self._seen[name] = function
        for used in _names(tree, function.__globals__):
            self.use(used, function.__globals__[used], function.__module__)
        self.functions.append(text)

    def use(self, name: str, value: Any, module: str) -> None:
        """Add a global that code of a module reads."""
        if name in self._seen:
            return
        self._seen[name] = value
        plain = _plain(value)
        if isinstance(value, ModuleType):
            self.imports.add(f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else ""))
        elif isinstance(plain, FunctionType) and plain.__module__ == module:
            self.take(plain, name)
        elif isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(one, _PLAIN) for one in value)):
            self.values.append(f"{name} = {value!r}")
        else:
            self._import_from(name, value)

    def _import_from(self, name: str, value: Any) -> None:
        """Return ``from module import name`` if that import gives this exact value."""
        home, known_as = getattr(value, "__module__", None), getattr(value, "__qualname__", name)
        if home in (None, "__main__", "builtins") or not str(known_as).isidentifier():
            raise UsageError(
                f"'{name}' is a {type(value).__name__}, which cannot be written into a separate file. Make it a "
                "number, a text, a function or an argument.",
                code="global_unwritable",
            )
        self.imports.add(f"from {home} import {known_as}" + (f" as {name}" if known_as != name else ""))


def _plain(value: Any) -> Any:
    """Return the function below a kernel's decorator."""
    inner = getattr(value, "fn", None)
    return inner if isinstance(inner, FunctionType) else value


def _parsed(function: Any, name: str) -> tuple[str, ast.Module]:
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise UsageError(f"{name!r} is no function defined with 'def'.", code="function_expected")
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise UsageError(
            f"the source of '{name}' is not known. Define it in a file or in a cell of a notebook.",
            code="source_unknown",
        ) from None
    return text, ast.parse(text)


def _bare(text: str, tree: ast.Module) -> tuple[str, ast.Module]:
    """Return the text and tree of a function without its decorators, and without annotations that need an import."""
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef), "only functions defined with def are parsed"
    lines = text.splitlines(keepends=True)[function.lineno - 1 :]
    function.decorator_list = []
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [function.returns, *(one.annotation for one in named if one is not None)]
    used = {node.id for one in annotations if one is not None for node in ast.walk(one) if isinstance(node, ast.Name)}
    if all(name == "torch" or hasattr(builtins, name) for name in used):
        return "".join(lines), tree
    for one in named:
        if one is not None:
            one.annotation = None
    function.returns = None
    return ast.unparse(tree), tree


def _names(tree: ast.AST, scope: Mapping[str, Any]) -> list[str]:
    """Return the module-level names that a function reads, in a fixed order, with annotations and decorators."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return sorted(name for name in read if name in scope and not hasattr(builtins, name))
