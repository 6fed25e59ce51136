"""Cut a part out of a model by data flow, and write the draft of its Definition.

The part is a function that a forward calls, or a module without submodules. Its inputs and outputs are the tensors that the model
passes: they are recorded in runs of two sizes. A size that differs between the runs is an axis, and so is one that the code lets
differ from all others, as symbolic sizes show. The draft's reference is the code of the model. A draft is written only if it
computes the numbers that the model computed.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from tilegym_db.errors import RecordError, TilegymDBError, UsageError
from tilegym_db.files import write_folder, writing
from tilegym_db.models.called_functions import Seam, watched
from tilegym_db.models.capture import CapturedCall, ModelInputs, copied, run_model, staged, workload_of
from tilegym_db.models.found import methods
from tilegym_db.models.rewrite import is_name
from tilegym_db.models.upstream_code import fingerprint, symbolic_sizes
from tilegym_db.records import Definition
from tilegym_db.records.dtypes import RECORD_DTYPES
from tilegym_db.resolver.hot_path import allocate_of
from tilegym_db.sandbox.scan import hard_findings, scan_definition
from tilegym_db.scaffold.definition_draft import DraftedCode, Size, code_files
from tilegym_db.scaffold.solution_draft import function_source, rewritten_source
from tilegym_db.verification.oracle import run_reference

MAX_CALLS = 16
"""The most kinds of calls of one part that are recorded."""
OTHER_BATCH, MORE_TOKENS = 3, 13
"""Minimum number of sequences of the second run, and the number of tokens that it adds to those of the first run."""
FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
PLAIN = (bool, int, str, type(None), torch.dtype)
AXES = "MNKHDEFGIJLPQRTUVWXYZ"
WORD = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
"""Where a word begins in the name of a class; capitals in a row are one word."""
OWN = "own_"
"""Beginning of the name of a module's attribute in the draft of its reference."""

Module = torch.nn.Module


@dataclass(frozen=True)
class RecordedCall:
    """One call of a part in a run of the model: copies of its arguments by name, and of its results."""

    stage: str
    arguments: dict[str, Any]
    returned: Any
    problem: str = ""
    """The reason if the call does more than compute tensors from tensors."""

    @property
    def signature(self) -> tuple[Any, ...]:
        """The call without its sizes and numbers: calls that differ in it need different Definitions."""
        found = []
        for name, value in self.arguments.items():
            is_tensor = isinstance(value, torch.Tensor)
            found.append((name, value.dim() if is_tensor else "number" if type(value) is float else value))
        return tuple(found)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The arguments that are tensors."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, torch.Tensor)}

    @property
    def results(self) -> tuple[Any, ...]:
        """The results, also if there is only one."""
        return _all_of(self.returned)


@dataclass(frozen=True)
class Cut:
    """A part that was cut out of a model: its draft as files, and the recorded calls that it was compared on."""

    name: str
    files: dict[str, str] = field(repr=False)
    compared: int = 0
    left: str = ""
    """What the static scan refuses in the reference, such as an import; the author writes these lines anew."""

    def write(self, folder: Path) -> Path:
        """Write the draft's folder, unless it exists, and return it."""
        target = folder / self.name
        if not target.exists():
            with writing(folder):
                write_folder(target, {path: text.encode() for path, text in self.files.items()})
        return target


def cut(model: Module, seam: Seam, inputs: ModelInputs, tag: str = "") -> Cut | str:
    """Return the draft of a part of a model, or the reason why the model cannot be cut there.

    Args:
        inputs: token ids [batch, tokens], or the arguments of the model's forward by name.
        tag: the model's name in workloads.
    """
    part = _part_of(model, seam)
    if isinstance(part, str):
        return part
    given = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
    calls = _recorded(model, seam, part, given)
    if not calls:
        return "the model's run does not call it"
    main = next((call for call in calls if call.stage == "prefill"), calls[0])
    reason = main.problem or _why_no_part(main)
    if reason:
        return reason
    try:
        again = _recorded(model, seam, part, resized(given))
    except UsageError:
        again = []  # the model runs on no other sizes; symbolic sizes still tell axes apart
    other = next((call for call in again if (call.stage, call.signature) == (main.stage, main.signature)), None)
    try:
        return _drafted(seam, part, main, other, [call for call in calls if call.signature == main.signature], tag)
    except TilegymDBError as error:
        return f"its draft is not valid: {error}"


