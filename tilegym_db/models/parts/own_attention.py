"""The attention that a module computes itself, without the registry of transformers: GPT-J, GPT-Neo, CodeGen, Bloom and others.

The forward of such a module calls a method for scores, mask, softmax and the product with the values, or has these statements in
it. They are known by their source, which says how scores are scaled and what is added to them. Their mask is one of numbers, so a
call is that of a bias: the mask spread over all heads. It is never read on the host. A position that sees no key, as in padding,
may get the mean of other values than in stock code.
"""

from __future__ import annotations

import ast
import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilegym_db.models.call_site import AUTOCAST, CallSite, has_hooks, is_autocast
from tilegym_db.models.found import (
    WRAPPED,
    DefinitionMatch,
    FunctionOverrides,
    KnownCode,
    MatchCandidates,
    ModuleGroup,
    ModuleOfPart,
    PartCall,
    grouped,
    methods,
    names_in_code,
    of_class,
)
from tilegym_db.models.parts.attention import DROPOUT, NO_HEADS, OTHER_VALUES, SCALE_IS_NO_NUMBER, WEIGHTS
from tilegym_db.models.parts.attention_sink import why_other_numbers
from tilegym_db.models.parts.biased_attention import KIND as BIASED
from tilegym_db.models.probe import Draw, Probe, are_close, device_of
from tilegym_db.models.rewrite import parsed
from tilegym_db.models.upstream_code import fingerprint, of_models, once_per_function, undecorated
from tilegym_db.records.definition_parts import ModelCode
from tilegym_db.resolver.device import is_capturing
from tilegym_db.resolver.hot_path import is_replayed

AFTER = ("cache", "rope")
"""The parts that rewrite other calls of a forward."""
KIND = "own_attention"
AGREES = are_close
METHOD, WANTED = "_attn", "output_attentions"
"""The method of a module, and the argument of its forward with which a caller asks for attention weights."""
OPERANDS = 4
"""Queries, keys, values and mask."""
CALL = "_tilegym_db_own_attention"
FLAGS = "bias"
"""The buffer [1, 1, P, P] of a module with the positions that each of P positions sees."""
SIZES = {"B": 2, "H": 4, "S": 5, "L": 9, "D": 32}
"""Sizes of the probe, whose positions are the last ones."""
DIVISOR = 3.0
"""What scores of the probe are divided by; a number that a module multiplies by is one over it."""

OTHER_DTYPES = "its queries, keys and values have several dtypes"
OTHER_ALIBI = "what it adds to scores has no number for each head and key"
OTHER_FACTOR = "it multiplies what it adds to scores by a number that is not one"
FEWER_FLAGS = "it has more keys than flags of what a position sees"
OTHER_METHOD = f"its {METHOD} was replaced"
OTHER_DROPOUT = "the dropout of its weights was replaced, or has hooks"
HOOKED = "a hook of the module may read attention weights"
UNSERVED = "no kernel served the first call of this size, so its mask is not spread over heads again"
MOST_KINDS = 4096
"""Number of kinds of calls without a kernel that are remembered, as many as a call site remembers."""

_is_compiling = torch.compiler.is_compiling
Function = Callable[..., Any]
Module = torch.nn.Module


class Form(NamedTuple):
    """The treatment of scores by code of a known text.

    Attributes:
        drop: the attribute with the dropout of weights.
        divisor: the attribute that scores are divided by; empty if there is none.
        factor: the attribute that they are multiplied by; empty if there is none.
        divides_mask: the mask is added before scores are divided.
        has_flags: the module keeps flags of what a position sees.
        one: the attribute that multiplies what is added, which must be one; empty if there is none.
        first, last: the variables of the first and the last statement, for statements in the middle of a forward.
    """

    drop: str
    divisor: str = ""
    factor: str = ""
    divides_mask: bool = False
    has_flags: bool = False
    one: str = ""
    first: str = ""
    last: str = ""


