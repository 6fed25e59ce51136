"""Run the first commands of a stranger in odd surroundings, and print a table of exit statuses.

    python tools/environments.py [PYTHON ...]

Each PYTHON has tilegym-db installed, with the extras that are to be tried; by default it is the one that runs this. A cell is the
exit status and the seconds. The script exits with 1 where a status is none that is documented, or where a traceback was printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUSES = (0, 1, 2, 3)
LIMIT_S = 300
KERNEL = "def run(x, weight, eps, out):\n    out.copy_(x)\n"
COMMANDS: dict[str, list[str]] = {
    "--help": ["--help"],
    "list": ["list"],
    "sql": ["sql", "SELECT count(*) FROM traces"],
    "best": ["best", "rms_norm"],
    "doctor": ["doctor"],
    "check": ["check", "swiglu"],
    "bench": ["bench", "rms_norm", "--gpu", "h100"],
    "add": ["add-solution", "kernel.py", "-d", "rms_norm", "-l", "python", "--name", "a_draft_of_mine"],
}
MEGABYTE = 1 << 20


@contextmanager
def surroundings(kind: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the environment of one row, and what starts its commands; the working folder of the row is its ``PWD``."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.mkdir()
        (Path(folder) / "kernel.py").write_text(KERNEL)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PWD": folder, "LANG": "C.UTF-8"}
        prefix: list[str] = []
        if kind == "locale C":
            environment |= {"LANG": "C", "LC_ALL": "C"}
        elif kind == "no HOME":
            del environment["HOME"]
            environment["XDG_DATA_HOME"] = folder  # else the account's own data would be used
        elif kind == "home is read-only":
            prefix = ["unshare", "--mount", "--map-root-user", "sh", "-c", READ_ONLY, str(home)]
        elif kind == "disk of 1 MB":
            prefix = ["unshare", "--mount", "--map-root-user", "sh", "-c", SMALL, str(home)]
        elif kind == "files of 1 MB":
            prefix = ["prlimit", f"--fsize={MEGABYTE}"]
        yield environment, prefix


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
SMALL = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
KINDS = ("plain", "locale C", "no HOME", "home is read-only", "disk of 1 MB", "files of 1 MB")


def outcome(python: str, arguments: list[str], environment: dict[str, str], prefix: list[str]) -> tuple[str, bool]:
    """Return a cell of the table, and whether it is as documented."""
    begun = time.monotonic()
    command = [*prefix, python, "-m", "tilegym_db", *arguments]
    try:
        result = subprocess.run(
            command,
            env=environment,
            cwd=environment["PWD"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs", False
    known = result.returncode in STATUSES and "Traceback" not in result.stderr
    said = result.returncode == 0 or bool(result.stderr or result.stdout)
    if not (known and said):
        print(f"{' '.join(command)}:\n{result.stderr[-1500:]}", file=sys.stderr)
    return f"{result.returncode} ({time.monotonic() - begun:.1f})", known and said


def why_not(prefix: list[str]) -> str:
    """Return why surroundings cannot be made on this machine, which would look like a failed command; empty if they can."""
    if not prefix:
        return ""
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except OSError as error:
        return str(error)
    return tried.stderr.strip() or f"exit status {tried.returncode}" if tried.returncode else ""


def main() -> int:
    """Print the table of each interpreter; 1 where something is not as documented."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "pythons", nargs="*", metavar="PYTHON", default=[sys.executable], help="with tilegym-db installed"
    )
    wrong = 0
    for python in parser.parse_args().pythons:
        if shutil.which(python) is None:
            parser.error(f"no program: {python}")
        print(f"{python}\n{'':20}" + "".join(f"{name:11}" for name in COMMANDS))
        for kind in KINDS:
            with surroundings(kind) as (environment, prefix):
                if problem := why_not(prefix):
                    print(f"{kind:20}cannot be made here: {problem}", flush=True)
                    wrong += 1
                    continue
                cells = [outcome(python, arguments, environment, prefix) for arguments in COMMANDS.values()]
            wrong += sum(not fine for _, fine in cells)
            print(f"{kind:20}" + "".join(f"{cell:11}" for cell, _ in cells), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
