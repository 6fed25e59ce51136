"""Earlier versions of a Solution, from the git history of the catalog that holds it. Read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tilegym_db.catalog import SolutionFiles
from tilegym_db.catalog.broken import RECORD_NAME
from tilegym_db.errors import RecordError, UsageError
from tilegym_db.records import Solution

__all__ = ["SourceHistory", "Version"]

TIMEOUT_S = 60


@dataclass(frozen=True)
class Version:
    """A Solution as a commit has it."""

    record: Solution
    sources: Mapping[str, bytes] = field(repr=False)
    commit: str

    @cached_property
    def digest(self) -> str:
        """As :attr:`tilegym_db.catalog.SolutionFiles.digest`."""
        return self.record.digest(self.sources)


class SourceHistory:
    """The git repository around one root of the catalog."""

    def __init__(self, root: Path) -> None:
        """``root`` holds ``solutions/``; it may be any folder of its repository.

        Raises:
            UsageError: git is not installed, or the folder is in no repository.
        """
        self.root = root
        self._git("rev-parse", "--git-dir", why=f"{root} has no history to compare with")

    def commit(self, revision: str) -> str | None:
        """The id of the commit that a revision (a branch, a tag, ``HEAD~3``, ...) names, or None."""
        found = self._try("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        return None if found is None else found.decode().strip()

    def at(self, commit: str, solution: SolutionFiles) -> Version | None:
        """The version that a commit has, or None where it has no Solution of that name and Definition.

        Raises:
            RecordError: it has one that today's package cannot read; says why.
        """
        for place, name in _places(solution):
            text = self._blob(commit, f"{place}/{name}")
            if text is not None:
                return self._read(commit, place, name, text)
        return None

    def _read(self, commit: str, place: str, name: str, text: bytes) -> Version:
        where = f"{place}/{name} at {commit[:10]}"
        record = Solution.from_json(text, where)
        sources = {}
        for source in record.sources:
            content = self._blob(commit, f"{place}/{source.path}")
            if content is None:
                raise RecordError(f"{where}: its source '{source.path}' is not in that commit.", code="source_missing")
            sources[source.path] = content
        return Version(record, sources, commit)

    def with_digest(self, solution: SolutionFiles, digest: str) -> Version | None:
        """The version whose digest it is, newest commit first; None where no commit has it: it was never committed."""
        for commit in self._commits(solution):
            try:
                version = self.at(commit, solution)
            except RecordError:
                continue  # what today's package cannot read has no digest that it could have recorded
            if version is not None and version.digest == digest:
                return version
        return None

    def _commits(self, solution: SolutionFiles) -> Iterator[str]:
        places = (place for place, _ in _places(solution))
        listed = self._try("log", "--all", "--full-history", "--format=%H", "--", *places)
        yield from (listed or b"").decode().split()

    def _blob(self, commit: str, path: str) -> bytes | None:
        return self._try("cat-file", "blob", f"{commit}:./{path}")

    def _try(self, *arguments: str) -> bytes | None:
        answer = self._run(*arguments)
        return answer.stdout if answer.returncode == 0 else None

    def _git(self, *arguments: str, why: str) -> bytes:
        answer = self._run(*arguments)
        if answer.returncode != 0:
            raise UsageError(f"{why}: {answer.stderr.decode(errors='replace').strip()}", code="git_failed")
        return answer.stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        # Inside a git hook, variables name another repository than the one around the folder.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        command = ["git", "-C", str(self.root), *arguments]
        try:
            return subprocess.run(command, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False)
        except FileNotFoundError:
            raise UsageError("old versions are read from git, and git is not installed.", code="git_absent") from None
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"git did not answer within {TIMEOUT_S} s: {' '.join(command)}", code="git_timeout"
            ) from None


def _places(solution: SolutionFiles) -> list[tuple[str, str]]:
    """Folder and file of its record, below the root: where it is, and the folder of its own that it had before its family's."""
    folder = solution.folder.resolve().relative_to(solution.root).as_posix()
    record = solution.record
    own = f"{'/'.join(folder.split('/')[:2])}/{record.definition}/{record.name}"
    return list(dict.fromkeys([(folder, solution.path.name), (own, RECORD_NAME)]))
