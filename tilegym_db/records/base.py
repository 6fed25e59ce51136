"""What the four records share: frozen models that refuse unknown keys, and errors that name file and key."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from tilegym_db.errors import RecordError

__all__ = ["NAME_PATTERN", "Int64", "Record", "RecordPart", "canonical_json", "length_prefixed_digest"]

NAME_PATTERN = r"^[a-z0-9][a-z0-9_.-]{0,127}$"


def _in_64_bits(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("this whole number does not fit in 64 bits")
    return value


Int64 = Annotated[int, AfterValidator(_in_64_bits)]
"""A whole number that the database can hold too."""


class RecordPart(BaseModel):
    """A piece of a record: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


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
            RecordError: malformed JSON, an unknown or missing key, or a value that breaks a rule of the record.
        """
        try:
            # Stricter than the json module: no NaN, no half of a surrogate pair, no number that takes forever to read.
            value = from_json(text, allow_inf_nan=False)
        except (ValueError, TypeError) as error:  # TypeError: a str that no encoding can hold
            raise RecordError(f"{source}: not valid JSON: {error}. Fix the file and run the command again.") from None
        return cls._validated(value, source)

    @classmethod
    def from_dict(cls, value: Any, source: str | Path = "<value>") -> Self:
        """As :meth:`from_json`, for a value that is already parsed."""
        record = cls._validated(value, source)
        try:
            record.to_json().encode()
        except ValueError as error:
            raise RecordError(f"{source}: not a valid {cls.kind}: JSON cannot hold it: {error}.") from None
        return record

    @classmethod
    def _validated(cls, value: Any, source: str | Path) -> Self:
        if not isinstance(value, dict):
            raise RecordError(f"{source}: a {cls.kind} is a JSON object, not {type(value).__name__}.")
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise RecordError(f"{source}: not a valid {cls.kind}: {_explain(error, cls)}") from None
        except UnicodeEncodeError as error:  # half of a surrogate pair, in what pydantic would quote in its message
            raise RecordError(f"{source}: not a valid {cls.kind}: {error}.") from None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready content without the keys that hold their default."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def to_json(self, *, indent: int | None = None) -> str:
        """One JSON object with ``schema_version`` first where the record has one."""
        content = self.to_dict()
        if "schema_version" in type(self).model_fields:
            content = {"schema_version": self.model_dump()["schema_version"], **content}
        return json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False)


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    parts = []
    for item in error.errors(include_url=False)[:5]:
        where = ".".join(str(step) for step in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key '{where}'{_nearest_key(item['loc'], model)}")
        elif item["type"] == "missing":
            parts.append(f"missing key '{where}'")
        else:
            message = item["msg"].removeprefix("Value error, ")
            parts.append(f"{where}: {message}" if where else message)
    more = error.error_count() - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "") + "."


def _nearest_key(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    if len(loc) != 1:
        return ""
    close = difflib.get_close_matches(str(loc[0]), model.model_fields, n=1)
    return f" (did you mean '{close[0]}'?)" if close else f" (known: {', '.join(model.model_fields)})"


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value that digests and identities are computed from."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def length_prefixed_digest(parts: Iterable[bytes]) -> str:
    """sha256 over the parts, each preceded by its length, so that no two lists of parts share a digest."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
