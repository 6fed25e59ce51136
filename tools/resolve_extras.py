"""Resolve every extra of tilegym-db, alone and all together, against PyPI with an empty configuration.

For each supported Python, the newest versions that the metadata allows, the oldest ones, and those of constraints.txt must
each be a set that fits together. Nothing is installed. Exits with 1 and the resolver's own explanation where one is not.

    python tools/resolve_extras.py [--python 3.12]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "x86_64-manylinux_2_28"
# Where a package server, a cache or a proxy of this machine is named: nothing of it may decide what resolves.
CONFIGURATION = ("PIP_", "UV_", "VIRTUAL_ENV", "CONDA_", "XDG_", "PYTHON")


@dataclass(frozen=True)
class Question:
    """One set of extras on one Python, with the versions to prefer: newest, oldest or pinned."""

    python: str
    extras: tuple[str, ...]
    versions: str

    def __str__(self) -> str:
        """Return the question as a line of the table names it."""
        return f"Python {self.python:5} {self.versions:7} tilegym-db[{','.join(self.extras)}]"


def supported_pythons(metadata: dict[str, object]) -> list[str]:
    """Return the Pythons that the classifiers name, as '3.11'."""
    prefix = "Programming Language :: Python :: "
    return [line.removeprefix(prefix) for line in metadata["classifiers"] if line.startswith(prefix)]  # type: ignore[attr-defined]


def questions(metadata: dict[str, object], pythons: list[str]) -> Iterator[Question]:
    """Yield what must resolve: the core alone, each extra alone, and all of them together."""
    extras = list(metadata["optional-dependencies"])  # type: ignore[call-overload]
    sets = [(), *((extra,) for extra in extras), tuple(extras)]
    for python in pythons:
        for chosen in sets:
            for versions in ("newest", "oldest", "pinned"):
                yield Question(python, chosen, versions)


def ask(question: Question, environment: dict[str, str]) -> tuple[Question, float, str]:
    """Resolve one question; return it with the seconds taken and the resolver's complaint, '' where it resolves."""
    command = ["uv", "pip", "compile", "--no-config", "--quiet", "--python-version", question.python]
    command += ["--python-platform", PLATFORM, "--only-binary", ":all:", "pyproject.toml"]
    command += [part for extra in question.extras for part in ("--extra", extra)]
    command += {"newest": [], "oldest": ["--resolution", "lowest-direct"], "pinned": ["-c", "constraints.txt"]}[
        question.versions
    ]
    start = time.monotonic()
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    return question, time.monotonic() - start, result.stderr.strip() if result.returncode else ""


def main() -> int:
    """Ask every question, print a line for each that fails and a summary; return the exit code."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = supported_pythons(metadata)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--python", choices=supported, action="append", help="only this Python (may be repeated)")
    pythons = parser.parse_args().python or supported
    asked = list(questions(metadata, pythons))
    start = time.monotonic()
    failures = 0
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(4) as threads:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(CONFIGURATION)}
        environment = kept | {"HOME": home, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        for question, seconds, complaint in threads.map(lambda question: ask(question, environment), asked):
            if complaint:
                failures += 1
                print(f"{question}: does not resolve ({seconds:.1f} s)\n{complaint}\n")
    print(
        f"{len(asked) - failures} of {len(asked)} sets resolve on PyPI alone "
        f"(Python {', '.join(pythons)}; {time.monotonic() - start:.0f} s)"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
