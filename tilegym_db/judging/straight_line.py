"""Turn a problem's code into plain functions, which is what a reference and a kernel's host code may be.

A module of KernelBench is traced in a confined worker into the calls that it makes. Its weights become arguments. A kernel's
module (``ModelNew``) and functions of GPU MODE are rewritten as texts, and nothing of them runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any


class NotPlain(Exception):
    """Code that cannot be a plain function. The message is the reason."""


def traced(model: Any, arguments: list[str], scalars: Mapping[str, Any]) -> str:
    """Return the source of ``run`` with a module's inputs and weights. Runs in a confined worker.

    Args:
        arguments: names of the inputs of its ``forward``, in order.
        scalars: those of them that are numbers.
    """
    from torch import fx

    class Through(fx.Tracer):
        def is_leaf_module(self, module: Any, name: str) -> bool:
            return False

    for module in model.modules():
        if hasattr(module, "_check_input_dim"):  # it asks for the rank, which a trace has not
            module._check_input_dim = lambda given: None
        if hasattr(
            module, "_apply_instance_norm"
        ):  # inputs have a batch; the comparison of the draft finds one that has not
            module.forward = module._apply_instance_norm
    try:
        graph = Through().trace(model)
    except Exception as error:  # foreign code may raise anything
        raise NotPlain(
            f"its forward() decides by values or sizes, so it is no straight line: {str(error)[:120]}"
        ) from None
    weights = dict(model.named_parameters())
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "batch_norm" and _trains(node):
            node.args = (
                node.args[0],
                None,
                None,
                *node.args[3:],
            )  # statistics of the batch; the running ones are not returned
        if "num_batches_tracked" in node.name and node.op == "call_method":
            graph.erase_node(node)
    graph.eliminate_dead_code()
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            if node.target not in weights:
                raise NotPlain(f"it reads the buffer {node.target}")
            renamed[node.name] = spelled(node.target)
            node.op, node.target, node.args = "placeholder", node.name, ()
    text = graph.python_code("self").src
    text = text.replace("torch._C._nn.", "torch.nn.functional.").replace("torch.functional.", "torch.")  # public names
    tree = ast.parse(text[text.index("def forward") :])
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    inputs = [node.name for node in graph.nodes if node.op == "placeholder" and node.name not in renamed]
    names = {**dict(zip(inputs, arguments, strict=False)), **renamed}
    body = [_Renamed(names).visit(one) for one in function.body if not _forgets(one)]
    return function_text("run", [*arguments, *map(spelled, weights)], _shortened(body))


def _shortened(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a trace without ``x = x``, and with the last value returned at once."""
    kept = [
        one
        for one in body
        if not (isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == ast.unparse(one.value))
    ]
    if (
        len(kept) > 1
        and isinstance(kept[-2], ast.Assign)
        and isinstance(kept[-1], ast.Return)
        and kept[-1].value is not None
    ) and ast.unparse(kept[-2].targets[0]) == ast.unparse(kept[-1].value):
        kept[-2:] = [ast.Return(kept[-2].value)]
    return kept


def _trains(node: Any) -> bool:
    return bool(node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False))


def _forgets(node: ast.stmt) -> bool:
    """Return True for a statement of a trace that drops a value."""
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is None


def spelled(name: str) -> str:
    """Return the name of an argument for a weight such as ``layers.0.weight``."""
    text = re.sub(r"\W", "_", name)
    return f"w_{text}" if text[0].isdigit() else text


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self.names.get(node.id, node.id), node.ctx), node)


