from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from raising import raises

from tilegym_db.backends.load import load_entry, unload_entry
from tilegym_db.catalog import SolutionFiles
from tilegym_db.errors import SolutionError, ToolchainError

WriteSolution = Callable[..., SolutionFiles]


def test_entry_function_runs_and_is_the_same_on_the_next_load(write_solution: WriteSolution) -> None:
    solution = write_solution("python", "def run(x):\n    return x + 1\n", destination_passing_style=False)

    assert load_entry(solution)(1) == 2
    assert load_entry(solution) is load_entry(solution)


def test_an_edited_source_is_another_module(write_solution: WriteSolution) -> None:
    before = load_entry(write_solution("python", "def run():\n    return 'before'\n"))
    after = load_entry(write_solution("python", "def run():\n    return 'after'\n"))

    assert (before(), after()) == ("before", "after")


def test_unloading_starts_over(write_solution: WriteSolution) -> None:
    solution = write_solution("python", "calls = []\ndef run():\n    calls.append(1)\n    return len(calls)\n")
    load_entry(solution)()

    unload_entry(solution)

    assert load_entry(solution)() == 1


@pytest.mark.parametrize(
    "statement", ["from .parts import table", "from parts import table", "from parts.table import ROWS"]
)
def test_sibling_sources_are_importable_by_either_name(write_solution: WriteSolution, statement: str) -> None:
    value = "ROWS" if statement.endswith("ROWS") else "table.ROWS"
    solution = write_solution(
        "python", f"{statement}\ndef run():\n    return {value}\n", files={"parts/table.py": "ROWS = 7\n"}
    )

    assert load_entry(solution)() == 7


def test_siblings_of_one_name_in_two_solutions_do_not_meet(write_solution: WriteSolution) -> None:
    source = "import sizes\ndef run():\n    return sizes.N\n"
    one = load_entry(write_solution("python", source, name="one", files={"sizes.py": "N = 1\n"}))
    two = load_entry(write_solution("python", source, name="two", files={"sizes.py": "N = 2\n"}))

    assert (one(), two()) == (1, 2)


def test_loading_leaves_no_trace_but_its_own_modules(write_solution: WriteSolution) -> None:
    solution = write_solution("python", "import sizes\ndef run(): ...\n", files={"sizes.py": ""})
    path, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)

    load_entry(solution)

    assert sys.path == path
    assert importlib.util.find_spec("sizes") is None
    assert all(name.startswith("_tilegym_db_solution_") for name in set(sys.modules) - modules)
    assert not list(solution.folder.rglob("__pycache__"))

    unload_entry(solution)

    assert (sys.meta_path, set(sys.modules)) == (finders, modules)


def test_a_sibling_can_be_imported_at_the_first_call(write_solution: WriteSolution) -> None:
    source = "def run():\n    from .parts import table\n    return table.ROWS\n"

    assert load_entry(write_solution("python", source, files={"parts/table.py": "ROWS = 7\n"}))() == 7


@pytest.mark.parametrize("statement", ["from . import hidden", "from .hidden import run", "import hidden"])
def test_a_file_that_is_no_declared_source_cannot_be_imported(write_solution: WriteSolution, statement: str) -> None:
    solution = write_solution("python", f"def run():\n    {statement}\n")
    (solution.folder / "hidden.py").write_text("def run(): ...\n")

    with pytest.raises(ImportError, match="hidden"):
        load_entry(solution)()


def test_an_import_that_raises_names_the_line_and_leaves_nothing(write_solution: WriteSolution) -> None:
    solution = write_solution("python", "table = {}\nvalue = table['missing']\ndef run(): ...\n")
    modules = set(sys.modules)

    with raises(SolutionError, "import_failed", "kernel.py", "line 2", "KeyError: 'missing'") as caught:
        load_entry(solution)

    assert "load.py" not in str(caught.value)
    assert set(sys.modules) <= modules


def test_a_source_changed_since_it_was_read_is_refused(write_solution: WriteSolution) -> None:
    solution = write_solution("python", "def run(): ...\n")
    (solution.folder / "kernel.py").write_text("def run():\n    return 'other'\n")

    with raises(SolutionError, "source_changed", "kernel.py"):
        load_entry(solution)


def test_a_missing_language_is_named_with_its_extra(
    write_solution: WriteSolution, monkeypatch: pytest.MonkeyPatch
) -> None:
    solution = write_solution("tilelang")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tilelang" else find_spec(name))

    with raises(ToolchainError, "toolchain_unusable", "pip install 'tilegym-db[tilelang]'"):
        load_entry(solution)


def test_a_language_that_is_broken_is_not_blamed_on_the_solution(write_solution: WriteSolution) -> None:
    solution = write_solution("triton", "import triton.no_such_module\ndef run(): ...\n")

    with raises(ToolchainError, "language_broken", "triton.no_such_module", "tilegym-db[triton]"):
        load_entry(solution)


def test_a_dependency_out_of_range_is_named(write_solution: WriteSolution) -> None:
    solution = write_solution("python", "def run(): ...\n", dependencies=["packaging>=9999"])
    version = importlib.metadata.version("packaging")

    with raises(ToolchainError, "dependency_unmet", "packaging>=9999", version):
        load_entry(solution)


@pytest.mark.turn("tilegym_db/backends/")  # a process that loads TileLang
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("before", "variable", "printed"),
    [("", None, "False"), ("", "1", "True"), ("import tilelang", None, "True")],
    ids=["nobody asked", "the variable asks", "the program uses TileLang"],
)
def test_tilelang_prints_what_it_compiles_only_on_request(before: str, variable: str | None, printed: str) -> None:
    program = f"""
{before}
from tilegym_db.backends.load import load_entry
from tilegym_db.catalog import Catalog
load_entry(Catalog.default().solution("silu_and_mul_tilelang"))
from tilelang import env
print(env.is_print_on_compilation_enabled())
"""
    name = "TILELANG_PRINT_ON_COMPILATION"
    environment = {key: value for key, value in os.environ.items() if key != name}
    environment |= {} if variable is None else {name: variable}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120
    )
    assert found.stdout.splitlines()[-1:] == [printed], found.stderr[-2000:]
