"""Check the records of a dialect against a table of rules: definitions, solutions, workloads and traces.

The first part reads untrusted files: JSON without repeated keys, and paths that stay inside the root.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tilegym_db.store.imported import Refusal

# ---- Reading untrusted files -----------------------------------------------------------------------------

MAX_RECORD_BYTES = 64 << 20
"""Maximum bytes of a record file or a trace line. FlashInfer-Bench cuts its logs at 5 MiB."""
_MAX_DEPTH = 100
"""Maximum nesting depth of a record. Copying records is recursive and cannot go much deeper."""
LFS_VERSION = b"version https://git-lfs.github.com/spec/v1"
POINTER_INSTEAD = "is a Git LFS pointer without its content: run git lfs pull in the data set, and import it again"
LINK_OUT = (
    "a link that leads out of the data set. A cache of the Hugging Face Hub holds nothing but such links: copy the data set "
    "with hf download --local-dir, or cp -rL"
)
_MAX_POINTER_BYTES = 1024
_MAX_HEADER_BYTES = 100 << 20
_GIT = ".git"
_SKIPPED = frozenset({_GIT, "__pycache__", ".cache"})
"""Folders of tools, which are not part of a data set."""


@dataclass(frozen=True)
class Line:
    """One line of a file, without its line end."""

    number: int
    offset: int
    content: bytes


def walk(root: Path) -> tuple[list[tuple[str, Path]], list[Refusal]]:
    """Return every regular file below a folder as (path with '/', file), sorted by path, and the refused entries.

    A link is followed if its target is inside the root.
    """
    found, refused = [], []
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted([*names, *(item for item in folders if (Path(folder) / item).is_symlink())]):
            file = Path(folder) / name
            path = file.relative_to(root).as_posix()
            if leads_out(file, root):
                refused.append(Refusal(path, "", LINK_OUT))
            elif not _is_text(path):
                refused.append(Refusal(ascii(path), "", "its name is not valid UTF-8"))
            elif file.is_file():
                found.append((path, file))
            elif file.is_dir():
                refused.append(Refusal(path, "", "a link to a folder; copy the folder"))
            else:
                refused.append(Refusal(path, "", "a broken link, or not a regular file"))
    return sorted(found), sorted(refused, key=str)


def leads_out(file: Path, root: Path) -> bool:
    """Return True if a file is a link to a target outside a folder or inside a ``.git``. Broken and cyclic links give False."""
    # Path.resolve raises for a link to itself.
    real, real_root = Path(os.path.realpath(file)), os.path.realpath(root)
    return not real.is_relative_to(real_root) or _GIT in real.relative_to(real_root).parts


def spelled_otherwise(file: Path, suffix: str) -> str | None:
    """Return why a file is skipped whose suffix differs from the expected one only in case; None for other files."""
    if file.suffix == suffix or file.suffix.lower() != suffix:
        return None
    return f"its name ends in {file.suffix}, but only {suffix} is read; rename it"


def _is_text(path: str) -> bool:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def file_digest(file: Path) -> tuple[str, int]:
    """Return the sha256 and the size of a file."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
        return digest.hexdigest(), content.tell()


def split_lines(content: bytes) -> Iterator[Line]:
    """Yield the non-empty lines, as FlashInfer-Bench reads them."""
    if content.startswith(LFS_VERSION):
        yield Line(1, 0, content)  # refuse the pointer once instead of once per line
        return
    offset = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield Line(number, offset, line)
        offset += len(line) + 1


