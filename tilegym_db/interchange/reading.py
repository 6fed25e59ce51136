"""Read untrusted files of a foreign data set: JSON without repeated keys, and paths that stay inside the root."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tilegym_db.store.imported import Refusal

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
    """Return True if a file is a link to a target outside a folder or inside a ``.git``. Broken and cyclic links are not."""
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
