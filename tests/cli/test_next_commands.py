"""The commands that are printed as the next ones run as they are printed, in a folder whose name has a space.

Every command in a text of the sources is found. Each exists with its options; those that read are run on a small catalog.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import tilegym_db
from tilegym_db.cli.commands import COMMANDS, root_command

pytestmark = pytest.mark.slow

FINISHED = {
    "reference.py": "# Source: https://example.org/model.py#L1\n"
    "def run(x, weight):\n    return (x.float() * weight.float()).to(x.dtype)\n",
    "independent.py": "def run(x, weight):\n    return weight.expand(x.shape).float().mul(x.float()).to(x.dtype)\n",
    "planted_errors.json": json.dumps(
        [
            {"find": "* weight.float()", "replace": "", "why": "the weight is forgotten"},
            {"find": "x.float()", "replace": "x.float().abs()", "why": "the sign is lost"},
            {"find": "weight.float()", "replace": "weight.float().flip(0)", "why": "the weights in reverse"},
        ]
    ),
    "kernel.py": "def run(x, weight):\n    return (x.float() * weight.float()).to(x.dtype)\n",
}
PLACEHOLDER = re.compile(r"^(?:[A-Z]+|TODO)$")
NEXT = re.compile(r"(?:Next|then|Try): (?=tilegym-db )")


def next_commands(text: str) -> list[list[str]]:
    """Return the words after ``tilegym-db`` of every command that a text says to run next."""
    found = []
    for part in NEXT.split(text)[1:]:
        for command in part.partition("\n")[0].split("; "):
            line = re.split(r", (?:then|so that)|\. |\)", command)[0].strip().rstrip(".,")
            found.append(shlex.split(line)[1:])
    return found


@pytest.fixture
def follow(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path) -> Callable[..., list[str]]:
    """``follow(words, times)``: run a command and the next ones it prints, so many after another; the names that ran."""
    folder = tmp_path / "my work"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(words: list[str], times: int) -> list[str]:
        ran: list[str] = []
        waiting = [words]
        while waiting and len(ran) < times:
            given = [word for word in waiting.pop(0) if word != "--watch"]
            assert not any(map(PLACEHOLDER.match, given)), given
            result = cli(*given)
            # The draft of a Triton kernel is left unfinished.
            assert result.code == 0 or (result.code, "my_scale_triton/" in given) == (1, True), (given, result.err)
            ran.append(" ".join(given))
            finish(folder)
            waiting += [one for one in next_commands(result.out + result.err) if " ".join(one) not in ran]
        return ran

    return run


def finish(folder: Path) -> None:
    """Put the maths into every draft below a folder, but those of Triton."""
    for path in folder.rglob("*"):
        if path.name in FINISHED and "triton" not in path.parent.name:
            path.write_text(FINISHED[path.name])
        if path.name == "solution.json":
            path.write_text(path.read_text().replace("TODO: ", ""))


@pytest.mark.nightly  # daily, docs/test_pages.py follows the page of a kernel, from its draft to the fastest
@pytest.mark.timeout(600)
def test_from_a_draft_to_the_fastest_kernel_by_printed_commands(follow: Callable[..., list[str]]) -> None:
    ran = follow(["new", "definition", "my_scale", "--description", "A row.", "-o", "a draft"], 6)
    assert ran[1:] == [
        "check a draft/",
        "add-definition a draft",
        "new solution my_scale --stock",
        "new solution my_scale -l triton",
        "dev my_scale_triton/",
    ]
    ran = follow(["new", "solution", "my_scale", "-l", "python", "-o", "a kernel"], 7)
    assert ran[1:3] == ["dev a kernel/", "add-solution a kernel/"]
    assert {"bench my_scale_python", "verify my_scale_python --gpu cpu", "best my_scale --gpu cpu"} <= set(ran)


def test_commands_are_found_in_sentences() -> None:
    text = "added. Next: tilegym-db dev 'a b/' --watch, then: tilegym-db add-solution 'a b/'\nno. Try: tilegym-db list, so that"
    assert next_commands(text) == [["dev", "a b/", "--watch"], ["add-solution", "a b/"], ["list"]]


NAMES = {name for panel in COMMANDS.values() for name in panel}
FILLED = {
    "--gpu": "h200", "--axes": "M=4,N=8", "-d": "row_scale", "--origin": "somewhere", "--since": "2026-01-01", "--name": "mine",
    "--to": "folder", "--because": "text", "--from-config": "config.json", "--dtype": "T=float32",
}  # fmt: skip
"""The values of options that are open in a text."""
READERS = {"best", "check", "explain", "list", "show", "sql", "task status", "data ingest"}
"""Commands that are run. The others are only parsed: they measure, write, compile, or need a network or a model."""
OPEN = re.compile(r"'?\{[^}]*\}|\[?\b[A-Z]{2,}\b(?:\.jsonl)?\]?")
"""What a text leaves open: a value, or a word in capital letters."""
FREE_WORDS = {"--verify", "on", "reads", "lists", "has", "ranks", "which", "continues"}


def printed_commands() -> list[str]:
    """Return every command of the package's texts, without ``tilegym-db``; what is open in a text stands as ``{}``."""
    found = set()
    sources = [path.read_text() for path in Path(tilegym_db.__file__).parent.rglob("*.py")]
    for source in sources:
        # Most modules print no command, and walking over a module takes long.
        for text in texts_of(ast.parse(source)) if "tilegym-db " in source else ():
            for part in text.split("tilegym-db ")[1:]:
                if re.split(r"\W", part + " ")[0] in NAMES or re.match(r"add-\w+", part):
                    found.add(command_at(part))
    return sorted(found)