def function_text(name: str, arguments: Iterable[str], body: list[ast.stmt]) -> str:
    """Return the source of a function."""
    made = ast.parse(f"def {name}({', '.join(arguments)}): pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.body = body
    return ast.unparse(ast.fix_missing_locations(made)) + "\n"


# ---- Texts ------------------------------------------------------------------------------------------------

_ANNOTATED = frozenset({"input_t", "output_t", "TestSpec"})


def plain_functions(text: str, left_out: set[str], harmless: set[str]) -> str:
    """Return the imports, constants and functions of a module, without types of a harness, its checks and its flags.

    Args:
        left_out: names of functions and constants to leave out.
        harmless: context managers that only set flags; their bodies stay.
    """
    kept = []
    for node in ast.parse(text).body:
        named = getattr(node, "name", None) or next(
            (one.id for one in getattr(node, "targets", ()) if isinstance(one, ast.Name)), None
        )
        is_harness = isinstance(node, ast.ImportFrom) and node.module in ("task", "utils", "typing")
        if named in left_out or is_harness or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue
        kept.append(ast.unparse(_Plain(harmless).visit(node)))
    return "\n\n".join(kept)


class _Plain(ast.NodeTransformer):
    """Remove types of a harness, and context managers that only set flags."""

    def __init__(self, harmless: set[str]) -> None:
        self.harmless = harmless

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.returns is not None and ast.unparse(node.returns) in _ANNOTATED:
            node.returns = None
        for one in node.args.args:
            if one.annotation is not None and ast.unparse(one.annotation) in _ANNOTATED:
                one.annotation = None
        if len(node.body) > 1 and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            node.body = node.body[1:]
        return node

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        calls = [item.context_expr for item in node.items]
        names = {one.func.id for one in calls if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
        return node.body if names and names <= self.harmless and len(names) == len(calls) else node


def forward_as_function(text: str, model: str, arguments: list[str], given: list[ast.expr]) -> str:
    """Return a module's source with its ``forward`` as ``run``. Its state may only be numbers that ``__init__`` computes.

    Args:
        given: what ``__init__`` is called with.
    """
    tree = ast.parse(text)
    made = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == model)
    methods = {node.name: node for node in made.body if isinstance(node, ast.FunctionDef)}
    if "forward" not in methods:
        raise NotPlain(f"{model} has no forward()")
    state = _state(methods["__init__"], given, model) if "__init__" in methods else {}
    forward = methods["forward"]
    parameters = [one.arg for one in forward.args.args if one.arg != "self"]
    if len(parameters) != len(arguments):
        raise NotPlain(f"{model}.forward() takes {', '.join(parameters)}, and the problem gives {', '.join(arguments)}")
    body: list[ast.stmt] = [ast.Assign([ast.Name(f"_{name}", ast.Store())], value) for name, value in state.items()]
    body += [_WithoutSelf(set(state), model).visit(one) for one in forward.body]
    aliases = [
        ast.Assign([ast.Name(mine, ast.Store())], ast.Name(theirs, ast.Load()))
        for mine, theirs in zip(parameters, arguments, strict=True)
        if mine != theirs
    ]
    left_out = {model, "Model", "get_inputs", "get_init_inputs", "run"}
    return f"{plain_functions(text, left_out, set())}\n\n\n{function_text('run', arguments, [*aliases, *body])}"


def _state(init: ast.FunctionDef, given: list[ast.expr], model: str) -> dict[str, ast.expr]:
    """Return the values that ``__init__`` keeps, over the values that it is called with."""
    names = [one.arg for one in init.args.args if one.arg != "self"]
    defaults = dict(zip(names[::-1], init.args.defaults[::-1], strict=False))
    values = {**defaults, **dict(zip(names, given, strict=False))}
    state: dict[str, ast.expr] = {}
    for node in init.body:
        text = ast.unparse(node)
        if "super(" in text or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if (
            not isinstance(target, ast.Attribute)
            or not isinstance(node, ast.Assign)
            or "nn." in text
            or "torch." in text
        ):
            raise NotPlain(f"{model} keeps more than numbers: {text[:80]}. Move the kernel's launch into run()")
        state[target.attr] = _Values(values).visit(node.value)
    return state


class _Values(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.values.get(node.id, node)


class _WithoutSelf(ast.NodeTransformer):
    def __init__(self, state: set[str], model: str) -> None:
        self.state, self.model = state, model

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            if node.attr not in self.state:
                raise NotPlain(
                    f"{self.model}.forward() uses self.{node.attr}, which is not a number. Move its launch into run()"
                )
            return ast.copy_location(ast.Name(f"_{node.attr}", ast.Load()), node)
        self.generic_visit(node)
        return node
