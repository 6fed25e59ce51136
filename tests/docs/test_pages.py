"""Every command and block of Python that the documentation shows prints what the page says, as after an installation."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from docs_site.function_page import page_text
from run_docs import FENCE, ROOT, Pages, Runner, Step, differs, normalised, rewritten, steps_of
from sample import pages_of

from tilegym_db.catalog import Catalog
from tilegym_db.paths import shipped_root
from tilegym_db.store.opening import open_store

PAGES = (
    "docs/how-to/add-an-operator.md",
    "docs/how-to/write-a-kernel.md",
    "docs/how-to/ask-the-database.md",
    "docs/how-to/serve-a-model.md",
    "docs/how-to/train-with-losses.md",
    "docs/how-to/interchange.md",
    "docs/how-to/measure.md",
    "docs/how-to/other-machines.md",
    "docs/how-to/report.md",
    "docs/how-to/tune-a-hybrid-model.md",
    "docs/how-to/write-kernels-with-an-agent.md",
    "docs/measurement.md",
    "docs/python-api.md",
    "README.md",
)
FASTER = ("docs/how-to/add-an-operator.md", "docs/python-api.md", "README.md")
"""Pages on which a kernel must be known to be faster, and what begins with the home that one of them left."""
FIRST = "docs/how-to/ask-the-database.md"
"""The page of commands that every run follows; the page of Python that every run follows is the generated one of operators."""
LONGEST = "docs/how-to/serve-a-model.md"
OF_THE_NIGHT = {FASTER[0]: pytest.mark.alone, LONGEST: pytest.mark.nightly, FASTER[1]: pytest.mark.nightly}
"""Pages that take a minute run only nightly. The tests of ``tests/models``, ``tests/resolver`` and ``tests/store`` patch such
models, and call such functions, daily.
"""
GIVEN = [
    pytest.param(name, marks=() if name == FIRST else OF_THE_NIGHT.get(name, pytest.mark.records("name")))
    for name in PAGES
]
"""The others if they have changed, in their turn, and nightly."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("docs"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", GIVEN)
def test_a_page_shows_what_its_commands_print(name: str, pages: Pages, tmp_path: Path):
    wrong = [step for step in pages.run(ROOT / name) if differs(step)]
    for attempt in range(ATTEMPTS - 1):
        if not wrong or not (name in FASTER or any(step.measured for step in wrong)):
            break  # what follows from no measurement is wrong again
        # While others keep the machine busy, a kernel may not be known to be faster, or a clock not be believed. Ask again.
        wrong = [step for step in Pages(tmp_path / str(attempt)).run(ROOT / name) if differs(step)]
    assert not wrong, "\n".join(shown(step) for step in wrong) + f"\nTry: python tools/run_docs.py --write {name}"


@pytest.mark.turn(
    "tilegym_db/ops/", "tools/docs_site/"
)  # runs a page; tests/resolver/test_ops.py has the operators daily
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generated_page_of_operators_shows_what_its_code_prints(pages: Pages, tmp_path: Path):
    page = tmp_path / "ops.md"
    page.write_text(page_text())
    steps = pages.run(page)
    assert [step.kind for step in steps] == ["python"]
    assert [shown(step) for step in steps if differs(step)] == []


ATTEMPTS = 3


def shown(step: Step) -> str:
    return f"{step.text}-- printed:\n{step.actual}-- the page says:\n{step.expected}"


WRITTEN = pages_of()
CODE = ("", "bash", "console", "python", "sh", "sql")
"""Languages of blocks that a reader would run; the others show a record, a tree of folders or an output."""
NOT_RUN = re.compile(r"<!-- not run: [a-z`][^:]{8,} -->")
"""The comment above a block of code that is not run, with the reason."""
RUN_BY_A_TEST = {("docs/performance/gpus.md", "sql")}


def blocks_of(name: str) -> list[tuple[str, bool]]:
    """Every block of code of a page, by its first line, and whether it is run."""
    page, found = (ROOT / name).read_text(), []
    for match in FENCE.finditer(page):
        language, *words = match["info"].split() if match["info"].strip() else [""]
        if language in CODE or any(word.startswith("file=") for word in words):
            steps = steps_of(page[match.start() : match.end()])
            line = match["body"].partition("\n")[0]
            found.append((line, (name in PAGES and bool(steps)) or (name, language) in RUN_BY_A_TEST))
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_every_block_of_code_is_run_or_says_why_not(name: str):
    page = (ROOT / name).read_text()
    for line, is_run in blocks_of(name):
        before = page[: page.index(f"\n{line}\n")].rpartition("\n```")[0].rstrip()
        above = " ".join(before.rpartition("\n\n")[2].split())
        assert is_run != bool(NOT_RUN.search(above)), f"{line}\nabove it: {above}"


