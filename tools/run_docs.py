"""Runs the commands and the Python of a page of documentation and compares what they print with what the page shows.

    python tools/run_docs.py README.md docs/python-api.md           # compare
    python tools/run_docs.py --write docs/python-api.md             # put the real output into the page

What is run, in the order of the page, in an empty folder with an empty home, as after an installation from a wheel:

- ``console``: lines that begin with ``$ `` are commands of a shell (``\\`` at the end of a line goes on); what follows is their
  output, standard error included.
- ``python``: one process a page. An ``output`` block right after it is what it prints.
- ``LANGUAGE file=PATH``: the block is written to that file.

``...`` alone on a line stands for any lines. In a block marked ``measured`` (``console measured``) numbers and the widths of
columns may differ. A page that begins with ``<!-- home: NAME -->`` starts with the home folder that
``docs/NAME.md`` left. ``<!-- columns: N -->`` anywhere in a page is the width of the terminal that it shows (100).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME_TEXT = "~/.local/share/tilegym-db"
DATA = ("definitions", "solutions", "workloads", "traces", "schema")
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 240
COLUMNS = 100
"""The width of the terminal that a page shows, unless it says another."""
NOWHERE = (-1, -1)
"""The span of a step whose output the page does not show: it must print nothing."""

SESSION = r"""
import sys, traceback
scope = {"__name__": "__main__"}
for text in sys.stdin.read().split("\0"):
    try:
        exec(compile(text, "page", "exec"), scope)
    except BaseException:
        traceback.print_exc()
        break
    sys.stderr.flush()
    print("\0", end="", flush=True)
"""
"""What follows an exception is not run: it would only fail for want of what the failed text should have made."""


@dataclass
class Step:
    """One command, file or text of Python, with what the page says it prints."""

    kind: str
    text: str
    expected: str
    measured: bool
    span: tuple[int, int]
    """Where the expected text lies in the page."""
    actual: str = ""
    ran: bool = True
    """False where Python before it, in the same process, ended with a traceback."""


@dataclass(frozen=True)
class Installation:
    """A folder laid out as an installed wheel, so that the checkout is not what commands write to."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Installation:
        """Copy the package, link its data, and write the two programs of a virtual environment."""
        site, programs = folder / "site", folder / "bin"
        shutil.copytree(ROOT / "tilegym_db", site / "tilegym_db", ignore=shutil.ignore_patterns("_data"))
        data = site / "tilegym_db" / "_data"
        data.mkdir()
        for name in DATA:
            (data / name).symlink_to(ROOT / name)
        programs.mkdir()
        for name, call in (("tilegym-db", "-m tilegym_db.cli.app"), ("python", "")):
            script = programs / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
            script.chmod(0o755)
        return cls(folder)

    def environment(self, home: Path, columns: int = COLUMNS) -> dict[str, str]:
        """Return what a command sees: this installation first on the path, a separate home folder, a terminal of this width."""
        keep = {
            key: os.environ[key] for key in ("LANG", "LC_ALL", "TMPDIR", "TILEGYM_DB_MAX_WAITING") if key in os.environ
        }
        return {
            **keep,
            "PATH": f"{self.folder / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": str(self.folder / "site"),
            "HOME": str(home),
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
            "COLUMNS": str(columns),
            "HF_HUB_OFFLINE": "1",
        }


def steps_of(page: str) -> list[Step]:
    """Return what a page runs, in order."""
    found: list[Step] = []
    for match in FENCE.finditer(page):
        language, *words = match["info"].split() if match["info"].strip() else [""]
        start, body = match.start("body"), match["body"]
        target = next((word.removeprefix("file=") for word in words if word.startswith("file=")), None)
        measured = "measured" in words
        if target is not None:
            found.append(Step(f"file {target}", body, "", False, NOWHERE))
        elif language == "console":
            found += _console_steps(body, start, measured)
        elif language == "python":
            found.append(Step("python", body, "", measured, NOWHERE))
        elif language == "output" and found and found[-1].kind == "python":
            last = found[-1]
            last.expected, last.span, last.measured = body, (start, start + len(body)), measured
    return found


def _console_steps(body: str, start: int, measured: bool) -> Iterator[Step]:
    position, lines = 0, body.splitlines(keepends=True)
    while lines:
        command = ""
        while lines and (not command or command.endswith("\\\n")):
            line = lines.pop(0)
            command += line
        position += len(command)
        output = ""
        while lines and not lines[0].startswith("$ "):
            output += lines.pop(0)
        text = re.sub(r"\\\n> ?", "\\\n", command.removeprefix("$ "))
        yield Step("console", text, output, measured, (start + position, start + position + len(output)))
        position += len(output)


