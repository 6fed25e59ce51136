"""What the four records share: frozen models that refuse unknown keys, and errors that name file and key."""

from __future__ import annotations

import difflib
import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Strict, ValidationError
from pydantic_core import from_json

from tilegym_db.errors import RecordError
from tilegym_db.files import decode

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
        """Return one JSON object with ``schema_version`` first where the record has one."""
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
    """Return a place in a record, without the name that pydantic gives to a member of a union (``str``,
    ``function-after[...]``).
    """
    last = str(loc[-1]) if len(loc) > 1 else ""
    return loc[:-1] if last in ("str", "int", "float", "bool") or last.endswith(("]", ")")) else loc


def _nearest_key(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    close = difflib.get_close_matches(str(loc[0])[:MAX_KEY], model.model_fields, n=1) if len(loc) == 1 else []
    return close[0] if close else ""


def canonical_json(value: Any) -> str:
    """Return the one spelling of a JSON value that digests and identities are computed from."""
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


# ---- fields ---------------------------------------------------------------------------------------
# The kinds of values that fields of records have: numbers that are numbers, and texts of bounded length.
#
# JSON tells ``4``, ``"4"`` and ``true`` apart, and so do records.

MAX_TEXT = 200_000
"""The most characters of any text in a record: sources and logs are the longest."""
MAX_LINE = 500
MAX_PROSE = 20_000
_CONTROL = frozenset(("Cc", "Cs", "Zl", "Zp"))  # control characters, halves of surrogate pairs, ends of lines
MAX_AXIS = 1 << 40
"""The largest size of an axis: no tensor of that many bytes fits into any GPU, nor into a hundred of them."""


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
        if value.isprintable():  # nearly every text, at once; what is printable is none of those
            return value
        for index, character in enumerate(value):
            if unicodedata.category(character) in _CONTROL and character not in allowed:
                raise RecordError(
                    f"the character {character!r} at position {index} is not allowed here", code="character_not_allowed"
                )
        return value

    return check


Int64 = Annotated[int, Strict(), AfterValidator(_in_64_bits)]
"""A whole number that the database can hold too; no text, no boolean."""
Real = Annotated[float, Strict()]
"""A finite number; no text, no boolean."""
Flag = Annotated[bool, Strict()]
"""``true`` or ``false``; no number, no text."""
Line = Annotated[str, AfterValidator(_text(MAX_LINE, "\t"))]
"""One short line: a tag, an author."""
Prose = Annotated[str, AfterValidator(_text(MAX_PROSE, "\n\t"))]
"""A description, which may have several lines."""


def shown(text: str, most: int = 120) -> str:
    """Return a text as a message may show it: on one line, and cut where it is long."""
    clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1])
    return clean if len(text) <= most else f"{clean[:most]}..."


def longest_text(value: Any) -> tuple[str, int]:
    """Where the longest text in a JSON value stands, and how many characters it has; keys count too."""
    longest: tuple[Any, ...] = ()
    size = 0
    # An item, whether it is a key, and where it stands: its step and the place around it. A name costs more than the search.
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


# ---- parsing --------------------------------------------------------------------------------------
# JSON as records are written in: UTF-8, no NaN, and no key twice.


class _RepeatedKeyError(Exception):
    """A key that one object has twice."""


def parse_object(text: str | bytes, kind: str, source: str | Path) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the whole of a file, or a line of one.
        kind: what it should be, for the message.
        source: where it came from (a path, or ``path:line``), for the message.

    Raises:
        RecordError: it is not UTF-8 or not JSON, or an object has a key twice.
    """
    if isinstance(text, bytes):
        text = decode(text, source)
    try:
        # Stricter than the json module: no NaN, no half of a surrogate pair, no number that takes forever to read.
        value = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError) as error:  # TypeError: a str that no encoding can hold
        raise RecordError(
            f"{source}: not valid JSON: {error}. Fix the file and run the command again.", code="json_syntax"
        ) from None
    try:
        json.loads(text, object_pairs_hook=_distinct, parse_int=len, parse_float=len)
    except _RepeatedKeyError as repeated:
        raise RecordError(
            f"{source}: not a valid {kind}: the key '{repeated}' occurs twice in one object. Remove one of them.",
            code="key_repeated",
        ) from None
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _RepeatedKeyError(shown(name))
        seen.add(name)