def why_not_cut(model: Module, seam: Seam) -> str:
    """Return the reason why the code at a place of a model cannot be a part; empty if its calls decide."""
    part = _part_of(model, seam)
    return part if isinstance(part, str) else ""


def _part_of(model: Module, seam: Seam) -> _Part | str:
    code = seam.code(model)
    module = seam.modules(model)[0]
    if not seam.function and module._modules:
        return f"its code lies between its submodules ({', '.join(list(module._modules)[:4])}), so no tensor bounds it"
    if isinstance(code, str):
        return code
    return _function_part(code) if seam.function else _module_part(module, code)


def resized(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's arguments with another number of sequences and of tokens; values repeat."""
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor) and value.dim()]
    ids = given.get("input_ids", tensors[0] if tensors else None)
    if ids is None:
        return dict(given)
    batch, tokens = ids.shape[0], ids.shape[1] if ids.dim() > 1 else 0
    sizes = {0: max(OTHER_BATCH, batch + 1), 1: tokens + MORE_TOKENS}

    def changed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != batch:
            return value
        for place in range(min(2, value.dim())):
            if place == 0 or value.shape[1] == tokens:
                order = torch.arange(sizes[place], device=value.device) % value.shape[place]
                value = value.index_select(place, order)
        return value

    return {name: changed(value) for name, value in given.items()}


