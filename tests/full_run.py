"""Which shipped records ``make test`` tries: what differs from the last run of everything, and a sample of the rest.

``make test-all`` tries every record, and where all of it passes it writes what it tried into ``tests/full_run.json``: the
digest of what judges (records, backends, verification, harness, pinned compilers) and that of each record. If what judges has
changed since, every record is tried again, without anybody having to remember it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tilegym_db.catalog import Catalog

ROOT = Path(__file__).resolve().parents[1]
STATE = Path(__file__).with_suffix(".json")
JUDGES = ("backends", "bench", "confinement", "records", "verify")
COMPILERS = ("torch", "triton", "tilelang", "cuda-tile", "nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
CHOSEN = pytest.StashKey[frozenset[str]]()
"""The shipped records that a run tries, as :func:`choose` returns them."""
SAMPLE = 8
"""One of so many records that have not changed is tried all the same; which ones changes with the commit."""


@dataclass(frozen=True)
class FullRun:
    """What the last run of everything was: the digest of what judged, and of every record that passed."""

    judge: str = ""
    records: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = STATE) -> FullRun:
        """Read the committed state; one that knows nothing where there is none."""
        if not path.is_file():
            return cls()
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path = STATE) -> None:
        """Write the state for a commit."""
        path.write_text(
            json.dumps({"judge": self.judge, "records": dict(sorted(self.records.items()))}, indent=1) + "\n"
        )


def choose(digests: Mapping[str, str], last: FullRun, judge: str, salt: str) -> frozenset[str]:
    """The records to try.

    Args:
        digests: digest by record name, as they are now.
        last: the last run of everything.
        judge: digest of what judges now.
        salt: what the sample changes with.
    """
    if judge != last.judge:
        return frozenset(digests)
    return frozenset(
        name
        for name, digest in digests.items()
        if last.records.get(name) != digest or _number(f"{salt}:{name}") % SAMPLE == 0
    )


def record_digests(catalog: Catalog) -> dict[str, str]:
    """Digest of every Definition with its Workloads, and of every Solution, by name."""
    found = {f"solution:{name}": files.digest for name, files in catalog.solutions.items()}
    for name, record in catalog.definitions.items():
        workloads = "".join(sorted(workload.uuid for workload in catalog.workloads_for(name)))
        found[f"definition:{name}"] = hashlib.sha256(f"{record.digest}{workloads}".encode()).hexdigest()
    return found


def judge_digest(root: Path = ROOT) -> str:
    """Digest of everything whose change can change a verdict."""
    digest = hashlib.sha256()
    for path in sorted(file for folder in JUDGES for file in (root / "tilegym_db" / folder).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)}:{len(content)}:".encode() + content)
    pins = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    digest.update("\n".join(line for line in pins if line.partition("==")[0] in COMPILERS).encode())
    return digest.hexdigest()


def commit(root: Path = ROOT) -> str:
    """The commit that is checked out; '' outside of a repository."""
    answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def select(names: Iterable[str], kind: str, chosen: frozenset[str]) -> list[str]:
    """Those of ``names`` that are chosen, in order; ``kind`` is ``solution`` or ``definition``."""
    return [name for name in names if f"{kind}:{name}" in chosen]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
