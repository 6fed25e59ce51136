"""What a Solution of a dialect must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilegym_db.integrations.interchange.checks.dialect import (
    Problem,
    Rules,
    check_name,
    check_optional_text,
    check_texts,
)
from tilegym_db.integrations.interchange.reading import path_problem

__all__ = [
    "check_solution",
]


def check_solution(record: Mapping[str, Any], rules: Rules) -> list[Problem]:
    """Why a Solution is refused; its sources are inline by now, whatever the dialect."""
    problems = [*check_name(record, "name"), *check_name(record, "definition"), *check_name(record, "author")]
    problems += check_optional_text(record, "description")
    spec = record.get("spec")
    if not isinstance(spec, dict):
        return [*problems, ("spec", "missing key" if "spec" not in record else "must be an object")]
    problems += _language(spec, rules)
    hardware = spec.get("target_hardware")
    if not isinstance(hardware, list) or not hardware or not all(isinstance(item, str) and item for item in hardware):
        problems.append(("spec.target_hardware", "must be a list of at least one text"))
    problems += check_texts(spec, "dependencies", "spec.")
    if not isinstance(spec.get("destination_passing_style", True), bool):
        problems.append(("spec.destination_passing_style", "must be true or false"))
    if spec.get("binding") not in (None, "tvm-ffi", "torch"):
        problems.append(("spec.binding", f"must be tvm-ffi, torch or null, not {spec['binding']!r:.40}"))
    paths = list(_sources(record.get("sources"), problems))
    entry = spec.get("entry_point")
    if not isinstance(entry, str) or entry.count("::") != 1 or not all(entry.split("::")):
        problems.append(("spec.entry_point", f"must read '<file>::<function>', not {entry!r:.80}"))
    elif entry.split("::")[0] not in paths:
        problems.append(("spec.entry_point", f"names the file '{entry.split('::')[0]}', which is no source"))
    return problems


def _language(spec: Mapping[str, Any], rules: Rules) -> Iterator[Problem]:
    key = "languages" if "languages" in spec and rules.languages_key == "languages" else "language"
    value = spec.get(key)
    if key == "languages" and not isinstance(value, list):
        yield f"spec.{key}", f"must be a list of texts, not {value!r:.40}"
        return
    chosen = value if isinstance(value, list) and key == "languages" else [value]
    if not chosen:
        yield f"spec.{key}", "names no language"
    for language in chosen:
        if not isinstance(language, str) or language not in rules.languages:
            known = ", ".join(sorted(rules.languages))
            yield f"spec.{key}", f"unknown language {language!r:.40}; this dialect knows {known}"


def _sources(sources: Any, problems: list[Problem]) -> Iterator[str]:
    if not isinstance(sources, list) or not sources:
        problems.append(("sources", "must be a list of at least one source"))
        return
    seen: set[str] = set()
    for number, source in enumerate(sources):
        where = f"sources[{number}]"
        if not isinstance(source, dict) or not isinstance(source.get("path"), str):
            problems.append((f"{where}.path", "missing key"))
            continue
        reason = path_problem(source["path"])
        if reason is not None:
            problems.append((f"{where}.path", reason))
        if source["path"] in seen:
            problems.append((f"{where}.path", f"'{source['path']}' is listed twice"))
        if not isinstance(source.get("content"), str) or not source["content"]:
            problems.append((f"{where}.content", "must be a text that is not empty"))
        seen.add(source["path"])
        yield source["path"]