class _Repeated(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        raise _Repeated(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return value


def parse(content: bytes) -> tuple[dict[str, Any], str] | str:
    """Return a JSON object and its digest, or why it is invalid.

    The digest ignores white space. It keeps the order of keys and the text of numbers.
    """
    if len(content) > MAX_RECORD_BYTES:
        return f"has {len(content)} bytes; a record has at most {MAX_RECORD_BYTES}"
    if content.startswith(LFS_VERSION):
        return POINTER_INSTEAD
    try:
        text = content.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_float=_finite, parse_constant=_spelled_constant)
        exact = json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number)
        spelled = json.dumps(exact, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeError as error:
        return f"is not UTF-8 text: {error}"
    except _Repeated as error:
        return f"has the key '{error}' twice in one object"
    except RecursionError:
        return "is nested too deeply"
    except ValueError as error:
        return f"is not valid JSON: {error}"
    if not isinstance(value, dict):
        return f"is a JSON {type(value).__name__}, not an object"
    if _is_deeper(value, _MAX_DEPTH):
        return "is nested too deeply"
    return value, hashlib.sha256(spelled).hexdigest()


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
        if not level:
            return False
    return True


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is out of range")
    return value


def _number(text: str) -> str:
    return f"\0{text}"  # JSON must escape this character, so no string of the record equals it


def _spelled_constant(text: str) -> str:
    return text  # read bare NaN and Infinity as the texts that FlashInfer-Bench writes


def path_problem(path: str) -> str | None:
    """Return why a path is not allowed inside its data set or solution; None if it is."""
    pure = PurePosixPath(path)
    if not path or not pure.parts:
        return "is empty"
    if "\0" in path or "\\" in path:
        return f"{path!r} is not a plain path"
    if pure.is_absolute() or ".." in pure.parts:
        return f"{path!r} leads out of its folder"
    if _GIT in (part.lower() for part in pure.parts):
        return f"{path!r} leads into a repository's {_GIT}, which is not part of its content"
    return None


def lfs_pointer(file: Path) -> tuple[str, int] | None:
    """Return the sha256 and size that a Git LFS pointer declares; None for any other file."""
    if file.stat().st_size > _MAX_POINTER_BYTES:
        return None
    content = file.read_bytes()
    if not content.startswith(LFS_VERSION):
        return None
    fields = dict(line.split(" ", 1) for line in content.decode("utf-8", "replace").splitlines() if " " in line)
    try:
        return fields["oid"].removeprefix("sha256:"), int(fields["size"])
    except (KeyError, ValueError):
        return "", 0


def tensor_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]] | str:
    """Return (dtype in safetensors' spelling, shape) by key from a safetensors header, or why it is invalid."""
    size = file.stat().st_size
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            return "is not a safetensors file: its header is longer than the file"
        try:
            header = json.loads(content.read(length))
            entries = {key: item for key, item in header.items() if key != "__metadata__"}
            tensors = {key: (item["dtype"], item["shape"], item["data_offsets"]) for key, item in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"is not a safetensors file: its header cannot be read ({error})"
    problem = _header_problem(tensors, size - 8 - length)
    if problem is not None:
        return f"is not a valid safetensors file: {problem}"
    return {key: (dtype, tuple(shape)) for key, (dtype, shape, _) in tensors.items()}


_TENSOR_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16,
    "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def _header_problem(tensors: Mapping[str, tuple[Any, Any, Any]], size: int) -> str | None:
    """Return the first contradiction of a header; ``size`` is that of the data. Tensors lie side by side without a gap."""
    for key, (dtype, shape, offsets) in tensors.items():
        if not isinstance(dtype, str):
            return f"the dtype of '{key}' must be a text, not {dtype!r:.40}"
        if not _are_counts(shape):
            return f"the shape of '{key}' must be a list of whole numbers, not {shape!r:.40}"
        if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
            return f"the offsets of '{key}' must be two that rise from 0 to at most {size}, not {offsets!r:.40}"
        bits = _TENSOR_BITS.get(dtype)
        if bits is not None and 8 * (offsets[1] - offsets[0]) != bits * math.prod(shape):
            return (
                f"'{key}' has {offsets[1] - offsets[0]} bytes, and {dtype} {shape} needs {bits * math.prod(shape) // 8}"
            )
    end = 0
    for key, (_, _, offsets) in sorted(tensors.items(), key=lambda item: item[1][2]):
        if offsets[0] != end:
            return f"'{key}' begins at {offsets[0]}, and the tensor before it ends at {end}"
        end = offsets[1]
    return None if end == size else f"its tensors end at {end}, and its data has {size} bytes"


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value)


