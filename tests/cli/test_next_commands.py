"""The commands that are printed as the next ones run as they are printed, in a folder whose name has a space."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    assert {"bench my_scale_python", "verify --gpu cpu", "best --gpu cpu"} <= set(ran)


def test_commands_are_found_in_sentences() -> None:
    text = "added. Next: tilegym-db dev 'a b/' --watch, then: tilegym-db add-solution 'a b/'\nno. Try: tilegym-db list, so that"
    assert next_commands(text) == [["dev", "a b/", "--watch"], ["add-solution", "a b/"], ["list"]]
