"""The demo's own kernel for a CPU, and the table of what was verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tilegym_db.cli.demo_output import say

if TYPE_CHECKING:
    from tilegym_db.bench.machine import Machine

__all__ = ["HIDDEN", "KERNEL", "KERNEL_RECORD", "add_demo_kernel", "publish_here"]

KERNEL = '''"""RMSNorm in float32 without temporaries: the norm of each row at once, and two products in place."""

import torch


def run(x, weight, eps, out):
    """x, out [M, N], weight [N]."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    torch.mul(x, scale, out=out)
    out.mul_(weight)
'''

KERNEL_RECORD = {
    "schema_version": 1,
    "name": "rms_norm_demo",
    "definition": "rms_norm",
    "author": "tilegym-db demo",
    "description": "PyTorch on a CPU, in place.",
    "spec": {
        "language": "python",
        "entry_point": "kernel.py::run",
        "destination_passing_style": True,
        "dependencies": ["torch>=2.8"],
        "dtypes": {"T": ["float32"]},
        "layouts": {"x": "row_contiguous", "out": "row_contiguous"},
    },
    "sources": [{"path": "kernel.py"}],
}

HIDDEN = 2048


def add_demo_kernel(catalog: Path, tokens: int) -> None:
    """The kernel for a CPU and the sizes of the model below, into the demo's own catalog."""
    from tilegym_db.catalog import Catalog
    from tilegym_db.files import write_atomically
    from tilegym_db.records import Workload

    folder = catalog / "solutions" / "norm" / "rms_norm" / "rms_norm_demo"
    write_atomically(folder / "kernel.py", KERNEL.encode())
    write_atomically(folder / "solution.json", (json.dumps(KERNEL_RECORD, indent=2) + "\n").encode())
    sizes = [
        Workload.from_dict(
            {
                "definition": "rms_norm",
                "axes": {"M": tokens, "N": HIDDEN},
                "dtypes": {"T": "float32"},
                "inputs": {"eps": {"type": "scalar", "value": 1e-6}},
                "tags": ["stage:demo"],
            }
        )
    ]
    Catalog.default().add_workloads(sizes, root=catalog)


def publish_here(machine: Machine, folder: Path) -> None:
    """Let the resolver of this demo use what was verified."""
    from tilegym_db.errors import NotFoundError
    from tilegym_db.store.connection import open_store
    from tilegym_db.store.publish import publish

    published = folder / "published"
    if not published.exists():
        (folder / "traces").mkdir(exist_ok=True)
        published.symlink_to("traces", target_is_directory=True)
    try:
        with open_store(folder, read_only=True) as store:
            report = publish(store, machine.gpu, root=folder)
    except NotFoundError as error:
        say(f"Nothing was published: {error}")
        return
    say(f"Published {report.entries} shapes for {machine.gpu}: from now on the resolver of this demo may use them.")
