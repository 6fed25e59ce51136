"""What a release says of itself in several files agrees."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import yaml
from marked_blocks import ROOT

import tilegym_db


def test_every_file_names_the_same_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert {citation["version"], newest[1]} == {tilegym_db.__version__}
    assert f"tilegym_db-{tilegym_db.__version__}-" in (ROOT / "README.md").read_text()


def test_workflows_and_templates_are_valid_with_known_commands():
    parsed = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml")}
    steps = [step.get("run", "") for step in parsed["ci.yml"]["jobs"]["test"]["steps"]]
    assert {"make install", "make test", "make demo"} <= set(steps)
    assert parsed["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    bounds = parsed["ci.yml"]["jobs"]["bounds"]
    assert bounds["strategy"]["matrix"]["versions"] == ["oldest", "newest"]
    assert "make bounds VERSIONS=${{ matrix.versions }}" in [step.get("run") for step in bounds["steps"]]


def test_a_release_runs_every_program_that_tries_an_installation():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    for name in ("environments.py", "first_steps.py"):
        (command,) = [line for text in commands for line in text.splitlines() if f"tools/{name}" in line]
        program = ROOT / "tools" / name
        options = [word for word in shlex.split(command) if word.startswith("--")]
        told = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True, check=True, cwd=ROOT)
        assert [option for option in options if option not in told.stdout] == []
    assert {"everything", "empty-machine", "surroundings", "first-steps"} == set(jobs["attach"]["needs"])


def test_pypi_gets_the_files_that_were_tried_without_a_token():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    job = jobs["pypi"]
    assert job["permissions"] == {"id-token": "write"}
    assert (job["needs"], job["environment"]) == ("attach", "pypi")
    assert "ref_type == 'tag'" in job["if"]
    assert [step["uses"].partition("@")[0] for step in job["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    assert not [step for step in job["steps"] if "password" in step.get("with", {})]


@pytest.mark.parametrize(("workflow", "job"), [("release.yml", "everything"), ("nightly.yml", "everything")])
def test_every_test_runs_nightly_and_before_a_release(workflow: str, job: str):
    jobs = yaml.safe_load((ROOT / ".github/workflows" / workflow).read_text())["jobs"]
    assert "make test-all" in [step.get("run") for step in jobs[job]["steps"]]


def test_impossible_surroundings_are_reported_and_are_no_result():
    from environments import why_not

    assert why_not([]) == ""
    assert why_not(["true"]) == ""
    assert "no_such_program" in why_not(["no_such_program"])
    assert why_not(["sh", "-c", "echo not permitted >&2; exit 1"]) == "not permitted"


def test_links_between_pages_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_numbers_of_decisions_in_code_and_pages_name_a_section():
    pages = [path for path in (ROOT / "docs/decisions").glob("*.md") if path.name != "README.md"]
    sections = {number for page in pages for number in re.findall(r"^## (\d{4}) ", page.read_text(), re.MULTILINE)}
    listed = set(re.findall(r"\b\d{4}\b", (ROOT / "docs/decisions/README.md").read_text()))
    files = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("tilegym_db/**/*.py"),
        *ROOT.glob("benchmarks/*.py"),
    ]
    cited = {
        (str(path.relative_to(ROOT)), number)
        for path in files
        for number in re.findall(r"decisions?(?:/[\w-]+\.md``,)?\s\[?(\d{4})\b", path.read_text())
    }
    assert len(cited) >= 10
    assert [one for one in sorted(cited) if one[1] not in sections] == []
    assert sections <= listed
