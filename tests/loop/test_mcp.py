"""The server for agents, asked by the official client over stdio."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed; it is part of the extra dev")
anyio = pytest.importorskip("anyio")

from tilegym_db.loop.mcp_server import MAX_LIST  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
READERS = {
    "check_architecture", "list_definitions", "list_awards", "recommend", "show_definition", "task_prompt", "task_status",
}  # fmt: skip
WRITERS = {"task_create", "task_from_model", "task_submit"}
TINY = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
SOLUTION = {
    "name": "mine",
    "definition": "rms_norm",
    "author": "an agent",
    "spec": {"language": "python", "entry_point": "kernel.py::run", "dtypes": {"T": ["float32"]}},
    "sources": [{"path": "kernel.py"}],
}
ONE_SHAPE = "d3415da7-3560-5724-8778-0414b26baf34"
"""256 rows of 2048 values in float32."""
CHEAT = "import socket\n\n\ndef run(x, weight, eps, out):\n    out.zero_()\n"


WRONG = "def run(x, weight, eps, out):\n    out.copy_(x * weight)\n"


def asked(home: Path, calls: list[tuple[str, dict[str, Any]]], *options: str) -> tuple[set[str], list[Any]]:
    """The tools of a server, and the answers to calls; ``TASK`` and functions take an argument from earlier answers."""
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "tilegym_db", "mcp", *options], env=environment
    )

    async def session() -> tuple[set[str], list[Any]]:
        async with mcp.stdio_client(server) as streams, mcp.ClientSession(*streams) as client:
            await client.initialize()
            tools = {tool.name for tool in (await client.list_tools()).tools}
            answers: list[Any] = []
            for name, arguments in calls:
                given = {key: answers[0]["id"] if value == "TASK" else value for key, value in arguments.items()}
                given = {key: value(answers) if callable(value) else value for key, value in given.items()}
                answers.append(content(await client.call_tool(name, given)))
            return tools, answers

    found: tuple[set[str], list[Any]] = anyio.run(session)
    return found


def content(result: Any) -> Any:
    text = "".join(part.text for part in result.content)
    if getattr(result, "is_error", False):
        return {"error": text}
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.turn("tilegym_db/loop/mcp_server.py", "tilegym_db/cli/task.py")  # a server and a submission
@pytest.mark.slow
def test_client_creates_a_task_and_gets_a_verdict_on_a_kernel(home: Path) -> None:
    create = {"definition": "rms_norm", "language": "python", "gpu": "cpu", "workload": ONE_SHAPE}
    tools, (task, page, verdict, status) = asked(
        home,
        [
            ("task_create", create),
            ("task_prompt", {"task": "TASK"}),
            ("task_submit", {"task": "TASK", "kernel": CHEAT, "solution": SOLUTION}),
            ("task_status", {"task": "TASK"}),
        ],
        "--allow-submit",
    )
    assert tools == READERS | WRITERS
    assert f"# Task {task['id']}" in page
    assert (verdict["verdict"], verdict["stage"]) == ("refused", "received")
    assert verdict["gate"].startswith("scan")
    assert "kernel.py:1" in verdict["reason"]
    assert [row["verdict"] for row in status["entries"]] == ["refused"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kernel_of_a_client_runs_in_the_sandbox_and_is_judged(home: Path) -> None:
    create = {"definition": "rms_norm", "language": "python", "gpu": "cpu", "workload": ONE_SHAPE}
    _, (task, verdict, status) = asked(
        home,
        [
            ("task_create", create),
            ("task_submit", {"task": "TASK", "kernel": WRONG, "solution": SOLUTION}),
            ("task_status", {"task": "TASK"}),
        ],
        "--allow-submit",
    )
    assert [one["axes"] for one in task["workloads"]] == [{"M": 256, "N": 2048}]
    assert (verdict["verdict"], verdict["stage"]) == ("refused", "compiled"), verdict
    assert "INCORRECT_NUMERICAL" in verdict["reason"]
    assert verdict["trace_ids"]  # measured: a confined worker ran it
    assert verdict["command"].startswith("tilegym-db debug reproduce rms_norm_python_")
    (row,) = status["entries"]
    assert (row["passed"], row["verdict"]) == ("compiled", "refused")
    assert "INCORRECT_NUMERICAL" in row["reason"]


SLOW = """def run(x, weight, eps, out):
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    out.copy_(weight * (wide * scale).to(x.dtype))
"""
"""Right, and slower than stock code."""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_client_hears_why_each_candidate_failed(home: Path) -> None:
    """From the task over a wrong kernel and its page of reasons to a right one that misses the bar."""
    create = {"definition": "rms_norm", "language": "python", "gpu": "cpu", "workload": ONE_SHAPE}
    left_out = {**SOLUTION, "spec": {**SOLUTION["spec"], "dtypes": {"T": ["bfloat16"]}}}
    _, (_, other, wrong, page, slow, status) = asked(
        home,
        [
            ("task_create", create),
            ("task_submit", {"task": "TASK", "kernel": SLOW, "solution": left_out}),
            ("task_submit", {"task": "TASK", "kernel": WRONG, "solution": SOLUTION}),
            ("task_prompt", {"task": "TASK"}),
            ("task_submit", {"task": "TASK", "kernel": SLOW, "solution": SOLUTION}),
            ("task_status", {"task": "TASK"}),
        ],
        "--allow-submit",
    )
    assert (other["gate"], other["trace_ids"]) == ("received", [])
    assert "float32 is not among bfloat16" in other["reason"]
    assert "INCORRECT_NUMERICAL" in wrong["reason"]
    told = page.partition("## 9.")[2]
    assert "INCORRECT_NUMERICAL" in told
    assert "float32 is not among bfloat16" in told
    assert (slow["verdict"], slow["gate"]) == ("refused", "speed"), slow
    assert "1.10x is required" in slow["reason"]
    assert [(row["verdict"], bool(row["reason"])) for row in status["entries"]] == [("refused", True)] * 3


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_client_has_a_model_profiled_and_reads_its_tasks(home: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    ask = {"config": str(config), "language": "python", "gpu": "cpu", "prompt": 16}
    _, (found, tasks, lacking) = asked(
        home, [("task_from_model", ask), ("task_status", {}), ("check_architecture", {})], "--allow-submit"
    )
    assert {"rms_norm", "swiglu"} <= {one["definition"] for one in found["pieces"]}
    assert {task["definition"] for task in tasks["entries"]} <= {one["definition"] for one in found["pieces"]}
    assert all(isinstance(line, str) for line in lacking["entries"])


@pytest.mark.slow
def test_without_leave_nothing_that_writes_is_offered(home: Path) -> None:
    tools, (answer,) = asked(home, [("task_create", {"definition": "rms_norm"})])
    assert tools == READERS
    assert "task_create" in answer["error"]
    assert not (home / "loop").exists()


GOOD: dict[str, dict[str, Any]] = {
    "check_architecture": {},
    "list_awards": {"op_type": "norm"},
    "list_definitions": {"op_type": "norm"},
    "recommend": {"config": "CONFIG", "gpu": "h200"},
    "show_definition": {"name": "rms_norm"},
    "task_create": {"definition": "rms_norm", "gpu": "h200", "workload": "M=1024,N=4096"},
    "task_from_model": {"config": "CONFIG", "gpu": "cpu"},
    "task_prompt": {"task": "TASK"},
    "task_status": {"task": "TASK"},
    "task_submit": {"task": "TASK", "kernel": CHEAT, "solution": SOLUTION},
}
"""Arguments for each tool."""
UNKNOWN = {
    "list_awards": {"op_type": "nrm"},
    "list_definitions": {"op_type": "nrm"},
    "recommend": {"config": "/nowhere/config.json"},
    "show_definition": {"name": "rms_nrom"},
    "task_create": {"language": "trion"},
    "task_from_model": {"language": "cuda"},
    "task_prompt": {"task": "nothing"},
    "task_status": {"task": "nothing"},
    "task_submit": {"task": "nothing"},
}
"""An argument for each tool that names what does not exist."""
COSTLY = {"check_architecture", "task_from_model"}
"""Tools whose answer takes minutes; other tests ask them."""


def refusals(given: dict[str, Any], tool: str) -> list[tuple[dict[str, Any], str]]:
    """Bad arguments for a tool, of each class, with a part of the reason that the client has to read."""
    bad: list[tuple[dict[str, Any], str]] = [({**given, "more": 1}, "no argument 'more'")]
    bad += [({**given, **UNKNOWN[tool]}, str(next(iter(UNKNOWN[tool].values()))))] if tool in UNKNOWN else []
    for name, value in given.items():
        bad += [({**given, name: 5}, name)]
        if isinstance(value, str) and name != "kernel":
            bad += [({**given, name: "a\0b"}, "null"), ({**given, name: "x" * 200_000}, "200,0")]
    return bad


@pytest.mark.turn("tilegym_db/loop/mcp_server.py")  # a separate server; the test of a verdict asks one daily
@pytest.mark.slow
@pytest.mark.sweep(10)
@pytest.mark.parametrize("tool", GOOD)
def test_client_reads_the_reason_of_every_refusal(tool: str, home: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    given = {name: str(config) if value == "CONFIG" else value for name, value in GOOD[tool].items()}
    walk: list[tuple[str, dict[str, Any], str | None]] = [("task_create", GOOD["task_create"], None)]
    walk += [] if tool in COSTLY else [(tool, given, None)]
    walk += [(tool, bad, reason) for bad, reason in refusals(given, tool)]
    tools, answers = asked(home, [(tool, given) for tool, given, _ in walk], "--allow-submit")
    assert tools == set(GOOD)
    for answer, (tool, given, reason) in zip(answers, walk, strict=True):
        error = answer.get("error", "") if isinstance(answer, dict) else ""
        assert (reason or "") in error, (tool, str(given)[:200], error[:500])
        assert bool(error) == (reason is not None), (tool, str(given)[:200], error[:500])
        assert "Traceback" not in error
        assert sys.executable not in error


@pytest.mark.nightly  # the command that answers is asked daily, by cli/test_list_and_show.py
@pytest.mark.slow
def test_misspelt_name_is_answered_with_the_nearest(home: Path) -> None:
    _, (answer,) = asked(home, [("show_definition", {"name": "rms_nrom"})])
    assert "Did you mean 'rms_norm'" in answer["error"]


@pytest.mark.turn("tilegym_db/loop/mcp_server.py")  # a separate server
@pytest.mark.slow
def test_value_of_a_client_is_never_an_option(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.txt"
    file.write_text("kept")
    value = f"--output={file}"
    calls = [
        ("task_status", {"task": value}),
        ("task_prompt", {"task": value}),
        ("show_definition", {"name": value}),
        ("list_definitions", {"op_type": value}),
        ("list_awards", {"op_type": value}),
        ("recommend", {"config": value, "gpu": value}),
        ("task_create", {"definition": value, "workload": value}),
    ]
    _, answers = asked(home, calls, "--allow-submit")
    assert file.read_text() == "kept"
    assert all(value in answer["error"] for answer in answers), answers


@pytest.mark.turn("tilegym_db/loop/mcp_server.py")  # a separate server
@pytest.mark.slow
def test_long_list_comes_in_pages_without_a_gap(home: Path) -> None:
    pages: list[dict[str, Any]] = [
        {},
        {"start": lambda answers: answers[0]["next_start"]},
        {"start": lambda answers: answers[0]["total"]},
    ]
    _, (first, second, last) = asked(home, [("list_awards", page) for page in pages])
    assert len(json.dumps(first)) < 2 * MAX_LIST
    assert first["next_start"] == len(first["entries"]) < first["total"]
    assert second["entries"]
    assert second["entries"][0] not in first["entries"]
    assert (last["entries"], last["next_start"]) == ([], None)


@pytest.mark.turn("tilegym_db/loop/mcp_server.py")  # a separate server
@pytest.mark.slow
def test_server_writes_nothing_to_stderr_on_a_refusal(home: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tilegym_db", "mcp"]
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    lines = [
        {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": "show_definition", "arguments": {"name": "no"}},
        },
    ]
    environment = {**os.environ, "TILEGYM_DB_HOME": str(home), "PYTHONPATH": str(ROOT)}
    with (
        (tmp_path / "stderr").open("wb+") as stderr,
        subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
        ) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        for line in lines:
            server.stdin.write(json.dumps(line).encode() + b"\n")
            server.stdin.flush()
        answers = [json.loads(server.stdout.readline()) for _ in range(2)]
        server.stdin.close()
        server.wait(60)
    assert answers[1]["result"]["isError"] is True
    assert (tmp_path / "stderr").read_bytes() == b""
