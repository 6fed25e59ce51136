"""What a confined worker says about a problem. Foreign code ran there, so its answer is read like a foreign file."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tilegym_db.errors import RecordError
from tilegym_db.records.base import Int64, Real, Record, RecordPart
from tilegym_db.records.dtypes import Scalar
from tilegym_db.records.workload import ScalarInput

MAX_REASON = 300
"""Maximum length of a reason, in characters."""

Text = Annotated[str, Field(min_length=1, max_length=MAX_REASON)]
Size = Annotated[str, Field(pattern=r"^[\w+\-*/() ]+$", max_length=MAX_REASON)]
"""A number, or arithmetic over axes."""


class Drawn(RecordPart):
    """The distribution from which a problem draws an input."""

    kind: Literal["normal", "made", "uniform", "integers"]
    low: Int64 | Real | None = None
    high: Int64 | Real | Size | None = None


class Observed(RecordPart):
    """A tensor or number of a problem. A number has no shape."""

    role: Literal["buffer", "input", "scalar", "weight", "output"]
    name: Annotated[str, Field(pattern=r"^\w[\w.]*$", max_length=MAX_REASON)]
    dtype: Text
    shape: list[Size] | None = None
    drawn: Drawn | None = None
    value: Scalar | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.role == "scalar") != (self.shape is None) or (self.role == "scalar") != (self.value is not None):
            raise RecordError(f"{self.name}: a number has a value, and a tensor a shape", code="description_invalid")
        if self.value is not None:
            ScalarInput(type="scalar", value=self.value)
        return self


class Description(Record):
    """Observations of a problem, or the reason that there are none."""

    kind: ClassVar[str] = "description"
    reason: str = ""
    tensors: list[Observed] = Field(default_factory=list)
    axes: dict[Text, Int64] = Field(default_factory=dict)
    small: dict[Text, Int64] | None = None
    run: str = ""
    packed: bool = False
    """True if a problem of GPU MODE gets its data as a tuple."""

    @model_validator(mode="after")
    def _has_inputs(self) -> Self:
        if not self.reason and not any(one.role == "input" for one in self.tensors):
            raise RecordError("none of its inputs is a tensor", code="description_invalid")
        return self


def read_description(content: bytes) -> Description:
    """Return the answer of a worker; what is no description becomes a reason."""
    try:
        found = Description.from_json(content, "its answer")
    except RecordError as error:
        return Description(reason=f"it does not run in the sandbox: {one_line(str(error))}")
    return found.model_copy(update={"reason": one_line(found.reason)})


def one_line(text: str) -> str:
    """Return a text of foreign code as one short line."""
    return " ".join(text.split())[:MAX_REASON]