Problem = tuple[str, str]
"""A key and the reason that it is refused."""

FIB_DTYPES = frozenset(
    [
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float4_e2m1",
        "int64",
        "int32",
        "int16",
        "int8",
        "bool",
    ]
)

STATUSES = (
    "PASSED", "INCORRECT_SHAPE", "INCORRECT_NUMERICAL", "INCORRECT_DTYPE", "RUNTIME_ERROR", "COMPILE_ERROR", "TIMEOUT",
)  # fmt: skip

_UNSAFE = frozenset({".", ".."})


@dataclass(frozen=True)
class Rules:
    """The rules in which dialects differ. ``dtypes`` None allows any text."""

    languages: frozenset[str]
    dtypes: frozenset[str] | None = FIB_DTYPES
    axis_kinds: frozenset[str] = frozenset({"const", "var"})
    const_needs_value: bool = True
    op_type_required: bool = True
    reference_required: bool = True
    entry_named_run: bool = True
    derived_axes: bool = False
    """True if a shape may have a number (``"1"``) or a part of an axis (``"K_div_2"``)."""
    in_place_by_name: bool = False
    """True if an output may have an input's name, and then overwrites it."""
    input_kinds: frozenset[str] = frozenset({"random", "safetensors", "scalar"})
    statuses: tuple[str, ...] = STATUSES
    languages_key: str = "language"
    destination_passing_default: bool = True
    binding_default: str | None = "tvm-ffi"


def check_text(record: Mapping[str, Any], key: str, where: str = "") -> Iterator[Problem]:
    """Yield a problem unless a required key has a non-empty text."""
    value = record.get(key)
    if key not in record:
        yield where + key, "missing key"
    elif not isinstance(value, str) or not value:
        yield where + key, f"must be a non-empty text, not {value!r:.80}"


