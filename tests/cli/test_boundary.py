"""Real processes: what leaves them where something outside is missing, closed, full, or interrupts."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tilegym_db"]
SLOW_QUERY = "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range * b.range % 7 = 3"

# Imported by the interpreter before anything else: as if the packages of every extra were not installed.
WITHOUT_EXTRAS = """
import sys

class Absent:
    names = ("torch", "numpy", "triton", "tilelang", "tvm", "cuda", "pyarrow", "transformers", "safetensors")

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def environment(home):
    return {**os.environ, "TILEGYM_DB_HOME": str(home), "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


@pytest.fixture
def core_only(environment, tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_EXTRAS)
    return {**environment, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


CONFIG = str(ROOT / "benchmarks" / "configs" / "olmoe-1b-7b.json")


def run(environment, *arguments, **options):
    options = {"capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run([*COMMAND, *arguments], env=environment, **options)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "rms_norm", "--gpu", "cpu"],
        ["tune", "rms_norm", "--gpu", "cpu"],
        ["verify", "rms_norm", "--gpu", "cpu"],
        ["regress", "--against", "HEAD", "--gpu", "cpu"],
        ["debug", "reproduce", "rms_norm_stock", "--axes", "M=1,N=8", "--dtype", "T=float32", "--gpu", "cpu"],
        ["demo"],
        ["check", "rms_norm"],
        ["fit", CONFIG],
        ["model", "verify", CONFIG],
        ["model", "bench", CONFIG],
    ],
    ids=lambda arguments: "-".join(arguments[:2]),
)
def test_a_missing_package_names_its_extra(core_only, arguments):
    result = run(core_only, *arguments)
    assert result.returncode == 2
    assert result.stderr.endswith("not installed here. Try: pip install 'tilegym-db[torch]'\n")
    assert "Traceback" not in result.stderr


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("module", "raised", "named", "arguments"),
    [
        ("torch", "ImportError('libcudart.so.13: cannot open')", "PyTorch", ["check", "rms_norm"]),
        ("torch", "OSError('wrong ELF class')", "PyTorch", ["bench", "rms_norm", "--gpu", "cpu"]),
        ("numpy", "RuntimeError('half installed')", "NumPy", ["check", "rms_norm"]),
        ("pyarrow", "ImportError('undefined symbol')", "Apache Arrow (pyarrow)", ["sql", "SELECT 1 AS one", "--arrow"]),
        ("duckdb", "ImportError('wrong ELF class')", "the package duckdb", ["sql", "SELECT 1"]),
        ("typer", "RuntimeError('half installed')", "the package typer", ["list"]),
        ("pydantic", "ImportError('undefined symbol')", "the package pydantic", ["list"]),
    ],
)
def test_a_package_that_does_not_import_is_named(environment, tmp_path, module, raised, named, arguments):
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text(f"raise {raised}")
    given = {**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    result = run(given, *arguments)
    assert result.returncode == 2
    assert f"error: {named} is installed here and cannot be imported: {raised.partition('(')[0]}: " in result.stderr
    assert "Try: pip install --force-reinstall" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.turn("tilegym_db/cli/doctor.py")  # a process with PyTorch
def test_doctor_says_what_does_not_import_and_looks_at_the_rest(environment, tmp_path):
    (tmp_path / "duckdb").mkdir()
    (tmp_path / "duckdb" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    result = run({**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, "doctor", "--json")
    found = {(item["what"], item["state"]): item["detail"] for item in json.loads(result.stdout)}
    assert result.returncode == 1
    assert (
        "duckdb is installed here and cannot be imported: ImportError: undefined symbol" in found["packages", "problem"]
    )
    assert ("catalog", "ok") in found


@pytest.mark.turn("tilegym_db/cli/", "pyproject.toml")  # processes without any extra
def test_what_needs_no_extra_works_without_any(core_only):
    assert run(core_only, "sql", "SELECT 1 AS one", "--csv").stdout == "one\n1\n"
    refused = run(core_only, "sql", "SELECT 1 AS one", "--parquet", "-o", "never.parquet")
    assert refused.returncode == 2
    assert "pip install 'tilegym-db[arrow]'" in refused.stderr
    assert not Path("never.parquet").exists()


def test_an_absent_gpu_is_refused_without_pytorch(environment):
    code = (
        "import sys; from tilegym_db.cli.app import app\n"
        "from tilegym_db.errors import HardwareError\n"
        "try:\n    app(['bench', '--gpu', 'b300'])\n"
        "except HardwareError as error:\n    print(error)\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "--gpu b300: " in result.stdout
    assert result.stdout.endswith("False\n")


@pytest.mark.turn("tilegym_db/cli/app.py")  # a pipe of 200,000 lines
def test_a_reader_that_goes_away_is_no_error(environment):
    command = " ".join([*COMMAND, "sql", "'SELECT * FROM range(200000)'", "--csv"])
    script = f"{command} | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert result.stdout == "range\n0\n"
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("target", "reason"), [("/dev/full", "No space left on device"), ("&-", "Bad file descriptor")]
)
def test_output_that_cannot_be_written_is_one_line(environment, target, reason):
    script = f"{' '.join(COMMAND)} list --json >{target}"
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (1, f"error: cannot write the output: {reason}.\n")


@pytest.mark.turn("tilegym_db/cli/app.py")  # separate processes
@pytest.mark.sweep(3)
@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_file_does_not_take_the_place_of_a_closed_stream(environment, home, descriptor):
    close = "<&-" if descriptor == 0 else f"{descriptor}>&-"
    script = f"{' '.join(COMMAND)} sql 'SELECT 1' {close}"
    subprocess.run(["bash", "-c", script], env=environment, capture_output=True, timeout=120)
    assert run(environment, "sql", "SELECT count(*) > 0 AS ok FROM definitions", "--csv").stdout == "ok\nTrue\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("SELECT 1".encode("utf-16"), "UTF-8"),
        (b"SELECT '\xff'", "UTF-8"),
        (b"SELECT 1\x00", "NUL"),
        (b"SELECT 1" + b" UNION SELECT 1" * 50_000, "65,536 at most"),
    ],
    # Not by their values, which pytest 8 does not shorten: the id is in the environment of what a test starts, 128 KiB at most.
    ids=["UTF-16", "no UTF-8", "NUL", "too long"],
)
def test_a_statement_that_is_no_text_is_refused(cli, content, message, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    result = cli("sql", "-")
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


# Waits 4 s; the interrupts beside it are sent daily.
@pytest.mark.turn("tilegym_db/cli/app.py", "tilegym_db/store/asking.py", "tilegym_db/store/connection.py")
def test_an_interrupt_ends_a_query(environment):
    assert run(environment, "sql", "SELECT 1").returncode == 0  # makes the store
    with subprocess.Popen([*COMMAND, "sql", SLOW_QUERY], env=environment, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(4)  # into the query
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=15)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.sweep
@pytest.mark.parametrize("delay_s", [0.05, 0.1, 0.2, 0.4])
def test_an_interrupt_during_the_start_is_quiet(environment, delay_s):
    code = (
        "import os, signal, threading\n"
        f"threading.Timer({delay_s}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "import sys; sys.argv = ['tilegym-db', 'sql', '-']\n"
        "from tilegym_db.cli.app import main\nmain()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        errors = process.stderr.read()  # standard input stays open until then
        assert (process.wait(timeout=60), errors) == (130, "")


@pytest.mark.turn("tilegym_db/cli/app.py")  # waits for processes; test_app.py interrupts one daily
@pytest.mark.parametrize(("arguments", "status"), [(["list"], 0), (["show", "nothing"], 2)])
def test_an_interrupt_after_the_answer_changes_no_status(environment, arguments, status):
    code = (
        "import atexit, os, signal, sys\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        f"sys.argv = ['tilegym-db', *{arguments!r}]\n"
        "from tilegym_db.cli.app import main\nmain()"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, "Traceback" in result.stderr) == (status, False)


INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_IMPORT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.sweep
@pytest.mark.parametrize("module", ["typer", "typer.core", "tilegym_db.cli.list", "pydantic"])
def test_an_interrupt_during_an_import_is_quiet(environment, tmp_path, module):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_IMPORT)
    given = {**environment, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "INTERRUPTED_IMPORT": module}
    result = run(given, "list")
    assert (result.returncode, result.stderr) == (130, "")


@pytest.mark.parametrize(
    "text",
    [
        "class Name:\n    def __set_name__(self, owner, name): os.kill(os.getpid(), 2)\nclass Owner:\n    name = Name()",
        "exec('os.kill(os.getpid(), 2)')",  # as in the making of a dataclass
        "try:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    raise ValueError('as pydantic does')",
    ],
)
def test_an_interrupt_is_one_whatever_python_makes_of_it(environment, text):
    command = f"import os\ndef command():\n    exec({text!r}, globals())\n"
    code = f"{command}from tilegym_db.cli.app import run\nexit(run(command))"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (130, "")


@pytest.mark.turn("tilegym_db/cli/app.py", "tilegym_db/cli/app.py")  # separate processes
@pytest.mark.sweep
@pytest.mark.parametrize(
    "changes",
    [
        {"LC_ALL": "C", "LANG": "C"},
        {"PYTHONIOENCODING": "ascii"},
        {"HOME": None, "XDG_DATA_HOME": None},
        {"COLUMNS": "20"},
        {"COLUMNS": "not a number"},
        {"TERM": "dumb", "NO_COLOR": "1"},
    ],
    ids=str,
)
def test_odd_surroundings_change_no_answer(environment, changes):
    given = {name: value for name, value in {**environment, **changes}.items() if value is not None}
    result = run(given, "list", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert run(given, "list").returncode == 0


@pytest.mark.turn("tilegym_db/cli/app.py", "tilegym_db/paths.py")  # separate processes
@pytest.mark.sweep
@pytest.mark.parametrize(
    "place",
    ["/dev/null/home", "/proc/home", "x" * 5000, "~nobody-of-that-name/x", "/etc/passwd", "\udcff", "loop/loop"],
)
def test_an_odd_home_is_an_error_or_works(environment, tmp_path, place):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    given = {**environment, "TILEGYM_DB_HOME": place}
    for arguments in (["sql", "SELECT 1"], ["list"], ["doctor"], ["data", "ingest"]):
        result = run(given, *arguments, cwd=tmp_path, errors="replace")
        assert result.returncode in (0, 1, 2)
        assert "Traceback" not in result.stderr
        assert result.returncode == 0 or result.stderr


def test_the_table_of_commands_says_what_the_commands_say():
    from tilegym_db.cli.commands import COMMANDS, load_command

    for panel in COMMANDS.values():
        for name, summary in panel.items():
            assert summary.endswith(".")
            assert load_command(name).help, name


def test_an_argument_that_fills_screens_is_not_repeated_whole(cli, row_scale):
    result = cli("show", "a" * 100_000)
    assert result.code == 2
    assert len(result.err) < 1000
    assert result.cause == "name_unknown"
    assert result.err.rstrip().endswith("Try: tilegym-db list")


@pytest.mark.parametrize(
    "words", [("report", "-o", "-"), ("data", "export", "flashinfer", "-"), ("data", "import", "-")]
)
def test_a_dash_is_no_path(words, cli, row_scale, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli(*words)
    assert (result.code, "'-' is not a path here" in result.err) == (2, True)
    assert not (tmp_path / "-").exists()
