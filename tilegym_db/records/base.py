"""Base of all records: frozen models that refuse unknown keys, and errors that name the file and the key.

Its parts are the models, the field types, and the JSON parser.
"""

from __future__ import annotations

import difflib
import json
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError

from tilegym_db.errors import RecordError
from tilegym_db.records.dtypes import RECORD_DTYPES
from tilegym_db.records.text import FIRST_YEAR, LAST_YEAR, parse_object, shown

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


class RecordPart(BaseModel):
    """A part of a record: frozen, and an unknown key is an error."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Record(RecordPart):
    """A record that is read from a file or from one line of a file."""

    kind: ClassVar[str] = "record"

    def __repr__(self) -> str:
        """Return the kind, and what names the record; ``to_dict()`` has all of it."""
        values = (getattr(self, key, None) for key in ("name", "version", "trace_id", "definition", "uuid", "status"))
        return f"<{type(self).__name__} {' '.join(str(value) for value in values if value not in (None, ''))}>"

    @classmethod
    def from_json(cls, text: str | bytes, source: str | Path = "<text>") -> Self:
        """Parse and validate one JSON object.

        Args:
            source: its origin (a path, or ``path:line``), for the error message.

        Raises:
            RecordError: malformed JSON, text that is not UTF-8, a key that is unknown, missing or repeated, or a value
                that breaks a rule of the record.
        """
        value = parse_object(text, cls.kind, source)
        return cls._validated(value, source, bounded=len(text) <= MAX_TEXT)

    @classmethod
    def from_dict(cls, value: Any, source: str | Path = "<value>") -> Self:
        """Validate a value of any origin; see :meth:`from_json`."""
        record = cls.from_parsed(value, source)
        try:
            record.to_json().encode()
        except ValueError as error:
            raise RecordError(
                f"{source}: not a valid {cls.kind}: JSON cannot hold it: {error}.", code="json_unholdable"
            ) from None
        return record

    @classmethod
    def from_parsed(cls, value: Any, source: str | Path) -> Self:
        """Validate a value that was read from JSON; see :meth:`from_json`."""
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
        except UnicodeEncodeError as error:  # half of a surrogate pair, which pydantic would quote in its message
            raise RecordError(f"{source}: not a valid {cls.kind}: {error}.", code="text_surrogate") from None
        # Not in the block above: the garbage collector does not see into pydantic's error. As the context of this one it would
        # keep every frame alive for good, with what the callers hold, such as an open database.
        texts, codes = zip(*problems, strict=True)
        refusal = RecordError(f"{source}: not a valid {cls.kind}: {'; '.join(texts)}{more}.", code=codes[0])
        refusal.problems, refusal.codes = texts, codes
        raise refusal

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready content without the keys that have their default value."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return one JSON object; ``schema_version``, if the record has one, comes first."""
        content = self.to_dict()
        if "schema_version" in type(self).model_fields:
            content = {"schema_version": self.model_dump()["schema_version"], **content}
        return json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False)


def _problems(error: ValidationError, model: type[BaseModel]) -> tuple[list[tuple[str, str]], str]:
    """Return text and code of each problem, and a note on how many more there are.

    Unknown keys come first, because they are often typing mistakes that explain the other problems.
    """
    found = error.errors(include_url=False)
    # A list whose items are refused is counted without them; its length is then a consequence of what is reported already.
    faulty = {item["loc"][:size] for item in found for size in range(len(item["loc"]))}
    items = [item for item in found if item["type"] != "too_short" or item["loc"] not in faulty]
    items.sort(key=lambda item: item["type"] != "extra_forbidden")
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
    """Return the path of a key without pydantic's name for a union member (``str``, ``function-after[...]``)."""
    last = str(loc[-1]) if len(loc) > 1 else ""
    return loc[:-1] if last in ("str", "int", "float", "bool") or last.endswith(("]", ")")) else loc


