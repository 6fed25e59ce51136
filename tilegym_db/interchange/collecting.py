"""Collect one data set while a dialect reads it: files with digests, accepted records, and refusals with reasons."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilegym_db.errors import RecordError
from tilegym_db.files import reason_of
from tilegym_db.interchange.checks import (
    LINK_OUT,
    Problem,
    Rules,
    axis_kind,
    file_digest,
    leads_out,
    lfs_pointer,
    parse,
    path_problem,
    spelled_otherwise,
    tensor_header,
)
from tilegym_db.store.imported import DataSet, Kind, Refusal, StoredFile, StoredRecord

# Dtype names of safetensors.
_TENSOR_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "uint32": "U32", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass
class Collection:
    """The parts of a data set read so far. ``sources`` maps paths in the data set to local files."""

    dialect: str
    rules: Rules
    root: Path
    sources: dict[str, Path] = field(default_factory=dict)
    records: list[StoredRecord] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    _roles: dict[str, str] = field(default_factory=dict)
    _names: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    _headers: dict[str, dict[str, tuple[str, tuple[int, ...]]] | str] = field(default_factory=dict)
    declared: Mapping[str, DeclaredBlob] = field(default_factory=dict)
    """Content of each exported blob by path, if the data set declares it."""
    undeclared: str = ""
    """The reason that the declaration of blobs cannot be read; empty if it can or does not exist."""
    _digests: dict[str, tuple[str, int]] = field(default_factory=dict)

    def carry(self, path: str, file: Path, role: str = "other") -> None:
        """Keep a file with the data set."""
        self.sources[path] = file
        self._roles.setdefault(path, role)
        if role == "records":
            self._roles[path] = role

    def refuse(self, path: str, problems: Iterable[Problem], line: int | None = None) -> None:
        """Record that something is refused, with every reason."""
        where = path if line is None else f"{path}:{line}"
        self.refused += [Refusal(where, key, reason) for key, reason in problems]

    def refuse_spelling(self, path: str, file: Path, suffix: str) -> bool:
        """Refuse a file whose suffix differs from the expected one only in case; return True if it does."""
        reason = spelled_otherwise(file, suffix)
        if reason is not None:
            self.refuse(path, [("", reason)])
        return reason is not None

    def parse(self, path: str, content: bytes, line: int | None = None) -> tuple[dict[str, Any], str] | None:
        """Return a JSON object and its digest; None if it is refused."""
        parsed = parse(content)
        if isinstance(parsed, str):
            self.refuse(path, [("", parsed)], line)
            return None
        return parsed

    def read_valid(
        self, path: str, file: Path, check: Callable[[Mapping[str, Any], Rules], list[Problem]]
    ) -> tuple[dict[str, Any], str, tuple[int, int]] | None:
        """Keep a file of one record and return the record, its digest and its span; None if it is refused."""
        content = file.read_bytes()
        parsed = self.parse(path, content)
        problems = [] if parsed is None else check(parsed[0], self.rules)
        if parsed is None or problems:
            self.refuse(path, problems)
            return None
        self.carry(path, file, "records")
        return *parsed, (0, len(content))

    def add(
        self,
        kind: Kind,
        record: Mapping[str, Any],
        digest: str,
        path: str,
        span: tuple[int, int],
        line: int | None = None,
        unset: Iterable[str] = (),
        findings: Iterable[str] = (),
    ) -> None:
        """Add a record that passed its checks; refuse a second Definition or Solution of its name."""
        name = str(record["workload"]["uuid"] if kind == "trace" else record["uuid" if kind == "workload" else "name"])
        if kind in ("definition", "solution"):
            first = self.first_of(kind, name, digest, path)
            if first is not None:
                raise RecordError(
                    f"{self.root / path}: the {kind} '{name}' is also in {first[0]}. Rename or remove one of them; "
                    "nothing was imported.",
                    code="record_repeated",
                )
        definition = name if kind == "definition" else str(record["definition"])
        self.records.append(
            StoredRecord(kind, name, definition, path, line, *span, digest, record, tuple(unset), tuple(findings))
        )

    def first_of(self, kind: Kind, name: str, digest: str, path: str) -> tuple[str, str] | None:
        """Return (path, digest) of another file that already has this name; None if there is no such file."""
        first = self._names.setdefault((kind, name), (path, digest))
        return first if first[0] != path else None

    def tensor_problems(self, record: Mapping[str, Any], base: str = "") -> tuple[list[Problem], list[str]]:
        """Return the problems and findings of the safetensors inputs of a Workload, and keep their files.

        A missing file is a finding, because it may still be added. A file with the wrong content is a problem. ``base`` is
        the folder that paths are relative to.
        """
        problems: list[Problem] = []
        findings: list[str] = []
        for name, spec in record["inputs"].items():
            if spec.get("type") != "safetensors":
                continue
            path = (Path(base) / spec["path"]).as_posix()
            file = self.root / path
            reason = path_problem(path)
            if reason is not None or leads_out(file, self.root):
                problems.append((f"workload.inputs.{name}.path", reason or f"'{spec['path']}' is {LINK_OUT}"))
            elif not os.path.isfile(file):  # Path.is_file raises if the name is too long
                findings.append(f"inputs.{name}: {spec['path']} is not in the data set")
            elif (pointer := lfs_pointer(file)) is not None:
                self.carry(path, file)
                self._roles[path] = "pointer"
                findings.append(
                    f"inputs.{name}: {spec['path']} is a Git LFS pointer without its content "
                    f"(sha256 {pointer[0] or 'unknown'}, {pointer[1]} bytes)"
                )
            else:
                self.carry(path, file)
                self._roles[path] = "blob"
                problems += self._content_problems(path, file, name, spec["tensor_key"])
        return problems, findings

    def _content_problems(self, path: str, file: Path, name: str, key: str) -> list[Problem]:
        where = f"workload.inputs.{name}"
        changed = self._changed(os.path.normpath(path), file)
        if changed is not None:
            return [(f"{where}.path", changed)]
        header = self.header(path, file)
        if isinstance(header, str):
            return [(f"{where}.path", f"{path} {header}")]
        if key not in header:
            known = ", ".join(sorted(header)) or "none"
            return [(f"{where}.tensor_key", f"{path} has no tensor '{key}' (it has {known})")]
        return []

    def _may_be_blob(self, path: str) -> bool:
        role = self._roles[path]
        return role == "blob" or (role == "other" and (path in self.declared or path.endswith(".safetensors")))

    def _digest(self, path: str, file: Path) -> tuple[str, int]:
        if path not in self._digests:
            self._digests[path] = file_digest(file)
        return self._digests[path]

    def _changed(self, path: str, file: Path) -> str | None:
        """Return how a blob differs, or may differ, from its exported content; None if it does not."""
        if self.undeclared:
            return (
                f"{path} may have changed after the export, and this cannot be checked: {SIDE_FILE} {self.undeclared}"
            )
        declared = self.declared.get(path)
        if declared is None:
            return None
        sha256, nbytes = self._digest(path, file)
        if sha256 == declared.sha256:
            return None
        return (
            f"{path} was changed after the export: its sha256 is {sha256[:12]}... with {nbytes} bytes, and {SIDE_FILE} "
            f"states {declared.sha256[:12]}... with {declared.nbytes}"
        )

    def read_declared(self) -> None:
        """Read the declaration of blobs in an export of ours, if there is one."""
        found = declared_blobs(self.root)
        if isinstance(found, str):
            self.refuse(SIDE_FILE, [("", found)])
            self.undeclared = found
        elif found is not None:
            self.declared = found

    def header(self, path: str, file: Path) -> dict[str, tuple[str, tuple[int, ...]]] | str:
        """Return the header of a safetensors file, read once."""
        if path not in self._headers:
            self._headers[path] = tensor_header(file)
        return self._headers[path]

    def fit_findings(self, definition: Mapping[str, Any], workload: Mapping[str, Any]) -> list[str]:
        """Return the mismatches of a Workload with its Definition, by the rules of FlashInfer-Bench's ``validate``."""
        var = {name for name, axis in definition["axes"].items() if axis_kind(axis) == "var"}
        findings = [f"axes.{name}: missing" for name in sorted(var - set(workload["axes"]))]
        findings += [
            f"axes.{name}: {definition['name']} has no such var axis" for name in workload["axes"] if name not in var
        ]
        findings += [f"axes.{name}: is 0" for name, size in workload["axes"].items() if size == 0]
        inputs = definition["inputs"]
        findings += [
            f"inputs.{name}: {definition['name']} has no such input"
            for name in workload["inputs"]
            if name not in inputs
        ]
        for name, spec in inputs.items():
            given = workload["inputs"].get(name)
            if given is None:
                findings.append(f"inputs.{name}: missing; it would be drawn at random")
            elif (given["type"] == "scalar") != (spec.get("shape") is None):
                what = "a Python scalar" if spec.get("shape") is None else "a tensor"
                findings.append(f"inputs.{name}: is {what}, and the workload gives it as {given['type']}")
        return findings

    def misfits(self, definition: Mapping[str, Any], workload: Mapping[str, Any], base: str = "") -> list[Problem]:
        """Return the tensors of a Workload whose shape or dtype differs from the Definition.

        Call :meth:`tensor_problems` first.
        """
        problems: list[Problem] = []
        for name, given in workload["inputs"].items():
            spec = definition["inputs"].get(name)
            if given["type"] == "safetensors" and spec is not None and spec.get("shape") is not None:
                path = (Path(base) / given["path"]).as_posix()
                reasons = self._misfit(definition, workload, spec, path, given["tensor_key"])
                problems += [(f"workload.inputs.{name}", reason) for reason in reasons]
        return problems

    def _misfit(
        self,
        definition: Mapping[str, Any],
        workload: Mapping[str, Any],
        spec: Mapping[str, Any],
        path: str,
        key: str,
    ) -> list[str]:
        header = self._headers.get(path, "")
        if isinstance(header, str) or key not in header:
            return []
        dtype, shape = header[key]
        sizes = {axis: item.get("value") for axis, item in definition["axes"].items()} | workload["axes"]
        wanted = tuple(sizes.get(axis) for axis in spec["shape"])
        found = []
        if None not in wanted and shape != wanted:
            found.append(f"{path} holds shape {list(shape)}, but the definition says {list(wanted)}")
        spelled = _TENSOR_DTYPES.get(spec["dtype"])
        if spelled is not None and dtype != spelled:
            found.append(f"{path} holds dtype {dtype}, but the definition says {spec['dtype']}")
        return found

    def _note_repeated_workloads(self) -> None:
        first: dict[tuple[str, str], StoredRecord] = {}
        for at, item in enumerate(self.records):
            if item.kind != "workload":
                continue
            known = first.setdefault((item.definition, item.name), item)
            if any(item.record[key] != known.record[key] for key in ("axes", "inputs")):
                text = f"uuid '{item.name}' is also in {known.path}:{known.line} with other axes or inputs; that one is used"
                self.records[at] = dataclasses.replace(item, findings=(*item.findings, text))

    def finish(self, name: str, home: Path) -> DataSet:
        """Return the data set, with the digest of every file."""
        self._note_repeated_workloads()
        files = []
        for path, file in sorted(self.sources.items()):
            sha256, size = self._digest(path, file)
            # Workloads that name a changed blob were refused. A trace embeds its Workload, so the blob itself is marked too.
            changed = self._may_be_blob(path) and self._changed(path, file) is not None
            files.append(StoredFile(path, sha256, size, "changed" if changed else self._roles[path]))
        return DataSet(self.dialect, name, tuple(files), tuple(self.records), tuple(self.refused), home)


