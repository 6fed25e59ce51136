"""Recognise the attention function of transformers that calls ``scaled_dot_product_attention``, in any release.

Its structure shows the arguments and attributes that it reads. Calls of it on random tensors show that it computes the bits of
PyTorch's own function for every kind of call that a kernel may serve.
"""

from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch

from tilegym_db.models.probe import ROWS, Draw
from tilegym_db.models.rewrite import parsed

Sdpa = torch.nn.functional.scaled_dot_product_attention

POSITIONAL = 5
"""The parameters of an attention function: module, query, key, value and mask."""
READ_OF_MODULE = {"num_key_value_groups", "is_causal", "layer_idx", "training"}
CHECKED = {"dropout", "scaling", "is_causal", "output_attentions"}
"""The options that a call site checks itself."""
HEAD_SIZE, SCALE = 64, 0.3


def other_options(function: Any) -> frozenset[str] | str:
    """Return the further options that an attention function reads, or the reason if its structure is not the known one.

    A call with such an option is one that no Definition describes. All other options have no effect.
    """
    tree = parsed(function) if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__") else None
    if tree is None:
        return "it is no plain function with a source"
    module, *others = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
    rest = tree.args.kwarg.arg if tree.args.kwarg else ""
    if len(others) < POSITIONAL - 1 or tree.args.vararg:
        return "its parameters are not module, query, key, value and mask"
    if Sdpa.__name__ not in function.__code__.co_names:
        return f"it does not call {Sdpa.__name__}"
    options = {*others[POSITIONAL - 1 :]}
    for use in _uses(tree, module, rest):
        if use is None:
            return "it passes its module or its options on to other code"
        name, is_of_module = use
        if is_of_module and name not in READ_OF_MODULE:
            return f"it reads {name} of its module"
        if not is_of_module:
            options.add(name)
    return frozenset(options - CHECKED)


def _uses(tree: ast.FunctionDef, module: str, rest: str) -> Iterator[tuple[str, bool] | None]:
    """Yield (name, True) for each attribute of the module that is read and (name, False) for each further option.

    Yields None for another use of the module or of the dictionary of further options.
    """
    explained: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name) as owner, attr=attribute) if name == module:
                explained.add(owner)
                yield attribute, True
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[ast.Name(id=name) as owner, ast.Constant(value=str(attribute)), *_],
            ) if name == module:
                explained.add(owner)
                yield attribute, True
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name) as owner, attr="get" | "pop"),
                args=[ast.Constant(value=str(option)), *_],
            ) if name == rest:
                explained.add(owner)
                yield option, False
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="update"), keywords=keywords) if (
                owner != rest
            ):
                # A cache that is an option: a call with one is not served, whatever it reads.
                explained |= {keyword.value for keyword in keywords if isinstance(keyword.value, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in (module, rest) and node not in explained:
            yield None


def why_other_bits(
    function: Callable[..., Any], device: torch.device, *, with_mask: bool = False, is_causal: bool = True
) -> str:
    """Return the reason if an attention function computes other bits than PyTorch's; empty if it computes the same.

    The calls have one or two query heads per key head, one or more positions, more keys than queries, and a scale or none.
    ``with_mask`` gives all of them a mask of flags. ``is_causal`` is what the module states.
    """
    draw = Draw(device)
    for groups, queries, keys, scale in itertools.product((1, 2), (1, ROWS), (ROWS, 2 * ROWS), (None, SCALE)):
        query = draw(2, 2 * groups, queries, HEAD_SIZE)
        key, value = draw(2, 2, keys, HEAD_SIZE), draw(2, 2, keys, HEAD_SIZE)
        asking = types.SimpleNamespace(num_key_value_groups=groups, is_causal=is_causal, training=False, layer_idx=0)
        with torch.no_grad():
            mask = drawn_mask(query, key) if with_mask else None
            try:
                found, _ = function(asking, query, key, value, mask, dropout=0.0, scaling=scale)
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                return f"it raises {type(error).__name__} in a probe"
            want = _bits_of_pytorch(query, key, value, mask, scale, is_causal=is_causal)
        if not any(found.shape == one.shape and torch.equal(found, one) for one in want):
            called = f"{queries} queries, {keys} keys and {groups} query heads per key head"
            called += ", with a mask," if with_mask else ""
            return f"its bits for {called} are not those of {Sdpa.__name__}"
    return ""


def drawn_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return random flags [B, 1, Sq, Skv], True at what a position sees. Each position sees the first key at least."""
    flags = Draw(query.device)(query.shape[0], 1, query.shape[2], key.shape[2]) > 0
    flags[..., 0] = True
    return flags


def _bits_of_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    *,
    is_causal: bool,
) -> Iterator[Any]:
    """Yield the results of the ways in which PyTorch can share key heads."""
    groups, is_causal = query.shape[1] // key.shape[1], is_causal and query.shape[2] > 1 and mask is None
    if is_causal:  # from the first key on: a cache of fixed size that is still empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
    yield Sdpa(query, key, value, **options, enable_gqa=groups > 1).transpose(1, 2)
    repeated = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    yield Sdpa(query, *repeated, **options).transpose(1, 2)
    if mask is not None and query.shape[2] == 1:  # the query heads of a key head as rows of one product
        rows = query.reshape(query.shape[0], key.shape[1], groups, -1)
        yield Sdpa(rows, key, value, **options).reshape(query.shape).transpose(1, 2)
