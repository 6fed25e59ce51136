"""The tables of the scan, read from the data files beside it.

``allowed/`` names everything that a Solution may use of each module, and every attribute that it may take from a value: what
is not there is refused. ``tools/scan_names.py`` writes it, but for the libraries of ``libraries.toml``, which are reviewed and
listed by hand. ``refused.txt`` only says what a refused name is called, and which
listed names are noted; ``words.txt`` holds the other sets of names, ``rules.toml`` the rules.

A path is spelt as it resolves, whatever it is called in the source: ``t.cuda.Stream`` after ``import torch as t`` is
``torch.cuda.Stream``.
"""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

# ---- findings -------------------------------------------------------------------------------------
# A finding has a severity, a rule and a place.


class Severity(StrEnum):
    """``hard`` refuses the Solution; ``soft`` is noted with its traces and forces the promotion tier."""

    HARD = "hard"
    SOFT = "soft"


@dataclass(frozen=True)
class Rule:
    """A rule. ``instead`` completes every finding with what the author can do about it."""

    name: str
    severity: Severity
    catches: str
    why: str
    instead: str


@dataclass(frozen=True)
class Finding:
    """A place in a source that breaks a rule. ``line`` counts from 1, ``column`` from 0; 0 and 0 mean the whole file."""

    path: str
    line: int
    column: int
    rule: str
    severity: Severity
    message: str

    def __str__(self) -> str:
        """Format the finding as one line, as compilers do."""
        return f"{self.path}:{self.line}: {self.severity}: {self.rule}: {self.message}"


