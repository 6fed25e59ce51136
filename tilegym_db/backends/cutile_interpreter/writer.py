"""Translates a kernel from cuTile's intermediate form, after type inference, into a Python function over NumPy arrays.

Each operation becomes one or two lines. Operations that do not depend on the block run once per launch. The others form
an inner function that runs once per block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tilegym_db.backends.cutile_interpreter import tiles
from tilegym_db.errors import SolutionError

Emit = Callable[["Writer", Any], None]
_EMIT: dict[str, Emit] = {}
_ONCE: set[str] = set()


def emits(*opcodes: str, once: bool = False) -> Callable[[Emit], Emit]:
    """Register the function that writes these operations; ``once`` if equal operands always give equal results."""

    def register(function: Emit) -> Emit:
        for opcode in opcodes:
            _EMIT[opcode] = function
            if once:
                _ONCE.add(opcode)
        return function

    return register


def refuse(op: Any, what: str = "") -> SolutionError:
    """Return the error for an operation that the interpreter does not support."""
    detail = f" with {what}" if what else ""
    return SolutionError(f"The cuTile interpreter has no '{op.op}'{detail} ({op.loc}).", code="not_interpreted")


@dataclass
class _Region:
    """A loop, a branch or a function body that is being written."""

    kind: str
    targets: tuple[str, ...] = ()
    pointers: tuple[str | None, ...] = ()


class Writer:
    """The text of one kernel so far, the objects that it names, and the names of the kernel's variables in it."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.memories: dict[str, str] = {}
        """The memory that a pointer points into, by the pointer's variable."""
        self.views: dict[str, tuple[Any, Any]] = {}
        """The operation that made an array or a partition, and its memory, by variable."""
        self.written: set[str] = set()
        self._early: list[str] = []
        self._lines: list[str] = []
        self._depth = 2
        self._regions: list[_Region] = []
        self._uniform: set[str] = set()
        self._count = 0

    # -- names --------------------------------------------------------------------------------------------------------

    def name(self, var: Any) -> str:
        """Return a new name for a variable."""
        self._count += 1
        return self.names.setdefault(var.name, f"v{self._count}")

    def object(self, value: Any) -> str:
        """Store an object and return its name in the text."""
        self._count += 1
        name = f"k{self._count}"
        self.objects[name] = value
        return name

    def of(self, var: Any) -> str:
        """Return the name of a variable."""
        return self.names[var.name]

    def alias(self, new: Any, old: Any) -> None:
        """Give a variable the value of another one."""
        self.names[new.name] = self.names[old.name]
        for table in (self.memories, self.views):
            if old.name in table:
                table[new.name] = table[old.name]  # type: ignore[assignment]
        if old.name in self._uniform:
            self._uniform.add(new.name)

    def parameter(self, var: Any) -> str:
        """Return the name of a kernel parameter, whose value is the same in every block."""
        self._uniform.add(var.name)
        return self.name(var)

    def uniform(self, var: Any, name: str) -> None:
        """Name a variable that is the same in every block."""
        self._uniform.add(var.name)
        self.names[var.name] = name

    # -- lines --------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        """Write one line of the block's function."""
        self._lines.append("    " * self._depth + text)

    def result(self, op: Any, text: str) -> None:
        """Assign the only result of an operation."""
        var = op.result_var
        early = op.op in _ONCE and all(operand.name in self._uniform for operand in op.all_inputs())
        if early and len(self._regions) == 0:
            self._uniform.add(var.name)
            self._early.append(f"    {self.name(var)} = {text}")
        else:
            self.line(f"{self.name(var)} = {text}")

    def rounded(self, text: str, dtype: str) -> str:
        """Return the text that rounds a float32 expression to ``dtype`` if values of that type are stored as float32."""
        narrowed = tiles.rounder(dtype)
        return text if narrowed is None else f"{self.object(narrowed)}({text})"

    @contextmanager
    def _indented(self, region: _Region) -> Any:
        self._regions.append(region)
        self._depth += 1
        yield
        self._depth -= 1
        self._regions.pop()

    # -- blocks -------------------------------------------------------------------------------------------------------

    def block(self, block: Any) -> None:
        """Write the operations of one block."""
        for op in block:
            if op.op not in _EMIT:
                raise refuse(op)
            _EMIT[op.op](self, op)

    def nested(self, block: Any, region: _Region) -> None:
        """Write a block inside of a loop, a branch or a function."""
        with self._indented(region):
            before = len(self._lines)
            self.block(block)
            if len(self._lines) == before:
                self.line("pass")

    def function(self, block: Any) -> str:
        """Write a function with the block's parameters and return its name."""
        self._count += 1
        name = f"f{self._count}"
        self.line(f"def {name}({', '.join(self.name(var) for var in block.params)}):")
        self.nested(block, _Region("function"))
        return name

    def loop(self, op: Any) -> None:
        """Write a loop; each iteration assigns the carried values to fixed names, which hold the results at the end."""
        kept = [(var, init) for var, init in zip(op.body_vars, op.initial_values, strict=True) if _counts(var)]
        for var, init in kept:
            self._carry(var, init)
        targets = tuple(self.name(var) for var, _ in kept)
        self._assign(targets, [init for _, init in kept])
        region = _Region("loop", targets, tuple(self.memories.get(var.name) for var, _ in kept))
        if op.is_for_loop:
            at, host = self.name(op.induction_var), self.object(tiles.host_dtype(_dtype(op.induction_var)))
            bounds = ", ".join(self.of(var) for var in (op.start, op.stop, op.step))
            self.line(f"for {at} in range({bounds}):")
            with self._indented(_Region("loop")):
                self.line(f"{at} = {host}({at})")
        else:
            self.line("while True:")
        self.nested(op.body, region)
        for result, var in zip([var for var in op.result_vars if _counts(var)], [var for var, _ in kept], strict=True):
            self._carry(result, var)
            self.line(f"{self.name(result)} = {self.of(var)}")

    def branch(self, op: Any) -> None:
        """Write two blocks, one of which runs."""
        results = [var for var in op.result_vars if _counts(var)]
        if any(_is_pointer(var) for var in results):
            raise refuse(op, "a pointer that it chooses")
        region = _Region("branch", tuple(self.name(var) for var in results))
        self.line(f"if {self.of(op.cond)}:")
        self.nested(op.then_block, region)
        self.line("else:")
        self.nested(op.else_block, region)

    def leave(self, kind: str, values: Any, word: str) -> None:
        """Assign the results of the innermost region of a kind, and write the jump."""
        region = next(region for region in reversed(self._regions) if region.kind == kind or kind == "branch")
        kept = [var for var in values if _counts(var)]
        if region.kind == "function":
            self.line(f"return ({', '.join(self.of(var) for var in kept)},)")
            return
        if region.pointers and tuple(self.memories.get(var.name) for var in kept) != region.pointers:
            raise SolutionError(
                "The cuTile interpreter has no loop that moves an array to other memory.", code="not_interpreted"
            )
        self._assign(region.targets, kept)
        if word:
            self.line(word)

    def _carry(self, new: Any, old: Any) -> None:
        if old.name in self.memories:
            self.memories[new.name] = self.memories[old.name]

    def _assign(self, targets: tuple[str, ...], values: list[Any]) -> None:
        pairs = [(target, self.of(var)) for target, var in zip(targets, values, strict=True)]
        pairs = [(target, value) for target, value in pairs if target != value]
        if pairs:
            self.line(f"{', '.join(target for target, _ in pairs)} = {', '.join(value for _, value in pairs)}")

    # -- the whole ----------------------------------------------------------------------------------------------------

    def text(self, parameters: list[str]) -> str:
        """Return the text of a function that takes the launch's arguments and returns the function of a block."""
        return "\n".join(
            [
                f"def prepare({', '.join(['blocks_0', 'blocks_1', 'blocks_2', *parameters])}):",
                *self._early,
                "    def block(block_0, block_1, block_2):",
                *self._lines,
                "        return",
                "    return block",
            ]
        )


def _dtype(var: Any) -> str:
    return str(var.get_type().dtype.name)


def _is_pointer(var: Any) -> bool:
    return _dtype(var).startswith("pointer") if hasattr(var.get_type(), "dtype") else False


def _counts(var: Any) -> bool:
    """Return False for a token, which only orders operations; they run in order here anyway."""
    return type(var.get_type()).__name__ != "TokenTy"