FORMS = {
    "260ec69ad29ef7e1": Form("attn_dropout", "scale_attn"),  # GPT-J
    "0d5dc05d21f48e92": Form("attn_dropout", has_flags=True),  # GPT-Neo
    "26e1956a657e4063": Form("attn_dropout", "scale_attn", divides_mask=True),  # CodeGen
    "673bf646a0d71231": Form("attention_dropout", "norm_factor"),  # GPT-NeoX-Japanese
    "39ba0bed21346a89": Form(
        "attention_dropout", factor="inv_norm_factor", one="beta", first="attention_scores", last="context_layer"
    ),  # Bloom
}
"""Fingerprint of a method, or of a forward with the statements in it -> their form."""
STATEMENTS = ("query_layer", "key_layer", "value_layer", "attention_mask", "alibi", "batch_size", "q_length")
"""The variables that statements in a forward read: heads and sequences are one axis, and keys are transposed."""
WEIGHT_VARIABLE = "attention_probs"
"""The variable of the attention weights that such a forward returns."""


class Own(NamedTuple):
    """A module's own code, ``call(module, *variables)``, and its form; the variables are those of the call in the forward."""

    form: Form
    call: Function
    mark: str


def find(model: Module, known: KnownCode, others: Sequence[ModuleGroup]) -> Iterable[ModuleGroup]:
    """Return the modules whose forward computes attention by a method of the module, or by known statements."""
    computes = of_class(_computes)
    parts = [ModuleOfPart(module, detail=device_of(module)) for module in model.modules() if computes(module)]
    return grouped(KIND, parts if known.definitions(BIASED) else ())


def _computes(cls: type[Module]) -> bool:
    """Return True if a forward has known statements, or gives queries, keys, values and a mask to a method."""
    forward: Any = undecorated(cls.forward)
    if (fingerprint(forward) or "") in FORMS:
        return True
    has_method = METHOD in names_in_code(forward) and METHOD in methods(cls)
    function = parsed(forward) if has_method and isinstance(forward, FunctionType) else None
    calls = (
        [] if function is None else [one for one in ast.walk(function) if isinstance(one, ast.Call) and _is_call(one)]
    )
    return len(calls) == 1 and len(calls[0].args) == OPERANDS and not calls[0].keywords


def _is_call(node: ast.Call) -> bool:
    match node.func:
        case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
            return attribute == METHOD
    return False


def candidates(found: ModuleGroup, known: KnownCode) -> MatchCandidates | str:
    """Look up the source of the method or of the forward; a probe confirms what is known about it."""
    forward: Any = undecorated(found.module_class.forward)
    if hasattr(forward, "__wrapped__"):
        return WRAPPED
    if WANTED not in forward.__code__.co_varnames[: forward.__code__.co_argcount]:
        return f"its forward has no argument {WANTED}"
    own = own_of(found.module_class)
    if isinstance(own, str):
        return own
    code = ModelCode(fingerprint=own.mark)
    return MatchCandidates([DefinitionMatch(one, code) for one in known.definitions(BIASED)])


def own_of(cls: type[Module]) -> Own | str:
    """Return the own code of a class of modules, or the reason if it is not known."""
    forward: Any = undecorated(cls.forward)
    mark = fingerprint(forward) or ""
    if mark in FORMS:
        return Own(FORMS[mark], own_statements(forward), mark)
    method: Any = methods(cls).get(METHOD)
    mark = fingerprint(method) or ""
    if mark not in FORMS:
        return f"its {METHOD} is no variant that is known (fingerprint {mark})"
    return Own(FORMS[mark], method, mark)


@once_per_function
def own_statements(forward: Any) -> Function:
    """Return ``own(module, *variables) -> (values, weights)``, the statements of a forward with :data:`STATEMENTS`."""
    function, form = parsed(forward), FORMS[fingerprint(forward) or ""]
    assert function is not None, "it has a fingerprint"
    first, last = _places(function, form)
    lines = [ast.unparse(one) for one in function.body[first : last + 1]]
    lines.append(f"return {form.last}, {WEIGHT_VARIABLE}")
    body = "".join("    " + line.replace("\n", "\n    ") + "\n" for line in lines)
    scope = dict(forward.__globals__)
    exec(compile(f"def own({', '.join(('self', *STATEMENTS))}):\n{body}", forward.__code__.co_filename, "exec"), scope)
    own: Function = scope["own"]
    return own


