"""The user's catalog with new operators, and what is published for this user's CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published_tables import write_table

from tilegym_db import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.records import Definition

SOURCE = "# Source: https://github.com/nobody/nothing/blob/0000000000000000000000000000000000000000/model.py#L1-L9\n"
DTYPES = {"T": ["bfloat16", "float16", "float32"]}


@dataclass
class Desk:
    """The user's catalog, and what is published for this user's CPU."""

    home: Path

    @property
    def catalog(self) -> Catalog:
        return Catalog((shipped_root(), self.home / "catalog"))

    def add(self, record: dict[str, Any], body: str, serving: dict[str, Any] | None = None) -> Definition:
        """Write a Definition with a stock solution and a kernel, and publish the kernel as measured."""
        made = {**record, **({"serving": serving} if serving else {}), "reference": self._reference(record, body)}
        return self.put(
            Definition.from_dict(made), f"import torch\n\n\ndef run({', '.join(record['inputs'])}):\n{body}"
        )

    def put(self, definition: Definition, run: str, layouts: Sequence[dict[str, str]] = ()) -> Definition:
        """Write a Definition, with the source of ``run`` as its stock solution and as a kernel that is published.

        It is published for contiguous tensors and for further ``layouts`` of those that the Definition has.
        """
        folder = self.home / "catalog" / "definitions" / definition.op_type
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{definition.name}.json").write_text(definition.to_json())
        names, tensors = ", ".join(definition.inputs), [*definition.tensor_inputs, *definition.outputs]
        spec = {"language": "python", "layouts": dict.fromkeys(tensors, "strided"), "entry_point": "kernel.py::run"}
        self._solution(definition, "stock", run, {**spec, "role": "baseline", "provides": "stock"}, writes=False)
        outputs = ", ".join(definition.outputs)
        made = "made if isinstance(made, tuple) else (made,)"
        copies = f"    for out, value in zip(({outputs},), {made}):\n        out.copy_(value)\n"
        written = f"{run}\n\ndef write({names}, {outputs}):\n    made = run({names})\n{copies}"
        self._solution(definition, "cpu", written, {**spec, "entry_point": "kernel.py::write"}, writes=True)
        self._publish(definition, layouts)
        return definition

    def _reference(self, record: dict[str, Any], body: str) -> str:
        return f"{SOURCE}import torch\n\n\ndef run({', '.join(record['inputs'])}):\n{body}"

    def _solution(self, definition: Definition, name: str, source: str, spec: dict[str, Any], *, writes: bool) -> None:
        name = f"{definition.name}_{name}"
        folder = self.home / "catalog" / "solutions" / definition.op_type / definition.name / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.py").write_text(source)
        record = {
            "name": name,
            "definition": definition.name,
            "author": "tests",
            "spec": {**spec, "destination_passing_style": writes},
            "sources": [{"path": "kernel.py"}],
        }
        (folder / "solution.json").write_text(json.dumps(record))

    def _publish(self, definition: Definition, layouts: Sequence[dict[str, str]]) -> None:
        kernel = self.catalog.solution(f"{definition.name}_cpu")
        measured = {"latency_us": 5.0, "speedup": 2.0, "speedup_ci_low": 1.9, "tier": "promotion", "envelope_cases": 9}
        candidate = {"solution": kernel.name, "solution_digest": kernel.digest, "language": "python", "role": "kernel"}
        point = {
            "definition": definition.name,
            "definition_version": definition.version,
            "definition_digest": definition.digest,
            "op_type": definition.op_type,
            "candidates": [{**candidate, **measured, "sandbox_level": 3, "trace_id": "t"}],
        }
        entries = [
            {
                **point,
                "dtypes": {"T": dtype},
                "axes": dict.fromkeys(definition.var_axes, size),
                "layouts": {name: kind for name, kind in layout.items() if name in definition.inputs},
            }
            for layout in ({}, *layouts)
            for dtype in definition.dtypes["T"]
            for size in (1, 4096)
        ]
        write_table(self.home / "published" / "cpu", entries, self.home, sm="cpu")


def slow_stock(checkout: Path) -> None:
    """Copy the stock RMS norm into a checkout, where it does its work eight times.

    A kernel of the test is then faster by more than what other work on the machine adds to a measurement.
    """
    folder = checkout / "solutions/norm/rms_norm/rms_norm_stock"
    shutil.copytree(Path(__file__).resolve().parents[1] / "solutions/norm/rms_norm/rms_norm_stock", folder)
    source = folder / "kernel.py"
    once = "    normed = wide * torch.rsqrt("
    text = source.read_text()
    assert text.count(once) == 1
    source.write_text(text.replace(once, "    for _ in range(8):\n    " + once))
