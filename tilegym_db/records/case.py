"""A call to verify, and how its contents are drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilegym_db.records.call import Call
from tilegym_db.records.definition import Definition
from tilegym_db.records.text import canonical_json
from tilegym_db.records.workload import RandomInput, SafetensorsInput, Workload, axes_key

TYPICAL = ":typical"


EXACT = "small_integers"


@dataclass(frozen=True)
class Case:
    """A call to verify, and the distribution of its contents."""

    call: Call
    distribution: str = "normal"
    seed: int = 0
    offset: int = 0
    """Elements by which every tensor's address is moved off its alignment."""
    typical: bool = False
    """True if ids, lengths and joint inputs are spread as usual in a model, whatever the distribution."""
    spread_as: str = ""
    """Distribution that spreads ids, lengths and joint inputs instead of the one of the other contents."""
    files: dict[str, SafetensorsInput] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_workload(cls, definition: Definition, workload: Workload, *, distribution: str, seed: int) -> Case:
        """Return the Workload's own shape with fresh contents."""
        return cls(
            workload.call(definition),
            distribution=distribution,
            seed=seed,
            files=workload.files(),
            scales={name: spec.scale for name, spec in workload.inputs.items() if isinstance(spec, RandomInput)},
        )

    def __str__(self) -> str:
        """Return a short form for reasons: sizes, dtypes, contents."""
        dtypes = ",".join(self.call.dtypes.values())
        layouts = " strided" if self.call.layouts else ""
        offset = f" offset={self.offset}" if self.offset else ""
        read = "".join(f" {name}={(spec.sha256 or '')[:12]}" for name, spec in self.files.items())
        return f"{axes_key(dict(self.call.axes))} {dtypes}{layouts}{offset} contents={self.contents}{read}"

    @property
    def key(self) -> str:
        """A text that is unique to one draw."""
        files = {name: spec.model_dump(mode="json") for name, spec in self.files.items()}
        return f"{self} {self.seed} {canonical_json([dict(self.call.layouts), dict(self.call.scalars), self.scales, files])}"

    @property
    def contents(self) -> str:
        """The contents, as ``debug reproduce --distribution`` takes them: ``outliers``, ``outliers:typical``, ``normal:ties``."""
        return self.distribution + (f":{self.spread_as}" if self.spread_as else TYPICAL * self.typical)

    @property
    def spread(self) -> str:
        """The distribution that spreads ids, lengths and joint inputs."""
        return self.spread_as or ("normal" if self.typical else self.distribution)

    @property
    def exact(self) -> bool:
        """True if sums and products of the contents never round, so that an exact operator must give exact bits."""
        return self.distribution == EXACT and not self.files

    def strides(self, definition: Definition, name: str) -> tuple[int, ...]:
        """Return the strides of one tensor of this case, in elements."""
        return definition.strides_of(name, self.call.axes, self.call.layouts.get(name))
