"""What the four records share: frozen models that refuse unknown keys, and errors that name file and key."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from tilegym_db.errors import RecordError
from tilegym_db.records.fields import MAX_TEXT, Flag, Int64, Real, longest_text, shown
from tilegym_db.records.parsing import parse_object

__all__ = [
    "NAME_PATTERN",
    "Flag",
    "Int64",
    "Real",
    "Record",
    "RecordPart",
    "canonical_json",
    "length_prefixed_digest",
    "problems_of",
]

NAME_PATTERN = r"^[a-z0-9][a-z0-9_.-]{0,127}$"
MAX_CULPRITS = 20
MAX_KEY = 80
PYDANTIC_CODES = {
    "string_type": "value_type",
    "int_type": "value_type",
    "float_type": "value_type",
    "bool_type": "value_type",
    "dict_type": "value_type",
    "tuple_type": "value_type",
    "list_type": "value_type",
    "int_from_float": "value_type",
    "string_pattern_mismatch": "text_pattern",
    "literal_error": "value_unknown",
    "too_short": "list_too_short",
    "too_long": "list_too_long",
    "finite_number": "number_not_finite",
    "greater_than": "value_range",
    "greater_than_equal": "value_range",
    "less_than": "value_range",
    "less_than_equal": "value_range",
}


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class RecordPart(BaseModel):
    """A piece of a record: frozen, and an unknown key is an error."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Record(RecordPart):
    """A record that is read from a file or a line of one."""

    kind: ClassVar[str] = "record"

    @classmethod
    def from_json(cls, text: str | bytes, source: str | Path = "<text>") -> Self:
        """Parse and validate one JSON object.

        Args:
            text: the JSON object.
            source: where it came from (a path, or ``path:line``), for the error message.

        Raises:
            RecordError: malformed JSON, text that is not UTF-8, a key that is unknown, missing or given twice, or a value
                that breaks a rule of the record.
        """
        value = parse_object(text, cls.kind, source)
        return cls._validated(value, source, bounded=len(text) <= MAX_TEXT)

    @classmethod
    def from_dict(cls, value: Any, source: str | Path = "<value>") -> Self:
        """As :meth:`from_json`, for a value of any origin."""
        record = cls.from_parsed(value, source)
        try:
            record.to_json().encode()
        except ValueError as error:
            raise RecordError(
                f"{source}: not a valid {cls.kind}: JSON cannot hold it: {error}.", code="json_unholdable"
            ) from None
        return record

    @classmethod
    def from_parsed(cls, value: Any, source: str | Path = "<value>") -> Self:
        """As :meth:`from_json`, for a value that was read from JSON."""
        return cls._validated(value, source)

    @classmethod
    def _validated(cls, value: Any, source: str | Path, *, bounded: bool = False) -> Self:
        if not isinstance(value, dict):
            raise RecordError(
                f"{source}: a {cls.kind} is a JSON object, not {type(value).__name__}.", code="object_expected"
            )
        where, size = ("", 0) if bounded else longest_text(value)
        if size > MAX_TEXT:
            raise RecordError(
                f"{source}: not a valid {cls.kind}: {where}: a text of {size} characters; at most {MAX_TEXT} are allowed.",
                code="text_too_long",
            )
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            problems, more = _problems(error, cls)
            texts, codes = zip(*problems, strict=True)
            refusal = RecordError(f"{source}: not a valid {cls.kind}: {'; '.join(texts)}{more}.", code=codes[0])
            refusal.problems, refusal.codes = texts, codes
            raise refusal from None
        except UnicodeEncodeError as error:  # half of a surrogate pair, in what pydantic would quote in its message
            raise RecordError(f"{source}: not a valid {cls.kind}: {error}.", code="text_surrogate") from None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready content without the keys that hold their default."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def to_json(self, *, indent: int | None = None) -> str:
        """One JSON object with ``schema_version`` first where the record has one."""
        content = self.to_dict()
        if "schema_version" in type(self).model_fields:
            content = {"schema_version": self.model_dump()["schema_version"], **content}
        return json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False)


def _problems(error: ValidationError, model: type[BaseModel]) -> tuple[list[tuple[str, str]], str]:
    """Return text and code of every culprit, and a remark about those that are too many to list.

    Unknown keys come first: they are what a typing mistake looks like, and often explain the others.
    """
    items = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    parts = []
    known_told = False
    for item in items[:MAX_CULPRITS]:
        where = ".".join(shown(str(step)) for step in _keys_of(item["loc"]))
        if item["type"] == "extra_forbidden":
            close = _nearest_key(item["loc"], model)
            if close:
                hint = f" (did you mean '{close}'?)"
            else:
                hint = "" if known_told or len(item["loc"]) != 1 else f" (known: {', '.join(model.model_fields)})"
                known_told = known_told or len(item["loc"]) == 1
            parts.append((f"unknown key '{where}'{hint}", "key_unknown"))
        elif item["type"] == "missing":
            parts.append((f"missing key '{where}'", "key_missing"))
        else:
            cause = item.get("ctx", {}).get("error")
            text = item["msg"].removeprefix("Value error, ")
            faults = (
                cause.each()
                if isinstance(cause, RecordError)
                else [(text, PYDANTIC_CODES.get(item["type"], "value_invalid"))]
            )
            parts += [(f"{where}: {shown(text, 600)}" if where else shown(text, 600), code) for text, code in faults]
    more = len(items) - MAX_CULPRITS
    return parts, f"; and {more} more" if more > 0 else ""


def _keys_of(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A place in a record, without the name that pydantic gives to a member of a union (``str``, ``function-after[...]``)."""
    last = str(loc[-1]) if len(loc) > 1 else ""
    return loc[:-1] if last in ("str", "int", "float", "bool") or last.endswith(("]", ")")) else loc


def _nearest_key(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    close = difflib.get_close_matches(str(loc[0])[:MAX_KEY], model.model_fields, n=1) if len(loc) == 1 else []
    return close[0] if close else ""


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value that digests and identities are computed from."""
    return _CANONICAL.encode(value)


def length_prefixed_digest(parts: Iterable[bytes]) -> str:
    """sha256 over the parts, each preceded by its length, so that no two lists of parts share a digest."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def problems_of(check: Callable[[], None]) -> tuple[RecordError, ...]:
    """Return the faults that one rule finds, so that all rules of a record are tried and all faults are named at once."""
    try:
        check()
    except RecordError as error:
        return (error,)
    except ValueError as error:
        return (RecordError(str(error), code="value_invalid"),)
    return ()
