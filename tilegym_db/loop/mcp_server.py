"""A server of the Model Context Protocol over stdio, with the loop's commands as tools.

Each call runs the command line in a separate process, so that printed text never mixes with the protocol. Values of a client
are never read as options. Candidates run in a confined worker. Tools that write are offered only if the server was started
with that permission.
"""

from __future__ import annotations

import errno
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tilegym_db
from tilegym_db.errors import MissingPackageError

if TYPE_CHECKING:
    from anyio import CapacityLimiter
    from mcp.server.mcpserver import MCPServer

INSTRUCTIONS = (
    "tilegym-db judges GPU kernels. Read a task's prompt, write kernel.py and solution.json, and submit both. Reference, inputs, "
    "comparison, timing and verdict are the database's."
)
VERDICT_STATUSES = (0, 1, 3)
"""Exit statuses of ``task submit`` that report a verdict: an award, a refusal, no GPU."""
CHECK_STATUSES = (0, 1)
"""Exit statuses of ``check``: no finding, findings."""
MAX_PROCESSES = 2
"""Maximum number of commands at a time. More calls wait."""
MAX_LIST = 20_000
"""Maximum number of characters of a list's entries in one answer."""


def serve(allow_submit: bool) -> None:
    """Answer on stdin and stdout until the client disconnects."""
    make_server(allow_submit).run("stdio")


def make_server(allow_submit: bool) -> MCPServer:
    """Return the server with its tools. Tools that write need ``allow_submit``."""
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise MissingPackageError(
            "the server needs the package mcp. Try: pip install 'tilegym-db[mcp]'", code="package_missing"
        ) from None
    from mcp.server.mcpserver.exceptions import ToolError

    class Server(MCPServer):  # type: ignore[misc]  # the types of mcp are not read
        """A server that refuses an argument of a name that its tool does not have; the package would leave it out."""

        async def call_tool(self, name: str, arguments: dict[str, Any], *context: Any, **named: Any) -> Any:
            tool = next((tool for tool in READERS + WRITERS if tool.__name__ == name), None)
            names = arguments if tool is None else inspect.signature(tool).parameters
            if unknown := [word for word in arguments if word not in names]:
                raise ToolError(f"{name} has no argument {unknown[0]!r}; it has {', '.join(names) or 'none'}.")
            return await super().call_tool(name, arguments, *context, **named)

    server = Server(
        "tilegym-db",
        instructions=INSTRUCTIONS,
        version=tilegym_db.__version__,
        log_level="WARNING",  # a client that does not read stderr would block the server
    )
    for tool in READERS + (WRITERS if allow_submit else ()):
        server.add_tool(tool)
    return server


@cache
def _processes() -> CapacityLimiter:
    import anyio  # installed with mcp

    return anyio.CapacityLimiter(MAX_PROCESSES)


def command_words(command: str, values: Sequence[str | None], options: Mapping[str, object]) -> list[str]:
    """Return words for a command line that read no value as an option, not even one that begins with ``-``."""
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    return [*command.split(), *named, "--", *(value for value in values if value is not None)]


async def _text(command: str, *values: str | None, answers: Sequence[int] = (0,), **options: object) -> str:
    """Run one command with values and options, and return its standard output.

    Raises:
        ToolError: the exit status is not in ``answers``; the client reads the command's reason.
    """
    import anyio
    from mcp.server.mcpserver.exceptions import ToolError

    words = [sys.executable, "-m", "tilegym_db", *command_words(command, values, options)]
    async with _processes():
        try:
            done = await anyio.run_process(words, stdin=subprocess.DEVNULL, check=False)
        except ValueError as error:  # a value with a null character
            raise ToolError(f"the values cannot be passed to a command: {error}") from None
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            longest = max(map(len, words))
            raise ToolError(f"the values cannot be passed to a command: one has {longest:,} characters") from None
    if done.returncode not in answers:
        raise ToolError(_reason(done.stderr.decode(errors="replace"), done.returncode))
    return done.stdout.decode()