# ---- Declared blobs -----------------------------------------------------------------------------------
# Our exports declare the content of their blobs, so that an import detects later changes.

SIDE_FILE = "tilegym_db/blobs.json"
"""File with the sha256, bytes, seed and inputs of each drawn blob, by path."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class DeclaredBlob:
    """The content of a file at the time of the export."""

    sha256: str
    nbytes: int


def declared_blobs(root: Path) -> dict[str, DeclaredBlob] | str | None:
    """Return the declared blobs by path, None without a declaration, or why it cannot be read."""
    file = root / SIDE_FILE
    try:
        if not os.path.lexists(file):
            return None
        if leads_out(file, root):
            return f"is {LINK_OUT}"
        if not file.is_file():
            return "is not a regular file"
        if file.stat().st_size > _MAX_BYTES:
            return f"has more than {_MAX_BYTES} bytes"
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"is not valid JSON: {error}"
    except OSError as error:
        return f"cannot be read: {reason_of(error)}"
    blobs = value.get("blobs") if isinstance(value, dict) else None
    if not isinstance(blobs, dict):
        return "has no object 'blobs'"
    found = {}
    for path, item in blobs.items():
        sha256, nbytes = (item.get(key) for key in ("sha256", "bytes")) if isinstance(item, Mapping) else (None, None)
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256) or not isinstance(nbytes, int):
            return f"blobs.{path:.200}: needs 'sha256' and 'bytes'"
        found[path] = DeclaredBlob(sha256, nbytes)
    return found