def _places(function: ast.FunctionDef, form: Form) -> tuple[int, int]:
    """Return the places of the statements that first set the first variable of a form and its last one."""
    sets = [
        one.targets[0].id if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) else ""
        for one in function.body
    ]
    return sets.index(form.first), sets.index(form.last)


def probe(found: ModuleGroup, module: Module, match: DefinitionMatch) -> Probe | str:
    """Run the module's own code in float32 on some of the last positions, with a mask that hides some keys.

    In bf16, models round scores, weights or both, and kernels neither.
    """
    own = own_of(found.module_class)
    assert isinstance(own, Own), "the group has a match"
    form, draw = own.form, Draw(device_of(module))
    sequences, heads, positions, keys, width = SIZES.values()
    q = draw(sequences, heads, positions, width).float()
    k, v = (draw(sequences, heads, keys, width).float() for _ in range(2))
    mask = draw(sequences, 1, positions, keys).float()
    twin = _twin(module, form, keys)
    variables: tuple[Any, ...] = (q, k, v, mask)
    if form.first:
        alibi = draw(sequences * heads, 1, keys).float()
        variables = (*(one.flatten(0, 1) for one in (q, k, v)), mask, alibi, sequences, positions)
        variables = (variables[0], variables[1].transpose(-1, -2), *variables[2:])
    try:
        with torch.no_grad():
            out, _ = own.call(twin, *variables)
            call = asked(twin, form, variables)
    except of_models() as error:
        return f"it cannot be probed: {type(error).__name__}: {error}"
    if isinstance(call, str):
        return call
    given = dict(zip(match.definition.inputs, call, strict=True))
    return given, (out.view(q.shape),)


def _twin(module: Module, form: Form, keys: int) -> Any:
    """Return a copy of a module that drops nothing, with numbers and flags of the probe."""
    twin: Any = copy.copy(module)
    state = vars(twin)
    state["_modules"] = {name: torch.nn.Identity() for name in module._modules}
    state["_buffers"] = dict(module._buffers)
    state["training"] = False
    state["num_heads"], state["head_dim"] = SIZES["H"], SIZES["D"]  # statements in a forward read them
    for name, number in ((form.divisor, DIVISOR), (form.factor, 1 / DIVISOR)):
        if name:
            state["_buffers"].pop(name, None)
            state[name] = number
    if form.has_flags:
        flags = torch.ones(keys, keys, dtype=torch.bool, device=device_of(module)).tril()
        state["_buffers"][FLAGS] = flags.view(1, 1, keys, keys)
    return twin


Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool, float]
"""The inputs of the Definition: queries, keys, values, bias, False and a scale."""


def asked(module: Any, form: Form, variables: Sequence[Any]) -> Call | str:
    """Return the inputs of the Definition for a call of a module's own code, or the reason if it does not describe the call."""
    query, key, value, mask, *others = variables
    if form.first:
        alibi, sequences, _ = others
        if not (query.dim() == key.dim() == value.dim() == 3):
            return NO_HEADS
        query, value = (one.view(sequences, -1, *one.shape[1:]) for one in (query, value))
        key = key.transpose(-1, -2).view(sequences, -1, key.shape[2], key.shape[1])
    if query.dim() != 4 or key.dim() != 4 or query.shape[:2] != key.shape[:2]:
        return NO_HEADS
    if value.shape != key.shape:
        return OTHER_VALUES
    if not query.dtype == key.dtype == value.dtype:
        return OTHER_DTYPES
    scale = _scale(module, form)
    if scale is None:
        return SCALE_IS_NO_NUMBER
    if form.one and getattr(module, form.one, None) != 1:
        return OTHER_FACTOR
    reason = why_other_numbers(mask, query, key)
    if reason:
        return reason
    if form.divides_mask:
        mask = mask * scale
    if form.has_flags:
        flags = module._buffers[FLAGS]
        if flags.shape[-1] < key.shape[2]:
            return FEWER_FLAGS
        seen = flags[:, :, key.shape[2] - query.shape[2] : key.shape[2], : key.shape[2]]
        mask = torch.where(seen, mask, torch.finfo(mask.dtype).min)
    bias = mask
    if form.first:
        if alibi.dtype != query.dtype or alibi.shape != (sequences * query.shape[1], 1, key.shape[2]):
            return OTHER_ALIBI
        bias = mask + alibi.view(sequences, query.shape[1], 1, key.shape[2])
    return query, key, value, bias.expand(-1, *query.shape[1:3], -1).contiguous(), False, scale


