"""The site's page of commands, from their own help."""

from __future__ import annotations

from typing import Any

from tilegym_db.cli.commands import COMMANDS, EPILOG, load_command

__all__ = ["reference_text"]

WIDTH = 100

HEAD = """# Commands

`tilegym-db COMMAND --help` prints the same.

- Results go to stdout, notes and progress to stderr.
- {epilog}
- A table has the width of the terminal (80 columns in a pipe, or `COLUMNS`): less important columns are left out first, and
  long names lose their middle. `--wide` shows everything. Programs take `--json`, `--csv`, `--parquet` or `--arrow`, to stdout
  or into a file with `-o FILE`.
- `--axes`, `--dtype`, `--scalar`, `--layout` and `--config` take `NAME=VALUE`, several with commas or the option again.
- `tilegym-db --install-completion` lets the shell complete commands, definitions, solutions, GPUs, languages and views.
"""


def reference_text() -> str:
    """Return the whole page as Markdown."""
    parts = [HEAD.format(epilog=EPILOG)]
    for panel, commands in COMMANDS.items():
        parts.append(f"\n## {panel}\n")
        for name in commands:
            command = load_command(name)
            inner = getattr(command, "commands", {})
            every = {name: command} | {f"{name} {verb}": inner[verb] for verb in inner}
            parts += [f"\n### {words}\n\n```text\n{_help(words, one)}\n```\n" for words, one in every.items()]
    return "".join(parts)


def _help(words: str, command: Any) -> str:
    with command.context_class(
        command, info_name=f"tilegym-db {words}", terminal_width=WIDTH, help_option_names=["-h", "--help"]
    ) as context:
        text: str = command.get_help(context)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()