# ---- parts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """The code of a part: how it is called by name, and its text as a function."""

    code: FunctionType
    attributes: dict[str, Any]
    """The attributes of the module that the code reads: tensors and plain values."""
    source: Callable[[Mapping[str, Any]], str]
    """``source(fixed)`` returns a file that defines ``callable_name``."""
    called: str
    calls: dict[str, str]
    """The functions and methods that the code relies on -> fingerprint."""
    methods: tuple[str, ...] = ()

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the arguments of a call by name with defaults and attributes, or the reason if they cannot be named."""
        signature = inspect.signature(self.code)
        given = signature.bind(*([None] if self.methods else []), *args, **kwargs)
        given.apply_defaults()
        found: dict[str, Any] = {}
        for number, (name, value) in enumerate(given.arguments.items()):
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL and value:
                return f"it is called with more arguments than it names (*{name})"
            if kind is inspect.Parameter.VAR_KEYWORD:
                others = sorted(key for key, one in value.items() if one is not None)
                if others:
                    return f"it is called with {', '.join(others)} as **{name}"
            elif kind is not inspect.Parameter.VAR_POSITIONAL and not (self.methods and number == 0):
                found[name] = value
        return {**found, **self.attributes}


def _function_part(code: FunctionType) -> _Part | str:
    try:
        text = function_source(code, is_bare=True)
    except UsageError as error:
        return f"its source cannot be written into a file: {error}"
    calls = {}
    for function in _functions_used(code):
        calls[function.__name__] = fingerprint(function) or ""
    unknown = next((name for name, mark in calls.items() if not mark), None)
    if unknown or fingerprint(code) is None:
        return f"the source of {unknown or code.__name__} is not known"
    alias = ""
    if re.search(r"(?m)^def run\(", text):
        alias = f"\n\nof_model = {code.__name__}\n"
    return _Part(code, {}, lambda fixed: text + alias, "of_model" if alias else code.__name__, calls)


def _functions_used(code: FunctionType) -> list[FunctionType]:
    """Return the functions of the same module that a function calls, directly or not."""
    found: dict[str, FunctionType] = {}
    waiting = [code]
    while waiting:
        one = waiting.pop()
        for name in one.__code__.co_names:
            value = one.__globals__.get(name)
            is_known = name in found or value is code
            if isinstance(value, FunctionType) and value.__module__ == code.__module__ and not is_known:
                found[name] = value
                waiting.append(value)
    return list(found.values())


def _module_part(module: Module, code: FunctionType) -> _Part | str:
    """Return a module without submodules as a part: its attributes become parameters."""
    if code.__code__.co_freevars == ("__class__",):
        return "its forward calls super(), so its code is not the whole computation"
    if code.__closure__:
        return "its forward reads variables of a function around it"
    known = {name: value for name, value in methods(type(module)).items() if isinstance(value, FunctionType)}
    followed = _methods_and_reads(module, known)
    if isinstance(followed, str):
        return followed
    trees, reads = followed
    clash = set(reads) & set(inspect.signature(code).parameters)
    if clash:
        return f"its {min(clash)} is both a parameter and an attribute"

    def source(fixed: Mapping[str, Any]) -> str:
        names = [name for name in reads if name not in fixed]
        made = [_WithoutModule(tree, set(trees), names, fixed).function() for tree in trees.values()]
        return rewritten_source(made, code.__globals__, code.__module__)

    calls = {name: fingerprint(known[name]) or "" for name in trees if name != "forward"}
    calls |= {
        function.__name__: fingerprint(function) or "" for name in trees for function in _functions_used(known[name])
    }
    unknown = next((name for name, mark in calls.items() if not mark), None)
    if unknown or fingerprint(code) is None:
        return f"the source of its {unknown or 'forward'} is not known"
    return _Part(code, reads, source, "forward", calls, tuple(trees))


def _methods_and_reads(
    module: Module, known: Mapping[str, FunctionType]
) -> tuple[dict[str, ast.FunctionDef], dict[str, Any]] | str:
    """Return the methods that a forward calls, itself included, and the attributes that they read, by name."""
    trees: dict[str, ast.FunctionDef] = {}
    waiting, reads = ["forward"], dict[str, Any]()
    while waiting:
        name = waiting.pop(0)
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(known[name]))).body
        except (OSError, SyntaxError, ValueError):
            return f"the source of its {name} is not known"
        assert isinstance(tree, ast.FunctionDef), "methods are defined with def"
        if tree.decorator_list:
            return f"its {name} has a decorator, so its code is not the whole computation"
        trees[name] = tree
        owner = tree.args.args[0].arg if tree.args.args else ""
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_name(node.value, owner)]
        if sum(is_name(node, owner) for node in ast.walk(tree)) != len(nodes):
            return f"its {name} passes the module on"
        attributes = list(dict.fromkeys(node.attr for node in nodes))
        waiting += [one for one in attributes if one in known and one not in trees and one not in waiting]
        for attribute in attributes:
            if attribute in known:
                continue
            value = getattr(module, attribute, None)
            if not isinstance(value, torch.Tensor) and type(value) is not float and not isinstance(value, PLAIN):
                return f"its {attribute} is a {type(value).__name__}"
            reads[attribute] = value
    return trees, reads


class _WithoutModule(ast.NodeTransformer):
    """A transformer of a method into a function: attributes become keyword parameters, and fixed ones constants."""

    def __init__(
        self, tree: ast.FunctionDef, methods: set[str], attributes: Sequence[str], fixed: Mapping[str, Any]
    ) -> None:
        self._tree, self._methods, self._attributes, self._fixed = tree, methods, attributes, fixed
        self._owner = tree.args.args[0].arg

    def function(self) -> ast.FunctionDef:
        """Return the function."""
        function = ast.parse(ast.unparse(self._tree)).body[0]  # a copy
        assert isinstance(function, ast.FunctionDef), "it was one"
        self.generic_visit(function)
        function.args.args = function.args.args[1:]
        for argument in (*function.args.args, *function.args.kwonlyargs):
            argument.annotation = None
        function.returns = None
        function.args.kwonlyargs += [ast.arg(OWN + name) for name in self._attributes]
        function.args.kw_defaults += [None] * len(self._attributes)
        return ast.fix_missing_locations(function)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self._methods:
            node.keywords += [
                ast.keyword(OWN + name, ast.Name(OWN + name, ctx=ast.Load())) for name in self._attributes
            ]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if not is_name(node.value, self._owner):
            return node
        if node.attr in self._methods:
            return ast.Name(node.attr, ctx=ast.Load())
        if node.attr in self._fixed:
            return ast.parse(_literal(self._fixed[node.attr]), mode="eval").body
        return ast.Name(OWN + node.attr, ctx=node.ctx)


def _literal(value: Any) -> str:
    return str(value) if isinstance(value, torch.dtype) else repr(value)


# ---- recording ------------------------------------------------------------------------------------


class _Recorder:
    """A stand-in for a part that records the first call of each kind, and calls the part."""

    def __init__(self, part: _Part) -> None:
        self._part = part
        self._stage = ""
        self.calls: dict[Any, RecordedCall] = {}

    def begin(self, stage: str) -> None:
        """Note that a forward of the model in that stage comes next."""
        self._stage = stage

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the part, and record the call unless there is one of this kind."""
        arguments = self._part.bound(args, kwargs)
        if isinstance(arguments, str):
            self.calls.setdefault((self._stage, arguments), RecordedCall(self._stage, {}, None, arguments))
            return function(*args, **kwargs)
        key = (self._stage, tuple(map(_kind, arguments.values())))
        if key in self.calls or len(self.calls) >= MAX_CALLS:
            return function(*args, **kwargs)
        kept = {name: copied(one) if isinstance(one, torch.Tensor) else one for name, one in arguments.items()}
        versions = {name: one._version for name, one in arguments.items() if _has_version(one)}
        returned = function(*args, **kwargs)
        written = [name for name, version in versions.items() if arguments[name]._version != version]
        problem = f"it writes into its argument {written[0]}" if written else _why_not_apart(arguments, returned)
        self.calls[key] = RecordedCall(self._stage, kept, _copies(returned), problem)
        return returned


