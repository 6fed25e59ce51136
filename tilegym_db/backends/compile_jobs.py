"""The job and the result of an ahead-of-time compilation, which cross process boundaries as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import SolutionError
from tilegym_db.records import Definition, Workload
from tilegym_db.records.solution import Tunable
from tilegym_db.records.trace import clip_log

CompileStatus = Literal["compiled", "refused", "failed", "unsupported", "toolchain-missing"]
"""``refused``: the toolchain cannot compile for this target at all (not even a one-line copy), so nothing is said about
the Solution. ``failed``: the Solution does not compile, or its compiler hung or crashed. ``unsupported``: the Solution
does not declare this target, shape, dtype or layout, or there is nothing to compile."""

DEFAULT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Artifact:
    """The machine code of one kernel specialisation.

    ``key`` tells specialisations apart: two calls that share it run the same code without compiling again.
    """

    kernel: str
    key: str
    bytes: int
    """Size of the device code."""
    shared_bytes: int | None = None
    """Shared memory a block asks for at launch, where the compiler says."""


"""Shared memory that a block requests at launch, if the compiler reports it."""


@dataclass(frozen=True)
class CompileResult:
    """The outcome of one job. ``log`` says why it is not ``compiled``; it is clipped."""

    status: CompileStatus
    seconds: float = 0.0
    artifacts: tuple[Artifact, ...] = ()
    log: str = ""

    def to_json(self) -> str:
        """Return the result as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> CompileResult:
        """Parse the output of :meth:`to_json`."""
        value: dict[str, Any] = json.loads(text)
        artifacts = tuple(Artifact(**item) for item in value.pop("artifacts"))
        return cls(**{**value, "artifacts": artifacts, "log": clip_log(value["log"])})


@dataclass(frozen=True)
class CompileJob:
    """Compile what one Solution launches for one Workload, under one config, for one target."""

    definition: Definition
    solution: SolutionFiles
    workload: Workload
    target: str
    """A name of ``records.hardware.TARGETS``, such as ``sm_90``."""
    config: Mapping[str, Tunable] = field(default_factory=dict)
    """Keyword arguments of ``run``; empty means the source's own defaults."""
    timeout_s: float = DEFAULT_TIMEOUT_S

    def to_json(self) -> str:
        """Return the job as one line of JSON; it holds the Solution's file and digest."""
        return json.dumps(
            {
                "definition": self.definition.model_dump(mode="json"),
                "record": str(self.solution.path),
                "digest": self.solution.digest,
                "workload": self.workload.model_dump(mode="json"),
                "target": self.target,
                "config": dict(self.config),
                "timeout_s": self.timeout_s,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> CompileJob:
        """Parse the output of :meth:`to_json` and read the Solution again.

        Raises:
            SolutionError: its file no longer names the source that the job was made for.
        """
        value: dict[str, Any] = json.loads(text)
        solution = SolutionFiles.read(Path(value["record"]))
        if solution.digest != value["digest"]:
            raise SolutionError(
                f"{solution.path}: the source changed while it was queued to compile. Run it again.",
                code="source_changed",
            )
        return cls(
            definition=Definition.model_validate(value["definition"]),
            solution=solution,
            workload=Workload.model_validate(value["workload"]),
            target=value["target"],
            config=value["config"],
            timeout_s=value["timeout_s"],
        )


# ---- recorder -------------------------------------------------------------------------------------
# Collects what a Solution launches while its language is intercepted.


@dataclass
class Recorder:
    """The launches of one call of ``run`` for one target. Equal specialisations are kept once."""

    target: str
    identity: str = ""
    """Digest of the source, for keys of languages that do not hash a kernel's source themselves."""
    launches: int = 0
    _artifacts: dict[str, Artifact] = field(default_factory=dict)

    def add(self, artifact: Artifact) -> None:
        """Count a launch and keep its machine code's description."""
        self.launches += 1
        self._artifacts.setdefault(artifact.key, artifact)

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """Distinct specialisations in the order of their first launch."""
        return tuple(self._artifacts.values())
