"""Every command with hostile values, from the app's own metadata: no traceback, no hang, documented statuses, nothing lost."""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_outcome import STATUSES, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilegym_db.cli.commands import every_command

LIMIT_S = 10
EXAMPLES = 20  # per command: about a minute in all on an idle core
EVERY_COMMAND = every_command()

MEASURING = (
    "bench", "tune", "verify", "regress", "fit", "model verify", "model bench", "task auto", "doctor calibrate",
    "debug reproduce", "debug sanitize", "debug profile", "dev",
)  # fmt: skip
"""What would measure for minutes if nothing of what it is given were wrong: each is given a GPU, as ``GPUS`` spells it."""
GPUS = [
    "b300", "h100", "h100-sxm", "h200", "H200", "hopper", "cuda:0", "h100,h200", "gpu", "0", "", " ", "\udcff", "a" * 5000,
    "\x1b[2J",
]  # fmt: skip
HERE = ["auto", "cpu"]
"""What there is on any machine: only together with a name that nothing has, or all would be measured."""
UNKNOWN = "no_such_definition"

# What would compile or generate for minutes, if nothing of what it is given were wrong.
REFUSED = {
    "task recommend": ("--layers", "0"),
    "mcp": ("--target",),
    "check": ("no_such_definition",),
    "compile": ("no_such_definition",),
    "demo": ("--target",),
}

HOSTILE = [
    "", " ", "-", "--", "\udcff", "\N{SNOWMAN}", "a" * 5000, "../../../etc/passwd", "/dev/zero", "/dev/full", "/proc/self/mem",
    "nan", "inf", "-1", "0", "1e309", "9" * 30, "-" + "9" * 30, "4096", "0x10", "1_000", "\N{ARABIC-INDIC DIGIT FOUR}",
    "M=4,N=8", "M=4,N=", "M=", "=", ",", "M=4,M=4", "M=1e3", f"M={1 << 62},N={1 << 62}", "M=-1", "x=strided(N + 8, 1)",
    "T=float32", "T=float99", "factor=nan", "factor=1e-5", "; rm -rf /", "$(touch here)", "%s%n", "'", '"', "{", "[" * 3000,
    "{}", "true", "h200", "cpu", "auto", "b300", "row_scale", "row_scale_stock", "rows_cale", "python", "triton", "HEAD",
    "SELECT 1", "SELECT * FROM traces", "SELECT * FROM range(100000000)", "DROP TABLE meta", "COPY traces TO 'out'", ";;",
    "SELECT 1 UNION " * 3000 + "SELECT 1", "SELECT * FROM read_csv('/etc/passwd')", "SELECT '\x1b[2J'", "ATTACH 'x.db'",
]  # fmt: skip


# By a parameter's name: what reaches further than its parser.
PLAUSIBLE = {
    "name": ["row_scale", "row_scale_stock"], "names": ["row_scale"], "definition": ["row_scale"], "axes": ["M=4,N=8", "M=4"],
    "dtype": ["T=float32"], "scalar": ["factor=0.5"], "gpu": ["h200", "cpu", "auto"], "language": ["python"],
    "op_type": ["elementwise"], "limit": ["1", "3"], "statement": ["SELECT * FROM traces", "FROM best", "DESCRIBE traces"],
    "status": ["verified"], "mode": ["training", "inference"], "layout": ["x=row_contiguous"], "output": ["out.file"],
}  # fmt: skip


def options_of(name: str) -> tuple[list[Any], list[Any]]:
    """The options and the arguments of a command, as Typer declared them."""
    parameters = EVERY_COMMAND[name].params
    return (
        [item for item in parameters if item.param_type_name == "option" and item.name != "help"],
        [item for item in parameters if item.param_type_name == "argument"],
    )


@st.composite
def command_lines(draw: Any, name: str, places: list[str]) -> list[str]:
    options, arguments = options_of(name)
    values = st.sampled_from([*HOSTILE, *places]) | st.text(
        st.characters(codec="utf-8", exclude_characters="\0"), max_size=40
    )
    line: list[str] = []
    for option in draw(st.lists(st.sampled_from(options), max_size=4)) if options else []:
        line.append(draw(st.sampled_from(option.opts)))
        if not option.is_flag:
            line.append(
                draw(values if option.name not in PLAUSIBLE else st.sampled_from(PLAUSIBLE[option.name]) | values)
            )
    for argument in arguments:
        if argument.required or draw(st.booleans()):
            known = st.sampled_from(PLAUSIBLE[argument.name]) if argument.name in PLAUSIBLE else values
            line += draw(st.lists(known | values, min_size=1, max_size=1 if argument.nargs == 1 else 3))
    if name in MEASURING:
        return [*name.split(), *draw(on_some_gpu(name, line))]
    return [*name.split(), *line, *REFUSED.get(name, ())]


