"""Quantised tensors: how codes lie in bytes, and where a Solution must give every one of them.

A packed tensor's shape counts bytes: two codes of ``float4_e2m1`` a byte (``[M, H // 2]``), two of 12 bits in three bytes of
``uint8`` (``[M, 3 * H // 2]``). Each rule raises :class:`RecordError` with the culprit's key.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tilegym_db.errors import RecordError
from tilegym_db.records.definition_parts import Axis, TensorSpec
from tilegym_db.records.dtypes import CODE_DTYPES
from tilegym_db.records.expressions import evaluate_bool, names_in, parse_expression

__all__ = ["check_codes", "check_packed", "codes_are_exact", "is_packed"]

PACKED_DTYPES = frozenset(("float4_e2m1", "uint8"))
"""Dtypes whose element is a byte that holds a part of one code, or several."""
_EXACT = re.compile(r"exact(?: when ([A-Za-z_]\w*))?")
_TRIED = {1: 256, 2: 24}
"""Axes in the size of a packed row -> how many sizes of each are tried."""

Specs = Mapping[str, TensorSpec]


def check_codes(
    codes: Mapping[str, str], oracle: str, inputs: Specs, outputs: Specs, dtypes: Mapping[str, tuple[str, ...]]
) -> None:
    """``codes`` names outputs of quantised formats, and flags that are inputs."""
    for name, text in codes.items():
        spec, match = outputs.get(name), _EXACT.fullmatch(text)
        if spec is None:
            raise RecordError(f"codes names the undeclared output '{name}'", code="output_undeclared")
        if match is None:
            raise RecordError(
                f"codes.{name} must be 'exact' or 'exact when <flag>', not {text!r}", code="codes_rule_unknown"
            )
        choices = dtypes.get(spec.dtype, (spec.dtype,))
        if not CODE_DTYPES.issuperset(choices):
            known = ", ".join(sorted(CODE_DTYPES))
            raise RecordError(
                f"codes.{name}: its dtype is {', '.join(choices)}, and not of {known}; integers are always exact",
                code="codes_dtype",
            )
        if oracle != "as_written":
            raise RecordError(
                f"codes.{name}: exact codes are those of the reference as written; set 'oracle': 'as_written'",
                code="codes_oracle",
            )
        flag = inputs.get(match[1]) if match[1] else None
        if match[1] and (flag is None or not flag.is_scalar or flag.dtype != "bool"):
            raise RecordError(
                f"codes.{name}: '{match[1]}' must be an input that is a Python bool (shape null, dtype bool)",
                code="codes_flag",
            )


def codes_are_exact(codes: Mapping[str, str], output: str, inputs: Mapping[str, Any]) -> bool:
    """Whether all codes of an output must be equal in a call with these inputs, flags among them."""
    match = _EXACT.fullmatch(codes.get(output, ""))
    return match is not None and (match[1] is None or bool(inputs[match[1]]))


def is_packed(spec: TensorSpec, dtypes: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the elements of a tensor are bytes in which codes may be packed."""
    return not PACKED_DTYPES.isdisjoint(dtypes.get(spec.dtype, (spec.dtype,)))


def check_packed(
    tensors: Mapping[str, TensorSpec],
    dtypes: Mapping[str, tuple[str, ...]],
    axes: Mapping[str, Axis],
    constraints: Sequence[str],
) -> None:
    """A row of a packed tensor is a whole number of bytes at every size that the constraints allow."""
    fixed = tuple((name, axis.value) for name, axis in axes.items() if axis.value is not None)
    for where, spec in tensors.items():
        entry = spec.shape[-1] if spec.shape else None
        if is_packed(spec, dtypes) and isinstance(entry, str) and not names_in(entry)[0] - set(axes):
            problem = _partial_byte(entry, fixed, tuple(constraints))
            if problem:
                raise RecordError(f"{where}: {problem}", code="packed_row_partial")


@lru_cache(maxsize=256)
def _partial_byte(entry: str, fixed: tuple[tuple[str, int], ...], constraints: tuple[str, ...]) -> str:
    """Sizes that the constraints allow and that a division in ``entry`` rounds down; empty where there are none."""
    known = dict(fixed)
    names = sorted(names_in(entry)[0] - set(known))
    divisions = [
        node
        for node in ast.walk(parse_expression(entry))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)
    ]
    about = [text for text in constraints if names_in(text)[0] <= {*names, *known}]
    for sizes in _tried(names) if divisions else ():
        bound = {**known, **sizes}
        for node in divisions:
            exact = f"({ast.unparse(node.left)}) % ({ast.unparse(node.right)}) == 0"
            if _holds([*about], bound) and not _holds([exact], bound):
                spelled = ", ".join(f"{name}={size}" for name, size in sizes.items())
                wanted = f"{ast.unparse(node.left)} % {ast.unparse(node.right)} == 0"
                return f"'{entry}' leaves out part of a byte at {spelled}; add the constraint '{wanted}'"
    return ""


def _tried(names: Sequence[str]) -> Iterator[dict[str, int]]:
    most = _TRIED.get(len(names), 8)
    for sizes in itertools.product(range(1, most + 1), repeat=len(names)):
        yield dict(zip(names, sizes, strict=True))


def _holds(constraints: Sequence[str], axes: Mapping[str, int]) -> bool:
    try:
        return all(evaluate_bool(text, axes) for text in constraints)
    except RecordError:  # a division by zero at this size
        return False