def _nearest_key(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    close = difflib.get_close_matches(str(loc[0])[:MAX_KEY], model.model_fields, n=1) if len(loc) == 1 else []
    return close[0] if close else ""


def problems_of(check: Callable[[], None]) -> tuple[RecordError, ...]:
    """Return the faults that one check raises, so that a record can report the faults of all its checks at once."""
    try:
        check()
    except RecordError as error:
        return (error,)
    except ValueError as error:
        return (RecordError(str(error), code="value_invalid"),)
    return ()


# ---- fields ---------------------------------------------------------------------------------------
# Types of record fields: strict numbers and texts of bounded length.
#
# JSON distinguishes ``4``, ``"4"`` and ``true``, and records do so too.

MAX_TEXT = 200_000
"""Maximum number of characters of a text in a record; sources and logs are the longest."""
MAX_LINE = 500
MAX_PROSE = 20_000
_CONTROL = frozenset(("Cc", "Cs", "Zl", "Zp"))  # control characters, halves of surrogate pairs, ends of lines
MAX_AXIS = 1 << 40
"""Maximum size of an axis; no GPU has memory for a tensor of that many bytes."""


def _in_64_bits(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise RecordError("this whole number does not fit in 64 bits", code="number_out_of_range")
    return value


def _text(most: int, allowed: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if len(value) > most:
            raise RecordError(
                f"a text of {len(value)} characters; at most {most} are allowed here", code="text_too_long"
            )
        if value.isprintable():  # fast path for nearly every text: a printable text has none of these characters
            return value
        for index, character in enumerate(value):
            if unicodedata.category(character) in _CONTROL and character not in allowed:
                raise RecordError(
                    f"the character {character!r} at position {index} is not allowed here", code="character_not_allowed"
                )
        return value

    return check


def in_utc(value: datetime) -> datetime:
    """Return a time in UTC; one without a zone is in UTC already. Refuse years outside of FIRST_YEAR to LAST_YEAR."""
    if not FIRST_YEAR <= value.year <= LAST_YEAR:
        raise RecordError(
            f"{value} is out of range: a record is from {FIRST_YEAR} to {LAST_YEAR}", code="time_out_of_range"
        )
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


Int64 = Annotated[int, Strict(), AfterValidator(_in_64_bits)]
"""A whole number of at most 64 bits, as the database stores it; text and booleans are refused."""
Real = Annotated[float, Strict()]
"""A finite number; text and booleans are refused."""
Flag = Annotated[bool, Strict()]
"""``true`` or ``false``; numbers and text are refused."""
Line = Annotated[str, AfterValidator(_text(MAX_LINE, "\t"))]
"""One short line, such as a tag or an author."""
Prose = Annotated[str, AfterValidator(_text(MAX_PROSE, "\n\t"))]
"""A description of one or several lines."""


def _known_dtype(name: str) -> str:
    if name not in RECORD_DTYPES:
        raise RecordError(f"unknown dtype {name!r}; known: {', '.join(sorted(RECORD_DTYPES))}", code="dtype_unknown")
    return name


DType = Annotated[str, AfterValidator(_known_dtype), Field(json_schema_extra={"enum": sorted(RECORD_DTYPES)})]


def longest_text(value: Any) -> tuple[str, int]:
    """Return the place and the number of characters of the longest text in a JSON value, keys included."""
    longest: tuple[Any, ...] = ()
    size = 0
    # Each entry: an item, whether it is a key, and its place as nested steps. Spelling every place would be too slow.
    open_: list[tuple[Any, bool, tuple[Any, ...]]] = [(value, False, ())]
    while open_:
        item, is_key, place = open_.pop()
        if isinstance(item, str):
            if len(item) > size:
                longest, size = (is_key, place), len(item)
        elif isinstance(item, dict):
            for key, inner in item.items():
                open_.append((str(key), True, place))
                open_.append((inner, False, (str(key), place)))
        elif isinstance(item, list | tuple):
            open_ += [(inner, False, (index, place)) for index, inner in enumerate(item)]
    if not longest:
        return "", 0
    is_key, place = longest
    name = _spelled(place) or "it"
    return f"a key of {name}" if is_key else name, size


def _spelled(place: tuple[Any, ...]) -> str:
    steps = []
    while place:
        step, place = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{shown(step, 40)}")
    return "".join(reversed(steps)).lstrip(".")
