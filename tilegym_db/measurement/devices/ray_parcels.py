"""Orders between hosts: records and sources are sent by digest, and stored in a checked catalog on the node.

A pickled order has a name in place of each record. It is a Definition's digest, a Workload's uuid, or the digest of a
Solution's record and sources. The records are sent separately, as text, once to each device that lacks them. Paths of the
driver's host have no meaning elsewhere, so each becomes the folder of the node.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tilegym_db.catalog import SolutionFiles
from tilegym_db.catalog.reader import find_blob
from tilegym_db.errors import RecordError
from tilegym_db.files import write_atomically
from tilegym_db.measurement.devices.messages import Order
from tilegym_db.records import Definition, Workload

Kind = Literal["definition", "workload", "solution", "blob"]


@dataclass(frozen=True)
class Parcel:
    """The content behind a name in an order. ``files`` are those of a Solution, or the input file of a Workload."""

    kind: Kind
    digest: str
    text: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Digest of its kind and content."""
        content = hashlib.sha256(f"{self.kind}\0{self.text}\0".encode())
        for path, data in sorted(self.files.items()):
            content.update(f"{path}\0".encode() + hashlib.sha256(data).digest())
        return content.hexdigest()


def pack(order: Order) -> tuple[bytes, dict[str, Parcel]]:
    """Return an order with names in place of records, and the parcel of each name."""
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    packer.dump(order)
    for plan in order.item.plans:
        for workload in plan.workloads:
            for name, spec in workload.files().items():
                _, content = find_blob(plan.roots, name, spec)
                packer.add(Parcel("blob", hashlib.sha256(content).hexdigest(), files={spec.path: content}))
    return buffer.getvalue(), packer.parcels


class _Packer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.parcels: dict[str, Parcel] = {}
        self._keys: dict[int, str] = {}
        self._packed: list[Any] = []  # keep packed objects alive, so that their ids stay unique

    def persistent_id(self, item: Any) -> tuple[str, str] | None:
        if isinstance(item, Path):
            return "folder", ""
        if not isinstance(item, (SolutionFiles, Definition, Workload)):
            return None
        if id(item) not in self._keys:
            self._packed.append(item)
            self._keys[id(item)] = self.add(_parcel(item))
        return "parcel", self._keys[id(item)]

    def add(self, parcel: Parcel) -> str:
        key = parcel.key
        self.parcels[key] = parcel
        return key


def _parcel(item: SolutionFiles | Definition | Workload) -> Parcel:
    if isinstance(item, SolutionFiles):
        return Parcel("solution", item.digest, item.record.to_json(), item.sources)
    if isinstance(item, Definition):
        return Parcel("definition", item.digest, item.to_json())
    return Parcel("workload", item.uuid, item.to_json())


class ParcelStore:
    """The catalog of one device of a node, in its own folder. All records in it were checked on arrival."""

    def __init__(self, folder: Path) -> None:
        """Create an empty store."""
        self.folder = folder
        self._records: dict[str, Any] = {}

    def lacks(self, keys: Mapping[str, Any]) -> list[str]:
        """Return the keys that the store does not have."""
        return [key for key in keys if key not in self._records]

    def add(self, key: str, parcel: Parcel) -> None:
        """Add a parcel whose content matches its key, and whose record has the stated digest; refuse another."""
        if parcel.key != key:
            raise RecordError(
                f"a {parcel.kind} was changed on its way: it has the key {parcel.key[:12]}..., not {key[:12]}...",
                code="parcel_key_differs",
            )
        record, digest = self._checked(key, parcel)
        if digest != parcel.digest:
            raise RecordError(
                f"a {parcel.kind} has the digest {digest[:12]}... here, and was sent as {parcel.digest[:12]}....",
                code="parcel_digest_differs",
            )
        self._records[key] = record

    def _checked(self, key: str, parcel: Parcel) -> tuple[Any, str]:
        """Return the record, and its digest as computed here."""
        match parcel.kind:
            case "definition":
                definition = Definition.from_json(parcel.text, "a definition of the order")
                return definition, definition.digest
            case "workload":
                workload = Workload.from_json(parcel.text, "a workload of the order")
                return workload, workload.uuid
            case "blob":
                ((path, content),) = parcel.files.items()
                self._write(self.folder, path, content)
                return None, hashlib.sha256(content).hexdigest()
            case "solution":
                solution = SolutionFiles.read(self._write_solution(key, parcel))
                return solution, solution.digest

    def _write_solution(self, key: str, parcel: Parcel) -> Path:
        name = json.loads(parcel.text)["name"]
        folder = self.folder / "solutions" / key[:16] / str(name)  # keeps two versions of one name apart
        for path, content in parcel.files.items():
            self._write(folder, path, content)
        self._write(folder, "solution.json", parcel.text.encode())
        return folder

    @staticmethod
    def _write(folder: Path, path: str, content: bytes) -> None:
        target = folder / path
        if not target.resolve().is_relative_to(folder.resolve()):
            raise RecordError(f"a file of the order leads out of its folder: {path}.", code="path_outside")
        write_atomically(target, content)

    def unpack(self, body: bytes) -> Order:
        """Return the order with its records."""
        order = _Unpacker(body, self._records, self.folder).load()
        assert isinstance(order, Order)
        return order


class _Unpacker(pickle.Unpickler):
    def __init__(self, body: bytes, records: Mapping[str, Any], folder: Path) -> None:
        super().__init__(io.BytesIO(body))
        self._records, self._folder = records, folder

    def persistent_load(self, name: tuple[str, str]) -> Any:
        kind, key = name
        return self._folder if kind == "folder" else self._records[key]