class Runner:
    """Runs the steps of one page in a separate folder and home."""

    def __init__(
        self, installation: Installation, place: Path, home: Path | None = None, columns: int = COLUMNS
    ) -> None:
        """Make ``place``, and copy ``home`` into it if the page starts with one."""
        self.folder, self.home = place / "work", place / "home"
        self.folder.mkdir(parents=True)
        if home is None:
            self.home.mkdir()
        else:
            shutil.copytree(home, self.home)
        self.environment = installation.environment(self.home, columns)
        self._site = str(installation.folder / "site")

    def run(self, steps: list[Step]) -> None:
        """Fill in what each step printed. Blocks of Python that nothing else interrupts share one process."""
        pending: list[Step] = []
        for step in [*steps, None]:
            if step is not None and step.kind == "python":
                pending.append(step)
                continue
            if pending:
                self._python(pending)
                pending = []
            if step is None:
                break
            if step.kind.startswith("file "):
                path = self.folder / step.kind.removeprefix("file ")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(step.text)
            else:
                step.actual = self._call(["sh", "-c", step.text], "")

    def _python(self, steps: list[Step]) -> None:
        answer = self._call(["python", "-c", SESSION], "\0".join(step.text for step in steps))
        texts = answer.removesuffix("\0").split("\0")
        for step, text in zip_longest(steps, texts[: len(steps)]):
            step.ran = text is not None
            step.actual = text or ""

    def _call(self, command: list[str], given: str) -> str:
        answer = subprocess.run(
            command, cwd=self.folder, env=self.environment, input=given, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
        )  # fmt: skip
        text = answer.stdout.replace(f"{self.home}/.local/share/tilegym-db", HOME_TEXT).replace(str(self.folder), ".")
        return text.replace(self._site, "site-packages")


RUN_ID = re.compile(r"\b\d{8}T\d{6}-[\w-]+")
CPU = re.compile(r"\S[^\n]*?(?= \(cpu\))")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?=x?\b|%)")


def normalised(text: str, *, measured: bool) -> list[str]:
    """Return lines to compare: without what differs from run to run."""
    lines = []
    for line in text.splitlines():
        line = RUN_ID.sub("RUN", line.rstrip())
        line = re.sub(r"on \S.*?(?= \(cpu\))", "on CPU", line) if " (cpu)" in line else line
        line = re.sub(r"^\S.*?(?= \(cpu\), run)", "CPU", line)
        if measured:
            line = re.sub(r"[─━-]{4,}", "----", re.sub(r"\s+", " ", NUMBER.sub("N", line))).strip()
        if line:
            lines.append(line)
    return lines


def differs(step: Step) -> bool:
    """Return whether a step printed something other than the page says."""
    if step.kind.startswith("file "):
        return False
    if not step.ran:
        return True
    return not _matches(
        normalised(step.expected, measured=step.measured), normalised(step.actual, measured=step.measured)
    )


def _matches(expected: list[str], actual: list[str]) -> bool:
    if "..." not in expected:
        return expected == actual
    cut = expected.index("...")
    if expected[:cut] != actual[:cut]:
        return False
    rest = expected[cut + 1 :]
    return any(_matches(rest, actual[start:]) for start in range(cut, len(actual) + 1))


def rewritten(page: str, steps: list[Step]) -> str:
    """Return the page with the real output in place of what differs; a block with ``...`` is left to a person."""
    for step in sorted(steps, key=lambda step: -step.span[0]):
        start, end = step.span
        if step.ran and differs(step) and "\n...\n" not in f"\n{step.expected}" and step.span != NOWHERE:
            text = step.actual if step.actual.endswith("\n") or not step.actual else f"{step.actual}\n"
            page = (
                page[:start]
                + "\n".join(line.rstrip() for line in text.splitlines())
                + ("\n" if text else "")
                + page[end:]
            )
    return page


class Pages:
    """Pages that are run at most once each, in separate folders."""

    def __init__(self, folder: Path) -> None:
        """Make ``folder`` with an installation in it."""
        self.installation = Installation.make(folder / "installed")
        self._place = folder / "pages"
        self._done: dict[Path, list[Step]] = {}

    def run(self, path: Path) -> list[Step]:
        """Return the steps of a page with what they printed, after those of the page whose home it begins with."""
        path = path.resolve()
        if path not in self._done:
            page = path.read_text()
            wanted = re.match(r"<!-- home: (\S+) -->", page)
            home = None
            if wanted:
                before = ROOT / "docs" / f"{wanted[1]}.md"
                self.run(before)
                home = self._place / before.stem / "home"
            width = re.search(r"<!-- columns: (\d+) -->", page)
            steps = steps_of(page)
            columns = int(width[1]) if width else COLUMNS
            Runner(self.installation, self._place / path.stem, home, columns).run(steps)
            self._done[path] = steps
        return self._done[path]


def main() -> int:
    """Run pages; exit with 1 where one shows something else than what is printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="put the real output into the pages")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        pages = Pages(Path(folder))
        for path in options.pages:
            steps = pages.run(path)
            for step in steps:
                if differs(step):
                    failed += 1
                    printed = step.actual if step.ran else "(not run: what came before it ended with a traceback)"
                    print(f"{path}: {step.text.strip()}\n-- printed:\n{printed}\n-- the page says:\n{step.expected}")
            if options.write:
                path.write_text(rewritten(path.read_text(), steps))
            print(f"{path}: {len(steps)} steps", file=sys.stderr)
    return 1 if failed and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