SCAN_DATA = Path(__file__).parent


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def read_sections(text: str) -> dict[str, frozenset[str]]:
    """Return ``[name]`` -> the words below it; lines that begin with # are comments."""
    bare = re.sub(r"(?m)^#.*$", "", text)
    parts = re.split(r"(?m)^\[(.+)\]$", bare)[1:]
    return {name: words(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _read(name: str) -> str:
    return (SCAN_DATA / name).read_text(encoding="utf-8")


def _import_name(distribution: str) -> str:
    """Return the usual import name of a distribution: ``Flash-Attn`` is ``flash_attn``."""
    return re.sub(r"[-_.]+", "_", distribution).lower()


RULES: dict[str, Rule] = {
    name: Rule(name, Severity(of["severity"]), of["catches"], of["why"], of["instead"])
    for name, of in tomllib.loads(_read("rules.toml")).items()
}
"""Name -> rule, in the order of the documentation."""

WORDS = read_sections(_read("words.txt"))

_ALLOWED = {
    section: names
    for file in sorted((SCAN_DATA / "allowed").glob("*.txt"))
    for section, names in read_sections(file.read_text(encoding="utf-8")).items()
}
MEMBERS = {section: names for section, names in _ALLOWED.items() if not section.startswith("*")}
"""Module -> its members that may be used. All others are refused."""

VALUES = frozenset[str]().union(*(names for section, names in _ALLOWED.items() if section.startswith("*")))
"""Attributes that may be taken from any value."""

OPERATOR_MAKERS = words("torch.library.custom_op torch.library.triton_op")
LISTED_ROOTS = frozenset(module.partition(".")[0] for module in MEMBERS)


def _read_refused() -> dict[str, str]:
    """Return path -> rule; ``*.name`` for an attribute of any value, ``import.name`` for a module."""
    found = {}
    for rule, body in re.findall(r"(?ms)^\[(.+?)\]$(.*?)(?=^\[|\Z)", _read("refused.txt")):
        for prefix, names in re.findall(r"(?m)^([\w.*]+):((?:.|\n )*)", body):
            found.update({f"{prefix}.{name}": rule for name in names.split()})
    return found


_REFUSED = _read_refused()
DENIED = {path.removeprefix("import."): rule for path, rule in _REFUSED.items() if path.startswith("import.")}
FORBIDDEN = {path.removeprefix("*."): rule for path, rule in _REFUSED.items() if path.startswith("*.")}
CLOSED = (
    frozenset(
        path.rpartition(".")[2]
        for path, rule in _REFUSED.items()
        if rule in RULES and RULES[rule].severity is Severity.HARD
    )
    | frozenset(sys.stdlib_module_names)
    | WORDS["closed"]
) - WORDS["open"]
"""Attributes that a class of the Solution may define; this does not make them readable on other values."""

SMUGGLED = (
    frozenset(DENIED)
    - words("code string trace test select signal queue profile random token resource cuda warp nvidia tilegym_db")
) | {"builtins"}
"""Attribute names that always count as modules; names that functions share are left out."""

LIBRARIES: dict[str, str] = {
    _import_name(distribution): of["imported_as"] for distribution, of in tomllib.loads(_read("libraries.toml")).items()
}
"""Distribution, spelt as an import -> its import name, for libraries with reviewed members. A Solution that declares one may
use only the listed members. It may use all public members of any other declared library."""

REFERENCE = "reference"
"""The language of the texts of a Definition: plain PyTorch, with gradients."""
LANGUAGE_ROOTS = {
    "python": (),
    REFERENCE: (),
    "triton": ("triton",),
    "tilelang": ("tilelang",),
    "cutile": ("cuda.tile",),
}
_TOOLCHAINS = words("triton tilelang cuda numpy")
ALLOWED_ROOTS = (LISTED_ROOTS - _TOOLCHAINS - set(LIBRARIES.values())) | {"typing_extensions"}
"""Import roots that every Solution may use."""

KNOWN_ROOTS = frozenset(sys.stdlib_module_names) | set(DENIED) | LISTED_ROOTS | ALLOWED_ROOTS | _TOOLCHAINS
"""Names that no source file may take."""


def is_public_dunder(name: str) -> bool:
    """Return True for the few harmless ``__names__``."""
    return name in WORDS["public-dunders"]


@cache
def path_rule(path: str) -> str | None:
    """Return the rule for the longest listed prefix of a path, or None."""
    prefix = path
    while prefix:
        if prefix in _REFUSED:
            return _REFUSED[prefix]
        prefix = prefix.rpartition(".")[0]
    return None


def refusal(path: str) -> str | None:
    """Return the HARD rule that names a path, or None; a list of allowed names must not contain such a path."""
    rule = path_rule(path)
    return rule if rule in RULES and RULES[rule].severity is Severity.HARD else None


_MIN_LIKENESS = 0.75
"""Of two names, by :mod:`difflib`; two letters in the wrong order keep 0.75 of a name of four."""


@cache
def is_listed(path: str) -> bool:
    """Return True for an allowed module, a member of one, or an attribute of such a member."""
    module = path
    while module and module not in MEMBERS:
        module = module.rpartition(".")[0]
    name, *attributes = path[len(module) + 1 :].split(".")
    if not module or (name and name not in MEMBERS[module] and not is_public_dunder(name)):
        return False
    return all(name in VALUES or is_public_dunder(name) for name in attributes)


@cache
def nearest(path: str) -> str | None:
    """Return the listed member of the same module that a path misspells, or None: ``triton.language.load`` for ``...laod``."""
    module, _, name = path.rpartition(".")
    close = difflib.get_close_matches(name, sorted(MEMBERS.get(module, ())), n=1, cutoff=_MIN_LIKENESS)
    return f"{module}.{close[0]}" if close else None


@cache
def label(path: str) -> str:
    """Return the rule for a path that is not listed."""
    parts = path.split(".")[1:]
    rule = refusal(path)
    if rule is not None:
        return rule
    if any(part in SMUGGLED for part in parts):
        return "smuggled-module"
    is_private = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return "private-member" if is_private else "unlisted-member"


def distribution_roots(dependencies: Iterable[str]) -> frozenset[str]:
    """Return the import names of declared distributions.

    ``flash-attn>=2`` is ``flash_attn``, ``flashinfer-python`` is ``flashinfer``.
    """
    names = (re.split(r"[^A-Za-z0-9._-]", text.strip(), maxsplit=1)[0] for text in dependencies)
    return frozenset(LIBRARIES.get(name, name) for name in map(_import_name, names))


def reviewed_libraries(dependencies: Iterable[str]) -> list[str]:
    """Return the import names of those declared distributions whose members are reviewed."""
    return sorted(distribution_roots(dependencies) & set(LIBRARIES.values()))


def import_rule(module: str, language: str, declared: frozenset[str]) -> str | None:
    """Return the rule that an import of ``module`` breaks, or None.

    Args:
        module: dotted name, absolute, not one of the Solution's own.
        declared: :func:`distribution_roots` of its dependencies.
    """
    root = module.partition(".")[0]
    if any(f"{module}.".startswith(f"{allowed}.") for allowed in LANGUAGE_ROOTS[language]) or root == "builtins":
        return None
    if root == "cuda" and module.startswith("cuda.tile"):
        return "imports-library" if "cuda_tile" in declared else "imports-unknown"
    if root in DENIED:
        return DENIED[root]
    if root in ALLOWED_ROOTS:
        return None
    if root.lower() in declared and root not in sys.stdlib_module_names:
        return "imports-library"
    return "imports-unknown"


def is_torch_compute(path: str) -> bool:
    """Return True for a member of torch that a tile language may not use."""
    by_member = WORDS["tile-torch-by-member"]
    if not path.startswith("torch.") or path in by_member:
        return False
    prefix = path
    while prefix and prefix.removeprefix("torch.") not in WORDS["tile-torch"]:
        prefix = prefix.rpartition(".")[0]
    return not prefix or prefix in by_member