def _scale(module: Any, form: Form) -> float | None:
    """Return the number that scores are multiplied by; None if the module states none above zero."""
    if not form.divisor and not form.factor:
        return 1.0
    number = getattr(module, form.divisor or form.factor, None)
    if type(number) is not float or not 0 < number < math.inf:
        return None
    return 1 / number if form.divisor else number


def forward(stock: Any, calls: Sequence[PartCall]) -> FunctionOverrides:
    """Return the function that a forward calls in place of this code, and the rewrite that makes it call that."""
    ((found, site),) = calls
    own = own_of(found.module_class)
    assert isinstance(own, Own), "the group has a match"
    rewrite = functools.partial(_replace_statements, form=own.form) if own.form.first else _Calls().rewrite
    return FunctionOverrides({CALL: attention_function(site, own)}, {}, [site], [rewrite])


class _Calls(ast.NodeTransformer):
    """Turns ``self._attn(x, ...)`` into a call that also knows if the caller wants weights."""

    def rewrite(self, function: ast.FunctionDef) -> None:
        self.visit(function)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not _is_call(node):
            return node
        given = [node.func.value, ast.Name(WANTED, ast.Load()), *node.args]  # type: ignore[attr-defined]
        call = ast.Call(ast.Name(CALL, ast.Load()), given, [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def _replace_statements(function: ast.FunctionDef, form: Form) -> None:
    first, last = _places(function, form)
    given = ", ".join(("self", WANTED, *STATEMENTS))
    (call,) = ast.parse(f"{form.last}, {WEIGHT_VARIABLE} = {CALL}({given})").body
    for node in ast.walk(call):
        ast.copy_location(node, function.body[first])
    function.body[first : last + 1] = [call]


def why_weights(module: Any, form: Form) -> str:
    """Return the reason if something may change or read the attention weights, which a kernel never writes; empty if not.

    Stock code returns them unasked, and a caller may set the dropout of weights alone to training.
    """
    drop = module._modules.get(form.drop)
    if type(drop) is not torch.nn.Dropout or has_hooks(drop):
        return OTHER_DROPOUT
    if drop.training and drop.p:
        return DROPOUT
    return HOOKED if module._forward_hooks else ""


def attention_function(site: CallSite, own: Own) -> Function:
    """Return ``attention(module, wants_weights, *variables) -> (values, weights or None)``, which asks for a kernel first."""
    form = own.form
    unserved: set[Any] = set()

    def serve(module: Any, wants_weights: Any, variables: tuple[Any, ...]) -> Any:
        query, key, value, mask, *_ = variables
        if site.falls_back(module.training, query, key, value):
            return None
        is_known = form.first or (METHOD not in vars(module) and getattr(type(module), METHOD) is own.call)
        reason = "" if is_known else OTHER_METHOD
        reason = reason or (AUTOCAST if is_autocast(query) else WEIGHTS if wants_weights else why_weights(module, form))
        kind = _kind(query, key, value, mask)
        if not reason and kind in unserved:
            site.unserved()
            reason = UNSERVED
        call = reason or asked(module, form, variables)
        if isinstance(call, str):
            site.bypass(call)
            return None
        out = site.ask(module.training, *call)
        if out is None and not (mask.requires_grad or is_capturing()) and len(unserved) < MOST_KINDS:
            unserved.add(kind)
        return out

    def attention(module: Any, wants_weights: Any, *variables: Any) -> Any:
        out = None if _is_compiling() else serve(module, wants_weights, variables)
        if out is None:
            return own.call(module, *variables) if form.first else getattr(module, METHOD)(*variables)
        return (out.flatten(0, 1) if form.first else out), None

    return attention


def _kind(query: Any, key: Any, value: Any, mask: Any) -> Any:
    """Return what decides which kernel serves a call; its other inputs follow from that, or are numbers of the module."""
    sizes = (query.shape, query.stride(), key.shape, key.stride(), value.stride(), getattr(mask, "shape", None))
    return *sizes, query.dtype, query.device, is_replayed()
