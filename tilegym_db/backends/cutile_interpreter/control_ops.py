"""Writes what surrounds the operations on tiles: blocks of the grid, loops, branches, assertions."""

from __future__ import annotations

from typing import Any

from tilegym_db.backends.cutile_interpreter.writer import Writer, emits

__all__: list[str] = []


@emits("tile_bid")
def _block_index(writer: Writer, op: Any) -> None:
    writer.names[op.result_var.name] = f"block_{op.axis}"


@emits("tile_num_blocks")
def _block_count(writer: Writer, op: Any) -> None:
    writer.uniform(op.result_var, f"blocks_{op.axis}")


@emits("make_token", "join_tokens", "tile_printf")
def _nothing(writer: Writer, op: Any) -> None:
    """Tokens only order operations; what is printed is not a result."""


@emits("assert")
def _assert(writer: Writer, op: Any) -> None:
    writer.line(f"require({writer.of(op.cond)}, {op.message!r})")


emits("loop")(Writer.loop)
emits("ifelse")(Writer.branch)
emits("continue")(lambda writer, op: writer.leave("loop", op.values, "continue"))
emits("break")(lambda writer, op: writer.leave("loop", op.values, "break"))
emits("end_branch")(lambda writer, op: writer.leave("branch", op.outputs, ""))
emits("return")(lambda writer, op: writer.line("return"))
