"""Collects what a Solution launches while its language is intercepted."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilegym_db.backends.compile_jobs import Artifact

__all__ = ["Recorder"]


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