def _has_version(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return (type(value), value) if isinstance(value, (*PLAIN, float)) else type(value)


def _copies(returned: Any) -> Any:
    if isinstance(returned, torch.Tensor):
        return copied(returned)
    if isinstance(returned, tuple | list):
        return tuple(copied(one) if isinstance(one, torch.Tensor) else one for one in returned)
    return returned


def _all_of(returned: Any) -> tuple[Any, ...]:
    """Return the results of a call, also if there is only one."""
    return tuple(returned) if isinstance(returned, tuple | list) else (returned,)


def _why_not_apart(arguments: Mapping[str, Any], returned: Any) -> str:
    """Return the reason if a result shares memory with an argument, which a kernel's result would not."""
    held = {value.untyped_storage().data_ptr(): name for name, value in arguments.items() if _has_memory(value)}
    for value in _all_of(returned):
        if _has_memory(value) and value.untyped_storage().data_ptr() in held:
            return f"it returns memory of its argument {held[value.untyped_storage().data_ptr()]}"
    return ""


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0 and value.device.type != "meta"


def _recorded(model: Module, seam: Seam, part: _Part, given: Mapping[str, Any]) -> list[RecordedCall]:
    """Run the model, and return the calls of a part, the first of each kind."""
    recorder = _Recorder(part)

    def around(_: Seam, function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            return recorder.run(function, args, kwargs)

        return recorded

    with contextlib.ExitStack() as undo:
        undo.enter_context(staged(model, [recorder]))
        if seam.function:
            undo.enter_context(watched(model, [seam], around))
        else:
            module = seam.modules(model)[0]
            own: Any = module.forward
            vars(module)["forward"] = around(seam, own)
            undo.callback(vars(module).pop, "forward")
        run_model(model, given)
    return list(recorder.calls.values())


def _why_no_part(call: RecordedCall) -> str:
    """Return the reason if a call's arguments or results are neither tensors nor plain values."""
    for name, value in call.arguments.items():
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter) or _dtype(value) not in RECORD_DTYPES:
                return f"its argument {name} is a {type(value).__name__} of {_dtype(value)}, which no Definition has"
        elif type(value) is not float and not isinstance(value, PLAIN):
            return f"its argument {name} is a {type(value).__name__}, no tensor"
    tensors = [value for value in call.tensors.values() if value.is_floating_point()]
    if not tensors:
        return "it is given no tensor of floating point"
    results = call.results
    if not any(isinstance(value, torch.Tensor) for value in results):
        return "it returns no tensor"
    for value in results:
        if value is not None and not isinstance(value, torch.Tensor):
            return f"it returns a {type(value).__name__} beside tensors"
        if isinstance(value, torch.Tensor) and (value.dim() == 0 or _dtype(value) not in RECORD_DTYPES):
            return f"it returns a tensor of {value.dim()} dimensions and {_dtype(value)}, which no kernel writes"
    return ""


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


# ---- drafting -------------------------------------------------------------------------------------


def _drafted(
    seam: Seam, part: _Part, main: RecordedCall, other: RecordedCall | None, calls: Sequence[RecordedCall], tag: str
) -> Cut | str:
    outputs = _output_names(part.code, main)
    fixed = {
        name: value
        for name, value in main.arguments.items()
        if not isinstance(value, torch.Tensor) and type(value) is not float
    }
    runs = [main] if other is None else [main, other]
    shapes = _shapes(part, runs, outputs, fixed)
    if isinstance(shapes, str):
        return shapes
    layouts = _output_layouts(runs[-1], outputs)
    if isinstance(layouts, str):
        return layouts
    code = _drafted_code(seam, part, main, outputs, shapes, fixed, layouts, tag)
    definition, files = code_files(code)
    compared = [*calls, *([] if other is None else [other])]
    for call in compared:
        reason = _why_other_numbers(definition, call, outputs)
        if reason:
            return reason
    workloads = [_workload(definition, call, tag) for call in calls]
    files["workloads.jsonl"] += "".join(f"{text}\n" for text in dict.fromkeys(workloads) if text)
    files["captured.json"] = json.dumps(_account(seam, code, calls, workloads), indent=2) + "\n"
    refused = hard_findings(scan_definition(definition))
    left = next((f"line {one.line} {one.message}" for one in refused if one.path == "reference.py"), "")
    return Cut(code.name, files, len(compared), left)


def _drafted_code(
    seam: Seam,
    part: _Part,
    main: RecordedCall,
    outputs: Sequence[str | None],
    shapes: _Shapes,
    fixed: Mapping[str, Any],
    layouts: Mapping[str, Any],
    tag: str,
) -> DraftedCode:
    """Return what the draft of a Definition states of a part, by its first call."""
    stream = next(value.dtype for value in main.tensors.values() if value.is_floating_point())
    module = "" if seam.function else seam.module_class.__name__
    return DraftedCode(
        name=re.sub(WORD, "_", module or part.code.__name__).lower().strip("_"),
        description=f"The computation of {seam.name}, cut out of {tag or 'a model'}.",
        source=source_of(seam.module_class if module else part.code),
        text=part.source(fixed),
        called=part.called,
        arguments=_argument_texts(part, main, fixed),
        returns=tuple(outputs),
        is_tuple=isinstance(main.returned, tuple | list),
        inputs={
            name: (shapes.inputs.get(name), _spelled(value, stream))
            for name, value in main.arguments.items()
            if name not in fixed
        },
        outputs={name: (shapes.outputs[name], _spelled(main.results[at], stream)) for name, at in _places(outputs)},
        dtypes=[FLOATS[stream]] if stream in FLOATS else [],  # that of the run alone
        generators={name: _generator(value) for name, value in main.tensors.items()},
        sizes=shapes.sizes[-1],
        scalars={name: value for name, value in main.arguments.items() if type(value) is float},
        notes=shapes.notes,
        serving={
            "part": "function" if seam.function else "module",
            "code": [
                {
                    "fingerprint": fingerprint(part.code),
                    "models": [tag] if tag else [],
                    "calls": part.calls,
                    "fixed": {name: str(one) if isinstance(one, torch.dtype) else one for name, one in fixed.items()},
                    **({"returns": list(outputs)} if isinstance(main.returned, tuple | list) else {}),
                    "probe": {**shapes.sizes[-1], **{n: v for n, v in main.arguments.items() if type(v) is float}},
                }
            ],
            **({"outputs": layouts} if layouts else {}),
            "eager_only": True,
        },
    )


@dataclass(frozen=True)
class _Shapes:
    inputs: dict[str, list[Size]]
    outputs: dict[str, list[Size]]
    sizes: list[dict[str, int]]
    """Axis -> size in each run."""
    notes: dict[str, str]


def _shapes(
    part: _Part, runs: Sequence[RecordedCall], outputs: Sequence[str | None], fixed: Mapping[str, Any]
) -> _Shapes | str:
    """Name the axes. Sizes that are equal in every run become one axis, unless the code lets them differ."""
    last = runs[-1]
    varying = {
        (name, place)
        for name, value in last.tensors.items()
        for place in range(value.dim())
        if len({run.tensors[name].shape[place] for run in runs}) > 1
    }
    symbols = symbolic_sizes(_callable(part, last, fixed), last.tensors, varying)
    used, names = set(last.arguments) | {"T"}, dict[Any, str]()
    letters = iter([letter for letter in AXES if letter not in used] + [f"N{number}" for number in range(99)])
    sizes: list[dict[str, int]] = [{} for _ in runs]
    inputs: dict[str, list[Size]] = {}
    notes: dict[str, str] = {}
    for name in last.tensors:
        inputs[name] = []
        for place in range(last.tensors[name].dim()):
            seen = tuple(run.tensors[name].shape[place] for run in runs)
            symbol = None if symbols is None else symbols.of(name, place)
            if set(seen) == {1}:
                inputs[name].append(1)
                continue
            key = (seen, symbol)
            if key not in names:
                names[key] = next(letters)
                notes[names[key]] = _axis_note(name, place, seen, is_known=symbol is not None)
            inputs[name].append(names[key])
            for found, size in zip(sizes, seen, strict=True):
                found[names[key]] = size
    made: dict[str, list[Size]] = {}
    for output, at in _places(outputs):
        made[output] = []
        for place in range(last.results[at].dim()):
            seen = tuple(run.results[at].shape[place] for run in runs)
            symbol = None if symbols is None else symbols.of_result(at, place)
            axis = _output_size(seen, symbol, names, sizes)
            if axis is None:
                return f"the size {seen[0]} of its result {output} follows from no size of its arguments"
            made[output].append(axis)
    return _Shapes(inputs, made, sizes, notes)


def _axis_note(name: str, place: int, seen: tuple[int, ...], *, is_known: bool) -> str:
    if len(set(seen)) > 1:
        return f"dimension {place} of {name}; {' and '.join(map(str, seen))} in the two runs"
    if is_known:
        return f"dimension {place} of {name}; {seen[0]} in the model"
    return (
        f"TODO: dimension {place} of {name}, {seen[0]} in every run; the code or the runs fix it, so check its equals"
    )


def _output_size(
    seen: tuple[int, ...], symbol: Any, names: Mapping[Any, str], sizes: Sequence[Mapping[str, int]]
) -> Size | None:
    if (seen, symbol) in names:
        return names[(seen, symbol)]
    if len(set(seen)) == 1:
        same = [name for (sizes_seen, _), name in names.items() if sizes_seen == seen]
        if symbol is None and len(same) == 1:
            return same[0]
    for name in sizes[0]:
        for factor in range(2, 9):
            if all(one == factor * found[name] for one, found in zip(seen, sizes, strict=True)):
                return f"{factor} * {name}"
            if all(one * factor == found[name] for one, found in zip(seen, sizes, strict=True)):
                return f"{name} // {factor}"
    return seen[0] if len(set(seen)) == 1 else None


def _callable(part: _Part, call: RecordedCall, fixed: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return ``run(tensors) -> results`` of a part, by the names of its tensors."""
    scope: dict[str, Any] = {}
    exec(compile(part.source(fixed), "<part of the model>", "exec"), scope)
    code = scope[part.called]

    def run(tensors: Mapping[str, Any]) -> Any:
        given = {**call.arguments, **tensors}
        own = {OWN + name: given[name] for name in part.attributes if name not in fixed}
        return code(**{name: value for name, value in given.items() if name not in part.attributes}, **own)

    return run


def _argument_texts(part: _Part, call: RecordedCall, fixed: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of the call in the reference: parameter -> expression."""
    texts = {}
    for name in call.arguments:
        if name in part.attributes:
            if name not in fixed:
                texts[OWN + name] = name
        else:
            texts[name] = _literal(fixed[name]) if name in fixed else name
    return texts


def _output_names(code: FunctionType, call: RecordedCall) -> list[str | None]:
    """Return a name for each result, None for None: that of the variable that the code returns, or ``out``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        tree = ast.Module([], [])
    returns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    value = returns[-1] if returns else None
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    names: list[str | None] = []
    for number, result in enumerate(call.results):
        said = parts[number] if len(parts) == len(call.results) else None
        name = said.id if isinstance(said, ast.Name) else f"out{number or ''}"
        while name in call.arguments or name in names:
            name += "_out"
        names.append(name if isinstance(result, torch.Tensor) else None)
    return names


def _places(outputs: Sequence[str | None]) -> list[tuple[str, int]]:
    return [(name, at) for at, name in enumerate(outputs) if name is not None]


def _spelled(value: Any, stream: torch.dtype) -> str:
    if not isinstance(value, torch.Tensor):
        return "float32"
    return "T" if value.dtype == stream and stream in FLOATS else _dtype(value)


def _generator(value: torch.Tensor) -> dict[str, Any] | None:
    """Return a generator for contents like the recorded ones; None for a normal distribution."""
    if not value.is_floating_point() or value.numel() < 16:
        return None
    wide = value.float()
    low, high = float(wide.min()), float(wide.max())
    if low >= 0 and high <= 1 and high > 0:
        return {"kind": "uniform", "low": 0.0, "high": 1.0}
    if high <= 0 and low < 0:
        return {"kind": "uniform", "low": round(min(low, -1e-3), 6), "high": 0.0}
    if low > 0:
        return {"kind": "positive", "scale": float(f"{float(wide.mean()):.3g}")}
    return None


def _output_layouts(call: RecordedCall, outputs: Sequence[str | None]) -> dict[str, Any] | str:
    layouts = {}
    for name, at in _places(outputs):
        value = call.results[at]
        if value.is_contiguous():
            continue
        order = sorted(range(value.dim()), key=lambda place: (-value.stride(place), value.shape[place] == 1, place))
        if not value.permute(order).is_contiguous():
            return f"its result {name} has gaps in memory, which no kernel's result has"
        layouts[name] = {"order": order}
    return layouts


def _why_other_numbers(definition: Definition, call: RecordedCall, outputs: Sequence[str | None]) -> str:
    inputs = {name: call.arguments[name] for name in definition.inputs}
    try:
        made = run_reference(definition, inputs)
    except (RecordError, torch.OutOfMemoryError) as error:
        return f"its draft does not run on a recorded call: {str(error).strip().splitlines()[-1]}"
    for name, at in _places(outputs):
        want = call.results[at]
        if made[name].dtype != want.dtype or not torch.equal(made[name].nan_to_num(), want.nan_to_num()):
            return (
                f"its draft does not give the numbers of the recorded {call.stage} call in {name}, so they depend on more "
                "than its arguments"
            )
    return ""


def _workload(definition: Definition, call: RecordedCall, tag: str) -> str:
    """Return a recorded call as a Workload's line; empty if a Workload cannot state it."""
    given = CapturedCall(call.stage, tuple(call.arguments[name] for name in definition.inputs))
    workload = workload_of(definition, given, allocate_of(definition))
    if workload is None:
        return ""
    tags = ((f"model:{tag}",) if tag else ()) + workload.tags
    return workload.model_copy(update={"tags": tags}).to_json()


def _account(seam: Seam, code: DraftedCode, calls: Sequence[RecordedCall], workloads: Sequence[str]) -> dict[str, Any]:
    """Return what was recorded: the place, and the tensors of each call."""
    return {
        "source": code.source,
        "class": f"{seam.module_class.__module__}.{seam.module_class.__qualname__}",
        "function": seam.function,
        "calls": [
            {
                "stage": call.stage,
                "inputs": _described(call.tensors.items()),
                "outputs": _described((name, call.results[at]) for name, at in _places(code.returns)),
                "is_workload": bool(workload),
            }
            for call, workload in zip(calls, workloads, strict=True)
        ],
    }


def _described(values: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    return {
        name: {"shape": list(value.shape), "dtype": _dtype(value), "strides": list(value.stride())}
        for name, value in values
    }


def source_of(code: Any) -> str:
    """Return the location of a class or function: a permalink into the release of transformers, or the file."""
    import transformers

    file = inspect.getsourcefile(code) or ""
    lines, first = inspect.getsourcelines(code)
    package = Path(transformers.__file__).parent
    place = f"#L{first}-L{first + len(lines) - 1}"
    if not Path(file).is_relative_to(package):
        return f"{file}{place}"
    inner = Path(file).relative_to(package).as_posix()
    return (
        f"https://github.com/huggingface/transformers/blob/v{transformers.__version__}/src/transformers/{inner}{place}"
    )