def command_at(text: str) -> str:
    """Return the command that a text begins with: up to a mark, or to words of a sentence."""
    line = re.split(r"\n|[,;:)`]|' |\.(?: |$)|  | > | \(", text)[0].strip()
    line = re.sub(r"(--[a-z-]+)\{\}", r"\1", line)  # an option that is printed at times
    quoted = re.match(r"sql (['\"])(.*)", text, re.DOTALL)
    if quoted:  # a statement has any marks in it
        return f"sql {quoted[1]}{quoted[2].partition(quoted[1])[0]}{quoted[1]}"
    words = line.split(" ")
    ends = [index for index, word in enumerate(words) if index and word in FREE_WORDS and word != "--verify"]
    return OPEN.sub("{}", " ".join(words[: min(ends, default=len(words))]).strip(" .'\""))


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield every text of a module that is no docstring."""
    nodes = list(ast.walk(tree))
    bodies = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    seen = {id(one.body[0].value) for one in bodies if one.body and isinstance(one.body[0], ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            seen |= {id(part) for part in ast.walk(node)} - {id(node)}
            if id(node) not in seen:
                parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            yield node.value


def filled(line: str, value: str) -> list[str]:
    """Return the words of a printed command, with a value in each open place."""
    words = shlex.split(line if line.count("'") % 2 == 0 and line.count('"') % 2 == 0 else re.sub("['\"]", "", line))
    return [
        FILLED.get(words[index - 1], value) if word == "{}" else word.replace("{}", value)
        for index, word in enumerate(words)
    ]


PRINTED = printed_commands()


@pytest.mark.parametrize("line", PRINTED)
def test_every_printed_command_exists_with_its_options(line: str) -> None:
    command: Any = root_command()
    context = typer.Context(command)
    words = filled(line, "row_scale")
    while hasattr(command, "get_command"):
        context = typer.Context(command, info_name=words[0], parent=context)
        found = command.get_command(context, words[0])
        if found is None:
            assert getattr(command, "invoke_without_command", False), words
            break
        command, words = found, words[1:]
        if not words:
            break
    _, rest, _ = command.make_parser(typer.Context(command, parent=context)).parse_args(args=list(words))
    assert rest == []
    given = {option for word in words for parameter in command.params for option in parameter.opts if option == word}
    assert not {word for word in words if word.startswith("-")} - given


PLACE = re.compile(r"(?:path|folder|file|config|uri|address|place|root|target)$")


def unquoted_places() -> list[str]:
    """Return each path or address that a text puts into a command without quotes."""
    found = []
    for path in Path(tilegym_db.__file__).parent.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "tilegym-db " in source else ():
            if isinstance(node, ast.JoinedStr):
                said = ""
                for part in node.values:
                    if isinstance(part, ast.Constant):
                        said += str(part.value)
                    elif isinstance(part, ast.FormattedValue):
                        spelled, after = ast.unparse(part.value), said.rpartition("tilegym-db ")
                        is_in_command = after[1] and not re.search(r"[,;:]|\. ", after[2])
                        if is_in_command and PLACE.search(spelled):
                            found.append(f"{path.name}: {spelled}")
                        said += "{}"
    return found


def test_paths_and_addresses_in_printed_commands_are_quoted() -> None:
    assert unquoted_places() == []


@pytest.mark.sweep(16)
@pytest.mark.parametrize("line", [line for line in PRINTED if any(map(line.startswith, READERS))])
def test_printed_reader_runs_on_a_small_catalog(line: str, cli: Any, journal_traces: Callable[..., Any]) -> None:
    journal_traces(3.0)
    if "{}" in line and line.startswith("data ingest"):
        pytest.skip("needs files of traces")
    result = cli(*filled(line.replace("rms_norm", "row_scale"), "row_scale"))
    known = result.cause in {
        "data_set_unknown",
        "pattern_unmatched",
        "task_unknown",
    }  # of the values that were filled in
    assert result.code in (0, 1, 3) or known, (result.code, result.err)


@pytest.mark.parametrize("words", [["best"], ["show", "row_scale"]])
def test_explain_is_offered_with_all_that_it_needs(
    words: list[str], cli: Any, journal_traces: Callable[..., Any]
) -> None:
    journal_traces(3.0)
    (offered,) = re.findall(r"tilegym-db (explain .*)", cli(*words).err)
    assert "--axes M=4,N=8 --dtype T=float32" in offered
    assert cli(*offered.split()).code in (0, 3)