def check_name(record: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Yield a problem unless a required key has a text that can be part of a path."""
    yield from check_text(record, key)
    value = record.get(key)
    if isinstance(value, str) and value and (value in _UNSAFE or any(mark in value for mark in "/\\\0")):
        yield key, f"{value!r} is not safe as a part of a path"


def check_texts(record: Mapping[str, Any], key: str, where: str = "") -> Iterator[Problem]:
    """Yield a problem unless an optional key has a list of texts."""
    value = record.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        yield where + key, "must be a list of texts"


def check_description(record: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem unless the description is a text, null or absent."""
    if not isinstance(record.get("description"), str | None):
        yield "description", f"must be a text or null, not {record['description']!r:.80}"


def is_one_of(value: Any, allowed: Collection[str]) -> bool:
    """Return True if a value is one of the allowed texts. Unlike ``in``, it accepts unhashable JSON values."""
    return isinstance(value, str) and value in allowed


def number(value: Any) -> float | None:
    """Convert a JSON number to float; return None for other values, booleans and too large numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def is_count(value: Any) -> bool:
    """Return True if a value is a non-negative 63-bit integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


# ---- Definitions --------------------------------------------------------------------------------------


def check_definition(record: Mapping[str, Any], rules: Rules) -> list[Problem]:
    """Return the problems of a Definition; empty if it is accepted."""
    problems = [*check_name(record, "name"), *check_texts(record, "tags"), *check_description(record)]
    if rules.op_type_required or record.get("op_type") is not None:
        problems += check_name(record, "op_type")
    groups = {key: record.get(key) for key in ("axes", "inputs", "outputs")}
    missing = [(key, "missing key" if key not in record else "must be an object") for key in groups
               if not isinstance(groups[key], dict)]  # fmt: skip
    if missing:
        return problems + missing
    for name, axis in record["axes"].items():
        problems += _axis(f"axes.{name}", axis, rules)
    for group in ("inputs", "outputs"):
        for name, spec in record[group].items():
            problems += _tensor(f"{group}.{name}", spec, record["axes"], rules)
    if not rules.in_place_by_name:
        clash = sorted(set(record["inputs"]) & set(record["outputs"]))
        problems += [(f"outputs.{name}", "is the name of an input too") for name in clash]
    problems += _constraints(record)
    return problems + list(_reference(record, rules))


def axis_kind(axis: Mapping[str, Any]) -> Any:
    """Return ``const``, ``var`` or a dialect's own kind. Without a type, a ``value`` means ``const``, as in FlashInfer-Bench."""
    return axis.get("type", "const" if "value" in axis else "var")


def _axis(where: str, axis: Any, rules: Rules) -> Iterator[Problem]:
    if not isinstance(axis, dict):
        yield where, "must be an object"
        return
    kind = axis_kind(axis)
    if not is_one_of(kind, rules.axis_kinds):
        yield f"{where}.type", f"must be one of {', '.join(sorted(rules.axis_kinds))}, not {kind!r:.80}"
    elif kind == "const" and (rules.const_needs_value or "value" in axis) and not is_count(axis.get("value")):
        yield f"{where}.value", f"a const axis needs a whole number >= 0, not {axis.get('value')!r:.40}"
    elif kind == "expr":
        yield from _expression(axis.get("expression"), f"{where}.expression")


def _tensor(where: str, spec: Any, axes: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    if not isinstance(spec, dict):
        yield where, "must be an object"
        return
    if "shape" not in spec:
        yield f"{where}.shape", "missing key"
    shape = spec.get("shape")
    if shape is not None and not (isinstance(shape, list) and all(isinstance(axis, str) for axis in shape)):
        yield f"{where}.shape", "must be a list of names of axes, or null for a Python scalar"
    else:
        for axis in shape or ():
            if axis not in axes and not (rules.derived_axes and derived_axis(axis, axes)):
                yield f"{where}.shape", f"uses the axis '{axis}', which is not declared"
    dtype = spec.get("dtype")
    if not isinstance(dtype, str):
        yield f"{where}.dtype", "missing key" if "dtype" not in spec else f"must be a text, not {dtype!r:.40}"
    elif rules.dtypes is not None and dtype not in rules.dtypes:
        yield f"{where}.dtype", f"unknown dtype '{dtype}'"


_DERIVED = re.compile(r"(?P<axis>\w+?)_(?P<operation>div|mul|times)_?(?P<number>[1-9][0-9]{0,8})")


def derived_axis(text: str, axes: Collection[str]) -> str | None:
    """Return the expression of a shape entry that is no declared axis: ``1``, or ``K // 2`` for ``K_div_2``; else None."""
    if text.isascii() and text.isdigit():
        return text if len(text) < 10 else None
    found = _DERIVED.fullmatch(text)
    if found is None or found["axis"] not in axes:
        return None
    return f"{found['axis']} {'//' if found['operation'] == 'div' else '*'} {found['number']}"


def _expression(text: Any, where: str) -> Iterator[Problem]:
    if not isinstance(text, str) or not text:
        yield where, f"must be a Python expression, not {text!r:.80}"
        return
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield where, f"is not a Python expression: {error}"


def _constraints(record: Mapping[str, Any]) -> list[Problem]:
    value = record.get("constraints", [])
    if not isinstance(value, list):
        return [("constraints", "must be a list of texts")]
    return [problem for number, text in enumerate(value) for problem in _expression(text, f"constraints[{number}]")]


def _reference(record: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    text = record.get("reference")
    if text is None and not rules.reference_required:
        return
    if not isinstance(text, str) or not text:
        yield "reference", "missing key" if "reference" not in record else "must be a non-empty text"
        return
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield "reference", f"is not valid Python: {error}"
        return
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if rules.entry_named_run and "run" not in functions:
        yield "reference", f"defines no top-level function 'run' (it defines {', '.join(functions) or 'none'})"
    elif not functions:
        yield "reference", "defines no function"


# ---- Solutions ----------------------------------------------------------------------------------------


def check_solution(record: Mapping[str, Any], rules: Rules) -> list[Problem]:
    """Return the problems of a Solution. Its sources are inline by now in every dialect."""
    problems = [*check_name(record, "name"), *check_name(record, "definition"), *check_name(record, "author")]
    problems += check_description(record)
    spec = record.get("spec")
    if not isinstance(spec, dict):
        return [*problems, ("spec", "missing key" if "spec" not in record else "must be an object")]
    problems += _language(spec, rules)
    hardware = spec.get("target_hardware")
    if not isinstance(hardware, list) or not hardware or not all(isinstance(item, str) and item for item in hardware):
        problems.append(("spec.target_hardware", "must be a list of at least one text"))
    problems += check_texts(spec, "dependencies", "spec.")
    if not isinstance(spec.get("destination_passing_style", True), bool):
        problems.append(("spec.destination_passing_style", "must be true or false"))
    if spec.get("binding") not in (None, "tvm-ffi", "torch"):
        problems.append(("spec.binding", f"must be tvm-ffi, torch or null, not {spec['binding']!r:.40}"))
    paths = list(_sources(record.get("sources"), problems))
    entry = spec.get("entry_point")
    if not isinstance(entry, str) or entry.count("::") != 1 or not all(entry.split("::")):
        problems.append(("spec.entry_point", f"must read '<file>::<function>', not {entry!r:.80}"))
    elif entry.split("::")[0] not in paths:
        problems.append(("spec.entry_point", f"names the file '{entry.split('::')[0]}', which is not a source"))
    return problems


def _language(spec: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    key = "languages" if "languages" in spec and rules.languages_key == "languages" else "language"
    value = spec.get(key)
    if key == "languages" and not isinstance(value, list):
        yield f"spec.{key}", f"must be a list of texts, not {value!r:.40}"
        return
    chosen = value if isinstance(value, list) and key == "languages" else [value]
    if not chosen:
        yield f"spec.{key}", "names no language"
    for language in chosen:
        if not isinstance(language, str) or language not in rules.languages:
            known = ", ".join(sorted(rules.languages))
            yield f"spec.{key}", f"unknown language {language!r:.40}; this dialect knows {known}"


def _sources(sources: Any, problems: list[Problem]) -> Iterator[str]:
    if not isinstance(sources, list) or not sources:
        problems.append(("sources", "must be a list of at least one source"))
        return
    seen: set[str] = set()
    for number, source in enumerate(sources):
        where = f"sources[{number}]"
        if not isinstance(source, dict) or not isinstance(source.get("path"), str):
            problems.append((f"{where}.path", "missing key"))
            continue
        reason = path_problem(source["path"])
        if reason is not None:
            problems.append((f"{where}.path", reason))
        if source["path"] in seen:
            problems.append((f"{where}.path", f"'{source['path']}' is listed twice"))
        if not isinstance(source.get("content"), str) or not source["content"]:
            problems.append((f"{where}.content", "must be a non-empty text"))
        seen.add(source["path"])
        yield source["path"]


# ---- Workloads and traces -----------------------------------------------------------------------------


def check_workload(record: Any, rules: Rules, where: str = "") -> list[Problem]:
    """Return the problems of a Workload by itself. A mismatch with its Definition is a finding instead."""
    if not isinstance(record, dict):
        return [(where.rstrip(".") or "workload", "must be an object")]
    problems = list(check_text(record, "uuid", where))
    axes, inputs = record.get("axes"), record.get("inputs")
    if not isinstance(axes, dict):
        problems.append((f"{where}axes", "missing key" if "axes" not in record else "must be an object"))
    else:
        problems += [(f"{where}axes.{n}", f"must be a whole number >= 0, not {v!r:.40}") for n, v in axes.items()
                     if not is_count(v)]  # fmt: skip
    if not isinstance(inputs, dict):
        problems.append((f"{where}inputs", "missing key" if "inputs" not in record else "must be an object"))
    else:
        for name, spec in inputs.items():
            problems += _input(f"{where}inputs.{name}", spec, rules)
    return problems


def _input(where: str, spec: Any, rules: Rules) -> Iterator[Problem]:
    kind = spec.get("type") if isinstance(spec, dict) else None
    if not is_one_of(kind, rules.input_kinds):
        yield f"{where}.type", f"must be one of {', '.join(sorted(rules.input_kinds))}, not {kind!r:.80}"
    elif kind == "scalar" and not _is_scalar(spec.get("value")):
        yield f"{where}.value", f"must be a boolean or a number of at most 64 bits, not {spec.get('value')!r:.40}"
    elif kind == "safetensors":
        yield from check_text(spec, "tensor_key", f"{where}.")
        yield from check_text(spec, "path", f"{where}.")
        if isinstance(spec.get("path"), str) and spec["path"]:
            reason = path_problem(spec["path"])
            if reason is not None:
                yield f"{where}.path", reason


def _is_scalar(value: Any) -> bool:
    return -(1 << 63) <= value < 1 << 64 if isinstance(value, int) else isinstance(value, float)


def check_trace(record: Mapping[str, Any], rules: Rules) -> list[Problem]:
    """Return the problems of a trace line. A line without solution and evaluation is a Workload."""
    problems = [*check_name(record, "definition"), *check_workload(record.get("workload"), rules, "workload.")]
    evaluation = record.get("evaluation")
    if record.get("solution") is None and evaluation is None:
        return problems
    problems += check_text(record, "solution")
    if not isinstance(evaluation, dict):
        return [*problems, ("evaluation", "must be an object if a solution is named")]
    return problems + list(_evaluation(evaluation, rules))


def _evaluation(evaluation: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    status = evaluation.get("status")
    if status not in rules.statuses:
        yield "evaluation.status", f"unknown status {status!r:.40}"
        return
    environment = evaluation.get("environment")
    if not isinstance(environment, dict):
        yield "evaluation.environment", "missing key"
    else:
        yield from check_text(environment, "hardware", "evaluation.environment.")
        if not isinstance(environment.get("libs", {}), dict):
            yield "evaluation.environment.libs", "must be an object"
    yield from check_text(evaluation, "timestamp", "evaluation.")
    if not isinstance(evaluation.get("log", ""), str):
        yield "evaluation.log", "must be a text"
    wanted = {"correctness": status in ("PASSED", "INCORRECT_NUMERICAL"), "performance": status == "PASSED"}
    for key, present in wanted.items():
        if present != (evaluation.get(key) is not None):
            yield f"evaluation.{key}", f"must {'' if present else 'not '}be present with status {status}"
    yield from _figures(evaluation, "correctness", ("max_relative_error", "max_absolute_error"), may_be_nan=True)
    yield from _figures(evaluation, "performance", ("latency_ms", "reference_latency_ms", "speedup_factor"))


def _figures(
    evaluation: Mapping[str, Any], group: str, keys: tuple[str, ...], *, may_be_nan: bool = False
) -> Iterator[Problem]:
    values = evaluation.get(group)
    if values is None:
        return
    if not isinstance(values, dict):
        yield f"evaluation.{group}", "must be an object"
        return
    for key in keys:
        figure = _figure(values.get(key, 0.0))
        if figure is None or figure < 0 or (not may_be_nan and not math.isfinite(figure)):
            yield f"evaluation.{group}.{key}", f"must be a number >= 0, not {values[key]!r:.40}"


def _figure(value: Any) -> float | None:
    """Convert a number, or the text of one that JSON cannot express (NaN, Infinity)."""
    return float(value) if is_one_of(value, ("NaN", "Infinity", "-Infinity")) else number(value)
