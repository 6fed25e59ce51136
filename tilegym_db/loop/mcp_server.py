"""A server of the Model Context Protocol over stdio, with the loop's commands as tools.

Each call runs the command line in a separate process, so that printed text never mixes with the protocol. Candidates run in
a confined worker. Tools that write are offered only if the server was started with that permission.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tilegym_db
from tilegym_db.errors import MissingPackageError, TilegymDBError

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

INSTRUCTIONS = (
    "tilegym-db judges GPU kernels. Read a task's prompt, write kernel.py and solution.json, and submit both. Reference, inputs, "
    "comparison, timing and verdict are the database's."
)
VERDICT_STATUSES = (0, 1, 3)
"""Exit statuses of ``task submit`` that report a verdict: an award, a refusal, no GPU."""
CHECK_STATUSES = (0, 1)
"""Exit statuses of ``check``: no finding, findings."""


def serve(allow_submit: bool) -> None:
    """Answer on stdin and stdout until the client disconnects.

    Raises:
        MissingPackageError: the package ``mcp`` is not installed.
    """
    make_server(allow_submit).run("stdio")


def make_server(allow_submit: bool) -> MCPServer:
    """Return the server with its tools. Tools that write need ``allow_submit``."""
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise MissingPackageError(
            "the server needs the package mcp. Try: pip install 'tilegym-db[mcp]'", code="package_missing"
        ) from None
    server = MCPServer("tilegym-db", instructions=INSTRUCTIONS, version=tilegym_db.__version__)
    for tool in READERS + (WRITERS if allow_submit else ()):
        server.add_tool(tool)
    return server


async def _command(*arguments: str, answers: Sequence[int] = (0,)) -> str:
    """Run one command and return its standard output.

    Raises:
        TilegymDBError: the exit status is not in ``answers``; the message is the command's last line.
    """
    import anyio  # installed with mcp

    command = [sys.executable, "-m", "tilegym_db", *arguments]
    done = await anyio.run_process(command, stdin=subprocess.DEVNULL, check=False)
    if done.returncode not in answers:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise TilegymDBError(
            said.splitlines()[-1] if said else f"it ended with status {done.returncode}", code="command_failed"
        )
    return done.stdout.decode()


async def _json(*arguments: str, answers: Sequence[int] = (0,)) -> Any:
    return json.loads(await _command(*arguments, "--json", answers=answers))


async def list_definitions(op_type: str | None = None) -> list[dict[str, Any]]:
    """List operators with their families, verified languages and numbers of solutions and workloads."""
    found: list[dict[str, Any]] = await _json("list", *(["--op-type", op_type] if op_type else []))
    return found


async def show_definition(name: str) -> dict[str, Any]:
    """Show one operator in full: axes, tensors, constraints, reference."""
    found: dict[str, Any] = await _json("show", name)
    return found


async def list_awards() -> list[dict[str, Any]]:
    """List awards, the kernels that beat the best baseline by 1.10x, and whether their evidence is still valid."""
    found: list[dict[str, Any]] = await _json("list", "--awards")
    return found


async def task_status(task: str | None = None) -> list[dict[str, Any]]:
    """List tasks, or the attempts at one task with the steps passed and the reason for the refusal."""
    found: list[dict[str, Any]] = await _json("task", "status", *([task] if task else []))
    return found


async def task_prompt(task: str) -> str:
    """Return the author's page of a task: operator, shapes, bars, rules, earlier attempts, patterns."""
    return await _command("task", "prompt", task)


async def recommend(config: str, gpu: str) -> dict[str, Any]:
    """List the awarded kernels that could serve a model's calls. Nothing is applied, and ratios are per operator.

    Args:
        config: path of a model's config.json on this machine.
        gpu: slug or family.
    """
    found: dict[str, Any] = await _json("task", "recommend", config, "--gpu", gpu)
    return found


async def check_architecture() -> list[str]:
    """Check the whole catalog: missing kernels per language, missing traces of the newest versions, names, pattern evidence."""
    found: list[str] = await _json("check", "--architecture", answers=CHECK_STATUSES)
    return found


async def task_from_model(
    config: str, language: str = "triton", gpu: str = "auto", prompt: int = 128
) -> dict[str, Any]:
    """Profile a model, rank its code by time, and create a task per operator without a verified kernel.

    Args:
        config: path of a model's config.json on this machine.
        language: language of the kernels.
        gpu: slug, family, or ``auto`` for the GPU of this machine.
        prompt: number of random tokens in the profiled call.
    """
    options = ["--language", language, "--gpu", gpu, "--prompt-tokens", str(prompt)]
    found: dict[str, Any] = await _json("task", "from-model", config, *options)
    return found


async def task_create(
    definition: str, language: str = "triton", gpu: str = "auto", workload: str | None = None
) -> dict[str, Any]:
    """Create a task for an operator, a language and a GPU, and return it with its id and bars."""
    options = ["--language", language, "--gpu", gpu, *(["--workload", workload] if workload else [])]
    found: dict[str, Any] = await _json("task", "create", definition, *options)
    return found


async def task_submit(task: str, kernel: str, solution: dict[str, Any]) -> dict[str, Any]:
    """Submit a kernel and return the verdict: received, scanned, compiled, screened, verified.

    Args:
        task: its id.
        kernel: text of kernel.py.
        solution: content of solution.json.
    """
    with tempfile.TemporaryDirectory(prefix="tilegym-db-") as folder:
        Path(folder, "kernel.py").write_text(kernel)
        Path(folder, "solution.json").write_text(json.dumps(solution))
        found: dict[str, Any] = await _json("task", "submit", task, folder, answers=VERDICT_STATUSES)
    return found


READERS = (list_definitions, show_definition, list_awards, task_status, task_prompt, recommend, check_architecture)
WRITERS = (task_create, task_from_model, task_submit)