@st.composite
def on_some_gpu(draw: Any, name: str, line: list[str]) -> list[str]:
    """A command line of a command that measures, with a GPU that is not here, or none, or with nothing to measure on it."""
    if draw(st.integers(0, 3)):
        return [*line, "--gpu", draw(st.sampled_from(GPUS))]
    asked = ["--gpu", draw(st.sampled_from(HERE))]
    if name == "doctor calibrate":
        return [*line, *asked]  # a CPU has no peaks
    return [UNKNOWN, *(["--against", "HEAD"] if name == "regress" else []), *asked]


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """Paths of every kind that an option may be given."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "half.json").write_text('{"name": ')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bytes.jsonl").write_bytes(random.Random(0).randbytes(2000))
    (tmp_path / "kernel.py").write_text("def run(x, weight, factor, out):\n    out.copy_(x)\n")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "fifo")
    return [str(path) for path in sorted(tmp_path.iterdir())] + [str(tmp_path / "missing" / "file")]


def kept(roots: list[Path]) -> dict[Path, bytes]:
    """Return what must never get lost: records and journals. The database is made of them, and its lock file has no content."""
    return {
        path: path.read_bytes()
        for root in roots
        for path in root.rglob("*")
        if path.is_file() and path.suffix in (".json", ".jsonl", ".py")
    }


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has none, so that no spelling of one has anything measured."""
    for module in ("tilegym_db.driver", "tilegym_db.measurement.machine"):
        importlib.import_module(module)
        monkeypatch.setattr(f"{module}.driver_files", lambda *_: ())
        monkeypatch.setattr(f"{module}.driver_gpu_names", lambda *_: ())


def _too_slow(*_: object) -> None:
    raise AssertionError(f"still running after {LIMIT_S} s")


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", EVERY_COMMAND)
def test_no_value_is_a_traceback_a_hang_or_a_loss(name, row_scale, home, places, journal_traces, monkeypatch):
    journal_traces(3.0, 2.0)
    monkeypatch.chdir(home.parent)
    without_a_gpu(monkeypatch)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(line=command_lines(name, places))
    def fuzz(line: list[str]) -> None:
        before = kept([row_scale, home])
        signal.signal(signal.SIGALRM, _too_slow)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S * 3)  # of a busy machine; an idle one takes a tenth of it
        try:
            code, errors = outcome(line)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert code in STATUSES
        assert "Traceback" not in errors
        assert code in (0, 1) or errors, "a refusal says why"
        after = kept([row_scale, home])
        lost = [path for path, content in before.items() if not after.get(path, b"").startswith(content)]
        asked = [path for path in lost if name == "remove" and code == 0 and any(word in path.parts for word in line)]
        for path in asked:  # for the next example
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(before[path])
        assert lost == asked

    fuzz()


@pytest.mark.parametrize("name", ["bench", "doctor calibrate"])
def test_a_command_that_measures_draws_every_kind_of_gpu(name):
    drawn = set()

    @settings(max_examples=150, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(line=command_lines(name, []))
    def draw(line: list[str]) -> None:
        drawn.add(line[-1])

    draw()
    assert {*HERE, "b300", "h100", ""} <= drawn


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", ["sql", "show", "explain", "data ingest", "bench"])
def test_a_real_process_ends_as_documented_too(name, home, places):
    lines = random.Random(f"17 {name}")
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home)}
    values = [lines.choice([*HOSTILE, *places]) for _ in EVERY_COMMAND[name].params[:1]]
    refused = ("--gpu", "b300") if name in MEASURING else REFUSED.get(name, ())
    command = [sys.executable, "-m", "tilegym_db", *name.split(), *values, *refused]
    result = subprocess.run(command, env=environment, capture_output=True, timeout=60, cwd=home.parent)
    assert result.returncode in STATUSES
    assert b"Traceback" not in result.stderr