def _reason(stderr: str, status: int) -> str:
    """Return the last error of a command's standard error, else its last line."""
    lines = stderr.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.lower().startswith("error: ")]
    text = "\n".join(lines[starts[-1] if starts else -1 :])
    return text[len("error: ") :] if starts else text or f"the command ended with status {status}"


async def _json(command: str, *values: str | None, answers: Sequence[int] = (0,), **options: object) -> Any:
    return json.loads(await _text(f"{command} --json", *values, answers=answers, **options))


def page_of(entries: Sequence[Any], start: int) -> dict[str, Any]:
    """Return the entries from ``start`` that fit into an answer, their total, and the next start if some are left."""
    end, length = start, 0
    while end < len(entries):
        length += len(json.dumps(entries[end]))
        if length > MAX_LIST and end > start:
            break
        end += 1
    return {"entries": [*entries[start:end]], "total": len(entries), "next_start": end if end < len(entries) else None}


async def list_definitions(op_type: str | None = None, start: int = 0) -> dict[str, Any]:
    """List operators with their families, verified languages and numbers of solutions and workloads.

    Args:
        op_type: a family; all by default.
        start: number of entries to skip: the ``next_start`` of the answer before.
    """
    return page_of(await _json("list", op_type=op_type), max(start, 0))


async def show_definition(name: str) -> dict[str, Any]:
    """Show one operator in full: axes, tensors, constraints, reference."""
    found: dict[str, Any] = await _json("show", name)
    return found


async def list_awards(op_type: str | None = None, start: int = 0) -> dict[str, Any]:
    """List awards, the kernels that beat the best baseline by 1.10x, and whether their evidence is still valid.

    Args:
        op_type: a family; all by default.
        start: number of entries to skip: the ``next_start`` of the answer before.
    """
    return page_of(await _json("list --awards", op_type=op_type), max(start, 0))


async def task_status(task: str | None = None, start: int = 0) -> dict[str, Any]:
    """List tasks, or the attempts at one task with the steps passed and the reason for the refusal.

    Args:
        task: its id, or how it begins; all tasks by default.
        start: number of entries to skip: the ``next_start`` of the answer before.
    """
    return page_of(await _json("task status", task), max(start, 0))


async def task_prompt(task: str) -> str:
    """Return the author's page of a task: operator, shapes, bars, rules, earlier attempts, patterns."""
    return await _text("task prompt", task)


async def recommend(config: str, gpu: str) -> dict[str, Any]:
    """List the awarded kernels that could serve a model's calls. Nothing is applied, and ratios are per operator.

    Args:
        config: path of a model's config.json on this machine.
        gpu: slug or family.
    """
    found: dict[str, Any] = await _json("task recommend", config, gpu=gpu)
    return found


async def check_architecture(start: int = 0) -> dict[str, Any]:
    """Check the whole catalog: missing kernels per language, missing traces of the newest versions, names, pattern evidence.

    Args:
        start: number of entries to skip: the ``next_start`` of the answer before.
    """
    return page_of(await _json("check --architecture", answers=CHECK_STATUSES), max(start, 0))


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
    found: dict[str, Any] = await _json("task from-model", config, language=language, gpu=gpu, prompt_tokens=prompt)
    return found


async def task_create(
    definition: str, language: str = "triton", gpu: str = "auto", workload: str | None = None
) -> dict[str, Any]:
    """Create a task for an operator, a language and a GPU, and return it with its id and bars."""
    found: dict[str, Any] = await _json("task create", definition, language=language, gpu=gpu, workload=workload)
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
        found: dict[str, Any] = await _json("task submit", task, folder, answers=VERDICT_STATUSES)
    return found


READERS = (list_definitions, show_definition, list_awards, task_status, task_prompt, recommend, check_architecture)
WRITERS = (task_create, task_from_model, task_submit)
