"""A stranger's way from an empty machine to a patched model: install the wheel, ask, show the demo, add a kernel and an operator.

    python tools/first_steps.py [--python PROGRAM] [--extras torch,transformers] [--uv-cache FOLDER]
                                [--transcript FILE] [--keep FOLDER]

Builds the wheel, makes an empty virtual environment with an empty home and no configuration, installs from PyPI alone, and runs
there what the README and the first two pages show, comparing what is printed with the pages. Prints one line a step; the
transcript has every command with its output. Exits with 1 where a step fails or prints something else than its page.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from run_docs import COLUMNS, ROOT, Installation, Runner, Step, differs, steps_of

LIMIT_S = 3600
NETWORK = (
    "SSL_CERT_FILE",
    "PIP_CERT",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "https_proxy",
    "http_proxy",
    "NO_PROXY",
    "no_proxy",
)
"""How this machine reaches PyPI; nothing else of its environment is kept."""
COMPILERS = (
    ("compilers", "python -c 'import torch, triton, tilelang, cuda.tile'"),
    ("compilers", "tilegym-db compile swiglu --target sm_90a"),
)
"""What an environment with every extra is for: all three languages build for a GPU that is not there."""
FIRST = (
    ("first answer", "tilegym-db explain swiglu --axes M=4096,I=14336 --dtype T=bfloat16 --gpu h200"),
    ("first answer", "tilegym-db best rms_norm --gpu h200"),
    ("what works here", "tilegym-db doctor"),
    ("demo", "tilegym-db demo"),
)
PAGES = (
    ("own kernel to best", "docs/python-api.md"),
    ("patched model", "README.md"),  # starts with the home of the page before
    ("own operator to best", "docs/how-to/add-an-operator.md"),
)


@dataclass(frozen=True)
class Done:
    """One command: what it was for, its text, its output, seconds, and what is wrong with it ('' for nothing)."""

    purpose: str
    command: str
    output: str
    seconds: float
    problem: str = ""


@dataclass(frozen=True)
class Environment(Installation):
    """A virtual environment that the wheel was installed into, in the place of run_docs' copy of the package."""

    def environment(self, home: Path, columns: int = COLUMNS) -> dict[str, str]:
        """Return what a command sees: the environment first on the path, a separate home, no configuration of this machine."""
        network = {name: os.environ[name] for name in NETWORK if name in os.environ}
        return {
            **network,
            "PATH": f"{self.folder / 'bin'}:{os.defpath}",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
            "COLUMNS": str(columns),
            "HF_HUB_OFFLINE": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }


class TimedRunner(Runner):
    """Runs the steps of a page and keeps what each call took."""

    def __init__(self, installation: Installation, place: Path, home: Path | None, columns: int) -> None:
        super().__init__(installation, place, home, columns)
        self.seconds: list[float] = []

    def _call(self, command: list[str], given: str) -> str:
        begun = time.monotonic()
        answer = super()._call(command, given)
        self.seconds.append(time.monotonic() - begun)
        return answer


