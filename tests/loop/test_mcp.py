"""The server for agents, asked by the official client over stdio."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed; it is part of the extra dev")
anyio = pytest.importorskip("anyio")

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
    """The tools of a server, and the answers to calls; a call's arguments may name the task of an earlier answer."""
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
                answers.append(content(await client.call_tool(name, given)))
            return tools, answers

    found: tuple[set[str], list[Any]] = anyio.run(session)
    return found


def content(result: Any) -> Any:
    text = "".join(part.text for part in result.content)
    if getattr(result, "is_error", False):
        return {"error": text}
    if set(result.structured_content or {}) == {"result"}:  # a list, of which each item is a text of its own beside it
        return result.structured_content["result"]
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.slow
def test_a_client_lists_tools_creates_a_task_submits_a_kernel_and_reads_the_verdict(home: Path) -> None:
    create = {"definition": "rms_norm", "language": "python", "gpu": "cpu", "workload": "cpu"}
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
    assert status["verdict"] == "refused" if isinstance(status, dict) else status[0]["verdict"] == "refused"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kernel_that_a_client_submits_is_run_in_the_sandbox_and_judged(home: Path) -> None:
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
    (row,) = status if isinstance(status, list) else [status]
    assert (row["passed"], row["verdict"]) == ("compiled", "refused")
    assert "INCORRECT_NUMERICAL" in row["reason"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_client_has_a_model_profiled_and_reads_the_tasks_it_is_worth(home: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    ask = {"config": str(config), "language": "python", "gpu": "cpu", "prompt": 16}
    _, (found, tasks, lacking) = asked(
        home, [("task_from_model", ask), ("task_status", {}), ("check_architecture", {})], "--allow-submit"
    )
    assert {"rms_norm", "swiglu"} <= {one["definition"] for one in found["pieces"]}
    assert {task["definition"] for task in tasks} <= {one["definition"] for one in found["pieces"]}
    assert all(isinstance(line, str) for line in lacking)


@pytest.mark.slow
def test_without_leave_nothing_that_writes_is_offered(home: Path) -> None:
    tools, (answer,) = asked(home, [("task_create", {"definition": "rms_norm"})])
    assert tools == READERS
    assert "task_create" in answer["error"]
    assert not (home / "loop").exists()