PLACES = ("", "tilegym_db", "tests", "solutions")
"""Folders that the path of a Python file in a page may be relative to."""


def test_python_files_that_pages_name_exist():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    named = {path for page in pages for path in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page.read_text())}
    assert sorted(path for path in named if not any((ROOT / place / path).is_file() for place in PLACES)) == []


def test_most_blocks_of_code_are_run():
    found = [is_run for name in WRITTEN for _, is_run in blocks_of(name)]
    print(f"{sum(found)} of {len(found)} blocks of code are run")
    assert sum(found) >= 60
    assert sum(found) / len(found) > 0.7


@pytest.mark.turn("docs/", "tilegym_db/store/views.sql")  # fills a store
def test_the_query_of_the_page_of_gpus_gives_its_table(tmp_path: Path):
    page = (ROOT / "docs/performance/gpus.md").read_text()
    (query,) = [match["body"] for match in FENCE.finditer(page) if match["info"] == "sql"]
    table = page.partition("<!-- generated: winners -->")[2].partition("<!-- end")[0]
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    with open_store(tmp_path, read_only=True, catalog=Catalog((shipped_root(),))) as store:
        rows = store.rows(query)
    assert len(shown) > 2
    assert shown == [[row["on_h200"], row["on_h100"], str(row["shapes"])] for row in rows]


PAGE = """\
```console
$ echo one \\
    two
one two
$ false
```
```python
print(1.5)
```
```output
2.5
```
```text file=a/b.txt
content
```
"""


def test_a_page_is_read_into_steps():
    kinds = [(step.kind, step.expected) for step in steps_of(PAGE)]
    assert kinds == [("console", "one two\n"), ("console", ""), ("python", "2.5\n"), ("file a/b.txt", "")]


UNFINISHED = """\
```python
print(1)
```
```output
1
```
```python
print(2)
raise ValueError("no")
```
```python
print(3)
```
```output
3
```
"""


def test_python_that_follows_a_traceback_is_not_run_and_says_so(pages: Pages, tmp_path: Path):
    steps = steps_of(UNFINISHED)
    Runner(pages.installation, tmp_path / "page").run(steps)
    assert [(step.ran, differs(step)) for step in steps] == [(True, False), (True, True), (False, True)]
    assert steps[1].actual.startswith("2\n")
    assert steps[1].actual.endswith("ValueError: no\n")
    assert "```output\n3\n```" in rewritten(UNFINISHED, steps)


def test_what_differs_is_found_and_written_into_the_page():
    steps = steps_of(PAGE)
    for step, actual in zip(steps, ("one two\n", "", "1.5\n", ""), strict=True):
        step.actual = actual
    assert [differs(step) for step in steps] == [False, False, True, False]
    assert rewritten(PAGE, steps) == PAGE.replace("2.5", "1.5")


def test_only_measured_blocks_may_differ_and_only_in_numbers():
    expected, actual = "kernel   12.3 us  1.07x\n", "kernel  9 us   0.98x\n"
    assert normalised(expected, measured=True) == normalised(actual, measured=True)
    assert normalised(expected, measured=False) != normalised(actual, measured=False)
    assert normalised("kernel_2 PASSED", measured=True) != normalised("kernel_3 PASSED", measured=True)
    assert normalised("10 PASSED", measured=True) != normalised("10 FAILED", measured=True)


def test_dots_stand_for_any_lines():
    step = Step("console", "x", "first\n...\nlast\n", False, (0, 0), "first\nmany\nlines\nlast\n")
    assert not differs(step)
    step.actual = "first\nmany\n"
    assert differs(step)


def test_commands_of_a_page_do_not_touch_the_checkout(pages: Pages):
    environment = pages.installation.environment(Path("/nowhere"))
    assert "TILEGYM_DB_HOME" not in environment
    assert environment["PYTHONPATH"] != os.environ.get("PYTHONPATH", "")