def run(purpose: str, command: list[str], environment: dict[str, str], folder: Path) -> Done:
    """Run one command and keep everything that it said."""
    begun = time.monotonic()
    answer = subprocess.run(
        command, cwd=folder, env=environment, text=True, check=False, timeout=LIMIT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    problem = "" if answer.returncode == 0 else f"exit status {answer.returncode}"
    return Done(purpose, shlex.join(command), answer.stdout, time.monotonic() - begun, problem)


def install(folder: Path, python: str, extras: str, uv_cache: Path | None) -> list[Done]:
    """Build the wheel and install it into ``folder/venv``; the seconds include every download."""
    home, venv = folder / "home", folder / "venv"
    home.mkdir()
    environment = Environment(venv).environment(home)
    uv = str(Path(sys.executable).parent / "uv")
    build = [uv, "build", "--no-config", "-q", "--wheel", "-o", str(folder), str(ROOT)]
    done = [
        run("wheel", build, environment, folder),
        run("environment", [python, "-m", "venv", str(venv)], environment, folder),
    ]
    if any(item.problem for item in done):
        return done
    wheel = next(folder.glob("tilegym_db-*.whl"))
    wanted = f"{wheel}[{extras}]"
    command = [str(venv / "bin" / "pip"), "install", "-q", wanted]
    if uv_cache is not None:
        environment["UV_CACHE_DIR"] = str(uv_cache)
        command = [
            uv,
            "pip",
            "install",
            "--no-config",
            "-q",
            "--compile-bytecode",
            "-p",
            str(venv / "bin" / "python"),
            wanted,
        ]
    return [*done, run("install", command, environment, folder)]


def run_page(purpose: str, path: Path, installed: Environment, places: Path) -> list[Done]:
    """Run a page of the documentation in the environment; one line a call, named after its first command."""
    page = path.read_text()
    wanted = re.match(r"<!-- home: (\S+) -->", page)
    width = re.search(r"<!-- columns: (\d+) -->", page)
    runner = TimedRunner(
        installed,
        places / path.stem,
        places / wanted[1] / "home" if wanted else None,
        int(width[1]) if width else COLUMNS,
    )
    steps = steps_of(page)
    runner.run(steps)
    done, seconds = [], iter(runner.seconds)
    for step, before in zip(steps, [None, *steps[:-1]], strict=True):
        if step.kind.startswith("file "):
            continue
        same_process = step.kind == "python" and before is not None and before.kind == "python"
        took = 0.0 if same_process else next(seconds)
        done.append(Done(purpose, step.text.strip(), step.actual, took, _problem(step)))
    return done


def _problem(step: Step) -> str:
    if not step.ran:
        return "not run: what came before it ended with a traceback"
    if "Traceback" in step.actual:
        return "a traceback"
    return "prints something else than the page" if differs(step) else ""


def main() -> int:
    """Print the table; write the transcript where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the Python that makes the environment")
    parser.add_argument("--transcript", type=Path)
    parser.add_argument("--extras", default="all")
    parser.add_argument("--uv-cache", type=Path, help="install with uv from this cache in place of pip")
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it, for more to be tried there")
    options = parser.parse_args()
    done: list[Done] = []
    with folder_of(options.keep) as folder:
        done += show(install(folder, options.python, options.extras, options.uv_cache))
        if any(item.problem for item in done):
            return 1
        print(f"the environment takes {size_of(folder / 'venv') / 1e9:.1f} GB", flush=True)
        installed = Environment(folder / "venv")
        environment, home = installed.environment(folder / "home"), folder / "home"
        for purpose, command in (*(COMPILERS if options.extras == "all" else ()), *FIRST):
            done += show([run(purpose, shlex.split(command), environment, home)])
        for purpose, page in PAGES:
            done += show(run_page(purpose, ROOT / page, installed, folder / "pages"))
    total = sum(item.seconds for item in done)
    wrong = [item for item in done if item.problem]
    print(f"{len(done)} steps, {total:.0f} s, {len(wrong)} not as they should be")
    if options.transcript is not None:
        options.transcript.write_text("\n".join(entry(item) for item in done))
    return 1 if wrong else 0


@contextmanager
def folder_of(kept: Path | None) -> Iterator[Path]:
    """Yield the folder that everything is made in: one that is left, or one that goes when all is done."""
    if kept is not None:
        kept.mkdir(parents=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def size_of(folder: Path) -> int:
    """Return the bytes that the files of a folder take on the disk."""
    files = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_blocks * 512 for path in files)


def entry(item: Done) -> str:
    """Return one command of the transcript: the command, its output, the seconds, and what is wrong."""
    return f"$ {item.command}\n{item.output.rstrip()}\n# {item.purpose}, {item.seconds:.1f} s, {item.problem or 'ok'}\n"


def show(done: list[Done]) -> list[Done]:
    """Print a line for each, and give them back."""
    for item in done:
        first = item.command.splitlines()[0][:70]
        print(f"{item.purpose:22}{item.seconds:8.1f} s  {first:72}{item.problem or 'ok'}", flush=True)
        if item.problem:
            print("\n".join(f"    {line}" for line in item.output.splitlines()[-15:]), flush=True)
    return done


if __name__ == "__main__":
    sys.exit(main())
